# SPDX-License-Identifier: Apache-2.0
"""Parameters on disk: safetensors, one entry per leaf, named by its path.

  {"layer_0": {"attention": {"q": {"kernel": ...}}}}
      ->  "layer_0.attention.q.kernel"

A folder made by `stage` is there as a whole or not at all.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from flax import traverse_util

from oppo_jax import metrics, types


def save_params(path: str | os.PathLike, params: types.Params) -> None:
  """Writes a nested dict of arrays to a safetensors file."""
  from safetensors import numpy as safetensors

  flat = traverse_util.flatten_dict(metrics.fetch(params), sep=".")
  flat = {name: np.ascontiguousarray(x) for name, x in flat.items()}
  safetensors.save_file(flat, path)


def load_params(path: str | os.PathLike, like: types.Params) -> types.Params:
  """Reads what `save_params` wrote.

  Args:
    path: safetensors file.
    like: tree with the names, shapes and dtypes that must be there (arrays or
      `jax.ShapeDtypeStruct`s).

  Raises:
    ValueError: a tensor is missing, too many, or of another shape or dtype, or
      the file is damaged; names the file and the tensor.
  """
  from safetensors import SafetensorError
  from safetensors import numpy as safetensors

  try:
    found = safetensors.load_file(path)
  except SafetensorError as e:
    raise ValueError(f"{path}: {e}") from e
  expected = traverse_util.flatten_dict(like, sep=".")
  for name in sorted(set(found) ^ set(expected)):
    what = "missing" if name in expected else "unexpected"
    raise ValueError(f"{path}: tensor {name!r} is {what}")
  for name, x in expected.items():
    saw = found[name]
    if (saw.shape, saw.dtype) != (x.shape, x.dtype):
      raise ValueError(
        f"{path}: tensor {name!r} is {saw.dtype}{list(saw.shape)}, expected"
        f" {x.dtype}{list(x.shape)}"
      )
  return jax.device_put(traverse_util.unflatten_dict(found, sep="."))


@contextlib.contextmanager
def stage(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields an empty folder that takes the name `folder` if the block succeeds.

  with stage(workdir / "sft") as temporary:
    save_params(temporary / "policy.safetensors", params)
  """
  temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  try:
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
