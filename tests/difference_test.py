# SPDX-License-Identifier: Apache-2.0
"""Distances in ulps by hand, and which difference counts as the first."""

import jax.numpy as jnp
import numpy as np
import pytest

from oppo_jax import difference

BFLOAT16 = jnp.bfloat16


@pytest.mark.parametrize(
  ("dtype", "a", "b", "expected"),
  [
    (np.float32, 1.0, 1.0, 0),
    (np.float32, 1.0, 1 + 2**-23, 1),
    (np.float32, 1.0, 1 - 2**-24, 1),
    (np.float32, 0.0, -0.0, 0),
    (np.float32, 2**-149, -(2**-149), 2),  # 0.0 lies between
    (np.float32, np.nan, np.nan, 0),
    (np.float32, np.inf, np.finfo(np.float32).max, 1),
    (np.float64, 1.0, 1 + 2**-51, 2),
    (np.float64, -1.0, 1.0, 2 * 0x3FF0000000000000),
    (BFLOAT16, 1.0, 1 + 2**-7, 1),
    (np.int32, 3, 7, 4),
    (np.bool_, True, False, 1),
  ],
)
def test_ulps_by_hand(dtype, a, b, expected):
  a, b = np.array([a], dtype), np.array([b], dtype)
  assert difference.ulps(a, b).tolist() == [expected]
  assert difference.ulps(b, a).tolist() == [expected]


def test_a_number_and_no_number_are_as_far_apart_as_can_be():
  found = difference.between([np.float32([1, 2])], [np.float32([1, np.nan])])
  assert found.max_abs == np.inf
  assert found.max_ulp == np.iinfo(np.int64).max


def test_the_first_leaf_that_differs_is_named_and_the_largest_distance_kept():
  a = {"b": {"w": np.zeros((2, 3), np.float32)}, "c": np.zeros(2, np.float32)}
  b = {
    "b": {"w": np.float32([[0, 0, 0], [0, 0, 0.25]])},
    "c": np.float32([0, 8]),
  }
  found = difference.between(a, b, name="grads/")
  assert (found.path, found.index) == ("grads/b/w", (1, 2))
  assert found.pair == (0.0, 0.25)
  assert found.max_abs == 8.0
  assert str(found) == "grads/b/w[1, 2]: 0 vs 0.25"


def test_equal_trees_have_no_place():
  a = {"w": np.arange(3)}
  assert difference.between(a, a) == difference.Difference()
  assert str(difference.between(a, a)) == ""


def test_integers_are_equal_or_not():
  found = difference.between([np.array([3, 4])], [np.array([3, 5])])
  assert found.max_abs == np.inf
  assert found.max_ulp == 1


@pytest.mark.parametrize(
  "b",
  [
    {"w": np.zeros(3, np.float64)},
    {"w": np.zeros(2, np.float32)},
    {"v": np.zeros(3, np.float32)},
    {"w": np.zeros(3, np.float32), "z": np.zeros(1)},
  ],
)
def test_trees_of_another_kind_are_refused(b):
  with pytest.raises(ValueError):
    difference.between({"w": np.zeros(3, np.float32)}, b)
