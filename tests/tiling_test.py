# SPDX-License-Identifier: Apache-2.0
"""Every tile that exists runs once, in order, in as few calls as possible."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from oppo_jax import tiling


@pytest.mark.parametrize(
  ("length", "is_done", "expected"),
  [
    # T = 8. A tile's last word is about the token after it: an unfinished row
    # of 8 tokens has no complete tile yet, one of 9 has.
    (0, False, 0),
    (7, False, 0),
    (8, False, 0),
    (9, False, 1),
    (16, False, 1),
    (17, False, 2),
    # A finished row has its partial tile, too.
    (1, True, 1),
    (8, True, 1),
    (9, True, 2),
    (16, True, 2),
    (17, True, 3),
  ],
)
def test_tiles_that_can_run(length, is_done, expected):
  assert tiling.num_tiles(length, is_done, tile_len=8) == expected


def test_rows_that_are_not_asked_for_have_no_tiles():
  length, done = np.array([17, 17, 17]), np.array([True, False, True])
  rows = np.array([True, True, False])
  limit = tiling.limits(length, done, rows, tile_len=8)
  assert limit.tolist() == [3, 2, 0]


def test_calls_take_low_tiles_first_as_drawn():
  # The drawing in tiling.py.
  frontier, limit = np.array([2, 1, 3]), np.array([4, 2, 5])
  flushed, after = tiling.calls_of(frontier, limit, num_rows=4, flush=True)
  pairs = [list(zip(slot.tolist(), tile.tolist())) for slot, tile in flushed]
  assert pairs == [
    [(1, 1), (0, 2), (0, 3), (2, 3)],
    [(2, 4), (3, 0), (3, 0), (3, 0)],
  ]
  assert after.tolist() == [4, 2, 5]
  held, after = tiling.calls_of(frontier, limit, num_rows=4, flush=False)
  assert len(held) == 1
  assert after.tolist() == [4, 2, 4]  # tile 4 of slot 2 waits
  assert frontier.tolist() == [2, 1, 3]  # the caller's array is left alone


def test_a_frontier_beyond_the_limit_is_nothing_to_do():
  calls, after = tiling.calls_of(
    np.array([7, 2]), np.array([0, 2]), num_rows=3, flush=True
  )
  assert calls == []
  assert after.tolist() == [7, 2]


rows_of = st.lists(
  st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=9
)


@hypothesis.given(rows=rows_of, num_rows=st.integers(1, 7), flush=st.booleans())
def test_every_pending_tile_runs_once_and_in_order(rows, num_rows, flush):
  frontier, limit = np.array(rows).T
  pending = {
    (slot, tile)
    for slot, (low, high) in enumerate(rows)
    for tile in range(low, high)
  }
  calls, after = tiling.calls_of(
    frontier, limit, num_rows=num_rows, flush=flush
  )
  full, rest = divmod(len(pending), num_rows)
  assert len(calls) == full + (flush and rest > 0)
  ran = []
  for slot, tile in calls:
    assert slot.shape == tile.shape == (num_rows,)
    assert slot.dtype == tile.dtype == np.int32
    is_real = slot < len(rows)
    assert (slot[~is_real] == len(rows)).all()
    ran += zip(slot[is_real].tolist(), tile[is_real].tolist())
  assert (
    len(set(ran)) == len(ran) == (len(pending) if flush else full * num_rows)
  )
  assert set(ran) <= pending
  # Tile by tile; so no tile runs before the one on its left.
  assert [tile for _, tile in ran] == sorted(tile for _, tile in ran)
  done = frontier.copy()
  for slot, tile in ran:
    assert tile == done[slot]
    done[slot] += 1
  assert after.tolist() == done.tolist()


@hypothesis.given(
  growth=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4)),
  num_rows=st.integers(1, 5),
)
def test_tiles_held_back_run_in_a_later_call(growth, num_rows):
  frontier, limit, ran = np.zeros(4, int), np.zeros(4, int), []
  for i, more in enumerate([*growth, [0] * 4]):
    limit = limit + more
    calls, frontier = tiling.calls_of(
      frontier, limit, num_rows=num_rows, flush=i == len(growth)
    )
    ran += [(s, t) for slot, tile in calls for s, t in zip(slot, tile) if s < 4]
  assert sorted(ran) == [(s, t) for s in range(4) for t in range(limit[s])]
