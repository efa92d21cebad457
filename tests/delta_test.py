# SPDX-License-Identifier: Apache-2.0
"""The delta controllers: tables of scores in, deltas out."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_jax import delta

BASE = dict(kind="paper", init=4, min=0, max=8, window=2, step=1, dead_band=2.0)


def run(scores, state=None, **changes):
  """Deltas of step 0, 1, ..., one more than there are scores."""
  config = {**BASE, **changes}
  state = state or delta.init(**config)
  deltas = [delta.overcommit(state)]
  for i, score in enumerate(scores):
    seen = delta.StepObservation(mean_score=score, deferred=i, step_s=1.0)
    state = delta.update(state, seen, **config)
    deltas.append(state.delta)
  return deltas, state


@pytest.mark.parametrize(
  ("changes", "scores", "expected"),
  [
    # The table of the module's docstring: differences over two steps are
    # 1, 1, 2, -1 from step 2 on.
    ({}, [3, 5, 4, 6, 6, 5], [4, 4, 4, 5, 6, 7, 6]),
    # A stall (difference 0) counts as a fall.
    ({}, [1, 1, 1, 1], [4, 4, 4, 3, 2]),
    # Only the ends of the window count: 1 > 0 whatever lies between.
    ({"window": 3}, [0, 9, -9, 1], [4, 4, 4, 4, 5]),
    ({"step": 3}, [0, 0, 1, 0], [4, 4, 4, 7, 4]),
    # A quarter of delta, at least 1: 4 + 1, + 1, + 1, + 1, 8 + 2, 10 + 2, + 3.
    (
      {"kind": "paper_proportional", "window": 1, "max": 99, "step": 50},
      list(range(8)),
      [4, 4, 5, 6, 7, 8, 10, 12, 15],
    ),
    # 15 - 3 = 12, 12 - 3 = 9, 9 - 2 = 7, 7 - 1 = 6.
    (
      {"kind": "paper_proportional", "window": 1, "max": 99, "init": 15},
      [0, 0, 0, 0, 0],
      [15, 15, 12, 9, 7, 6],
    ),
    # Below 4 a quarter is less than 1.
    (
      {"kind": "paper_proportional", "window": 1, "init": 1},
      [0, 1, 2],
      [1, 1, 2, 3],
    ),
    ({"kind": "fixed"}, [1, 2, 3, 2, 1], [4, 4, 4, 4, 4, 4]),
  ],
)
def test_rules_follow_hand_made_tables(changes, scores, expected):
  assert run(scores, **changes)[0] == expected


@pytest.mark.parametrize(
  ("scores", "dead_band", "change"),
  [
    # w = 3, so i - mean i = -1.5, -0.5, 0.5, 1.5 and Sxx = 5.
    # 0 1 1 2: slope 3 / 5; residuals -0.1, 0.3, -0.3, 0.1; error
    # sqrt(0.2 / 2 / 5) = 0.1414; slope / error = 4.243.
    ([0, 1, 1, 2], 4.2, 1),
    ([0, 1, 1, 2], 4.3, 0),
    ([2, 1, 1, 0], 4.2, -1),
    ([2, 1, 1, 0], 4.3, 0),
    # 0 2 0 1: slope 0.5 / 5 = 0.1; sum of squares 2.75 - 0.5^2 / 5 = 2.7;
    # error sqrt(2.7 / 2 / 5) = 0.5196; slope / error = 0.192.
    ([0, 2, 0, 1], 0.19, 1),
    ([0, 2, 0, 1], 0.20, 0),
    # A straight line has no residuals: any slope is clear, none is none.
    ([1, 2, 3, 4], 100.0, 1),
    ([4, 3, 2, 1], 100.0, -1),
    ([0.1, 0.1, 0.1, 0.1], 0.0, 0),
  ],
)
def test_robust_moves_only_outside_its_dead_band(scores, dead_band, change):
  config = dict(kind="robust", window=3, dead_band=dead_band)
  deltas, _ = run(scores, **config)
  assert deltas == [4, 4, 4, 4, 4 + change]


@settings(deadline=None, max_examples=60)
@given(st.floats(-1e6, 1e6), st.integers(2, 20))
def test_equal_scores_have_no_slope_not_even_by_rounding(score, window):
  config = dict(kind="robust", window=window, dead_band=0.0)
  deltas, _ = run([score] * (window + 3), **config)
  assert set(deltas) == {4}


def test_at_a_plateau_paper_walks_and_robust_stays():
  """The same noise around a constant: a coin flip moves one, not the other."""
  noise = random.Random(0)
  scores = [noise.gauss(0.0, 1.0) for _ in range(400)]
  config = dict(window=20, max=200, init=100)
  moves = {}
  for kind in ("paper", "robust"):
    deltas, _ = run(scores, kind=kind, dead_band=3.0, **config)
    moves[kind] = sum(a != b for a, b in zip(deltas, deltas[1:]))
  assert moves["paper"] == 400 - 20  # every step once the window is full
  assert moves["robust"] < 0.1 * moves["paper"]


SCORES = st.lists(st.floats(-1e6, 1e6), max_size=20)
KINDS = sorted(set(delta.RULES) - {"replay"})


@settings(deadline=None, max_examples=60)
@given(SCORES, st.sampled_from(KINDS), st.integers(1, 9), st.integers(2, 5))
def test_delta_stays_in_its_bounds(scores, kind, step, window):
  config = dict(kind=kind, step=step, window=window, min=2, max=7)
  deltas, state = run(scores, **config)
  assert all(2 <= d <= 7 for d in deltas)
  assert len(state.history) == min(len(scores), window + 1)


@settings(deadline=None, max_examples=60)
@given(SCORES, st.sampled_from(KINDS), st.data())
def test_restart_from_json_gives_the_same_deltas(scores, kind, data):
  cut = data.draw(st.integers(0, len(scores)))
  whole, end = run(scores, kind=kind)
  _, state = run(scores[:cut], kind=kind)
  state = delta.from_json(json.loads(json.dumps(delta.to_json(state))))
  rest, resumed_end = run(scores[cut:], state, kind=kind)
  assert rest == whole[cut:]
  assert resumed_end == end


def test_replay_gives_back_the_log_whatever_the_scores():
  log = [4, 4, 5, 6]
  state = delta.init(**{**BASE, "kind": "replay"}, log=log)
  state = delta.from_json(json.loads(json.dumps(delta.to_json(state))))
  assert run([5, 4, 3], state, kind="replay")[0] == log


def test_replay_past_its_log_names_the_step():
  state = delta.init(**{**BASE, "kind": "replay"}, log=[4, 5])
  _, state = run([0, 0], state, kind="replay")  # steps 0 and 1 are fine
  with pytest.raises(ValueError, match=r"no decision for step 2.*at step 1"):
    delta.overcommit(state)


def test_state_is_not_changed_in_place():
  _, state = run([1, 2, 3])
  saved = delta.to_json(state)
  run([4, 5, 6], state)
  assert delta.to_json(state) == saved


@pytest.mark.parametrize(
  ("key", "changes"),
  [
    ("kind", {"kind": "papr"}),
    ("min", {"min": -1}),
    ("max", {"min": 3, "max": 2}),
    ("init", {"init": 9}),
    ("init", {"min": 5}),
    ("window", {"window": 0}),
    ("window", {"window": 1, "kind": "robust"}),
    ("step", {"step": 0}),
    ("dead_band", {"dead_band": -0.1}),
    ("log", {"kind": "replay"}),
  ],
)
def test_init_names_the_key_that_is_wrong(key, changes):
  with pytest.raises(ValueError, match=rf"overlap\.delta\.{key}="):
    delta.init(**{**BASE, **changes})


def test_replay_of_a_delta_beyond_the_slots_is_refused():
  with pytest.raises(ValueError, match=r"delta=9 of step 1"):
    delta.init(**{**BASE, "kind": "replay"}, log=[4, 9])
