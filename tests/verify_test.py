# SPDX-License-Identifier: Apache-2.0
"""The proof holds on the package as it is, and finds defects where they are.

Each defect is planted into a copy of one function for one test; the proof must
fail, at the claim that the defect breaks, and name the place.
"""

import argparse
import dataclasses
import json
import pathlib

import jax
import pytest

from configs import ablation
from oppo_jax import (
  assemble,
  audit,
  claims,
  decode,
  flight,
  metrics,
  overlap,
  score,
  short_runs,
  slots,
  tiling,
  train,
  types,
  verify,
  warm_start,
)
from oppo_jax import config as config_lib

pytestmark = pytest.mark.usefixtures("compiled_once")


def small():
  """The ablation, smaller: 8 rows and 4 more, one layer."""
  config = ablation.get_config("oppo")
  config.task.update(num_train=64, num_test=8)
  config.model.update(num_layers=1, width=32, head_dim=8, mlp_dim=48)
  config.rollout.update(batch_size=8, max_response_len=40)
  config.score.update(tile_rows=4, tile_len=8)
  config.overlap.chunk.size = 5
  config.overlap.delta.update(kind="fixed", init=4, max=4)
  config.optim.policy_lr = 1e-2  # so that what is stale shows
  config.optim.critic_lr = 1e-2
  config.compile_cache = "off"
  return config


@pytest.fixture
def bench(tmp_path):
  """Makes a bench after a defect has been planted: nothing is compiled yet."""

  def make(**overrides):
    config = small()
    config.update_from_flattened_dict(overrides)
    config_lib.validate(config)
    made = assemble.setup(config, tmp_path, log=lambda line: None)
    params = warm_start.run(
      config, made.parts, workdir=tmp_path, log=lambda line: None
    )
    forced = verify.forced_lengths(
      made.prompt_of, max_response_len=40, seed=config.seed
    )
    return short_runs.Bench(
      config, made._replace(prompt_of=forced), params, 3, 1e-4
    )

  return make


def rows_of(bench, *names):
  traces = short_runs.Traces(bench)
  return [row for name in names for row in claims.CLAIMS[name](bench, traces)]


def broken(rows):
  return [row for row in rows if not row.holds]


def test_everything_holds_as_it_is(bench):
  rows = rows_of(bench(), *claims.CLAIMS)
  assert broken(rows) == []
  parts = {row.part for row in rows}
  assert "gradients of update 0, 23 leaves" in parts
  assert {row.claim for row in rows} == {"G1", "G2", "G3", "G4", "G5", "G7"}
  promised = {row.promised for row in rows if row.claim in ("G2", "G3", "G4")}
  assert promised == {"EXACT"}


def test_rows_are_deferred_in_what_is_proven(bench):
  made = bench()
  trace = short_runs.run(made, short_runs.base_way(made.config))
  assert any((i > b.admitted_at).any() for i, b in enumerate(trace.batches))


def test_every_scorer_streams_in_what_is_proven(bench, monkeypatch):
  made, waiting = bench(), []
  assert not made.s.fns.sizes.speculates  # the critic of a run would wait
  ask = flight.waiting
  monkeypatch.setattr(
    flight, "waiting", lambda *args: waiting.append(ask(*args)) or waiting[-1]
  )
  short_runs.run(made, short_runs.base_way(made.config), num_updates=1)
  assert waiting == [set()]


