# SPDX-License-Identifier: Apache-2.0
"""Inverse CDF, digit by digit: shares, edges, and a row is by itself."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_exact

from oppo_jax import inverse_cdf, ops

LARGE = 151_936  # 3 digits
# Below, at and above a block, a block of blocks; nothing to choose.
SIZES = (1, 63, 64, 65, 4096, 4097)
# The least and the largest numbers, those nearest to them, and beyond.
EDGES = np.array([0, 2**-23, 0.5, 1 - 2**-24, 1], np.float32)

index_of = jax.jit(inverse_cdf.index_of)


@jax.jit
def draw(logits, who):
  """One index per row, with the key of who is drawing."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return inverse_cdf.draw(logits, fold(jax.random.key(0), who))


@functools.partial(jax.jit, static_argnames=("rows", "batches"))
def draws(logits, *, rows, batches):
  """Indices drawn from one row of logits, a few rows at a time."""
  wide = jnp.broadcast_to(logits, (rows, len(logits)))
  one_batch = lambda i: draw(wide, i * rows + jnp.arange(rows))
  return jax.lax.map(one_batch, jnp.arange(batches)).reshape(-1)


def softmax(logits):
  probs = np.exp(np.asarray(logits, np.float64) - np.max(logits))
  return probs / probs.sum()


def check_shares(drawn, probs):
  """Chi-square: five standard deviations above what chance gives."""
  want = len(drawn) * probs
  assert want.min() > 5
  counts = np.bincount(drawn, minlength=len(probs))
  freedom = len(probs) - 1
  chi_square = np.sum((counts - want) ** 2 / want)
  assert chi_square < freedom + 5 * np.sqrt(2 * freedom), chi_square


# Shares.


@pytest.mark.parametrize("size", [5, 300])
def test_words_are_drawn_with_their_probabilities(size):
  logits = np.random.default_rng(size).normal(size=size).astype(np.float32)
  drawn = draws(jnp.asarray(logits), rows=1024, batches=64)
  check_shares(np.asarray(drawn), softmax(logits))


