# SPDX-License-Identifier: Apache-2.0
"""Runs of the supervised commands: kills change nothing, folders hand over."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from compare import assert_exact

from configs import jsonl
from oppo_jax import config as config_lib
from oppo_jax import (
  evaluate,
  hf,
  metrics,
  reward_model,
  sft,
  stage_command,
  supervised,
  supervised_run,
  train,
)

pytestmark = pytest.mark.usefixtures("compiled_once")

ROOT = pathlib.Path(sft.__file__).parents[1]
COMMANDS = {"sft": sft, "reward_model": reward_model}
FIELDS = {"chosen": "good", "rejected": "bad", "margin": "gap"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  """Sums; the chosen answer is right, the rejected one is not."""
  folder = tmp_path_factory.mktemp("rows")
  for split, first, num in (("train", 0, 30), ("test", 50, 8)):
    rows = [
      dict(prompt=f"{i}+{i % 3}=", good=str(i + i % 3), bad=str(i), gap=i % 2)
      for i in range(first, first + num)
      if i % 3
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / f"{split}.jsonl").write_text("".join(lines))
  return folder


def make_config(data, **overrides):
  config = jsonl.get_config()
  config.task.update(data_dir=str(data), **FIELDS)
  config.tokenizer.kind = "byte"
  config.model.update(
    num_layers=1, width=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32
  )
  fit = dict(num_steps=6, rows=4, width=20, eval_every=3, save_every=2)
  config.sft.update(**fit)
  config.reward_model.update(margin_coef=0.5, center_coef=0.01, **fit)
  config.rollout.update(batch_size=4, max_prompt_len=10, max_response_len=8)
  config.score.tile_len = 8
  config.overlap.delta.update(init=2, max=4)
  config.num_steps = 2
  config.eval.num_prompts = 0
  config.update_from_flattened_dict(overrides)
  config_lib.validate(stage_command.without_reward(config))
  return config


class Killed(BaseException):
  """Nobody catches it."""


def rows_of(workdir):
  rows = metrics.read_jsonl(workdir / "metrics.jsonl")
  return [
    {k: v for k, v in row.items() if not k.startswith("time/")} for row in rows
  ]


def summary_of(workdir):
  return json.loads((workdir / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
  """finished(name): a run of the command that nobody killed."""
  made = {}

  def run(name):
    if name not in made:
      made[name] = tmp_path_factory.mktemp(name)
      COMMANDS[name].train(make_config(data), made[name])
    return made[name]

  return run


def kill_at(monkeypatch, step):
  """The process ends in step `step` of its own."""
  real, taken = supervised.learner, []

  def learner(*args):
    init, take = real(*args)

    def counted(*args):
      taken.append(None)
      if len(taken) > step:
        raise Killed
      return take(*args)

    return supervised.Learner(init, counted)

  monkeypatch.setattr(supervised, "learner", learner)


@pytest.mark.parametrize(
  ("name", "stops", "goes_on_from"),
  [("sft", (1, 3), 2), ("reward_model", (5,), 4)],
)
def test_a_stopped_run_ends_in_the_same_bits(
  name, stops, goes_on_from, data, finished, tmp_path, monkeypatch
):
  """Stopped before the first snapshot, and between two."""
  for steps in stops:
    with monkeypatch.context() as patch:
      kill_at(patch, steps)
      with pytest.raises(Killed):
        COMMANDS[name].train(make_config(data), tmp_path)
  COMMANDS[name].train(make_config(data), tmp_path)
  whole = finished(name)
  assert summary_of(tmp_path)["started_at"] == goes_on_from
  same = ("params_sha256", "before", "after", "epochs", "tokens")
  for key in same:
    assert summary_of(tmp_path)[key] == summary_of(whole)[key]
  assert rows_of(tmp_path) == rows_of(whole)
  assert [row["step"] for row in rows_of(whole)] == [*range(7)]
  judged = [r["step"] for r in rows_of(whole) if "eval/loss" in r]
  assert judged == [0, 3, 6]
  assert not (tmp_path / "snapshots").exists()


def test_a_run_survives_sigkill(data, finished, tmp_path):
  """A process of its own, killed once the first snapshot is there."""
  script = (
    "import pathlib, sys; sys.path.insert(0, 'tests')\n"
    "import supervised_run_test as t\n"
    f"workdir = pathlib.Path({str(tmp_path)!r})\n"
    f"t.sft.train(t.make_config({str(data)!r}), workdir)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", script],
    cwd=ROOT,
    env=os.environ | dict(PYTHONPATH=str(ROOT)),
    stdout=subprocess.DEVNULL,
  )
  limit = time.monotonic() + 120
  while process.poll() is None and time.monotonic() < limit:
    if list(tmp_path.glob("snapshots/[0-9]*")):
      break
    time.sleep(0.005)
  process.send_signal(signal.SIGKILL)
  process.wait()
  if not (tmp_path / "summary.json").exists():  # it may have been faster
    sft.train(make_config(data), tmp_path)
  for key in ("params_sha256", "after"):
    assert summary_of(tmp_path)[key] == summary_of(finished("sft"))[key]


def test_a_workdir_is_of_one_config(data, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    kill_at(patch, 3)
    with pytest.raises(Killed):
      sft.train(make_config(data), tmp_path)
  supervised_run.check_workdir(tmp_path, make_config(data))
  other = make_config(data, **{"sft.lr": 0.5, "compile_cache": "off"})
  with pytest.raises(ValueError, match=r"config.sft.lr=0.003, now it is 0.5"):
    supervised_run.check_workdir(tmp_path, other)
  edited = tmp_path / "edited"
  edited.mkdir()
  for split in ("train", "test"):
    text = (data / f"{split}.jsonl").read_text()
    (edited / f"{split}.jsonl").write_text(
      text.replace('"good": "1', '"good": "7')
    )
  config = make_config(edited)
  with pytest.raises(ValueError, match="the data changed since the run"):
    sft.train(config, tmp_path)


def test_a_finished_run_is_refused(data, finished):
  with pytest.raises(ValueError, match="holds a finished run already"):
    supervised_run.check_workdir(finished("sft"), make_config(data))


def test_the_exported_folder_is_what_was_trained(data, finished, tmp_path):
  """And what the next command starts from, as its first evaluation says."""
  workdir = finished("sft")
  model = hf.make_model(workdir / "hf", head="lm", **hf.PLAIN)
  params = hf.load_params(workdir / "hf", model, dtype="float32")
  assert metrics.params_sha256(params) == summary_of(workdir)["params_sha256"]
  config = make_config(data, **{"load.policy": str(workdir / "hf")})
  config.sft.num_steps = 1
  sft.train(config, tmp_path)
  assert summary_of(tmp_path)["before"] == summary_of(workdir)["after"]


def test_learning_lowers_the_held_out_loss(finished):
  found = summary_of(finished("sft"))
  assert found["after"]["loss"] < found["before"]["loss"] - 0.1
  perplexity = np.exp(found["after"]["loss"])
  np.testing.assert_allclose(found["after"]["perplexity"], perplexity)


def test_the_summary_of_a_reward_model_has_the_baselines(finished):
  """Of 6 held-out pairs the chosen text is as long as the rejected: half."""
  found = summary_of(finished("reward_model"))["baselines"]
  assert found == {"num_pairs": 5, "longer": 0.5, "majority": 0.5}


def test_parameters_stay_float32_where_the_model_computes_in_bfloat16(
  data, tmp_path
):
  config = make_config(
    data, **{"model.dtype": "bfloat16", "model.remat": "layer"}
  )
  config.sft.num_steps = 1
  sft.train(config, tmp_path)
  model = hf.make_model(tmp_path / "hf", head="lm", **hf.PLAIN)
  params = hf.load_params(tmp_path / "hf", model, dtype=None)
  assert params["embedding"].dtype == np.float32
  coarse = params["embedding"].astype("bfloat16").astype(np.float32)
  assert (coarse != params["embedding"]).any()


def test_a_reward_model_starts_from_the_policys_trunk(
  data, finished, tmp_path, monkeypatch
):
  folder = finished("sft") / "hf"
  config = make_config(data, **{"load.policy": str(folder)})
  seen = []

  def run(config, stage, *args, **kwargs):
    seen.append(stage.start())
    return {"after": {}, "baselines": {}, "wall_s": 0.0}

  monkeypatch.setattr(supervised_run, "run", run)
  reward_model.train(config, tmp_path)
  model = hf.make_model(folder, head="lm", **hf.PLAIN)
  policy = hf.load_params(folder, model, dtype="float32")
  start = dict(seen[0])
  assert start.pop("out").shape == (16, 1)
  policy.pop("out", None)
  assert_exact(start, policy)


def test_ppo_starts_where_the_stages_ended(data, finished, tmp_path):
  """sft -> reward_model -> train -> evaluate, by folders alone."""
  policy = str(finished("sft") / "hf")
  load = {"load.policy": policy}
  reward_model.train(make_config(data, **load), tmp_path / "rm")
  load |= {"load.reward_model": str(tmp_path / "rm" / "hf")}
  train.train(make_config(data, **load), tmp_path / "ppo")
  rows = metrics.read_jsonl(tmp_path / "ppo" / "metrics.jsonl")
  assert len(rows) == 2
  assert "reward/rule" not in rows[0]
  # On-policy: the ratio to the reference is 1 up to the way it is computed.
  assert abs(rows[0]["objective/kl"]) < 1e-3

  load |= {
    "load.policy": str(tmp_path / "ppo" / "hf"),
    "load.reference": policy,
  }
  asked = evaluate.Asked(
    split="test", num_prompts=0, samples=2, ks=(), is_greedy=False, shown=1
  )
  config = make_config(data, **load)
  found = evaluate.evaluate(config, tmp_path / "out", asked)
  table = metrics.read_jsonl(tmp_path / "out" / "completions.jsonl")
  assert len(table) == found["responses"] == 10
  for name in ("score", "kl", "response_len"):
    mean = np.mean([row[name] for row in table])
    np.testing.assert_allclose(found[name], mean, rtol=1e-6)
  assert abs(found["kl"]) > 1e-6  # two updates moved it
  alone = make_config(data, **load | {"load.policy": policy})
  same = evaluate.evaluate(alone, tmp_path / "same", asked)
  assert same["kl"] == 0.0


def test_a_task_without_pairs_is_named(data, tmp_path):
  config = make_config(data)
  config.task.update({k: "" for k in FIELDS}, answer="good")
  with pytest.raises(ValueError, match="config.task_name='jsonl': has no pair"):
    reward_model.train(config, tmp_path)


def test_without_a_solution_there_is_nothing_to_learn(data, tmp_path):
  config = make_config(data)
  config.task.update({k: "" for k in FIELDS})
  with pytest.raises(ValueError, match=r"config.sft: nothing to learn from"):
    sft.train(config, tmp_path)


@pytest.mark.parametrize(
  ("module", "args", "says"),
  [
    ("sft", ["--config.sft.num_steps=0"], "config.sft.num_steps=0: must be at"),
    ("evaluate", ["--samples=2", "--k=3"], "--k=3: must be in [1, 2]"),
    ("evaluate", [], "config.load.policy='': must be a folder to evaluate"),
  ],
)
def test_bad_input_ends_with_one_line(module, args, says, tmp_path):
  out = "--out" if module == "evaluate" else "--workdir"
  config = "--config=configs/jsonl.py"
  done = subprocess.run(
    [
      *(sys.executable, "-m", f"oppo_jax.{module}", config),
      *(*args, f"{out}={tmp_path / 'out'}"),
    ],
    cwd=ROOT,
    env=os.environ | dict(PYTHONPATH=str(ROOT)),
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 1
  assert says in done.stderr
  assert len(done.stderr.strip().splitlines()) == 1
