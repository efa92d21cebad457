# SPDX-License-Identifier: Apache-2.0
"""Whole runs: what they leave behind, and which of them are the same run.

The ablation, 20 updates of a small model, in one process. Runs that differ only
in when things happen must end in the same bits: `batches_sha256` covers every
token, log-prob, value and score of every batch, `params_sha256` the parameters
after the last update.
"""

import json
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import pytest
from compare import assert_exact

from configs import ablation, gsm8k
from oppo_jax import checkpoint, convert, hf, metrics, tokenizer, train
from oppo_jax import config as config_lib

pytestmark = pytest.mark.usefixtures("compiled_once")

HASHES = ("batches_sha256", "params_sha256")
DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


class Run(NamedTuple):
  """A finished run.

  Attributes:
    workdir: its folder.
    summary: of summary.json.
    rows: of metrics.jsonl.
    decisions: of decisions.jsonl.
    rollouts: of rollouts.jsonl.
  """

  workdir: pathlib.Path
  summary: dict
  rows: list[dict]
  decisions: list[dict]
  rollouts: list[dict]

  @property
  def hashes(self):
    return [self.summary[name] for name in HASHES]


def finish(config, workdir):
  """Runs a config to its end."""
  config_lib.validate(config)
  train.train(config, workdir)
  read = lambda name: metrics.read_jsonl(workdir / f"{name}.jsonl")
  return Run(
    workdir,
    json.loads((workdir / "summary.json").read_text()),
    read("metrics"),
    read("decisions"),
    read("rollouts"),
  )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """run(arm, **{"dotted.key": value}): that ablation, each made once."""
  made = {}

  def make(arm, **overrides):
    key = (arm, *overrides.items())
    if key not in made:
      config = ablation.get_config(arm)
      config.log.rollouts_per_step = config.rollout.batch_size
      config.update_from_flattened_dict(overrides)
      made[key] = finish(config, tmp_path_factory.mktemp(arm))
    return made[key]

  return make


def chunk(size):
  return {"overlap.chunk.size": size}


TUNED = {"overlap.chunk.kind": "tuned", "overlap.chunk.sizes": (4, 32, 1)}
TUNED |= {"overlap.chunk.period": 8}
DELTA_0 = {"overlap.delta.kind": "fixed", "overlap.delta.init": 0}
BFLOAT16 = {"model.dtype": "bfloat16", "num_steps": 8, "overlap.delta.min": 4}


# Same work at other times, same bits.


def num_deferring(run):
  """Steps that left rows in flight."""
  return sum(row["overlap/deferred"] > 0 for row in run.rows)


@pytest.mark.parametrize(
  ("arm", "overrides"),
  [
    ("inter", {}),
    ("inter", {"overlap.intra": "sequence"}),
    ("oppo", chunk(1)),
    ("oppo", chunk(7)),
    ("oppo", chunk(64)),
    ("oppo", TUNED),
    ("oppo", {"rollout.decode_loop": "fori"}),
  ],
)
def test_neither_streaming_nor_chunk_size_changes_a_bit(run, arm, overrides):
  oppo = run("oppo")
  assert run(arm, **overrides).hashes == oppo.hashes
  assert num_deferring(oppo) >= 15
  assert len({row["overlap/delta"] for row in oppo.rows}) > 2


@pytest.mark.parametrize(
  ("arm", "overrides"), [("sequence", {}), ("intra", {}), ("oppo", DELTA_0)]
)
def test_without_overcommitment_every_arm_is_plain_ppo(run, arm, overrides):
  serial, other = run("serial"), run(arm, **overrides)
  assert other.hashes == serial.hashes
  assert {row["overlap/deferred"] for row in other.rows} == {0}
  assert {row["overlap/staleness_max"] for row in other.rows} == {0}


def test_the_arms_that_differ_do_differ(run):
  """So the hashes of the tests above can tell runs apart."""
  arms = ("serial", "oppo", "restart")
  for name in HASHES:
    assert len({run(arm).summary[name] for arm in arms}) == 3


