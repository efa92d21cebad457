# SPDX-License-Identifier: Apache-2.0
"""What a reward model is held to: baselines and grades, by hand."""

import types

import ml_collections
import numpy as np
import pytest

from oppo_jax import reward_model, tokenizer
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


def test_margins_stay_with_their_pairs():
  """Of five, a held-out prompt, a tie and a long one are left out."""
  pairs = {
    "train": [
      base.Pair("a?", "b", "c", 1.0),
      base.Pair("b?", "b", "c", 2.0),
      base.Pair("c?", "b", "b", 3.0),
      base.Pair("d?", "bbbbbbbbb", "b", 4.0),
      base.Pair("e?", "c", "b", 5.0),
    ],
    "test": [base.Pair("b?", "bb", "c", 6.0)],
  }
  parts = types.SimpleNamespace(
    task=types.SimpleNamespace(name="own", pairs=pairs.get),
    tokens=tokenizer.make("char", corpus=["abcde?"]),
    reward=None,
  )
  config = ml_collections.ConfigDict(
    dict(
      seed=0,
      reward_model=dict(
        width=8,
        long_responses="skip",
        num_eval=0,
        margin_coef=0.0,
        center_coef=0.0,
      ),
      rollout=dict(max_prompt_len=4, long_prompts="skip"),
      load=dict(policy="", reward_model=""),
    )
  )
  setup = types.SimpleNamespace(parts=parts)
  stage = reward_model.make_stage(config, setup)
  said = [parts.tokens.decode(item[0].tokens[1:]) for item in stage.items]
  assert said == ["a?b", "e?c"]
  assert stage.margins.tolist() == [1.0, 5.0]
  assert stage.baselines == dict(num_pairs=1, longer=1.0, majority=1.0)
