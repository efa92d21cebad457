# SPDX-License-Identifier: Apache-2.0
"""Training texts, packed into rows of fixed shape. NumPy only.

  row 0    a a a a b b b .        segment   0 0 0 0 1 1 1 -1
  row 1    c c c c c c . .                  2 2 2 2 2 2 -1 -1

An item is one text, or a pair of them: both are in a batch or neither is.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import struct


class Text(NamedTuple):
  """One training sequence.

  Attributes:
    tokens: prompt, then response, the EOS included.
    prompt_len: tokens that are not learned from.
  """

  tokens: np.ndarray
  prompt_len: int


@struct.dataclass
class Packed:
  """Items laid end to end in rows of fixed width; padding has segment -1.

  Attributes:
    tokens: token ids.
    positions: position in the own sequence.
    segments: index of the sequence in this batch, -1 = padding.
    is_target: the next token belongs to the response of the same sequence.
    last: flat index of the last token of sequence i of item j, [items, i].
    item_mask: items in use.
    margin: how much better the first sequence of a pair is; 0 = not known.
  """

  tokens: jax.Array  # [rows, W] int32
  positions: jax.Array  # [rows, W] int32
  segments: jax.Array  # [rows, W] int32
  is_target: jax.Array  # [rows, W] bool
  last: jax.Array  # [items, k] int32
  item_mask: jax.Array  # [items] bool
  margin: jax.Array  # [items] float32


def pack(
  items: Iterator[tuple[Text, ...]], *, rows: int, width: int, num_items: int
) -> Packed:
  """Fills rows with items until one does not fit; that one is dropped.

  Args:
    items: an item is placed as a whole (a pair: both or neither).
    rows: rows per batch.
    width: tokens per row.
    num_items: most items per batch.
  """
  cells = lambda fill: np.full((rows, width), fill, np.int32)
  tokens, positions, segments = cells(0), cells(0), cells(-1)
  is_target = np.zeros((rows, width), bool)
  used = np.zeros(rows, int)
  last: list[list[int]] = []
  num_segments = 0
  while len(last) < num_items:
    item, ends, trial = next(items, None), [], used.copy()
    if item is None:
      break
    for text in item:
      fits = np.flatnonzero(trial + len(text.tokens) <= width)
      if not len(fits):
        break
      row, n = fits[0], len(text.tokens)
      ends.append((row, trial[row], n))
      trial[row] += n
    if len(ends) < len(item):
      break
    used = trial
    for text, (row, at, n) in zip(item, ends):
      cut = slice(at, at + n)
      tokens[row, cut] = text.tokens
      positions[row, cut] = np.arange(n)
      segments[row, cut] = num_segments
      is_target[row, at + text.prompt_len - 1 : at + n - 1] = True
      num_segments += 1
    last.append([row * width + at + n - 1 for row, at, n in ends])
  mask = np.arange(num_items) < len(last)
  last += [[0] * len(last[0])] * (num_items - len(last))
  return Packed(
    tokens,
    positions,
    segments,
    is_target,
    np.array(last, np.int32),
    mask,
    np.zeros(num_items, np.float32),
  )


def most_items(items: Sequence[tuple[Text, ...]], *, cells: int) -> int:
  """As many of the shortest item as lie in so many cells, at least 1."""
  shortest = min(sum(len(t.tokens) for t in item) for item in items)
  return max(1, cells // shortest)


def shuffled(
  items: Sequence, *, seed: tuple[int, ...], start: int = 0
) -> Iterator:
  """Endless passes over the items, each in its own order; `start` are past."""
  epoch, skip = divmod(start, len(items))
  while True:
    order = np.random.default_rng((*seed, epoch)).permutation(len(items))
    for i in order[skip:]:
      yield items[i]
    epoch, skip = epoch + 1, 0


def batches(
  items: Sequence[tuple[Text, ...]],
  margins: np.ndarray,
  *,
  rows: int,
  width: int,
  seed: tuple[int, ...],
  start: int,
) -> Iterator[tuple[Packed, int]]:
  """Endless batches, and the number of items in them and in all before.

  An item that does not fit is the first one of the next batch: none is dropped,
  so long ones are not learned from less often.

  Args:
    items: what an epoch is made of.
    margins: one per item.
    rows: rows per batch.
    width: tokens per row; every item fits.
    seed: of the order of items.
    start: where to go on: what came with the last batch, or 0.
  """
  num_items = most_items(items, cells=rows * width)
  order = shuffled(range(len(items)), seed=seed, start=start)
  taken: list[int] = []
  while True:
    taken += itertools.islice(order, num_items - len(taken))
    batch = pack(
      (items[i] for i in taken), rows=rows, width=width, num_items=num_items
    )
    num = int(batch.item_mask.sum())
    margin = np.where(batch.item_mask, margins[taken], 0).astype(np.float32)
    start, taken = start + num, taken[num:]
    yield batch.replace(margin=margin), start


def in_turn(
  items: Sequence[tuple[Text, ...]], *, rows: int, width: int
) -> Iterator[Packed]:
  """Batches of every item once, in order."""
  num_items, at = most_items(items, cells=rows * width), 0
  while at < len(items):
    batch = pack(
      iter(items[at : at + num_items]),
      rows=rows,
      width=width,
      num_items=num_items,
    )
    at += int(batch.item_mask.sum())
    yield batch


def check(items: Sequence[tuple[Text, ...]], width: int) -> None:
  """Raises ValueError: no items, or a sequence longer than a row."""
  if not items:
    raise ValueError("nothing to learn from: no items")
  longest = max(len(text.tokens) for item in items for text in item)
  if longest > width:
    raise ValueError(f"a sequence of {longest} tokens > width {width}")
