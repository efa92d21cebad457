# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors files as one table of named tensors.

  model.safetensors                        one file, or
  model-00001-of-00002.safetensors         several, with
  model-00002-of-00002.safetensors
  model.safetensors.index.json             {"weight_map": {name: file}}

Reading maps a file into memory and copies nothing; writing holds one file's
tensors at a time.
"""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Tensor(NamedTuple):
  """Where a tensor lies.

  Attributes:
    path: its file.
    offset: of its first byte there.
    dtype: of its elements, little-endian.
    shape: row-major.
  """

  path: pathlib.Path
  offset: int
  dtype: np.dtype
  shape: tuple[int, ...]


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
  """All tensors of one file by name.

  Raises:
    ValueError: it is damaged, or a tensor is of a type that is not read.
  """
  from safetensors import SafetensorError, safe_open

  try:
    with safe_open(path, "np"):  # checks sizes and offsets
      pass
  except SafetensorError as e:
    raise ValueError(f"{path}: {e}") from e
  with path.open("rb") as file:
    size = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(size))
  header.pop("__metadata__", None)
  found = {}
  for name, entry in header.items():
    if entry["dtype"] not in DTYPES:
      raise ValueError(
        f"{path}: tensor {name!r} is {entry['dtype']}, which is not read; one"
        f" of {', '.join(DTYPES)} is"
      )
    offset = 8 + size + entry["data_offsets"][0]
    shape = tuple(entry["shape"])
    found[name] = Tensor(path, offset, DTYPES[entry["dtype"]], shape)
  return found


def find(folder: pathlib.Path) -> dict[str, Tensor]:
  """All tensors of a folder by name; reads headers only.

  Raises:
    FileNotFoundError: there are no safetensors, or one of the files is missing.
    ValueError: a file is damaged, a tensor of the index is not where it should
      be, or a tensor is of a type that is not read; names it.
  """
  index = folder / INDEX
  if not index.is_file():
    if not (folder / SINGLE).is_file():
      raise FileNotFoundError(f"{folder}: no {SINGLE} and no {INDEX}")
    return read_header(folder / SINGLE)
  try:
    weight_map = json.loads(index.read_text())["weight_map"]
  except (ValueError, KeyError, TypeError) as e:
    raise ValueError(f"{index}: no index of tensors: {e!r}") from e
  found: dict[str, Tensor] = {}
  for file in sorted(set(weight_map.values())):
    if not (folder / file).is_file():
      raise FileNotFoundError(f"{index}: names {file}, which is not there")
    found |= read_header(folder / file)
  for name, file in weight_map.items():
    if name not in found or found[name].path != folder / file:
      raise ValueError(f"{index}: tensor {name!r} is not in {file}")
  return found


def view(tensor: Tensor) -> np.ndarray:
  """The tensor, mapped into memory: read-only, and gone with the file."""
  if 0 in tensor.shape:
    return np.zeros(tensor.shape, tensor.dtype)
  return np.memmap(
    tensor.path, tensor.dtype, "r", offset=tensor.offset, shape=tensor.shape
  )


def write(
  folder: pathlib.Path,
  tensors: Mapping[str, tuple[int, Callable[[], np.ndarray]]],
  *,
  max_bytes: int,
) -> None:
  """Writes tensors to as few files as `max_bytes` allows, in their order.

  Args:
    folder: is there.
    tensors: name -> (size in bytes, a function that makes the array).
    max_bytes: of one file, > 0; a tensor larger than that has its own.
  """
  from safetensors import numpy as safetensors

  files: list[list[str]] = []
  room = -1
  for name, (size, _) in tensors.items():
    if room < size:
      files.append([])
      room = max_bytes
    files[-1].append(name)
    room -= size
  weight_map = {}
  for i, names in enumerate(files, 1):
    file = SINGLE
    if len(files) > 1:
      file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
    # Without the format, transformers refuses the file.
    safetensors.save_file(
      {name: np.ascontiguousarray(tensors[name][1]()) for name in names},
      folder / file,
      metadata={"format": "pt"},
    )
    weight_map |= dict.fromkeys(names, file)
  if len(files) > 1:
    total = sum(size for size, _ in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
