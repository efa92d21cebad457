# SPDX-License-Identifier: Apache-2.0
"""Which tiles run, and in which call. NumPy on the host.

A row's frontier is the number of its tiles that have been run, its limit the
number that can be. Everything in between is pending.

  tile        0  1  2  3  4         Q = 4
  slot 0      x  x  o  o  .         x run, o pending
  slot 1      x  o  .  .  .         calls: (1,1) (0,2) (0,3) (2,3) | (2,4)
  slot 2      x  x  x  o  o                as (slot, tile), by tile
"""

import math

import numpy as np


def num_tiles(length: int, is_done: bool, *, tile_len: int) -> int:
  """Tiles of a row that can be scored.

  A tile's last output is about the token after it, so an unfinished row must
  hold one token more than the tile.
  """
  return -(-length // tile_len) if is_done else max(length - 1, 0) // tile_len


def limits(
  length: np.ndarray, done: np.ndarray, rows: np.ndarray, *, tile_len: int
) -> np.ndarray:
  """`num_tiles` of every slot, 0 outside `rows`; all [S]."""
  return np.array(
    [
      num_tiles(int(n), bool(d), tile_len=tile_len) if r else 0
      for n, d, r in zip(length, done, rows)
    ],
    np.int32,
  )


def calls_of(
  frontier: np.ndarray, limit: np.ndarray, *, num_rows: int, flush: bool
) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
  """Cuts the pending (slot, tile) pairs into calls of `num_rows` pairs.

  Sorted by tile, so that a call holds prefixes of like length and a row's tiles
  run in order. Without `flush` an incomplete call waits for the next round.

  Args:
    frontier: [S] tiles of each row already run.
    limit: [S] tiles that can be run.
    num_rows: Q.
    flush: pad the last call instead of holding its tiles back.

  Returns:
    The calls, each (slot [Q], tile [Q]) padded with slot = S, and the frontier
    after them.
  """
  num_slots = len(frontier)
  pairs = sorted(
    (tile, slot)
    for slot in range(num_slots)
    for tile in range(frontier[slot], limit[slot])
  )
  num_calls = (
    math.ceil(len(pairs) / num_rows) if flush else len(pairs) // num_rows
  )
  frontier = frontier.copy()
  calls = []
  for i in range(num_calls):
    chosen = pairs[i * num_rows : (i + 1) * num_rows]
    slot = np.full(num_rows, num_slots, np.int32)
    tile = np.zeros(num_rows, np.int32)
    for j, (t, s) in enumerate(chosen):
      slot[j], tile[j] = s, t
      frontier[s] = t + 1
    calls.append((slot, tile))
  return calls, frontier
