# SPDX-License-Identifier: Apache-2.0
"""Which prompt belongs to a uid, and prompts as token ids. NumPy only.

  uid      0 1 2 3 4 5 6 7 ...     group_size = 2
  group    0 0 1 1 2 2 3 3 ...     n = 3 prompts
  epoch    0 0 0 0 0 0 1 1 ...     every epoch is another permutation

A uid's prompt is a pure function of the uid, so a resumed run needs no iterator
state and a row's content does not depend on who was in flight beside it.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

LONG_PROMPTS = ("refuse", "skip", "truncate_left")


@dataclasses.dataclass(frozen=True)
class Stream:
  """An endless, shuffled pass over the prompts.

  Attributes:
    num_examples: prompts in the training split, >= 1.
    seed: of the permutations, >= 0.
    group_size: successive uids that share a prompt, >= 1.
  """

  num_examples: int
  seed: int
  group_size: int

  def __post_init__(self):
    for key, low in (("num_examples", 1), ("seed", 0), ("group_size", 1)):
      if getattr(self, key) < low:
        raise ValueError(
          f"stream: {key}={getattr(self, key)}: must be at least {low}"
        )

  def index(self, uid: int) -> int:
    """Row of the uid's prompt, in [0, num_examples)."""
    epoch, k = divmod(int(uid) // self.group_size, self.num_examples)
    return int(_permutation(self.num_examples, self.seed, epoch)[k])


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(n)


class HasPrompt(Protocol):
  """What is asked of an example here: `tasks.base.Example` is one."""

  @property
  def prompt(self) -> str: ...


class Encoder(Protocol):
  """What is asked of a tokenizer here."""

  @property
  def bos_id(self) -> int | None: ...

  def encode_prompt(self, text: str) -> list[int]: ...


class Prompts(NamedTuple):
  """Prompts as token ids.

  Attributes:
    tokens: one int32 array per kept row, a BOS included.
    rows: [len(tokens)] the row of each in the examples given.
    num_long: rows over the limit: dropped or cut.
  """

  tokens: list[np.ndarray]
  rows: np.ndarray
  num_long: int


def encode_prompts(
  examples: Sequence[HasPrompt],
  tokenizer: Encoder,
  *,
  max_prompt_len: int,
  long_prompts: str,
) -> Prompts:
  """Encodes every prompt.

  Args:
    examples: rows with a `prompt`.
    tokenizer: as in `tokenizer.py`.
    max_prompt_len: limit in tokens, BOS included.
    long_prompts: what to do with a longer one: "refuse" (an error), "skip"
      (leave the row out), "truncate_left" (keep the BOS and the end).

  Raises:
    ValueError: a long prompt under "refuse", an empty one, none left.
  """
  if long_prompts not in LONG_PROMPTS:
    raise ValueError(
      f"long_prompts={long_prompts!r}: not one of {LONG_PROMPTS}"
    )
  if max_prompt_len <= (tokenizer.bos_id is not None):
    raise ValueError(f"max_prompt_len={max_prompt_len}: no room for a prompt")
  tokens, rows, num_long = [], [], 0
  for i, example in enumerate(examples):
    ids = list(tokenizer.encode_prompt(example.prompt))
    if not ids:
      raise ValueError(f"prompt of row {i} is empty")
    if len(ids) > max_prompt_len:
      num_long += 1
      if long_prompts == "refuse":
        raise ValueError(
          f"prompt of row {i} has {len(ids)} tokens, the limit max_prompt_len"
          f" is {max_prompt_len}"
        )
      if long_prompts == "skip":
        continue
      kept = ids[:1] if ids[0] == tokenizer.bos_id else []
      ids = kept + ids[len(ids) - (max_prompt_len - len(kept)) :]
    tokens.append(np.asarray(ids, np.int32))
    rows.append(i)
  if not tokens:
    raise ValueError(
      f"no prompt fits into max_prompt_len={max_prompt_len} ({num_long} do not)"
    )
  return Prompts(tokens, np.asarray(rows, np.int64), num_long)


def load_target_lengths(
  path: str | os.PathLike, *, max_response_len: int
) -> np.ndarray:
  """Response lengths to force, from a text file: line k + 1 is for uid k.

  Args:
    path: one integer per line.
    max_response_len: largest length allowed.

  Returns:
    int32 array of the lengths.

  Raises:
    ValueError: an empty file; a line that is not an integer in
      [1, max_response_len], by file and line.
  """
  with open(path, encoding="utf-8", errors="replace") as f:
    lines = f.read().splitlines()
  if not lines:
    raise ValueError(f"{path}: no target lengths")
  lengths = np.zeros(len(lines), np.int32)
  for i, line in enumerate(lines):
    try:
      length = int(line)
    except ValueError as e:
      raise ValueError(f"{path}, line {i + 1}: {line!r} is no integer") from e
    if not 1 <= length <= max_response_len:
      raise ValueError(
        f"{path}, line {i + 1}: target length {length} is not in"
        f" [1, {max_response_len}]"
      )
    lengths[i] = length
  return lengths
