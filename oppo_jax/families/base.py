# SPDX-License-Identifier: Apache-2.0
"""What a family of published models is to the rest: a table, translations."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
  """One tensor, or one in every layer.

  Attributes:
    theirs: its name, after the trunk's prefix; {i} is the layer.
    ours: its path in our tree.
    layout: how ours lies to theirs, one of `LAYOUTS`.
  """

  theirs: str
  ours: str
  layout: str = "same"


def _split_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
  """[H * 3 * dim (, D)] -> [(D,) 3 * H * dim]: all q, all k, all v."""
  x = x.reshape(num_heads, 3, -1, *x.shape[1:])
  order = (3, 1, 0, 2) if x.ndim == 4 else (1, 0, 2)
  x = x.transpose(order)
  return x.reshape(*x.shape[:-3], -1)


def _join_heads(x: np.ndarray, num_heads: int) -> np.ndarray:
  """The inverse."""
  x = x.reshape(*x.shape[:-1], 3, num_heads, -1)
  order = (2, 1, 3, 0) if x.ndim == 4 else (1, 0, 2)
  x = x.transpose(order)
  return x.reshape(-1, *x.shape[3:])


# Theirs to ours and back, of (array, num_heads). A dense layer is [out, in]
# there, and [in, out] here.
LAYOUTS: dict[str, tuple[Callable, Callable]] = {
  "same": (lambda x, _: x, lambda x, _: x),
  "transposed": (lambda x, _: x.T, lambda x, _: x.T),
  "by_head": (_split_heads, _join_heads),
}


class Family(NamedTuple):
  """One model_type of transformers.

  Attributes:
    name: as in {name}Config.
    lm: its language model's architecture.
    model: the model here, a key of `models.MODELS`.
    prefix: of the trunk's tensors; files of a bare trunk are without.
    rows: the trunk's tensors. Those that a config does without (biases) have
      no place in our tree, and are then not expected.
    head: tensor of the LM head.
    read: transformers' config -> fields of our model's config.
    write: our model's config -> fields of theirs.
    fits: our config is one that this family can state.
  """

  name: str
  lm: str
  model: str
  prefix: str
  rows: tuple[Row, ...]
  head: str
  read: Callable[[Any], dict[str, Any]]
  write: Callable[[Any], dict[str, Any]]
  fits: Callable[[Any], bool]


SCORE = "score.weight"  # of every {name}ForSequenceClassification

# Buffers of older files: made anew from the config.
IGNORED = re.compile(
  r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$"
)


def require(value: Any, key: str, *allowed: Any) -> None:
  if value not in allowed:
    known = " or ".join(repr(x) for x in allowed)
    raise ValueError(f"{key}={value!r}: only {known} is known here")