def test_a_tuned_run_tries_every_size_and_keeps_one(run):
  sizes = [d["chunk_size"] for d in run("oppo", **TUNED).decisions]
  for start in (0, 8, 16):
    assert sizes[start : start + 3] == [4, 32, 1]
  for kept in (sizes[3:8], sizes[11:16]):
    assert len(set(kept)) == 1
    assert kept[0] in (4, 32, 1)


@pytest.mark.parametrize(
  ("arm", "overrides"), [("oppo", chunk(7)), ("inter", {})]
)
def test_bfloat16_changes_no_bit_either(run, arm, overrides):
  oppo = run("oppo", **BFLOAT16)
  assert run(arm, **BFLOAT16, **overrides).hashes == oppo.hashes
  assert oppo.hashes != run("oppo").hashes
  assert num_deferring(oppo) == 8


# Decisions, and their replay.


def replayed(path):
  return {
    "overlap.chunk.kind": "replay",
    "overlap.delta.kind": "replay",
    "overlap.replay_path": str(path),
  }


def test_a_replay_of_the_decisions_is_the_same_run(run):
  tuned = run("oppo", **TUNED)
  replay = run("oppo", **replayed(tuned.workdir / "decisions.jsonl"))
  assert replay.decisions == tuned.decisions
  assert replay.hashes == tuned.hashes


def test_a_replay_does_what_the_log_says(run, tmp_path):
  log = [
    {"step": step, "delta": (5 * step) % 17, "chunk_size": 3 + step}
    for step in range(20)
  ]
  path = tmp_path / "decisions.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in log))
  replay = run("oppo", **replayed(path), num_steps=6)
  assert replay.decisions == log[:6]
  deferred = [row["overlap/deferred"] for row in replay.rows]
  assert deferred == [0, 5, 10, 15, 3, 8]


# What a run leaves behind.

METRICS = """
  objective/kl objective/scores objective/rlhf_reward objective/entropy
  policy/approxkl_avg policy/clipfrac_avg loss/policy_avg loss/value_avg
  val/ratio val/clipfrac_avg overlap/delta overlap/chunk_size overlap/deferred
  overlap/staleness_mean overlap/staleness_max overlap/slot_fill overlap/ticks
  time/decode_s time/score_s time/update_s time/step_s
  tokens/generated tokens/trained
""".split()
SUMMARY = """
  steps arm wall_s tokens_generated tokens_trained decode_ticks batches_sha256
  params_sha256 jax backend device
""".split()


def test_every_step_has_every_metric(run):
  rows = run("oppo").rows
  assert [row["step"] for row in rows] == list(range(20))
  for row in rows:
    assert set(METRICS) <= set(row)
    assert all(np.isfinite(value) for value in row.values())
    assert 0 < row["overlap/slot_fill"] <= 1
    assert 0 <= row["overlap/staleness_mean"] <= row["overlap/staleness_max"]
    assert row["overlap/staleness_max"] <= row["overlap/deferrals_max"] <= 2


def test_the_summary_adds_up(run):
  done = run("oppo")
  summary = done.summary
  assert set(SUMMARY) <= set(summary)
  assert summary["steps"] == 20
  assert summary["arm"] == "oppo"
  assert not summary["forced_lengths"]
  assert summary["jax"] == jax.__version__
  assert summary["backend"] == jax.default_backend()
  for total, key in (
    ("tokens_generated", "tokens/generated"),
    ("tokens_trained", "tokens/trained"),
    ("decode_ticks", "overlap/ticks"),
  ):
    assert summary[total] == sum(row[key] for row in done.rows)
  in_flight = done.rows[-1]["overlap/deferred"]
  assert summary["prompts_in_flight"] == in_flight
  assert summary["prompts_admitted"] == 20 * 16 + in_flight


def test_serial_ticks_is_what_the_serial_arm_takes(run):
  serial, oppo = run("serial").summary, run("oppo").summary
  assert serial["serial_ticks"] == serial["decode_ticks"]
  assert oppo["decode_ticks"] < oppo["serial_ticks"]


