# SPDX-License-Identifier: Apache-2.0
"""What a reward model is held to: baselines and grades, by hand."""

import numpy as np
import pytest

from oppo_jax import reward_model
from oppo_jax.tasks import base
from oppo_jax.texts import Text


def pair(chosen, rejected, prompt="p"):
  return base.Pair(prompt, chosen, rejected, margin=0.0)


LONG, SHORT, EQUAL = pair("aaa", "a"), pair("a", "aaa"), pair("aa", "bb")


def test_equally_long_texts_are_half_a_point():
  assert reward_model.longer_wins([LONG, LONG, SHORT, EQUAL]) == 2.5 / 4


@pytest.mark.parametrize(
  ("train", "test", "longer", "majority"),
  [
    ([LONG, LONG, SHORT], [LONG, SHORT, SHORT, SHORT], 0.25, 0.25),
    ([SHORT, SHORT, LONG], [LONG, SHORT, SHORT, SHORT], 0.25, 0.75),
  ],
)
def test_the_majority_is_that_of_the_training_pairs(
  train, test, longer, majority
):
  found = reward_model.baselines(train, test)
  assert found == dict(num_pairs=4, longer=longer, majority=majority)


def test_no_training_pair_has_a_held_out_prompt():
  train = [pair("a", "b", prompt) for prompt in ("x", "y", "x", "z")]
  found = reward_model.apart(train, [pair("c", "d", "x")])
  assert [p.prompt for p in found] == ["y", "z"]


def test_grades_by_hand():
  """Gaps 2, -1, 0: one right, one wrong, one half."""
  text = lambda response_len: Text(np.zeros(1 + response_len, np.int32), 1)
  items = [(text(3), text(1)), (text(2), text(3)), (text(2), text(2))]
  scores = np.array([[3.0, 1.0], [2.0, 3.0], [2.0, 2.0]], np.float32)
  found = reward_model.judge(scores, items)
  loss = (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(1.0)) + np.log(2)) / 3
  expected = dict(
    accuracy=1.5 / 3,
    loss=loss,
    gap=1 / 3,
    score=13 / 6,
    spread=np.std([3, 1, 2, 3, 2, 2]),
    length=1.0,  # the score is the length
  )
  assert set(found) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-12)


def test_equal_scores_have_no_correlation():
  text = Text(np.zeros(3, np.int32), 1)
  found = reward_model.judge(np.ones((2, 2)), [(text, text)] * 2)
  assert found["length"] == 0.0
  assert found["accuracy"] == 0.5
