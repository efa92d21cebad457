# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: config.json, safetensors, tokenizer files.

No torch. Weights are mapped into memory and go to the device one tensor at a
time, in their stored type; they are cast there. What is written loads in
transformers, and what is read and written again is the same bit by bit.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util

from oppo_jax import checkpoint, families, metrics, models, shards, types
from oppo_jax import tokenizer as tokenizer_lib
from oppo_jax.families import base
from oppo_jax.models import transformer

CONFIG = "config.json"
GENERATION = "generation_config.json"
MAX_BYTES = 5_000_000_000  # of one file of weights
# Copied from the source of an export, those that are there.
TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "tokenizer.model",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  GENERATION,
)
# How a model is run, not what it is: no checkpoint says it.
CHOICES = ("dtype", "attention", "attention_block", "remat", "head")
# Values for all of them but the head, where it is of no matter.
PLAIN = dict(dtype="float32", attention="xla", attention_block=0, remat="none")

Sharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object; a ValueError names the file that has none."""
  try:
    found = json.loads(path.read_text())
  except (ValueError, UnicodeDecodeError) as e:
    raise ValueError(f"{path}: not JSON: {e}") from e
  if not isinstance(found, dict):
    raise ValueError(f"{path}: not a JSON object")
  return found


def _transformers():
  """Imported on first use; without torch it has something to say."""
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  import transformers

  return transformers


def _family(raw: dict[str, Any], path: pathlib.Path) -> base.Family:
  kind = raw.get("model_type")
  if kind not in families.FAMILIES:
    raise ValueError(
      f"{path}: model_type={kind!r}: not one of {sorted(families.FAMILIES)}"
    )
  return families.FAMILIES[kind]


def load_config(folder: str | os.PathLike) -> tuple[str, dict[str, Any]]:
  """What model a folder holds.

  Returns:
    The model's name, and keywords of `models.make`: all but those of
    `CHOICES`, which are up to the caller. `vocab_size` is the number of rows
    of the embedding, which is often more than the tokenizer has.

  Raises:
    FileNotFoundError: no folder, or no config.json in it.
    ValueError: a family or an option that is not known here; names it.
  """
  folder = pathlib.Path(folder).expanduser()
  path = folder / CONFIG
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  family = _family(read_json(path), path)
  try:
    theirs = _transformers().AutoConfig.from_pretrained(
      folder, local_files_only=True
    )
    return family.model, family.read(theirs)
  except Exception as e:  # files of others, so anything may be raised
    raise ValueError(f"{path}: {e}") from e


def make_model(
  folder: str | os.PathLike, **choices: Any
) -> transformer.Transformer:
  """The model of a folder.

  Args:
    folder: with a config.json.
    **choices: values for all of `CHOICES`.
  """
  name, kwargs = load_config(folder)
  return models.make(name, **kwargs, **choices)


def _check_model(folder: pathlib.Path, model: transformer.Transformer) -> None:
  """Raises a ValueError if the folder is of another model."""
  choices = {k: getattr(model.config, k) for k in CHOICES}
  expected = make_model(folder, **choices).config
  if type(expected) is not type(model.config):
    raise ValueError(f"{folder}: holds another kind of model: {expected}")
  for field in dataclasses.fields(expected):
    theirs = getattr(expected, field.name)
    ours = getattr(model.config, field.name)
    if theirs != ours:
      raise ValueError(
        f"{folder / CONFIG}: {field.name} is {theirs}, the model's is {ours}"
      )


def head(folder: str | os.PathLike) -> str:
  """Which head a folder holds: "scalar" (a reward model) or "lm"."""
  found = shards.find(pathlib.Path(folder).expanduser())
  return "scalar" if base.SCORE in found else "lm"


def longest(
  folder: str | os.PathLike, model: transformer.Transformer
) -> int | None:
  """Tokens of the longest row that a folder's model is for; None = not said."""
  raw = read_json(pathlib.Path(folder).expanduser() / CONFIG)
  keys = ("max_position_embeddings", "n_positions")
  limits = [raw[key] for key in keys if key in raw]
  limits += [model.config.max_row_len] * (model.config.max_row_len > 0)
  return min(limits, default=None)


