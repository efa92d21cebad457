# SPDX-License-Identifier: Apache-2.0
"""Grades do not depend on when, where and in which order they are computed."""

import dataclasses
import threading
import time
import zlib

import numpy as np
import pytest

from configs import ablation
from oppo_jax import assemble, grading, metrics, step, warm_start
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


# In the loop.

NUM_STEPS = 4


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
  """A run that is ready to start: config, setup, parameters."""
  config = ablation.get_config("oppo")
  config.num_steps = NUM_STEPS
  config.task.update(num_train=200, num_test=8)
  config.rollout.update(batch_size=8, max_response_len=48)
  config.overlap.delta.update(kind="fixed", init=4, max=8)
  config.reward.rules.update(length=0.1, ended=0.3)
  with config.unlocked():
    config.reward.rules.digits = 0.2
  workdir = tmp_path_factory.mktemp("loop")
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(assemble.rewards, "check_rules", lambda *args: None)
    s = assemble.setup(config, workdir, log=lambda line: None)
  params = warm_start.run(
    config, s.parts, workdir=workdir, log=lambda line: None
  )
  return config, s, params


def run(loop, grade, workers):
  """Batches and metrics of a few steps under another rule."""
  config, s, params = loop
  rules = ("digits",)
  task = dataclasses.replace(
    s.parts.task, grade=grade, rules=rules, workers=workers
  )
  s = s._replace(parts=s.parts._replace(task=task), grader=grading.Grader(task))
  state, timers, found = step.init(config, s, params), metrics.Timers(), []
  for _ in range(NUM_STEPS):
    state, done = step.run(config, s, state, timers)
    found.append(done)
  s.grader.close()
  return found


def slow(example, text):
  """A rule of example and text, that takes its time: more or less of it."""
  draw = zlib.crc32(f"{example.prompt}{text}".encode())
  time.sleep(draw % 7 / 100)
  digits = float(sum(x.isdigit() for x in text))
  return {"rule": float(draw % 2), "digits": digits}


def test_batches_do_not_depend_on_workers(loop):
  runs = {workers: run(loop, slow, workers) for workers in (0, 1, 8)}
  for found in (runs[1], runs[8]):
    for got, expected in zip(found, runs[0], strict=True):
      np.testing.assert_array_equal(got.batch.uid, expected.batch.uid)
      np.testing.assert_array_equal(got.batch.scores, expected.batch.scores)
      np.testing.assert_array_equal(
        got.batch.sequences, expected.batch.sequences
      )
      named = {k: v for k, v in got.row.items() if k.startswith("reward/")}
      assert named == {k: expected.row[k] for k in named}
  assert any(done.row["overlap/deferred"] for done in runs[0])


def test_every_reward_is_logged_by_its_name_and_adds_up(loop):
  config, s, _ = loop
  done = run(loop, slow, 2)[0]
  named = {k: v for k, v in done.row.items() if k.startswith("reward/")}
  assert set(named) == {
    f"reward/{name}" for name in ("model", "rule", "digits", "length", "ended")
  }
  batch, w = done.batch, config.reward
  limit = config.rollout.max_response_len
  expected = {
    "reward/ended": np.mean(batch.has_eos),
    "reward/length": -np.mean(batch.response_len) / limit,
    "reward/digits": np.mean([sum(map(str.isdigit, t)) for t in done.texts]),
  }
  for name, value in expected.items():
    assert named[name] == pytest.approx(value, abs=1e-6), name
  total = w.model_weight * named["reward/model"]
  total += w.rule_weight * named["reward/rule"]
  total += sum(
    w.rules[name] * named[f"reward/{name}"]
    for name in ("length", "ended", "digits")
  )
  assert np.mean(batch.scores) == pytest.approx(total, abs=1e-5)


def test_a_rule_that_fails_ends_the_run_and_names_the_row(loop):
  def fail(example, text):
    raise RuntimeError("no sandbox")

  with pytest.raises(
    ValueError, match=r"^task 'arithmetic', uid \d+: RuntimeError: no sandbox$"
  ):
    run(loop, fail, 2)


def test_rows_are_graded_while_others_decode(loop, monkeypatch):
  began = []
  rollout = step.overlap.rollout

  def watched(*args, **kwargs):
    got = rollout(*args, **kwargs)
    began.append(len(seen))  # before anybody asked for a grade
    return got

  seen = []
  monkeypatch.setattr(step.overlap, "rollout", watched)
  submit = grading.Grader.submit
  monkeypatch.setattr(
    grading.Grader,
    "submit",
    lambda self, item: (seen.append(item.uid), submit(self, item)),
  )
  run(loop, slow, 2)
  assert began[0] >= 8  # all of the first batch
  assert len(seen) == len(set(seen)) == began[-1]  # and none of them twice
