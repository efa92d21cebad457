# SPDX-License-Identifier: Apache-2.0
"""What a task is to the rest of the package: text in, a number out.

A task owns prompts, worked solutions and the rule that grades a response. It
knows nothing about tokens, models or training.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Example:
  """One problem.

  Attributes:
    prompt: what the policy is given, word for word.
    answer: what the response must arrive at, in the grader's normal form.
    solution: a worked response for supervised fine-tuning; "" if there is none.
  """

  prompt: str
  answer: str
  solution: str


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two responses to one prompt, of which people prefer the first.

  Attributes:
    prompt: what was asked, word for word what the policy would be given.
    chosen: the better response.
    rejected: the other one.
    margin: how much better, in units of the data; 0 = not known.
  """

  prompt: str
  chosen: str
  rejected: str
  margin: float


@dataclasses.dataclass(frozen=True)
class Task:
  """Prompts and the rule that grades responses to them.

  Attributes:
    name: key in `tasks.TASKS`.
    prompts: split -> examples, in an order that never changes.
    reward: (example, response text) -> [0, 1]; 1 = the final answer is right.
      None where there is no rule: a learned reward grades.
    terse: example -> a right response that shows no work; None where there is
      no such thing.
    corrupt: (example, rng) -> a plausible wrong solution, for preference pairs;
      None where the task cannot make one.
    pairs: split -> preferences, for a reward model, in an order that never
      changes; None where there are none. No prompt is in both splits.
    demonstrations: split -> examples whose solutions are learned from; None =
      those of `prompts`.
    grade: (example, response text) -> numbers by name: "rule", which is the
      reward, and `rules`; None = the reward is all there is.
    rules: names of further numbers: rewards that a config can weigh
      (`config.reward.rules`), and what is logged of a response.
    workers: threads that grade while other rows decode; 0 = the rule is cheap,
      and grades in place when a batch is complete.
  """

  name: str
  prompts: Callable[[str], Sequence[Example]]
  reward: Callable[[Example, str], float] | None
  terse: Callable[[Example], str] | None
  corrupt: Callable[[Example, np.random.Generator], str] | None
  pairs: Callable[[str], Sequence[Pair]] | None = None
  demonstrations: Callable[[str], Sequence[Example]] | None = None
  grade: Callable[[Example, str], dict[str, float]] | None = None
  rules: tuple[str, ...] = ()
  workers: int = 0

  def grades(self, example: Example, response: str) -> dict[str, float]:
    """What the rule says of a response: "rule", and `rules`."""
    if self.grade is not None:
      return self.grade(example, response)
    return {"rule": self.reward(example, response)}

  def corpus(self, n: int) -> list[str]:
    """The first n training texts (prompt and solution), for a tokenizer."""
    found = (self.demonstrations or self.prompts)("train")[:n]
    return [e.prompt + e.solution for e in found]


def check_split(split: str) -> None:
  """Raises ValueError unless `split` is one of `SPLITS`."""
  if split not in SPLITS:
    raise ValueError(f"split={split!r}: not one of {SPLITS}")