def test_the_other_files_are_there(run):
  done = run("oppo")
  config = ablation.get_config("oppo")
  config.log.rollouts_per_step = 16
  saved = json.loads((done.workdir / "config.json").read_text())
  assert saved == json.loads(config.to_json_best_effort())
  for name in ("policy", "critic"):
    assert (done.workdir / "params" / f"{name}.safetensors").is_file()
  assert (done.workdir / "tokenizer" / "tokenizer.json").is_file()
  assert [d["step"] for d in done.decisions] == list(range(20))
  for row, decision in zip(done.rows, done.decisions):
    assert row["overlap/delta"] == decision["delta"]
    assert row["overlap/chunk_size"] == decision["chunk_size"]


@pytest.mark.parametrize(
  ("name", "head"), [("policy", "lm"), ("critic", "scalar")]
)
def test_a_run_becomes_a_hugging_face_folder(run, name, head, tmp_path):
  workdir = run("oppo").workdir
  file, out = f"params/{name}.safetensors", tmp_path / name
  convert.convert(workdir, out, file=file)
  assert hf.head(out) == head
  model = hf.make_model(out, **hf.PLAIN, head=head)
  params = hf.load_params(out, model, dtype="float32")
  assert_exact(params, checkpoint.load_params(workdir / file, params))
  told, told_out = (tokenizer.load(x) for x in (workdir / "tokenizer", out))
  assert told.encode("12+7=") == told_out.encode("12+7=")
  assert told.eos_ids == told_out.eos_ids


def test_every_prompt_is_trained_on_once_and_in_time(run):
  done = run("oppo")
  uids = [row["uid"] for row in done.rollouts]
  assert len(uids) == len(set(uids)) == 20 * 16
  trained = sum(len(row["response_tokens"]) for row in done.rollouts)
  assert trained == done.summary["tokens_trained"]
  for row in done.rollouts:
    assert row["admitted_at"] <= row["step"] <= row["admitted_at"] + 2
    versions = row["versions"]
    assert versions == sorted(versions)
    assert row["admitted_at"] <= versions[0]
    assert versions[-1] <= row["step"]
    assert max(row["behavior_logprobs"]) <= 0
  admitted = done.summary["prompts_admitted"]
  assert (
    len(set(range(admitted)) - set(uids)) == done.rows[-1]["overlap/deferred"]
  )
  mixed = [row for row in done.rollouts if len(set(row["versions"])) > 1]
  assert mixed  # some responses were sampled by two policies


# Forced lengths.


def simulate(lengths, *, deltas, batch_size, max_staleness, restarts):
  """Decode ticks of the slot buffer, and the lengths of all batches, by uid."""
  ticks, next_uid, rows, taken = 0, 0, {}, {}
  for version, delta in enumerate(deltas):
    while len(rows) < batch_size + delta:
      rows[next_uid] = dict(left=lengths[next_uid % len(lengths)], at=version)
      next_uid += 1
    while True:
      ready = [uid for uid, row in rows.items() if row["left"] == 0]
      late = [
        uid
        for uid, row in rows.items()
        if 0 <= max_staleness <= version - row["at"]
      ]
      if len(ready) >= batch_size and set(late) <= set(ready):
        break
      ticks += 1
      for row in rows.values():
        if row["left"] > 0:
          row["left"] -= 1
          row["end"] = ticks
    order = lambda uid: (uid not in late, rows[uid]["end"], uid)
    for uid in sorted(ready, key=order)[:batch_size]:
      taken[uid] = lengths[uid % len(lengths)]
      del rows[uid]
    if restarts:
      for uid, row in rows.items():
        row["left"] = lengths[uid % len(lengths)]
  return ticks, taken


