# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np
import pytest

from oppo_jax import rewards

# Responses of 2, 3 (all of R), and 0 tokens.
MASK = jnp.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
KL = jnp.array([[0.5, -1.0, jnp.nan], [1.0, 2.0, 3.0], [jnp.nan] * 3])


@pytest.mark.parametrize(
  ("position", "columns"), [("last", [1, 2, -1]), ("after_eos", [2, 2, 0])]
)
def test_scores_land_where_the_library_they_follow_puts_them(position, columns):
  got = rewards.score_column(MASK, position=position)
  np.testing.assert_array_equal(got, columns)


def test_values_reach_one_column_further_if_the_score_does():
  got = rewards.value_mask(MASK, position="last")
  np.testing.assert_array_equal(got, MASK)
  got = rewards.value_mask(MASK, position="after_eos")
  np.testing.assert_array_equal(got, [[1, 1, 1], [1, 1, 1], [1, 0, 0]])


@pytest.mark.parametrize(
  ("position", "expected"),
  [
    # -0.1 * kl, plus the score in its column; the empty row has no last token.
    ("last", [[-0.05, 4.1, 0.0], [-0.1, -0.2, 4.7], [0.0, 0.0, 0.0]]),
    ("after_eos", [[-0.05, 0.1, 4.0], [-0.1, -0.2, 4.7], [6.0, 0.0, 0.0]]),
  ],
)
def test_token_rewards_by_hand(position, expected):
  got = rewards.token_rewards(
    jnp.array([4.0, 5.0, 6.0]), KL, MASK, kl_coef=0.1, position=position
  )
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_integer_scores_are_not_truncated():
  scores = rewards.final_scores(
    jnp.array([1, 1, -1]),
    jnp.array([True, False, False]),
    missing_eos_penalty=0.25,
    score_clip=0.0,
  )
  np.testing.assert_array_equal(scores, [1.0, 0.75, -1.25])
  got = rewards.token_rewards(
    jnp.array([1, 1, 1]), KL, MASK, kl_coef=0.5, position="last"
  )
  np.testing.assert_array_equal(got[0], [-0.25, 1.5, 0.0])
  assert got.dtype == jnp.float32


def test_fractions_of_scores_reach_the_rewards():
  got = rewards.token_rewards(
    jnp.array([0.25, -1.75, 0.5]), KL, MASK, kl_coef=0.0, position="after_eos"
  )
  np.testing.assert_array_equal(
    got, [[0.0, 0.0, 0.25], [0.0, 0.0, -1.75], [0.5, 0.0, 0.0]]
  )


def test_the_penalty_comes_after_the_clip():
  scores = rewards.final_scores(
    jnp.array([9.0, -9.0, 9.0, -9.0]),
    jnp.array([True, True, False, False]),
    missing_eos_penalty=1.0,
    score_clip=5.0,
  )
  np.testing.assert_array_equal(scores, [5.0, -5.0, 4.0, -6.0])


def test_no_clip_and_no_penalty_leave_scores_alone():
  scores = rewards.final_scores(
    jnp.array([9.0, -9.0]),
    jnp.array([True, False]),
    missing_eos_penalty=0.0,
    score_clip=0.0,
  )
  np.testing.assert_array_equal(scores, [9.0, -9.0])


def test_unknown_score_position_is_refused():
  with pytest.raises(ValueError, match=r"'first'.*after_eos"):
    rewards.score_column(MASK, position="first")


WEIGHTS = dict(model_weight=0.5, rule_weight=2.0, rules=dict(tests=0.25, x=0.0))


def test_scores_are_weighted_by_name():
  parts = {
    "model": np.float32([1.0, -1.0]),
    "rule": np.float32([0.0, 1.0]),
    "tests": np.float32([4.0, 8.0]),
    "x": np.float32([np.nan, np.nan]),  # without a weight: only logged
    "y": np.float32([np.nan, np.nan]),
  }
  got = rewards.weighted_sum(parts, WEIGHTS)
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, [0.5 + 1.0, -0.5 + 2.0 + 2.0])


def test_rules_of_every_task_by_hand():
  got = rewards.rule_parts(
    ["ended", "length", "tests"],
    np.array([8, 2]),
    np.array([False, True]),
    max_response_len=8,
  )
  assert {k: v.tolist() for k, v in got.items()} == {
    "ended": [0.0, 1.0],
    "length": [-1.0, -0.25],
  }
  assert {v.dtype for v in got.values()} == {np.dtype("float32")}


def test_a_weight_of_no_rule_is_named():
  rewards.check_rules({"length": 0.0, "tests": 1.0}, ("tests",))
  with pytest.raises(
    ValueError, match=r"^config.reward.rules.test: unknown rule.*'tests'\?$"
  ):
    rewards.check_rules({"test": 1.0}, ("tests",))