def test_many_rare_words_are_drawn_as_often_as_they_should():
  # One word has half of the mass; the others 1e-8 to 3e-5 each.
  rng = np.random.default_rng(0)
  logits = rng.uniform(-8, 0, LARGE)
  logits[70_001] = np.log(np.exp(logits).sum())
  probs = softmax(logits)
  rare = probs < 1e-6
  assert rare.sum() > 80_000
  assert 0.01 < probs[rare].sum() < 0.03
  drawn = np.asarray(
    draws(jnp.asarray(logits, jnp.float32), rows=8, batches=1024)
  )
  # By likelihood, and by where they are in blocks of either size.
  places = np.arange(LARGE)
  for group in (
    np.digitize(probs, [1e-7, 1e-6, 1e-5, 0.1]),
    np.where(rare, 1 + places * 8 // LARGE, 0),
    np.where(rare, 1 + places // 64 % 8, 0),
    np.where(rare, 1 + places % 8, 0),
  ):
    check_shares(group[drawn], np.bincount(group, weights=probs))


def intervals(probs, word):
  """Of each digit of a word, between which random numbers it is drawn."""
  found = []
  for digit in reversed(range(inverse_cdf.num_digits(len(probs)))):
    block = 64**digit
    first = word // (64 * block) * (64 * block)
    edges = range(first, min(first + 64 * block, len(probs)), block)
    masses = [probs[i : i + block].sum() for i in edges]
    k, whole = (word - first) // block, sum(masses)
    found.append((sum(masses[:k]) / whole, sum(masses[: k + 1]) / whole))
  return found


@hypothesis.settings(max_examples=40)
@hypothesis.given(
  size=st.sampled_from([*SIZES, LARGE]),
  seed=st.integers(0, 2**20),
  spread=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_a_word_is_what_lies_between_its_numbers(size, seed, spread):
  """And so has its probability, however small."""
  rng = np.random.default_rng(seed)
  logits = np.asarray(spread * rng.normal(size=size), np.float32)
  probs = softmax(logits)
  for word in (0, size - 1, int(rng.integers(size))):
    low, high = np.array(intervals(probs, word)).T
    np.testing.assert_allclose(np.prod(high - low), probs[word], rtol=1e-6)
    if (high - low).min() < 1e-5:
      continue  # what float32 may round away
    for share in (0.01, rng.uniform(0.01, 0.99), 0.99):
      u = np.float32(low + share * (high - low))
      # float32 numbers may round out of an interval at its ends.
      if ((low + 1e-6 < u) & (u < high - 1e-6)).all():
        assert index_of(logits[None], u[None]).tolist() == [word]


# What has no probability.


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  size=st.sampled_from(SIZES),
  seed=st.integers(0, 2**20),
  share=st.sampled_from([0.0, 0.02, 0.5, 0.98]),
  never=st.sampled_from([ops.MASKED_LOGIT, -1e30, -np.inf, -200.0]),
)
def test_probability_0_is_never_drawn(size, seed, share, never):
  rng = np.random.default_rng(seed)
  is_kept = rng.random(size) < share
  is_kept[rng.integers(size)] = True
  logits = np.where(is_kept, 8 * rng.normal(size=size), never)
  digits = inverse_cdf.num_digits(size)
  u = np.array(list(itertools.product(EDGES, repeat=digits)))
  wide = np.broadcast_to(logits.astype(np.float32), (len(u), size))
  drawn = np.asarray(index_of(wide, u))
  assert (drawn < size).all()
  assert is_kept[drawn].all()


@pytest.mark.parametrize("seed", range(4))
def test_next_to_nothing_is_not_drawn_where_sums_round(seed):
  """At the very numbers at which a sum reaches a word, and the next ones."""
  rng = np.random.default_rng(seed)
  is_word = np.arange(64) % 2 == 0
  logits = np.where(is_word, rng.normal(size=64), -60).astype(np.float32)
  near = np.cumsum(softmax(logits)).astype(np.float32)
  u = near[:, None] + np.float32(2**-24) * np.arange(-8, 9)
  u = np.clip(u, 2**-23, 1).reshape(-1, 1).astype(np.float32)
  drawn = np.asarray(index_of(np.broadcast_to(logits, (len(u), 64)), u))
  assert set(drawn.tolist()) == set(np.flatnonzero(is_word).tolist())


def test_all_mass_in_one_word():
  logits = np.full((3, LARGE), -1e30, np.float32)
  words = [0, 77_777, LARGE - 1]
  logits[range(3), words] = 1e4
  for u in EDGES:
    assert index_of(logits, np.full((3, 3), u)).tolist() == words


def test_rows_that_are_no_distribution_give_an_index_and_leave_others_alone():
  logits = np.random.default_rng(0).normal(size=(5, 4097)).astype(np.float32)
  want = np.asarray(draw(logits, np.arange(5)))
  logits[1, 4096], logits[2], logits[3, 7] = np.nan, -np.inf, np.inf
  found = np.asarray(draw(logits, np.arange(5)))
  assert ((found >= 0) & (found < 4097)).all()
  assert_exact(found[[0, 4]], want[[0, 4]])


# A row is by itself.


def test_a_draw_depends_on_no_other_row():
  rng = np.random.default_rng(0)
  logits = 3 * rng.normal(size=(12, 20_000)).astype(np.float32)
  want = np.asarray(draw(logits, np.arange(12)))
  assert len(set(want.tolist())) > 6
  for rows in (rng.permutation(12), np.array([4]), np.array([7, 2, 2, 0, 11])):
    assert_exact(np.asarray(draw(logits[rows], rows)), want[rows])


# The random numbers.


def test_a_digit_is_one_of_64():
  sizes = {1: 1, 64: 1, 65: 2, 4096: 2, 4097: 3, LARGE: 3, 64**3 + 1: 4}
  assert {n: inverse_cdf.num_digits(n) for n in sizes} == sizes


def test_no_random_number_is_0():
  # At 0 the first word with any mass would be drawn, however little.
  key = jax.random.fold_in(jax.random.key(0), 15_405_709)
  assert jax.random.uniform(key, (1,)) == 0
  assert inverse_cdf.uniforms(key[None], 64).tolist() == [[1]]


def test_random_numbers_are_uniform_and_independent():
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  keys = jax.jit(fold)(jax.random.key(0), np.arange(20_000))
  u = np.asarray(inverse_cdf.uniforms(keys, LARGE), np.float64)
  assert u.shape == (20_000, 3)
  cells = (np.ceil(u * 5) - 1).astype(int) @ [25, 5, 1]
  check_shares(cells, np.full(125, 1 / 125))
