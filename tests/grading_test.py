# SPDX-License-Identifier: Apache-2.0
"""Grades do not depend on when, where and in which order they are computed."""

import threading

import pytest

from oppo_jax import grading
from oppo_jax.tasks import base

EXAMPLES = [base.Example(f"prompt {i}", str(i), "") for i in range(8)]


def task_of(grade, workers, rules=()):
  reward = lambda example, text: grade(example, text)["rule"]
  return base.Task(
    "t", None, reward, None, None, grade=grade, rules=rules, workers=workers
  )


def answers(example, text):
  return {"rule": float(example.answer == text), "length": float(len(text))}


def items(texts):
  return [
    grading.Item(10 + i, EXAMPLES[i], text) for i, text in enumerate(texts)
  ]


TEXTS = ["0", "x", "2", "333", "4", "", "6", "7"]
EXPECTED = [answers(e, t) for e, t in zip(EXAMPLES, TEXTS)]


@pytest.mark.parametrize("workers", [0, 1, 8])
@pytest.mark.parametrize("early", ["none", "some", "all"])
def test_results_do_not_depend_on_workers_and_time(workers, early):
  grader = grading.Grader(task_of(answers, workers))
  assert grader.is_early == bool(workers)
  found = items(TEXTS)
  if workers:
    for item in reversed(found[:: {"none": 9, "some": 3, "all": 1}[early]]):
      grader.submit(item)
  assert grader.results(found) == EXPECTED
  grader.close()


def test_a_grade_begins_before_it_is_asked_for():
  began, may_end = threading.Event(), threading.Event()

  def grade(example, text):
    began.set()
    assert may_end.wait(60)
    return {"rule": 1.0}

  grader = grading.Grader(task_of(grade, 1))
  grader.submit(items(TEXTS)[0])
  assert began.wait(60)  # and nobody has asked
  may_end.set()
  assert grader.results(items(TEXTS)[:1]) == [{"rule": 1.0}]


def test_a_row_that_starts_anew_is_graded_anew():
  grader = grading.Grader(task_of(answers, 2))
  first, second = items(["x", "x"]), items(["0", "1"])
  for item in first:
    grader.submit(item)
  grader.submit(second[0])  # said again; of the other, nobody has told
  assert [x["rule"] for x in grader.results(second)] == [1.0, 1.0]


def test_results_are_by_uid_and_stay_until_asked_for():
  grader = grading.Grader(task_of(answers, 2))
  found = items(TEXTS)
  for item in found:
    grader.submit(item)
  assert grader.results(found[4:]) == EXPECTED[4:]
  assert grader.results(found[:4][::-1]) == EXPECTED[:4][::-1]


def test_an_error_names_task_and_uid():
  def grade(example, text):
    if text == "x":
      raise OSError("no\nsandbox")
    return {"rule": 1.0}

  grader = grading.Grader(task_of(grade, 2))
  with pytest.raises(
    ValueError, match="^task 't', uid 11: OSError: no sandbox$"
  ):
    grader.results(items(TEXTS))
  with pytest.raises(ValueError, match="task 't', uid 1: OSError"):
    grading.rewards(task_of(grade, 2), EXAMPLES, TEXTS)


@pytest.mark.parametrize("workers", [0, 3])
def test_the_rewards_of_many_responses(workers):
  found = grading.rewards(task_of(answers, workers), EXAMPLES, TEXTS)
  assert found == [e["rule"] for e in EXPECTED]


def test_a_task_without_further_numbers_has_its_reward():
  task = base.Task("t", None, lambda e, t: 0.5, None, None)
  assert task.grades(EXAMPLES[0], "") == {"rule": 0.5}
