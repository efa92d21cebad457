# SPDX-License-Identifier: Apache-2.0
"""The chunk-size controllers: seconds and tokens in, sizes out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_jax import chunking

BASE = dict(kind="tuned", size=16, sizes=(8, 32, 64), period=6)


def run(steps, state=None, **changes):
  """Sizes of step 0, 1, ..., one more than there are steps.

  `steps[i](size)` is (seconds, tokens) of step i, run at `size`.
  """
  config = {**BASE, **changes}
  state = state or chunking.init(**config)
  sizes = [chunking.chunk_size(state)]
  for step in steps:
    step_s, generated = step(state.size)
    seen = chunking.ChunkObservation(
      step_s=step_s, generated=generated, chunk_size=state.size
    )
    state = chunking.observe(state, seen, **config)
    sizes.append(state.size)
  return sizes, state


def costs(**by_size):
  """A step of 100 tokens at so many microseconds per token: costs(_8=9)."""
  return lambda size: (by_size[f"_{size}"] * 1e-4, 100)


def test_fixed_never_moves():
  step = costs(_16=1.0)
  assert run([step] * 4, kind="fixed")[0] == [16] * 5


def test_tuned_tries_every_size_then_keeps_the_fastest():
  """The machine changes at step 6; the second round of trials finds out."""
  first, then = costs(_8=9, _32=7, _64=8), costs(_8=6, _32=7, _64=8)
  sizes, _ = run([first] * 6 + [then] * 6)
  trials = [8, 32, 64]
  assert sizes == [*trials, 32, 32, 32, *trials, 8, 8, 8, 8]


def test_tuned_goes_by_seconds_per_token_not_per_step():
  """Size 8 has the shortest step, but only because it decoded least."""
  step = {8: (1.0, 10), 32: (4.0, 80), 64: (3.0, 50)}  # 0.1, 0.05, 0.06
  assert run([step.get] * 4)[0] == [8, 32, 64, 32, 32]


def test_tuned_learns_nothing_from_a_step_without_tokens():
  """All rows were ready already: next to no time, and no word on decoding."""
  step = {8: (0.0, 0), 32: (4.0, 80), 64: (3.0, 50)}
  assert run([step.get] * 4)[0] == [8, 32, 64, 32, 32]


def test_tuned_without_any_trial_keeps_the_last_size():
  assert run([lambda size: (0.0, 0)] * 4)[0] == [8, 32, 64, 64, 64]


def test_of_equally_fast_sizes_the_first_listed_is_kept():
  step = costs(_8=7, _32=7, _64=7)
  assert run([step] * 3, sizes=(64, 8, 32))[0] == [64, 8, 32, 64]


TIMES = st.lists(
  st.tuples(st.floats(1e-3, 1e3), st.integers(0, 1000)), max_size=20
)


@settings(deadline=None, max_examples=60)
@given(TIMES, st.sampled_from(["fixed", "tuned"]), st.data())
def test_restart_from_json_gives_the_same_sizes(times, kind, data):
  steps = [lambda size, pair=pair: pair for pair in times]
  cut = data.draw(st.integers(0, len(steps)))
  whole, end = run(steps, kind=kind)
  _, state = run(steps[:cut], kind=kind)
  state = chunking.from_json(json.loads(json.dumps(chunking.to_json(state))))
  rest, resumed_end = run(steps[cut:], state, kind=kind)
  assert rest == whole[cut:]
  assert resumed_end == end


@settings(deadline=None, max_examples=60)
@given(TIMES)
def test_tuned_never_leaves_its_sizes(times):
  sizes, state = run([lambda size, pair=pair: pair for pair in times])
  assert set(sizes) <= {8, 32, 64}
  assert len(state.trials) <= 3


def write_log(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def decision(step, chunk_size, delta=0):
  return dict(step=step, delta=delta, chunk_size=chunk_size)


def test_replay_repeats_a_tuned_run(tmp_path):
  step = costs(_8=9, _32=7, _64=8)
  sizes, _ = run([step] * 8)
  path = write_log(
    tmp_path / "decisions.jsonl",
    [decision(i, size) for i, size in enumerate(sizes)],
  )
  log = [d["chunk_size"] for d in chunking.load_decisions(path)]
  config = dict(kind="replay", log=log)
  slow_elsewhere = costs(_8=1, _32=70, _64=8)
  assert run([slow_elsewhere] * 8, **config)[0] == sizes


def test_replay_past_its_log_names_the_step():
  _, state = run(
    [lambda size: (1.0, 1)] * 2, kind="replay", log=[8, 64]
  )  # steps 0 and 1 are fine
  state = chunking.from_json(json.loads(json.dumps(chunking.to_json(state))))
  with pytest.raises(ValueError, match=r"no decision for step 2.*at step 1"):
    chunking.chunk_size(state)


def test_a_step_taken_again_counts_as_it_was_taken_last(tmp_path):
  """A killed run had decided steps 1 and 2; the resumed one went back to 1."""
  rows = [decision(0, 8), decision(1, 32), decision(2, 32)]
  rows += [decision(1, 64, delta=3), decision(2, 8)]
  loaded = chunking.load_decisions(write_log(tmp_path / "log", rows))
  assert [d["chunk_size"] for d in loaded] == [8, 64, 8]
  assert [d["delta"] for d in loaded] == [0, 3, 0]


def test_half_a_line_at_the_end_of_the_log_is_dropped(tmp_path):
  path = tmp_path / "log"
  write_log(path, [decision(0, 8)])
  with path.open("a") as f:
    f.write('{"step": 1, "chunk_')
  assert chunking.load_decisions(path) == [decision(0, 8)]


@pytest.mark.parametrize(
  ("line", "complaint"),
  [
    ("{", "line 2: not JSON"),
    ("[1]", 'line 2: "step" must be an integer >= 0'),
    ('{"step": 1, "delta": 0}', 'line 2: "chunk_size" must be'),
    ('{"step": 1, "delta": -1, "chunk_size": 8}', 'line 2: "delta" must be'),
    ('{"step": 1, "delta": 0, "chunk_size": 0}', 'line 2: "chunk_size" must'),
    ('{"step": 1, "delta": 0, "chunk_size": true}', 'line 2: "chunk_size"'),
    ('{"step": 2, "delta": 0, "chunk_size": 8}', "no decision for step 1"),
  ],
)
def test_a_bad_log_is_refused_by_file_and_line(tmp_path, line, complaint):
  path = tmp_path / "decisions.jsonl"
  path.write_text(json.dumps(decision(0, 8)) + "\n" + line + "\n")
  with pytest.raises(ValueError, match=r"decisions\.jsonl") as e:
    chunking.load_decisions(path)
  assert complaint in str(e.value)


def test_an_empty_log_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no decision for step 0"):
    chunking.load_decisions(write_log(tmp_path / "log", []))


@pytest.mark.parametrize(
  ("key", "changes"),
  [
    ("kind", {"kind": "auto"}),
    ("size", {"kind": "fixed", "size": 0}),
    ("sizes", {"sizes": ()}),
    ("sizes", {"sizes": (8, 0)}),
    ("period", {"period": 3}),
    ("log", {"kind": "replay"}),
  ],
)
def test_init_names_the_key_that_is_wrong(key, changes):
  with pytest.raises(ValueError, match=rf"overlap\.chunk\.{key}="):
    chunking.init(**{**BASE, **changes})
