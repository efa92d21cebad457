# SPDX-License-Identifier: Apache-2.0
"""The key/value cache: what is written where, and what is never read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import score
from oppo_jax.models import attention

MODEL = tiny.model()
ROW_LEN, TILE = 22, 8  # three tiles, the last one runs two columns over


@pytest.fixture(scope="module")
def params():
  return tiny.params(MODEL, 0)


@jax.jit
def append(params, tokens, start, cache, slots=None):
  return MODEL.apply(params, tokens, start, cache, slots)


@jax.jit
def forward(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return MODEL.forward(params, tokens, positions, jnp.zeros_like(tokens))


prefill = jax.jit(functools.partial(score.prefill, model=MODEL, tile_len=TILE))


def tokens_of(rows, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, tiny.VOCAB, (rows, ROW_LEN)).astype(np.int32)


def garbage(cache, seed=0):
  """Large numbers in every column."""
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(1e3 * rng.normal(size=x.shape), x.dtype)
  return jax.tree.map(draw, cache)


def beyond(cache, cursor, other):
  """`cache`, but for what lies at each row's cursor and beyond: `other`."""
  columns = np.arange(cache[0][0].shape[2])
  is_beyond = (columns >= np.asarray(cursor)[:, None])[:, None, :, None]
  pick = lambda x, y: jnp.where(is_beyond, y, x)
  return jax.tree.map(pick, cache, other)


# new[row, i] = 100 * row + i + 1, two columns per row, one head of size 1.
#
#   cursor 0   row 0   1   2   .   .
#   cursor 2   row 1   .   .  101 102
NEW = (100 * np.arange(2)[:, None] + [1.0, 2.0])[..., None, None]


def written(start, slots):
  cache = attention.write(
    jnp.zeros((2, 1, 4, 1)), jnp.asarray(NEW), np.array(start), slots
  )
  return cache[:, 0, :, 0].tolist()


def test_an_append_writes_at_each_rows_cursor():
  assert written([0, 2], None) == [[1, 2, 0, 0], [0, 0, 101, 102]]


def test_an_append_to_named_slots_writes_there():
  assert written([0, 2], np.array([1, 0])) == [[0, 0, 101, 102], [1, 2, 0, 0]]
  # Both rows are pieces of slot 1.
  assert written([0, 2], np.array([1, 1])) == [[0, 0, 0, 0], [1, 2, 101, 102]]


def test_an_append_to_no_slot_writes_nothing():
  assert written([0, 2], np.array([2, 0])) == [[0, 0, 101, 102], [0, 0, 0, 0]]


def test_what_runs_past_the_end_of_a_named_slot_is_dropped_not_moved():
  # Column 3 is the last: 2 has no place, and must not shift 1 to column 2.
  assert written([3, 0], np.array([0, 1])) == [[0, 0, 0, 1], [101, 102, 0, 0]]


def test_a_read_takes_the_named_slots():
  cache = jnp.arange(3.0)[:, None, None, None]
  read = lambda slots: attention.read(cache, slots).reshape(-1).tolist()
  assert read(None) == [0, 1, 2]
  assert read(np.array([2, 0])) == [2, 0]


def test_a_cache_has_room_for_the_last_tile_of_a_full_row():
  # 22 columns in tiles of 8: 0..7, 8..15, 16..23.
  assert score.cache_len(22, 8) == 24
  assert score.cache_len(24, 8) == 24
  assert score.cache_len(1, 8) == 8
  state = score.init(MODEL, num_slots=3, row_len=22, tile_len=8)
  assert state.cache[0][0].shape[2] == 24
  assert state.outputs.shape == (3, 22)


def test_the_last_tile_of_a_full_row_leaves_earlier_columns_alone(params):
  tokens = tokens_of(2)
  cache = MODEL.init_cache(2, score.cache_len(ROW_LEN, TILE))
  full = np.array([1, 1, 2], np.int32)  # slot 1 twice, then no slot
  cache = prefill(params, cache, tokens, full, np.array([0, 1, 0], np.int32))
  last = np.array([1, 2, 2], np.int32), np.array([2, 0, 0], np.int32)
  after = prefill(params, cache, tokens, *last)
  for pair, pair_after in zip(cache, after):
    for x, x_after in zip(pair, pair_after):
      assert_exact(x[:, :, :16], x_after[:, :, :16])
      assert x_after[1, :, 16:ROW_LEN].any()


def test_the_last_token_of_a_full_row_leaves_earlier_columns_alone(params):
  tokens = tokens_of(2)
  # Without blocks or tiles: a cache of exactly the row's 22 columns.
  model = tiny.model(attention_block=0)
  cache = garbage(model.init_cache(2, ROW_LEN))
  at = np.array([21, 3], np.int32)
  fed = np.stack([t[i : i + 1] for t, i in zip(tokens, at)])
  _, after = jax.jit(model.apply)(params, fed, at, cache)
  changed = np.asarray((cache[0][0] != after[0][0]).any(axis=(1, 3)))
  assert [np.flatnonzero(row).tolist() for row in changed] == [[21], [3]]


def test_tiles_of_no_slot_write_nothing(params):
  tokens = tokens_of(2)
  cache = garbage(MODEL.init_cache(2, 24))
  nobody = np.array([2, 2, 2], np.int32)
  after = prefill(params, cache, tokens, nobody, np.array([0, 1, 2], np.int32))
  assert_exact(after, cache)


@pytest.mark.parametrize("size", [1, 8])
def test_what_lies_beyond_the_cursor_never_matters(params, size):
  tokens = tokens_of(3)
  start = np.array([0, 5, 14], np.int32)
  clean = MODEL.init_cache(3, 24)
  _, clean = append(params, tokens[:, :16], np.zeros(3, np.int32), clean)
  fed = np.stack([t[s : s + size] for t, s in zip(tokens, start)])
  want, cache = append(params, fed, start, beyond(clean, start, clean))
  for seed in range(2):
    dirty = beyond(clean, start, garbage(clean, seed))
    said, after = append(params, fed, start, dirty)
    assert_exact(said, want)
    # What was appended is what the next call reads: equal up to the new cursor.
    upto = lambda x: beyond(x, start + size, jax.tree.map(jnp.zeros_like, x))
    assert_exact(upto(after), upto(cache))
  assert_close(
    np.asarray(want)[:, 0],
    np.stack([forward(params, tokens)[i, s] for i, s in enumerate(start)]),
  )


def test_a_reused_slot_remembers_nothing_of_the_row_before(params):
  # The row before filled slot 0 to the end; the new one has 9 tokens.
  cache = MODEL.init_cache(2, 24)
  tiles = np.array([0, 0, 0], np.int32), np.array([0, 1, 2], np.int32)
  used = prefill(params, cache, tokens_of(2, seed=1), *tiles)
  tokens = tokens_of(2)
  tokens[:, 9:] = 0
  start, slots = np.array([0, 8, 0], np.int32), np.array([0, 0, 2], np.int32)
  pieces = np.stack([tokens[0, :8], tokens[0, 8:16], tokens[0, :8]])
  fresh, _ = append(params, pieces, start, cache, slots)
  again, _ = append(params, pieces, start, used, slots)
  assert_exact(again[:2], fresh[:2])
