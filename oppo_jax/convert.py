# SPDX-License-Identifier: Apache-2.0
r"""Writes a model as a Hugging Face folder, which transformers and we can load.

  python -m oppo_jax.convert --source=runs/quickstart --out=exported
  python -m oppo_jax.convert --source=stories260k --out=stories
  python -m oppo_jax.convert --source=llama --out=llama_bf16 --dtype=bfloat16

What `source` is shows in what is there:

  a run         config.json with a model_name, tokenizer/, params/
  Hugging Face  config.json with a model_type, *.safetensors
  llama2.c      one *.bin of weights and one tok*.bin of tokens
"""

import json
import os
import pathlib
import tempfile
from typing import Any, NamedTuple

import jax
from absl import flags

from oppo_jax import (
  checkpoint,
  cli,
  hf,
  llama2c,
  models,
  shards,
  tokenizer,
  types,
)
from oppo_jax.models import transformer


class Opened(NamedTuple):
  """What a source holds.

  Attributes:
    model: its head as the parameters have it.
    params: in their stored type.
    dtype: that type.
    base: Hugging Face folder whose config and names are kept, if any.
    tokens: tokenizer, unless `base` has it.
  """

  model: transformer.Transformer
  params: types.Params
  dtype: str
  base: pathlib.Path | None
  tokens: tokenizer.Tokenizer | None


def open_hf(folder: pathlib.Path) -> Opened:
  """A Hugging Face folder: a language model or a reward model."""
  model = hf.make_model(folder, head=hf.head(folder), **hf.PLAIN)
  params = hf.load_params(folder, model, dtype=None)
  return Opened(model, params, str(params["embedding"].dtype), folder, None)


def open_llama2c(folder: pathlib.Path) -> Opened:
  """A folder with one file of weights and one of tokens.

  Raises:
    ValueError: there are none, or several.
  """
  found = sorted(folder.glob("*.bin"))
  texts = [path for path in found if path.name.startswith("tok")]
  weights = [path for path in found if path not in texts]
  if len(texts) != 1 or len(weights) != 1:
    raise ValueError(
      f"{folder}: neither a config.json, nor one *.bin of weights and one"
      " tok*.bin of tokens"
    )
  kwargs, params = llama2c.read(weights[0])
  model = models.make("transformer", head="lm", **kwargs, **hf.PLAIN)
  with tempfile.TemporaryDirectory() as temporary:
    into = pathlib.Path(temporary)
    llama2c.save_tokenizer(texts[0], into, vocab_size=model.vocab_size)
    tokens = tokenizer.load(into)
  return Opened(model, params, "float32", None, tokens)


def open_run(
  folder: pathlib.Path, *, file: str, base: pathlib.Path | None
) -> Opened:
  """Parameters of a run.

  Args:
    folder: workdir of the run.
    file: the parameters, in it.
    base: Hugging Face folder that the run started from; None = the one that
      the run's config names, and if there is none, the model of that config.

  Raises:
    FileNotFoundError: there are no such parameters.
    ValueError: they are of another model.
  """
  path = folder / file
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  found = shards.read_header(path)
  head = found["out"].shape[-1] if "out" in found else 0
  choices = dict(head="scalar" if head == 1 else "lm", **hf.PLAIN)
  config = json.loads((folder / hf.CONFIG).read_text())
  base = base or _started_from(config, choices["head"])
  if base is not None:
    model = hf.make_model(base, **choices)
  else:
    vocab_size = found["embedding"].shape[0]
    kwargs = config["model"] | dict(vocab_size=vocab_size) | choices
    model = models.make(config["model_name"], **kwargs)
  params = checkpoint.load_params(path, hf.shapes(model))
  tokens = tokenizer.load(folder / "tokenizer")
  return Opened(model, params, "float32", base, tokens)


def _started_from(config: dict[str, Any], head: str) -> pathlib.Path | None:
  """Folder with the model of a run's policy, or ("scalar") of its critic."""
  load = config.get("load", {})
  roles = ["policy"]
  if head == "scalar":
    is_like_reward = config["critic"]["init"] == "reward"
    roles = ["critic", *["reward_model"] * is_like_reward, "policy"]
  found = [load[role] for role in roles if load.get(role)]
  return pathlib.Path(found[0]).expanduser() if found else None


def open_source(
  source: pathlib.Path, *, file: str, base: pathlib.Path | None
) -> Opened:
  """Opens a source of any kind.

  Args:
    source: see the module.
    file: see `open_run`; of no matter for the other kinds.
    base: likewise.

  Raises:
    FileNotFoundError: no such folder, or a file is missing.
    ValueError: it is of no known kind, or its content does not fit together.
  """
  if not source.is_dir():
    raise FileNotFoundError(f"{source}: is not a folder")
  config = source / hf.CONFIG
  if not config.is_file():
    return open_llama2c(source)
  if "model_name" in hf.read_json(config):
    return open_run(source, file=file, base=base)
  return open_hf(source)


def convert(
  source: pathlib.Path,
  out: pathlib.Path,
  *,
  dtype: str = "",
  file: str = "params/policy.safetensors",
  base: pathlib.Path | None = None,
) -> Opened:
  """Opens `source` and writes it to `out`; returns what was opened.

  Args:
    source: see the module.
    out: folder; must not be there.
    dtype: of the tensors written; "" = as they are stored.
    file: see `open_run`.
    base: see `open_run`.

  Raises:
    ValueError: bad input; names the file.
    OSError: likewise.
  """
  if out.exists():
    raise ValueError(f"--out={out}: is there already")
  opened = open_source(source, file=file, base=base)
  hf.save(
    out,
    opened.model,
    opened.params,
    dtype=dtype or opened.dtype,
    source=opened.base,
    tokens=opened.tokens,
  )
  return opened


def main(values: flags.FlagValues) -> None:
  paths = {
    name: pathlib.Path(os.path.expanduser(values[name].value))
    for name in ("source", "out", "base")
    if values[name].value
  }
  opened = convert(**paths, dtype=values.dtype, file=values.params)
  size = sum(x.size for x in jax.tree.leaves(opened.params))
  cli.say(f"{paths['out']}: {size:,} parameters, {opened.model.config}")


def define_flags() -> None:
  flags.DEFINE_string("source", None, "Folder: a run, Hugging Face, llama2.c.")
  flags.DEFINE_string("out", None, "Folder to write; must not be there.")
  flags.DEFINE_enum(
    "dtype", "", ["", "float32", "bfloat16", "float16"], "Default: as stored."
  )
  flags.DEFINE_string(
    "params", "params/policy.safetensors", "Of a run: which parameters."
  )
  flags.DEFINE_string("base", "", "Of a run: folder that it started from.")


if __name__ == "__main__":
  cli.run(main, define_flags, required=["source", "out"])
