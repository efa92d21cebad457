# SPDX-License-Identifier: Apache-2.0
"""Openings of children's stories; the rule wants them told with exclamations.

  prompt    Once upon a time, there was a little girl named Sue. One day, she
  reward    share of sentences that end in "!"

Made for a model that can tell such stories and little else (TinyStories,
arXiv 2305.07759): what the rule counts is easily seen in the text, and nothing
else about a story is asked for. It is no measure of a good story.
"""

import functools
import itertools
import os
import random
import re

from oppo_jax.tasks import base

NAMES = {
  "girl": "Lily Sue Mia Anna Amy Lucy Emma Sara Mary Lola Molly Jane".split(),
  "boy": "Tim Tom Ben Max Sam Jack Bob Billy Mike Leo John Fred".split(),
}
KINDS = ("little", "happy", "kind", "brave", "shy", "funny")
STARTS = ("One day, {he}", "{He} loved to", "Every day, {he}", "{He} had a")
MIN_SENTENCES = 3  # a story of fewer counts as one of three

# Up to a mark that ends a sentence, with the quotation marks after it.
_SENTENCE = re.compile(r"[^.!?]*[^.!?\s\"'][^.!?]*([.!?]+)[\"']*")


def make(*, num_test: int, seed: int, cache_dir: str | os.PathLike):
  """The task.

  Args:
    num_test: prompts of the test split; the others are trained on.
    seed: of the order.
    cache_dir: not used; the prompts are made anew.

  Raises:
    ValueError: a split would be empty.
  """
  del cache_dir
  total = len(_prompts())
  if not 0 < num_test < total:
    raise ValueError(f"num_test={num_test}: must be in [1, {total - 1}]")

  @functools.cache
  def rows():
    found = list(_prompts())
    random.Random(seed).shuffle(found)
    examples = [base.Example(prompt, "", "") for prompt in found]
    return {"test": examples[:num_test], "train": examples[num_test:]}

  def prompts(split):
    base.check_split(split)
    return rows()[split]

  return base.Task("stories", prompts, reward, terse=None, corrupt=None)


@functools.cache
def _prompts() -> tuple[str, ...]:
  """All openings: who the story is about, and how it goes on."""
  return tuple(
    f"Once upon a time, there was a {kind} {child} named {name}. "
    + start.format(he=he, He=he.capitalize())
    for child, he in (("girl", "she"), ("boy", "he"))
    for kind, name, start in itertools.product(KINDS, NAMES[child], STARTS)
  )


def reward(example: base.Example, response: str) -> float:
  """Share of the response's sentences that end in an exclamation mark.

  The first continues the prompt's last; a last one that was cut off does not
  count. Marks in a row ("?!") count as the first of them.
  """
  del example
  ends = [found[1][0] for found in _SENTENCE.finditer(response)]
  return ends.count("!") / max(len(ends), MIN_SENTENCES)