def test_a_tile_scored_before_its_tokens_exist_is_found(bench, monkeypatch):
  """The report is one chunk behind the tokens; here the tiles are ahead."""
  monkeypatch.setattr(
    tiling,
    "num_tiles",
    lambda length, is_done, *, tile_len: -(-length // tile_len),
  )
  (first, *_) = broken(rows_of(bench(), "G1"))
  assert first.part == "3 batches"
  assert first.where.startswith("update 0, ref_logprobs[")
  assert "the cache of reference parts in leaf 0/0, column " in first.where
  assert "uid " in first.where


def test_a_key_that_follows_the_slot_is_found(bench, monkeypatch):
  sample = decode.sample

  def by_slot(logits, uid, *args, **kwargs):
    return sample(logits, jax.numpy.arange(uid.shape[0]), *args, **kwargs)

  monkeypatch.setattr(decode, "sample", by_slot)
  first = broken(rows_of(bench(), "G3"))[0]
  assert first.what == "slots filled from the first = from the last"
  assert first.where.startswith("update 0, sequences[")


def test_a_batch_that_ends_with_its_chunk_is_found(bench, monkeypatch):
  """Chunk-boundary stop: later rows of the chunk push earlier uids aside."""
  select = slots.select

  def by_uid(buffer, version, **rule):
    buffer = buffer.replace(finished_tick=buffer.finished_tick * 0)
    return select(buffer, version, **rule)

  decode_chunk = decode.decode_chunk

  def whole_chunks(*args, is_complete, **kwargs):
    never = lambda *a, **k: jax.numpy.zeros((), bool)
    made = decode_chunk(*args, is_complete=never, **kwargs)
    return (
      made[0],
      made[1],
      made[2].replace(is_complete=is_complete(made[0], args[3])),
    )

  monkeypatch.setattr(slots, "select", by_uid)
  monkeypatch.setattr(decode, "decode_chunk", whole_chunks)
  first = broken(rows_of(bench(), "G2"))[0]
  assert first.what.startswith("chunk 5 = ")
  assert "uid" in first.where


def test_a_stale_policy_cache_is_found(bench, monkeypatch):
  """It is stale in every way to run: only the plain forward pass can tell."""
  stale = flight.goes_stale
  monkeypatch.setattr(
    flight, "goes_stale", lambda *args: stale(*args) - {flight.POLICY_CACHE}
  )
  rows = broken(rows_of(bench(), "G1"))
  assert [row.part for row in rows] == ["behavior_logprobs"]


def test_a_stale_critic_cache_is_found(bench):
  rows = rows_of(bench(**{"overlap.critic_cache": "keep"}), "G1")
  assert "values" in [row.part for row in broken(rows)]


def test_a_wrong_temperature_in_one_of_the_logprobs_is_found(
  bench, monkeypatch
):
  append = score.prefill_append

  def at_one(*args, temperature, **kwargs):
    return append(*args, temperature=1.0, **kwargs)

  monkeypatch.setattr(score, "prefill_append", at_one)
  rows = rows_of(bench(**{"rollout.temperature": 0.7}), "G1")
  assert [row.part for row in broken(rows)] == ["ref_logprobs"]


def test_a_lost_prompt_is_found(bench, monkeypatch):
  """Every eighth uid is skipped."""
  admit = flight.admit

  def skipping(fns, state, **kwargs):
    state = admit(fns, state, **kwargs)
    return dataclasses.replace(state, next_uid=state.next_uid + 1)

  monkeypatch.setattr(flight, "admit", skipping)
  (row,) = broken(rows_of(bench(), "G5"))
  assert row.where == "uid 12 is there 0 times"


def test_a_row_that_waits_too_long_is_found(bench, monkeypatch):
  monkeypatch.setattr(
    slots, "_starving", lambda s, *args: jax.numpy.zeros_like(s.done)
  )
  (row,) = broken(rows_of(bench(**{"overlap.max_staleness": 1}), "G5"))
  assert "a row was deferred 2 times > 1" in row.where


def test_math_that_follows_delta_is_found(bench, monkeypatch):
  """The reference is a millionth off if more than B rows are in flight."""
  rollout = overlap.rollout

  def nudged(fns, state, params, **kwargs):
    if state.in_flight.sum() > fns.sizes.batch_size:
      nudge = lambda x: x * (1 + 2**-20)
      params = params | {"reference": jax.tree.map(nudge, params["reference"])}
    return rollout(fns, state, params, **kwargs)

  monkeypatch.setattr(overlap, "rollout", nudged)
  (row,) = broken(rows_of(bench(), "G3"))
  assert row.what.endswith("among B + 4 = the same among B")
  assert row.found == "CLOSE"
  assert row.promised == "EXACT"
  assert row.where.startswith("ref_logprobs[")


def row(found, promised="EXACT"):
  return claims.Row("G1", "a = b", "c", promised, found, 1e-6, 3, "here", 1.0)


@pytest.mark.parametrize(
  ("found", "promised", "exact_is_promised", "expected"),
  [
    ("EXACT", "EXACT", True, True),
    ("EXACT", "CLOSE", True, True),
    ("CLOSE", "CLOSE", True, True),
    ("CLOSE", "EXACT", True, False),
    ("CLOSE", "EXACT", False, True),  # a GPU without its flags
    ("FAIL", "EXACT", False, False),
    ("FAIL", "CLOSE", True, False),
  ],
)
def test_what_a_backend_must_keep(found, promised, exact_is_promised, expected):
  kept = verify.is_kept(
    row(found, promised), exact_is_promised=exact_is_promised
  )
  assert kept == expected


def test_a_line_that_does_not_hold_says_where():
  kept = verify.lines(row("CLOSE", "CLOSE"), is_kept=True)
  assert kept == ["CLOSE   1.0e-06      3    1.0  G1  a = b: c"]
  lost = verify.lines(row("CLOSE"), is_kept=False)
  assert lost[0].startswith("FAIL ")
  assert lost[1].strip() == "first: here"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A finished run with two kept versions."""
  workdir = tmp_path_factory.mktemp("run")
  config = small()
  config.num_steps = 3
  config.log.params_every = 2
  config.warm_start.sft.update(num_steps=2, rows=2)
  train.train(config, workdir)
  return workdir


def test_an_audit_recomputes_what_was_logged(finished):
  found = list(audit.checks(finished, log=lambda line: None))
  of = {(c.what, c.version): c for c in found}
  assert set(of) == {
    ("ref_logprobs", -1),
    ("behavior_logprobs", 0),
    ("values", 0),
    ("behavior_logprobs", 2),
    ("values", 2),
  }
  assert all(c.max_abs < 1e-4 for c in found)
  rows = metrics.read_jsonl(finished / "rollouts.jsonl")
  num = sum(len(row["response_tokens"]) for row in rows)
  assert of["ref_logprobs", -1].num == num
  by_two = sum(row["versions"].count(2) for row in rows)
  assert of["behavior_logprobs", 2].num == by_two > 0


@pytest.mark.parametrize("what", ["behavior_logprobs", "values"])
def test_an_audit_finds_a_number_that_was_changed(finished, what, tmp_path):
  copy = tmp_path / "copy"
  copy.mkdir()
  for path in finished.iterdir():
    (copy / path.name).symlink_to(path)
  rows = metrics.read_jsonl(finished / "rollouts.jsonl")
  rows[1][what][3] += 0.01
  (copy / "rollouts.jsonl").unlink()
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (copy / "rollouts.jsonl").write_text(text)
  said = []
  assert not audit.run(copy, log=said.append)
  (line,) = [line for line in said if line.startswith("FAIL")]
  assert what in line
  assert f"(step 0, uid {rows[1]['uid']}, token 3)" in line


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
  with pytest.raises(ValueError, match="no finished run, summary.json is"):
    audit.run(tmp_path, log=print)


def test_a_config_that_went_through_json_is_the_same(finished):
  config = audit.load_config(finished)
  assert config.overlap.chunk.sizes == small().overlap.chunk.sizes
  assert pathlib.Path(finished / "config.json").exists()
  assert types.Slots.FREE == -1


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    ({"config": None}, "--config: must be given, or --audit"),
    ({"claims": ["G1", "G9"]}, "--claims=G1,G9: must be of G1, G2, G3, G4, G5"),
    ({"claims": []}, "--claims=: must be of G1"),
    ({"updates": 1}, "--updates=1: must be an integer >= 2"),
    ({"workdir": "no/such"}, "--workdir=no/such: holds no stages"),
  ],
)
def test_bad_flags_are_named(changes, says):
  args = dict(config=small(), claims=["G1"], updates=2, workdir=None)
  args = argparse.Namespace(**args | {"audit": None, "out": None} | changes)
  with pytest.raises(ValueError) as e:
    verify.main(args)
  assert str(e.value).startswith(says)


def test_the_command_ends_with_0_only_if_all_holds(tmp_path, monkeypatch):
  args = argparse.Namespace(
    config=small(),
    claims=["G5"],
    updates=2,
    workdir=None,
    audit=None,
    out=str(tmp_path / "report.json"),
  )
  with pytest.raises(SystemExit) as e:
    verify.main(args)
  assert e.value.code == 0
  report = json.loads((tmp_path / "report.json").read_text())
  assert [row["found"] for row in report["rows"]] == ["EXACT"]
  assert report["conditions"]["exact_is_promised"]

  lost = claims.Row("G5", "x", "", "EXACT", "FAIL", 0.0, 0, "there", 0.0)
  monkeypatch.setitem(claims.CLAIMS, "G5", lambda bench, traces: iter([lost]))
  with pytest.raises(SystemExit) as e:
    verify.main(args)
  assert e.value.code == 1
