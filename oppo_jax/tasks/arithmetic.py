# SPDX-License-Identifier: Apache-2.0
"""Chains of sums with worked solutions: the task that needs no download.

  prompt     7+5-3*2=
  solution   7+5=12;12-3=9;9*2=18;#18      one local step per operation

Operations are carried out from left to right, as on a pocket calculator, also
across `*`. The number of operations is log-normal, so response lengths have the
long tail that overlap is about. A problem is a pure function of
(seed, split, index) and the knobs.

Characters (one token each under a "char" tokenizer) of 20,000 training rows,
seed 0, max_ops 12 | 16:

  difficulty                   1          2          3          4          5
  solution, median       18 | 18    19 | 19    21 | 21    24 | 24    26 | 26
  solution, 99%          80 | 98   91 | 107   96 | 117  115 | 143  123 | 154
  solution, longest     99 | 131   99 | 131  110 | 145  134 | 176  136 | 179
  prompt, longest        27 | 35    27 | 35    38 | 49    39 | 50    39 | 51
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import operator
import os
import random
import re
import sys
from collections.abc import Sequence

import numpy as np

from oppo_jax.tasks import base, rows

OPS_MEDIAN = 2.5  # of the log-normal number of operations
OPS_SIGMA = 0.9
TEST_SHARE = 8  # one prompt in this many belongs to the test split

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_STEP = re.compile(r"(-?[0-9]{1,9})([-+*])([0-9]{1,9})=(-?[0-9]{1,18})")


@dataclasses.dataclass(frozen=True)
class Level:
  """What a difficulty allows.

  Attributes:
    operators: of "+-*"; the right operand of `*` is one digit, at least 2.
    max_operand: largest operand of + and -.
    bound: running values stay in [0, bound); the first is at most half of it.
  """

  operators: str
  max_operand: int
  bound: int


LEVELS = {
  1: Level("+-", max_operand=9, bound=20),
  2: Level("+-", max_operand=9, bound=100),
  3: Level("+-", max_operand=49, bound=100),
  4: Level("+-*", max_operand=49, bound=200),
  5: Level("+-*", max_operand=99, bound=1000),
}


def make(
  *,
  difficulty: int,
  max_ops: int,
  num_train: int,
  num_test: int,
  seed: int,
  cache_dir: str | os.PathLike,
) -> base.Task:
  """The task; rows are generated once and kept under `cache_dir`.

  Args:
    difficulty: 1 .. 5, see `LEVELS`.
    max_ops: operations in the longest problem, >= 1.
    num_train: training problems. Short ones repeat, as there are few of them.
    num_test: test problems; no prompt of theirs is in any training split.
    seed: another seed is another draw of problems.
    cache_dir: where the data set is kept, see `rows.py`.
  """
  if difficulty not in LEVELS:
    raise ValueError(f"difficulty={difficulty}: not one of {sorted(LEVELS)}")
  sizes = {"train": num_train, "test": num_test}
  for key, value, low in (
    ("max_ops", max_ops, 1),
    ("num_train", num_train, 1),
    ("num_test", num_test, 1),
    ("seed", seed, 0),
  ):
    if value < low:
      raise ValueError(f"{key}={value}: must be at least {low}")
  knobs = dict(seed=seed, difficulty=difficulty, max_ops=max_ops)

  def make_rows():
    return {
      split: [
        dataclasses.asdict(problem(index=i, split=split, **knobs))
        for i in range(sizes[split])
      ]
      for split in base.SPLITS
    }

  @functools.cache
  def load():
    found = rows.load(
      "arithmetic",
      # The source is part of the key: an edited generator is a new data set.
      key=json.dumps([knobs, sizes, inspect.getsource(sys.modules[__name__])]),
      fields=[f.name for f in dataclasses.fields(base.Example)],
      make_rows=make_rows,
      data_dir=cache_dir,
    )
    return {k: [base.Example(**row) for row in v] for k, v in found.items()}

  def prompts(split: str) -> Sequence[base.Example]:
    base.check_split(split)
    return load()[split]

  return base.Task("arithmetic", prompts, reward, terse, corrupt)


def problem(
  *, seed: int, split: str, index: int, difficulty: int, max_ops: int
) -> base.Example:
  """Problem `index` of a split.

  The length is drawn first and kept while operands are redrawn until the prompt
  belongs to the split (`split_of`), so both splits have the same lengths.
  """
  rng = random.Random(f"{seed}/{split}/{index}")
  num_ops = max_ops + 1
  while num_ops > max_ops:  # Redrawn, not clipped: no lump at the maximum.
    draw = rng.lognormvariate(0.0, OPS_SIGMA) * OPS_MEDIAN
    num_ops = max(1, round(draw))
  while True:
    first, ops = _draw(rng, LEVELS[difficulty], num_ops)
    prompt = f"{first}{''.join(f'{op}{n}' for op, n in ops)}="
    if split_of(prompt) == split:
      solution, answer = _work(first, ops)
      return base.Example(prompt, str(answer), solution)


def split_of(prompt: str) -> str:
  """The split a prompt belongs to, whatever the seed: a hash of its text."""
  digest = hashlib.sha256(prompt.encode("ascii")).digest()
  return "test" if digest[0] % TEST_SHARE == 0 else "train"


def reward(example: base.Example, response: str) -> float:
  """1.0 if what follows the last `#` is the answer and nothing else."""
  _, mark, tail = response.rpartition("#")
  return float(bool(mark) and tail.strip() == example.answer)


def terse(example: base.Example) -> str:
  """The answer alone: right, but few can tell it without working it out."""
  return f"#{example.answer}"


def check_steps(text: str) -> float:
  """Share of right steps in a solution; for diagnostics, never for rewards.

  A step is right if its equation holds and it starts from the result of the
  step before it. 0.0 if there is no step.
  """
  steps = text.partition("#")[0].split(";")
  steps = [s.strip() for s in steps if s.strip()]
  right, before = 0, None
  for step in steps:
    match = _STEP.fullmatch(step)
    if match:
      a, op, b, c = match.groups()
      holds = _APPLY[op](int(a), int(b)) == int(c)
      right += holds and before in (None, a)
    before = match and match.group(4)
  return right / max(len(steps), 1)


def corrupt(example: base.Example, rng: np.random.Generator) -> str:
  """A plausible wrong solution: it never earns the reward.

  One of: a wrong result carried on to the end, a step left out (if there are
  two or more), a wrong final answer after right steps.
  """
  first, ops = _parse(example.prompt)
  kind = rng.choice(["slip", "drop", "answer"])
  k = int(rng.integers(len(ops)))
  if kind == "drop" and len(ops) > 1:
    return _work(first, ops[:k] + ops[k + 1 :])[0]
  if kind == "answer":
    right_steps = example.solution.rpartition("#")[0]
    return f"{right_steps}#{_wrong(int(example.answer), rng)}"
  head, value = _work(first, ops[:k])
  op, operand = ops[k]
  wrong = _wrong(_APPLY[op](value, operand), rng)
  tail, _ = _work(wrong, ops[k + 1 :])
  return f"{head.rpartition('#')[0]}{value}{op}{operand}={wrong};{tail}"


def _draw(rng: random.Random, level: Level, num_ops: int):
  """First number and [(operator, operand)] with all values in the bound."""
  first = value = rng.randint(1, level.bound // 2)
  ops = []
  for _ in range(num_ops):
    ranges = {
      "+": (1, min(level.max_operand, level.bound - 1 - value)),
      "-": (1, min(level.max_operand, value)),
      "*": (2, min(9, (level.bound - 1) // value) if value else 0),
    }
    possible = [o for o in level.operators if ranges[o][0] <= ranges[o][1]]
    op = rng.choice(possible)
    operand = rng.randint(*ranges[op])
    ops.append((op, operand))
    value = _APPLY[op](value, operand)
  return first, ops


def _work(first: int, ops) -> tuple[str, int]:
  """The worked solution of a chain, and its value."""
  value, steps = first, []
  for op, operand in ops:
    result = _APPLY[op](value, operand)
    steps.append(f"{value}{op}{operand}={result};")
    value = result
  return f"{''.join(steps)}#{value}", value


def _parse(prompt: str):
  """Inverse of what `problem` writes."""
  first = re.match("[0-9]+", prompt).group()
  ops = re.findall("([-+*])([0-9]+)", prompt[len(first) :])
  return int(first), [(op, int(n)) for op, n in ops]


def _wrong(value: int, rng: np.random.Generator) -> int:
  """A number near `value`, not below 0: off by 1, 2 or 10."""
  offset = int(rng.choice([1, 2, 10]))
  sign = -1 if value >= offset and rng.integers(2) else 1
  return value + sign * offset
