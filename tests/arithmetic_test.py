# SPDX-License-Identifier: Apache-2.0
"""Claims about the arithmetic task."""

import re

import numpy as np
import pytest

from oppo_jax import tasks
from oppo_jax.tasks import arithmetic, base

KNOBS = dict(difficulty=2, max_ops=12, num_train=600, num_test=100, seed=0)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def task(cache_dir):
  return tasks.make("arithmetic", cache_dir=cache_dir, **KNOBS)


def draw(difficulty, n=1500, split="train", max_ops=12, seed=0):
  return [
    arithmetic.problem(
      seed=seed,
      split=split,
      index=i,
      difficulty=difficulty,
      max_ops=max_ops,
    )
    for i in range(n)
  ]


def left_to_right(prompt):
  """The value of a prompt, by Python's own arithmetic."""
  first, *rest = re.findall(r"[-+*]?\d+", prompt)
  expression = first
  for part in rest:
    expression = f"({expression}){part}"
  return eval(expression)


def test_rows_on_disk_are_the_problems(task):
  assert task.prompts("train") == draw(2, 600)
  assert task.prompts("test") == draw(2, 100, split="test")


def test_a_problem_does_not_depend_on_how_many_there_are(cache_dir, task):
  knobs = KNOBS | dict(num_train=50)
  small = tasks.make("arithmetic", cache_dir=cache_dir, **knobs)
  assert small.prompts("train") == task.prompts("train")[:50]


def test_changed_knobs_are_another_data_set(cache_dir, task):
  for change in (dict(seed=1), dict(difficulty=3), dict(max_ops=4)):
    knobs = KNOBS | change
    other = tasks.make("arithmetic", cache_dir=cache_dir, **knobs)
    assert other.prompts("train") != task.prompts("train")
    assert len(other.prompts("test")) == 100


def test_an_edited_generator_is_another_data_set(tmp_path, monkeypatch):
  knobs = KNOBS | dict(num_train=2, num_test=2)
  for source in ("", "edited", "edited"):
    if source:
      monkeypatch.setattr(arithmetic.inspect, "getsource", lambda _: "edited")
    tasks.make("arithmetic", cache_dir=tmp_path, **knobs).prompts("train")
  assert len(list(tmp_path.glob("arithmetic-*"))) == 2


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_solutions_are_right_step_by_step(difficulty):
  for example in draw(difficulty, 300):
    assert int(example.answer) == left_to_right(example.prompt)
    assert arithmetic.reward(example, example.solution) == 1.0
    assert arithmetic.check_steps(example.solution) == 1.0
    steps = example.solution.split(";")
    assert len(steps) - 1 == len(re.findall("[-+*]", example.prompt))
    assert example.solution.startswith(re.match(r"\d+", example.prompt).group())


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_values_stay_in_the_bound(difficulty):
  bound = arithmetic.LEVELS[difficulty].bound
  values = [
    int(value)
    for example in draw(difficulty)
    for value in re.findall(r"\d+(?=;)", example.solution)
  ]
  assert max(values) < bound
  assert max(values) > bound / 2  # The bound is used.
  assert not any("=-" in e.solution for e in draw(difficulty))


@pytest.mark.parametrize("difficulty", [1, 2, 3, 4, 5])
def test_lengths_have_a_long_tail(difficulty):
  lengths = [len(e.solution) for e in draw(difficulty, max_ops=16)]
  median, p99 = np.percentile(lengths, [50, 99])
  assert 15 <= median <= 30
  assert p99 >= 5 * median
  assert min(lengths) <= 10


def test_difficulty_makes_numbers_larger():
  largest = [max(int(e.answer) for e in draw(d)) for d in arithmetic.LEVELS]
  assert largest == sorted(largest)
  assert largest[0] < 20
  assert largest[-1] > 500
  assert not any("*" in e.prompt for e in draw(3))
  assert any("*" in e.prompt for e in draw(4))


