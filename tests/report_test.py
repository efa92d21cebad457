# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself, by hand."""

import json

import numpy as np
import pytest

from oppo_jax import generation, overlap, report, types


def batch():
  """Two rows at version 5; the second was deferred once, and cut at R = 4."""
  mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
  number = lambda x: np.asarray(x, np.float32)
  return types.Batch(
    uid=np.array([7, 9], np.int32),
    sequences=np.array([[3, 4, 5, 1, 0, 0], [6, 2, 2, 2, 2, 0]], np.int32),
    prompt_len=np.array([2, 1], np.int32),
    response_len=np.array([2, 4], np.int32),
    has_eos=np.array([True, False]),
    responses=np.array([[5, 1, 0, 0], [2, 2, 2, 2]], np.int32),
    mask=mask,
    behavior_logprobs=number([[-1, -2, 0, 0], [-3, -4, -5, -6]]),
    start_logprobs=np.zeros((2, 4), np.float32),
    ref_logprobs=number([[-1.5, -2.5, 0, 0], [-3.5, -4.5, -5.5, -6.5]]),
    values=number([[0.1, 0.2, 0.3, 0], [0.4, 0.5, 0.6, 0.7]]),
    scores=number([1.0, 0.25]),
    token_version=np.array([[5, 5, 0, 0], [4, 4, 4, 5]], np.int32),
    admitted_at=np.array([5, 3], np.int32),
  )


DONE = overlap.Rollout(
  ticks=10,
  generated=24,
  chunks=3,
  deferred=1,
  tiles={"reward": 4, "critic": 5},
  slot=np.array([2, 0]),
  row_len=np.array([4, 5]),
)


def step_row(**changes):
  numbers = dict(delta=1, chunk_size=4, in_flight=3)
  return report.step_row(5, batch(), DONE, **numbers | changes)


def test_staleness_is_of_tokens_and_deferrals_are_of_rows():
  row = step_row()
  # Versions of the 6 tokens: 5 5 4 4 4 5; the oldest row was admitted at 3.
  assert row["overlap/staleness_mean"] == pytest.approx(3 / 6)
  assert row["overlap/staleness_max"] == 1
  assert row["overlap/deferrals_max"] == 2


def test_a_step_is_counted_by_hand():
  row = step_row()
  expected = {
    "overlap/delta": 1,
    "overlap/chunk_size": 4,
    "overlap/chunks": 3,
    "overlap/deferred": 1,
    "overlap/slot_fill": 24 / 30,  # tokens over ticks times rows in flight
    "overlap/ticks": 10,
    "score/tiles": 9,
    "score/tiles_reward": 4,
    "score/tiles_critic": 5,
    "tokens/generated": 24,
    "tokens/trained": 6,
    "tokens/response_len": 3.0,
    "tokens/truncated": 0.5,
  }
  assert {k: row[k] for k in expected} == pytest.approx(expected)
  json.dumps(row)  # plain numbers


def test_a_step_without_ticks_has_a_fill():
  """All rows of the batch were left over from the step before."""
  done = DONE._replace(ticks=0, generated=0)
  row = report.step_row(5, batch(), done, delta=1, chunk_size=4, in_flight=3)
  assert row["overlap/slot_fill"] == 0


def test_a_rollout_row_ends_where_the_response_ends():
  row = report.rollout_row(5, batch(), 0, "1+1=", "2")
  assert row == {
    "step": 5,
    "uid": 7,
    "prompt": "1+1=",
    "response": "2",
    "score": 1.0,
    "has_eos": True,
    "admitted_at": 5,
    "prompt_tokens": [3, 4],
    "response_tokens": [5, 1],
    "versions": [5, 5],
    "behavior_logprobs": [-1.0, -2.0],
    "ref_logprobs": [-1.5, -2.5],
    "values": pytest.approx([0.1, 0.2]),
  }
  json.dumps(row)
  assert report.rollout_row(5, batch(), 1, "", "")["prompt_tokens"] == [6]


@pytest.mark.parametrize(
  ("num_rows", "num_picked", "expected"),
  [(8, 4, [0, 2, 4, 6]), (5, 2, [0, 2]), (3, 9, [0, 1, 2]), (3, 0, [])],
)
def test_logged_rows_are_spread_over_the_batch(num_rows, num_picked, expected):
  assert report.spread(num_rows, num_picked) == expected


@pytest.mark.parametrize(
  ("response_len", "batch_size", "expected"),
  [
    ({0: 3, 1: 5, 2: 2, 3: 4}, 2, 5 + 4),
    ({3: 4, 1: 5, 0: 3, 2: 2}, 2, 5 + 4),  # by uid, not by completion
    ({0: 3, 1: 5, 2: 2, 3: 4}, 4, 5),
    ({0: 3, 1: 5, 2: 2, 3: 4}, 1, 14),
    ({10: 3, 12: 1, 40: 7}, 2, 3 + 7),  # uids in flight leave gaps
    ({}, 2, 0),
  ],
)
def test_serial_ticks_by_hand(response_len, batch_size, expected):
  assert report.serial_ticks(response_len, batch_size) == expected


SUMMARY = dict(
  steps=2,
  arm="oppo",
  wall_s=61.4,
  ppo_s=50.0,
  tokens_per_s=123.4,
  decode_ticks=30,
  serial_ticks=40,
  forced_lengths=False,
)


def test_the_table_says_what_was_gained():
  before = {"greedy": generation.Accuracy(0.25, 9.0, 0.0)}
  after = {"greedy": generation.Accuracy(0.75, 8.0, 0.0)}
  lines = report.table(SUMMARY, before, after)
  (greedy,) = [line for line in lines if "greedy" in line]
  assert greedy.split() == ["greedy", "0.250", "0.750"]
  text = "\n".join(lines)
  assert "oppo, 2 updates" in text
  assert "61 s, of which PPO 50 s" in text
  assert "25.0% of decode ticks" in text
  assert "FORCED" not in text


def test_the_table_of_a_run_without_updates_or_evaluation():
  nothing = SUMMARY | dict(steps=0, decode_ticks=0, serial_ticks=0)
  assert report.table(nothing, {}, {}) == ["", "no updates asked for"]


def test_forced_lengths_are_said_last():
  lines = report.table(SUMMARY | dict(forced_lengths=True), {}, {})
  assert lines[-1].startswith("FORCED LENGTHS")
