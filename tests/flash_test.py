# SPDX-License-Identifier: Apache-2.0
"""Attention by kernels, interpreted here: the numbers and the guarantees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax.models import attention, flash

KV, GROUP, DIM = 2, 3, 8


def draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def packed_by_xla(q, k, v, segments):
  return attention.attend_causal(
    q, k.swapaxes(1, 2), v.swapaxes(1, 2), segments
  )


def test_packed_rows_and_their_gradient():
  width = flash.WIDTH + 22  # no multiple of it
  q = draw(0, 2, width, KV, GROUP, DIM)
  k, v = draw(1, 2, width, KV, DIM), draw(2, 2, width, KV, DIM)
  rng = np.random.default_rng(0)
  segments = np.sort(rng.integers(-1, 3, (2, width)), axis=1)
  segments, dy = jnp.asarray(segments), draw(3, *q.shape)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradient(attend):
    y, backward = jax.vjp(lambda *x: attend(*x, segments), q, k, v)
    return y, backward(dy)

  assert_close(
    value_and_gradient(flash.packed), value_and_gradient(packed_by_xla)
  )


def appended(size, start, *, seed=0, rows=3, columns=64, block=16):
  """What `flash.cached` says of rows at `start`, and what XLA does."""
  q = draw(seed, rows, size, KV, GROUP, DIM)
  k, v = (draw(seed + i, rows, size, KV, DIM) for i in (1, 2))
  cache = [draw(i, rows, KV, columns, DIM) for i in (90, 91)]
  start = np.asarray(start, np.int32)
  cache = [
    attention.write(x, new, start, None) for x, new in zip(cache, (k, v))
  ]
  got = flash.cached(q, *cache, k, v, start, block=block)
  at = start[:, None] + np.arange(size)
  seen = np.arange(columns) <= at[:, None, None, :, None]
  return got, attention.attend(q, *cache, seen)


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("block", [16, 32])
def test_new_tokens_over_a_cache(size, block):
  # Nothing before; the end of a block, and one behind it; the end of the row.
  for start in ([0, 15, 16], [17, 33, 64 - size]):
    got, want = appended(size, start, block=block)
    assert_close(got, want)


@pytest.mark.parametrize("size", [1, 7])
def test_a_row_does_not_depend_on_the_others(size):
  alone, _ = appended(size, [5, 0, 0])
  among, _ = appended(size, [5, 40, 57])
  assert_exact(among[0], alone[0])
  assert not np.array_equal(among[1], alone[1])


@pytest.fixture(scope="module")
def setup():
  make = functools.partial(
    tiny.model, attention="flash", attention_block=16, dtype="bfloat16"
  )
  return tiny.setup(make_model=make, denominator="decoupled")


def train(s, **changes):
  given = dict(num_steps=3, delta=(3, 0, 4).__getitem__, intra="chunk")
  return tiny.train(s, **given | changes)


@pytest.fixture(scope="module")
def streamed(setup):
  return train(setup)


@pytest.mark.parametrize(
  "changes",
  [
    dict(intra="none"),
    dict(chunk_size=lambda step: 1),
    dict(slot_order=np.arange(8)[::-1]),
  ],
  ids=["not streamed", "chunks of one", "other slots"],
)
def test_a_run_has_the_same_bits(setup, streamed, changes):
  run = train(setup, **changes)
  assert_exact(run.batches, streamed.batches)
  assert_exact(run.params, streamed.params)


def test_a_model_says_the_same_with_and_without_kernels():
  make = functools.partial(tiny.model, attention_block=16)
  params = tiny.params(make(), 0)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, tiny.VOCAB, (2, 9)).astype(np.int32)
  start = np.array([0, 20], np.int32)

  @functools.partial(jax.jit, static_argnums=0)
  def said(model):
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    whole = model.forward(params, tokens, positions, positions // 4)
    fill = lambda x: draw(x.ndim, *x.shape)
    cache = jax.tree.map(fill, model.init_cache(2, 32))
    return whole, model.apply(params, tokens, start, cache)

  assert_close(said(make(attention="flash")), said(make(attention="xla")))
