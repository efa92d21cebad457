# SPDX-License-Identifier: Apache-2.0
"""Which calls of tiles a step makes, in token time: `tiling.py` in sums.

NumPy on numbers, as `schedule.py`, of which this is the part about scorers.
"""

from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
  """What a step did to the rows in flight.

  Attributes:
    used: slots that hold a row.
    began: tokens when the step began.
    left: ticks until the row ends, counted from then.
    length: tokens when the batch was complete.
    is_done: whether it had ended then.
    taken: slots of the batch.
  """

  used: np.ndarray  # [S] bool
  began: np.ndarray  # [S] int64
  left: np.ndarray  # [S] int64
  length: np.ndarray  # [S] int64
  is_done: np.ndarray  # [S] bool
  taken: np.ndarray  # [B] int64


class Calls(NamedTuple):
  """Scoring calls of one class of scorers in one step.

  Attributes:
    tiles: tiles run, by each scorer of the class.
    streamed: [rounds] calls dispatched when a round was seen.
    flushed: calls left when the batch was complete.
  """

  tiles: int
  streamed: np.ndarray
  flushed: int


def of_step(
  rows: Rows,
  frontier: np.ndarray,
  *,
  intra: str,
  tile_rows: int,
  tile_len: int,
  chunks: int,
  chunk_size: int,
) -> tuple[Calls, np.ndarray]:
  """Calls of one class of scorers, and how far each row is then.

  Between two rounds only whole calls run, so after a round Q * (available // Q)
  tiles have run, whichever they are. Which ones are held back matters at the
  end alone, when those of the rows that leave are flushed.

  Args:
    rows: of the step.
    frontier: [S] tiles of each row that have been run before.
    intra: when tiles run: "none", "sequence" or "chunk".
    tile_rows: Q.
    tile_len: T.
    chunks: rounds of the step.
    chunk_size: C.
  """
  whole = -(-rows.length // tile_len)
  streamed = np.zeros(chunks, np.int64)
  if intra == "none":
    after = frontier
  else:
    limit = np.where(rows.is_done, whole, (rows.length - 1) // tile_len)
    limit = np.where(
      rows.is_done if intra == "sequence" else rows.used, limit, 0
    )
    after = np.maximum(limit, frontier)
    new = after - frontier
    total = int(new.sum())
    row = np.repeat(np.arange(len(new)), new)
    tile = np.arange(total) - np.repeat(np.cumsum(new) - new - frontier, new)
    at = rows.left[row]  # tick at which the tile exists
    if intra == "chunk":
      at = np.minimum(at, (tile + 1) * tile_len + 1 - rows.began[row])
    seen = np.maximum(-(-at // chunk_size) - 1, 0)
    available = np.cumsum(np.bincount(seen, minlength=chunks))
    streamed = np.diff(available // tile_rows, prepend=0)
    if total % tile_rows:
      back = _held_back(available, seen, tile, row, num_rows=tile_rows)
      after = after - np.bincount(back, minlength=len(new))
  pending = int((whole[rows.taken] - after[rows.taken]).sum())
  done = after.copy()
  done[rows.taken] = whole[rows.taken]
  tiles = int((done - frontier).sum())
  return Calls(tiles, streamed, -(-pending // tile_rows)), done


def _held_back(available, seen, tile, row, *, num_rows) -> list[int]:
  """Slot of each tile that waits for others after the last round.

  A round runs its pending tiles in the order of (tile, slot) and keeps the last
  `available % Q`. A round that keeps none forgets all before it.
  """
  keep = available % num_rows
  start = int(np.flatnonzero(np.append(0, keep) == 0)[-1])
  late = np.flatnonzero(seen >= start)
  late = late[np.lexsort((row[late], tile[late], seen[late]))]
  cuts = np.searchsorted(seen[late], np.arange(start, len(keep) + 1))
  back: list[tuple[int, int]] = []
  for n, lo, hi in zip(keep[start:].tolist(), cuts[:-1], cuts[1:]):
    if lo == hi:
      continue
    last = late[max(lo, hi - n) : hi]
    new = zip(tile[last].tolist(), row[last].tolist())
    back = sorted([*back, *new])[-n:]
  return [slot for _, slot in back]
