# SPDX-License-Identifier: Apache-2.0
"""Draws one index per row from softmax(logits), with 1 to 3 random numbers.

Knows neither tokens nor slots. One random number per word would cost more than
a tick of a small model. An index is drawn digit by digit instead, each digit in
proportion to the mass below it; with 2 digits of 4 (there are 64):

  u[0] = 0.7   masses of 4 words    3    1    4    2
               cumulated            3    4   [8]  10   8 >= 0.7 * 10: digit 2
                                           __|__
  u[1] = 0.2   masses of 1 word       1    0    2    1
               cumulated             [1]   1    3    4   1 >= 0.2 * 4: digit 0
                                      |
                              index 2 * 4 + 0 = 8

Every digit has a number of its own and is right to 2^-23 of the mass that it is
drawn from, however small a part of the row that is.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BRANCHES = 64


def num_digits(size: int) -> int:
  """Random numbers that one of `size` indices takes: 1 to 64, 2 to 4096, ..."""
  digits = 1
  while BRANCHES**digits < size:
    digits += 1
  return digits


def uniforms(keys: jax.Array, size: int) -> Float[Array, "S digits"]:
  """The random numbers of one draw per key, in (0, 1]."""
  one = lambda key: jax.random.uniform(key, (num_digits(size),), jnp.float32)
  return 1 - jax.vmap(one)(keys)


def _branches(masses: Float[Array, "S n"]) -> Float[Array, "S m 64"]:
  missing = -masses.shape[1] % BRANCHES
  padded = jnp.pad(masses, ((0, 0), (0, missing)))
  return padded.reshape(len(masses), -1, BRANCHES)


def _digit(
  masses: Float[Array, "S b"], u: Float[Array, " S"]
) -> Int[Array, " S"]:
  """First digit with mass at which the cumulated mass reaches u of the whole.

  There is one, and it has mass, whatever rounds where. All sums add in the same
  order, zeros for what comes later, so that next to no mass moves no bit. In a
  tree of partial sums (`lax.associative_scan`, and what `jnp.cumsum` may be) it
  would own the difference in the last bit, 6e-8.
  """
  digits = jnp.arange(masses.shape[1])
  is_before = digits[:, None] <= digits  # [what is added, where]
  up_to = jnp.sum(jnp.where(is_before, masses[:, :, None], 0), axis=1)
  has_mass = masses > 0
  whole = jnp.max(jnp.where(has_mass, up_to, 0), axis=1)
  return jnp.argmax(has_mass & (up_to >= (u * whole)[:, None]), axis=1)


def index_of(
  logits: Float[Array, "S V"], u: Float[Array, "S digits"]
) -> Int[Array, " S"]:
  """The index that these random numbers stand for.

  Args:
    logits: float32. Probability 0 is never drawn; of a row with NaN or plus
      infinity, or without any mass, nothing is said but that the index exists.
    u: of `uniforms`; any numbers in [0, 1] are safe.
  """
  top = jnp.max(logits, axis=1, keepdims=True)
  levels = [jnp.exp(logits - top)]  # masses: of words, of 64 words, of 4096 ...
  while levels[-1].shape[1] > BRANCHES:
    levels.append(jnp.sum(_branches(levels[-1]), axis=2))
  index = _digit(levels.pop(), u[:, 0])
  for place in range(1, u.shape[1]):
    branches = _branches(levels.pop())
    below = jnp.take_along_axis(branches, index[:, None, None], axis=1)[:, 0]
    index = index * BRANCHES + _digit(below, u[:, place])
  return index


def draw(logits: Float[Array, "S V"], keys: jax.Array) -> Int[Array, " S"]:
  """One index per row: a function of the row's logits and its key alone."""
  return index_of(logits, uniforms(keys, logits.shape[1]))