def fingerprint(folder: str | os.PathLike) -> list[list[str | int]]:
  """Names, sizes and times of a folder's files: another list, another model."""
  files = sorted(pathlib.Path(folder).expanduser().iterdir())
  return [
    [str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files
  ]


def shapes(model: transformer.Transformer) -> types.Params:
  """The tree of a model's parameters, as `jax.ShapeDtypeStruct`s."""
  return jax.eval_shape(model.init, jax.random.key(0))


def _shapes(model: transformer.Transformer) -> dict[str, tuple[int, ...]]:
  """Paths and shapes of the model's parameters."""
  flat = traverse_util.flatten_dict(shapes(model), sep=".")
  return {path: x.shape for path, x in flat.items()}


def _rows(
  family: base.Family,
  model: transformer.Transformer,
  found: Mapping[str, Any] | None = None,
) -> dict[str, base.Row]:
  """Names of the model's tensors; as in `found`, with or without a prefix."""
  if found is not None:
    is_bare = family.rows[0].theirs in found
    family = family._replace(prefix="" if is_bare else family.prefix)
  return families.expand(
    family,
    _shapes(model),
    num_layers=model.config.num_layers,
    is_lm=model.is_lm,
  )


def _listed(names: Iterable[str]) -> str:
  names = sorted(names)
  more = f" and {len(names) - 4} more" if len(names) > 4 else ""
  return ", ".join(repr(name) for name in names[:4]) + more


def _check_tensors(
  folder: pathlib.Path,
  found: dict[str, shards.Tensor],
  rows: dict[str, base.Row],
  family: base.Family,
  model: transformer.Transformer,
) -> None:
  """Raises a ValueError that names tensors which are not as expected."""
  if base.SCORE in found and model.is_lm:
    raise ValueError(
      f"{folder}: is a reward model (tensor {base.SCORE!r}), not a language"
      " model"
    )
  if base.SCORE not in found and not model.is_lm:
    raise ValueError(
      f"{folder}: is not a reward model: tensor {base.SCORE!r} is missing"
    )
  missing = set(rows) - set(found)
  if missing:
    raise ValueError(f"{folder}: missing: {_listed(missing)}")
  extra = {n for n in set(found) - set(rows) if not base.IGNORED.search(n)}
  if model.is_lm and model.config.tie_embeddings and family.head in extra:
    embedding = next(n for n, row in rows.items() if row.ours == "embedding")
    ours, theirs = (shards.view(found[n]) for n in (embedding, family.head))
    if not np.array_equal(ours, theirs):
      raise ValueError(
        f"{folder}: {CONFIG} says that embeddings are tied, but"
        f" {family.head!r} is not {embedding!r}"
      )
    extra.remove(family.head)
  if extra:
    raise ValueError(f"{folder}: unexpected: {_listed(extra)}")
  expected = _shapes(model)
  for name, row in rows.items():
    saw = found[name].shape
    back = base.LAYOUTS[row.layout][1]
    want = np.broadcast_to(np.zeros((), np.int8), expected[row.ours])
    want = back(want, model.config.num_heads).shape
    if saw != want:
      what = ""
      if base.SCORE == name:
        what = ": only one label is known here"
      raise ValueError(
        f"{found[name].path}: tensor {name!r} is {list(saw)}, expected"
        f" {list(want)}{what}"
      )


def check(
  folder: str | os.PathLike, model: transformer.Transformer
) -> tuple[dict[str, shards.Tensor], dict[str, base.Row]]:
  """That a folder holds the parameters of a model; reads headers only.

  Returns:
    Its tensors, and what they are here, both by their names there.

  Raises:
    As `load_params`.
  """
  folder = pathlib.Path(folder).expanduser()
  _check_model(folder, model)
  path = folder / CONFIG
  family = _family(read_json(path), path)
  found = shards.find(folder)
  rows = _rows(family, model, found)
  _check_tensors(folder, found, rows, family, model)
  return found, rows


def load_params(
  folder: str | os.PathLike,
  model: transformer.Transformer,
  *,
  dtype: str | None,
  sharding: Sharding | None = None,
) -> types.Params:
  """Parameters of a model from a folder.

  Args:
    folder: config.json and safetensors, in one file or several.
    model: of `make_model`, or with the same config. With a "scalar" head the
      folder must hold a reward model ({family}ForSequenceClassification).
    dtype: of all parameters; None = as they are stored. Training wants
      "float32".
    sharding: from (path in our tree, shape) to where the tensor goes; default:
      the default device.

  Raises:
    FileNotFoundError: a file is missing; names it.
    ValueError: another model's folder, or tensors that are missing, unexpected
      or of another shape; names them.
  """
  found, rows = check(folder, model)
  flat = {}
  for name, row in rows.items():
    x = shards.view(found[name])
    x = base.LAYOUTS[row.layout][0](x, model.config.num_heads)
    where = sharding(row.ours, x.shape) if sharding else None
    # A copy even where none is needed: the file may change, or go.
    x = jax.device_put(x, where, may_alias=False)
    flat[row.ours] = x if dtype is None else x.astype(dtype)
  return traverse_util.unflatten_dict(flat, sep=".")


def _config_json(
  family: base.Family,
  model_type: str,
  model: transformer.Transformer,
  raw: dict[str, Any] | None,
  tokens: tokenizer_lib.Tokenizer | None,
) -> dict[str, Any]:
  """The source's config.json, or one made from ours; with the right head."""
  if raw is None:
    raw = {"model_type": model_type, **family.write(model.config)}
    if tokens is not None:
      raw["bos_token_id"] = tokens.bos_id
      raw["eos_token_id"] = list(tokens.eos_ids)
      raw["pad_token_id"] = tokens.pad_id
  scorer = f"{family.name}ForSequenceClassification"
  raw = raw | {"architectures": [family.lm if model.is_lm else scorer]}
  if not model.is_lm:  # how transformers writes num_labels=1
    raw |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
  return raw


def save(
  folder: str | os.PathLike,
  model: transformer.Transformer,
  params: types.Params,
  *,
  dtype: str,
  source: str | os.PathLike | None = None,
  tokens: tokenizer_lib.Tokenizer | None = None,
  max_bytes: int = MAX_BYTES,
) -> None:
  """Writes a folder that transformers loads; as a whole or not at all.

  Args:
    folder: replaced if it is there.
    model: a "scalar" head becomes {family}ForSequenceClassification.
    params: of the model.
    dtype: of the tensors written.
    source: folder that the parameters started from. Its config.json is kept
      but for the head and the type, and its tokenizer files are copied. None =
      a config is made: of the first family that has all this model has.
    tokens: tokenizer to write, instead of the source's files; what its
      generation_config.json says is kept but for the EOS ids. Beside "qwen2"
      transformers' AutoTokenizer reads it as one of that family:
      PreTrainedTokenizerFast reads it as it is.
    max_bytes: of one file of weights.

  Raises:
    ValueError: the source is of another model, or no family is like this one.
  """
  folder, raw, found = pathlib.Path(folder).expanduser(), None, None
  if source is None:
    model_type = families.fitting(getattr(model, "config", None))
  else:
    source = pathlib.Path(source).expanduser()
    _check_model(source, model)
    raw, found = read_json(source / CONFIG), shards.find(source)
    model_type = raw["model_type"]
  family = families.FAMILIES[model_type]
  if tokens is not None and tokens.vocab_size > model.vocab_size:
    raise ValueError(
      f"the tokenizer has {tokens.vocab_size} ids, the model's embedding"
      f" {model.vocab_size}"
    )
  config = _config_json(family, model_type, model, raw, tokens)
  config.pop("torch_dtype", None)  # what transformers 4 called it
  config["dtype"] = dtype
  flat = traverse_util.flatten_dict(params, sep=".")
  rows = _rows(family, model, found)
  missing = set(_shapes(model)) - {row.ours for row in rows.values()}
  if missing:
    raise ValueError(f"{family.name} has no place for {_listed(missing)}")
  to = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

  def make(row: base.Row) -> np.ndarray:
    back = base.LAYOUTS[row.layout][1]
    x = metrics.fetch(flat[row.ours])
    return back(x, model.config.num_heads).astype(to)

  with checkpoint.stage(folder) as temporary:
    (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for file in TOKENIZER_FILES if tokens is None else (GENERATION,):
      if source is not None and (source / file).is_file():
        shutil.copyfile(source / file, temporary / file)
    if tokens is not None:
      tokens.save(temporary)
    shards.write(
      temporary,
      {
        name: (flat[row.ours].size * to.itemsize, lambda row=row: make(row))
        for name, row in rows.items()
      },
      max_bytes=max_bytes,
    )
