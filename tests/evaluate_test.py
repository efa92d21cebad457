# SPDX-License-Identifier: Apache-2.0
"""Numbers of an evaluation, by hand."""

import itertools
import types

import numpy as np
import pytest

from oppo_jax import evaluate


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_right, k):
  samples = [True] * num_right + [False] * (6 - num_right)
  subsets = list(itertools.combinations(samples, k))
  expected = np.mean([any(subset) for subset in subsets])
  got = evaluate.pass_at_k(6, num_right, k)
  np.testing.assert_allclose(got, expected, atol=1e-12)


def test_pass_at_k_of_many_samples_is_a_number():
  assert 0.99 < evaluate.pass_at_k(10_000, 100, 1_000) <= 1.0


def test_more_than_were_drawn_cannot_be_asked_for():
  for k in (0, 4):
    with pytest.raises(ValueError, match=f"k={k}: must be in"):
      evaluate.pass_at_k(3, 1, k)


@pytest.mark.parametrize(
  ("texts", "says"),
  [(["x"], "--k=x: must be integers"), (["1", "5"], "--k=5: must be in")],
)
def test_a_bad_k_is_named(texts, says):
  with pytest.raises(ValueError, match=says):
    evaluate.read_ks(texts, 4)


def test_numbers_are_means_over_responses_and_pass_at_k_over_prompts():
  """Two prompts of two samples; the first prompt has one right."""
  said = evaluate.Said(
    examples=[None] * 4,
    prompts=[np.arange(2)] * 4,
    responses=[np.arange(n) for n in (1, 2, 3, 4)],
    texts=[""] * 4,
    has_eos=np.array([True, True, True, False]),
  )
  columns = {"rule": np.array([0.0, 1.0, 0.5, 0.0]), "kl": np.arange(4.0)}
  task = types.SimpleNamespace(reward=lambda example, text: 0.0)
  found = evaluate.numbers_of(task, said, columns, (1, 2), 2)
  assert found == {
    "responses": 4,
    "response_len": 2.5,
    "truncated": 0.25,
    "accuracy": 0.375,
    "kl": 1.5,
    "pass@1": (1 / 2 + 0) / 2,
    "pass@2": (1 + 0) / 2,
  }


def test_rows_are_prompts_and_responses_side_by_side():
  said = evaluate.Said(
    [None] * 2,
    [np.array([1, 2]), np.array([3])],
    [np.array([4]), np.array([5, 6])],
    ["", ""],
    np.array([True, True]),
  )
  tokens, length = evaluate.rows_of(said, row_len=4)
  np.testing.assert_array_equal(tokens, [[1, 2, 4, 0], [3, 5, 6, 0]])
  np.testing.assert_array_equal(length, [3, 3])
