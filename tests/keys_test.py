# SPDX-License-Identifier: Apache-2.0
"""Keys: one per seed and purpose."""

import itertools

import jax
import pytest

from oppo_jax import keys


def test_no_two_purposes_or_seeds_share_a_key():
  found = {
    (seed, purpose): tuple(
      jax.random.key_data(keys.named(seed, purpose)).tolist()
    )
    for seed, purpose in itertools.product(range(3), keys.PURPOSES)
  }
  assert len(set(found.values())) == len(found) == 3 * len(keys.PURPOSES)


def test_a_key_is_a_function_of_its_seed_and_purpose():
  a, b = (keys.named(5, "rollout") for _ in range(2))
  assert (jax.random.key_data(a) == jax.random.key_data(b)).all()


def test_an_unknown_purpose_is_refused():
  with pytest.raises(ValueError, match="not in"):
    keys.named(0, "dropout")