@pytest.mark.parametrize("arm", ["serial", "oppo", "restart"])
def test_forced_lengths_are_the_lengths_and_ticks_are_counted(
  arm, run, tmp_path_factory, capsys
):
  lengths = [1 + (7 * i * i) % 23 for i in range(50)] + [96]
  path = tmp_path_factory.mktemp("lengths") / "lengths.txt"
  path.write_text("".join(f"{n}\n" for n in lengths))
  done = run(
    arm,
    **{
      "num_steps": 8,
      "rollout.target_lengths_path": str(path),
      "overlap.delta.kind": "fixed",
      "overlap.delta.init": 13,
    },
  )
  out = capsys.readouterr().out
  assert f"FORCED LENGTHS: every response ends where {path} says" in out
  assert "FORCED LENGTHS: a benchmark" in out.splitlines()[-1]
  assert done.summary["forced_lengths"]
  ticks, taken = simulate(
    lengths,
    deltas=[d["delta"] if arm != "serial" else 0 for d in done.decisions],
    batch_size=16,
    max_staleness=2,
    restarts=arm == "restart",
  )
  found = {row["uid"]: len(row["response_tokens"]) for row in done.rollouts}
  assert found == taken
  assert all(row["has_eos"] for row in done.rollouts)
  assert done.summary["decode_ticks"] == ticks


# Runs that were cut short.


class Killed(Exception):
  """Stands for a kill."""


def with_stages(config):
  config.num_steps = 3
  for stage in (config.warm_start.sft, config.warm_start.reward_model):
    stage.update(num_steps=2, rows=2)
  config.warm_start.reward_model.update(num_prompts=8, num_spoiled=8)
  return config


def test_a_run_that_was_cut_short_starts_from_its_stages(
  tmp_path, monkeypatch, capsys
):
  config = with_stages(ablation.get_config("oppo"))
  whole = finish(config, tmp_path / "whole")
  assert "cached" not in capsys.readouterr().out

  step_row = train.report.step_row

  def killed(step, *args, **kwargs):
    if step == 1:
      raise Killed
    return step_row(step, *args, **kwargs)

  monkeypatch.setattr(train.report, "step_row", killed)
  workdir = tmp_path / "cut"
  with pytest.raises(Killed):
    train.train(config, workdir)
  assert not (workdir / "summary.json").exists()
  assert [r["step"] for r in metrics.read_jsonl(workdir / "metrics.jsonl")] == [
    0
  ]
  monkeypatch.undo()
  capsys.readouterr()
  again = finish(config, workdir)
  out = capsys.readouterr().out
  assert "sft: cached in" in out
  assert "reward_model: cached in" in out
  assert "sft step" not in out
  assert again.hashes == whole.hashes
  assert [row["step"] for row in again.rows] == [0, 1, 2]


# Real rows.


def check_gsm8k(config, workdir):
  config.log.rollouts_per_step = 8
  config.warm_start.sft.num_steps = 4
  done = finish(config, workdir)
  assert done.summary["steps"] == 3
  assert set(METRICS) <= set(done.rows[-1])
  assert len(done.rollouts) == 3 * 8
  assert done.rollouts[0]["prompt"].startswith("Question: ")
  assert done.summary["tokens_trained"] > 3 * 8
  return done


def test_gsm8k_runs_on_real_rows(tmp_path):
  if not DATA.is_dir():
    pytest.skip(f"no GSM8K in {DATA}")
  config = gsm8k.get_config("tiny")
  config.task.data_dir = str(DATA)
  config.eval.num_prompts = 0
  check_gsm8k(config, tmp_path)


def test_gsm8k_runs_on_rows_made_here(tmp_path):
  data = tmp_path / "data"
  data.mkdir()
  for split, count in (("train", 40), ("test", 8)):
    rows = [
      dict(
        question=f"Ann has {i} pens and buys {i + 3}. How many has she?",
        answer=f"{i} + {i + 3} = <<{i}+{i + 3}={2 * i + 3}>>{2 * i + 3} pens."
        f"\n#### {2 * i + 3}",
      )
      for i in range(count)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (data / f"{split}.jsonl").write_text("".join(lines))
  config = gsm8k.get_config("tiny")
  config.task.data_dir = str(data)
  config.eval.num_prompts = 8
  config.rollout.update(max_prompt_len=64, max_response_len=64)
  done = check_gsm8k(config, tmp_path / "run")
  assert "buys" in done.rollouts[0]["prompt"]
  for when in ("accuracy_before", "accuracy_after"):
    assert set(done.summary[when]) == {"greedy", "sampled"}
    assert all(0 <= x <= 1 for x in done.summary[when].values())
