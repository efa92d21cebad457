# SPDX-License-Identifier: Apache-2.0
"""Stories: the rule by hand, and openings that are told apart."""

import pytest

from oppo_jax import tasks
from oppo_jax.tasks import stories


def reward(text):
  return stories.reward(None, text)


@pytest.mark.parametrize(
  ("text", "share"),
  [
    ("went home! She ran! She sang!", 1.0),
    ("went home. She ran! She sang.", 1 / 3),
    ('said, "Come!" She ran. She sang. She', 1 / 3),  # the last was cut off
    ("went home! She ran! She sang", 2 / 3),  # two of three at least
    ("went home!", 1 / 3),
    ("went home!!! She ran?! She sang. No!", 2 / 4),  # marks in a row: one
    ("! ! ! !", 0.0),  # no sentences
    ("", 0.0),
    ("went home", 0.0),
  ],
)
def test_the_reward_is_the_share_of_exclamations(text, share):
  assert reward(text) == pytest.approx(share)


def make(**kwargs):
  return tasks.make("stories", cache_dir="", **kwargs)


def test_no_test_prompt_is_in_the_training_split():
  task = make(num_test=64, seed=0)
  test, train = (
    [e.prompt for e in task.prompts(split)] for split in ("test", "train")
  )
  assert len(test) == 64
  assert len({*test, *train}) == len(test) + len(train) == 576
  assert "girl named Lily. One day, she" in " ".join(train + test)
  other = [e.prompt for e in make(num_test=64, seed=1).prompts("test")]
  assert other != test


@pytest.mark.parametrize("num_test", [0, 576])
def test_an_empty_split_is_refused(num_test):
  with pytest.raises(ValueError, match=f"num_test={num_test}"):
    make(num_test=num_test, seed=0)