def test_no_test_prompt_is_trained_on_whatever_the_seed(task):
  trained = {e.prompt for seed in (0, 1) for e in draw(2, seed=seed)}
  tested = {e.prompt for e in draw(2, 500, split="test")}
  assert not trained & tested
  assert all(arithmetic.split_of(p) == "test" for p in tested)


def test_no_problem_has_more_than_max_ops():
  counts = [len(re.findall("[-+*]", e.prompt)) for e in draw(4, max_ops=5)]
  assert max(counts) == 5
  assert min(counts) == 1


@pytest.mark.parametrize(
  ("response", "reward"),
  [
    ("7+5=12;12-3=9;#9", 1.0),
    ("#9", 1.0),  # Steps are not graded.
    ("#8#9 \n", 1.0),  # The last mark counts.
    ("7+5=12;12-3=9;#9.", 0.0),
    ("#9;", 0.0),
    ("#9 9", 0.0),
    ("#09", 0.0),
    ("#+9", 0.0),
    ("#9#", 0.0),
    ("#9#8", 0.0),
    ("#", 0.0),
    ("9", 0.0),
    ("", 0.0),
  ],
)
def test_only_the_exact_final_answer_is_rewarded(response, reward):
  example = base.Example("7+5-3=", "9", "7+5=12;12-3=9;#9")
  assert arithmetic.reward(example, response) == reward


def test_corrupted_solutions_never_earn_the_reward():
  rng = np.random.default_rng(0)
  shorter = wrong_step = wrong_answer = 0
  for difficulty in arithmetic.LEVELS:
    for example in draw(difficulty, 400):
      text = arithmetic.corrupt(example, rng)
      assert arithmetic.reward(example, text) == 0.0
      assert re.fullmatch(r"(-?\d+[-+*]\d+=-?\d+;)+#-?\d+", text)
      is_shorter = text.count(";") < example.solution.count(";")
      shorter += is_shorter
      wrong_step += arithmetic.check_steps(text) < 1
      if arithmetic.check_steps(text) == 1 and not is_shorter:
        assert "#-" not in text  # A slip at the end is no negative number.
      last = re.search(r"=(-?\d+);#", text).group(1)
      wrong_answer += text.rpartition("#")[2] != last
      # What follows a slip follows from it: at most one step is wrong.
      steps = text.count(";")
      assert arithmetic.check_steps(text) >= (steps - 1) / steps
  assert min(shorter, wrong_step, wrong_answer) > 400  # of 2000


def test_check_steps_counts_what_holds():
  # Right, right but from the wrong number, wrong, no equation.
  assert arithmetic.check_steps("1+2=3;4+1=5;5+1=7;x;#7") == 1 / 4
  assert arithmetic.check_steps("1+2=3;3*4=12;12-20=-8;-8+1=-7;#0") == 1.0
  assert arithmetic.check_steps("#7") == 0.0
  assert arithmetic.check_steps("") == 0.0
  assert arithmetic.check_steps("9" * 5000 + "+1=1;") == 0.0


def test_corpus_is_training_text(task):
  first = task.prompts("train")[0]
  assert task.corpus(3)[0] == first.prompt + first.solution
  assert len(task.corpus(3)) == 3


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (dict(difficulty=6), "difficulty=6"),
    (dict(max_ops=0), "max_ops=0"),
    (dict(num_train=0), "num_train=0"),
    (dict(num_test=0), "num_test=0"),
    (dict(seed=-1), "seed=-1"),
    (dict(max_opps=3), "max_opps"),
  ],
)
def test_a_bad_knob_is_named(cache_dir, change, message):
  with pytest.raises(ValueError, match=message):
    tasks.make("arithmetic", cache_dir=cache_dir, **(KNOBS | change))


def test_a_bad_task_or_split_is_named(task):
  with pytest.raises(ValueError, match="'algebra'.*arithmetic.*gsm8k"):
    tasks.make("algebra")
  with pytest.raises(ValueError, match="'dev'"):
    task.prompts("dev")
  assert {"arithmetic", "gsm8k"} <= set(tasks.TASKS)
