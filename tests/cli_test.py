# SPDX-License-Identifier: Apache-2.0
"""What the command line does with bad input, and with good.

Bad input ends with one line on stderr that names what is wrong, exit code 1 and
no summary.json. A process takes seconds to start, so only what depends on flags
is run as one; the rest calls `validate` and `train`, as `main` does.
"""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors import numpy as safetensors

from configs import ablation, gsm8k
from oppo_jax import config as config_lib
from oppo_jax import metrics, step, train

ROOT = pathlib.Path(train.__file__).parents[1]


def command(*args, cwd=ROOT):
  """Runs `python -m oppo_jax.train`."""
  return subprocess.run(
    [sys.executable, "-m", "oppo_jax.train", *map(str, args)],
    cwd=cwd,
    env=os.environ | dict(PYTHONPATH=str(ROOT)),
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


ABLATION = "--config=configs/ablation.py"


@pytest.mark.parametrize(
  ("args", "says"),
  [
    (
      [ABLATION, "--config.rollout.batchsize=3"],
      "--config.rollout.batchsize=3: unknown key; did you mean 'batch_size'?",
    ),
    ([ABLATION, "--config.nope.x=1"], "--config.nope.x=1: unknown key"),
    (
      [ABLATION, "--config.algo.clip=0.1"],
      "--config.algo.clip=0.1: unknown key",
    ),
    (
      [ABLATION, "--config.num_steps=2.5"],
      "flag --config.num_steps=2.5: invalid literal for int()",
    ),
    (
      [ABLATION, "--config.rollout.top_p=2.0"],
      "config.rollout.top_p=2.0: must be a float > 0.0 and <= 1.0",
    ),
    (["--config=configs/ablation.py:foo"], "arm='foo': must be one of"),
    (["--config=configs/nope.py"], "No such file or directory: 'configs/nope."),
    ([], "Flag --config must have a value"),
    ([ABLATION, "more"], "unknown arguments ['more']"),
    (["--config=configs/gsm8k.py:tiny"], "config.task: gsm8k: no train.jsonl"),
    (  # of which transformers has five lines to say
      [
        ABLATION,
        "--config.tokenizer.kind=hf",
        "--config.tokenizer.path=configs",
      ],
      "config.tokenizer.path='configs': ",
    ),
    (
      [ABLATION, "--config.rollout.max_prompt_len=2"],
      "tokens, the limit max_prompt_len is 2",
    ),
  ],
)
def test_bad_input_ends_with_one_line(args, says, tmp_path):
  workdir = tmp_path / "run"
  done = command(*args, f"--workdir={workdir}")
  assert done.returncode == 1
  assert done.stderr.startswith("error: ")
  assert says in done.stderr
  assert done.stderr.count("\n") == 1
  assert done.stdout == ""
  assert not (workdir / "summary.json").exists()
  assert not (workdir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
  ("args", "says"),
  [
    ([], "Flag --workdir must have a value"),
    (["--workdir="], "--workdir='': must be a folder"),
  ],
)
def test_a_run_needs_a_workdir(args, says, tmp_path):
  config = ROOT / "configs" / "ablation.py"
  done = command(f"--config={config}", *args, cwd=tmp_path)
  assert done.returncode == 1
  assert says in done.stderr
  assert done.stderr.count("\n") == 1
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("line", "says"),
  [
    ("return undefined", "NameError: name 'undefined' is not defined"),
    ("return len(3)", "TypeError: object of type 'int' has no len()"),
  ],
)
def test_a_bug_in_a_config_file_keeps_its_traceback(line, says, tmp_path):
  file = tmp_path / "broken.py"
  file.write_text(f"def get_config(arg=None):\n  {line}\n")
  done = command(f"--config={file}", f"--workdir={tmp_path / 'run'}")
  assert done.returncode == 1
  assert says in done.stderr
  assert f'File "{file}", line 2' in done.stderr


def test_a_run_finishes_and_is_not_run_twice(tmp_path):
  args = [ABLATION, "--config.num_steps=1", f"--workdir={tmp_path}"]
  done = command(*args)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert "step     0" in done.stdout
  assert "arm                     oppo, 1 updates" in done.stdout
  before = (tmp_path / "summary.json").read_bytes()
  assert json.loads(before)["steps"] == 1
  again = command(*args)
  assert again.returncode == 1
  says = f"error: --workdir={tmp_path}: holds a finished run already\n"
  assert again.stderr == says
  assert (tmp_path / "summary.json").read_bytes() == before


# Without a process: what `main` runs, short of flags.


def run(config, workdir, **overrides):
  """Validates and trains; returns nothing, as bad input is all it is given."""
  config.update_from_flattened_dict(overrides)
  config_lib.validate(config)
  train.train(config, workdir)


def refused(config, workdir, **overrides):
  """The line that the run ends with."""
  with pytest.raises((ValueError, OSError)) as e:
    run(config, workdir, **overrides)
  assert not (workdir / "summary.json").exists()
  assert not (workdir / "metrics.jsonl").exists()
  return str(e.value)


ROW = dict(question="What is 1 + 1?", answer="1 + 1 = 2\n#### 2")


def write_rows(folder, *, train=(ROW,), test=(ROW,)):
  folder.mkdir()
  for split, rows in (("train", train), ("test", test)):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
  return {"task.data_dir": str(folder)}


def test_a_bad_config_is_refused_before_anything_is_written(tmp_path):
  workdir = tmp_path / "run"
  for key, value in (
    ("algo.kl_estimator", "k9"),
    ("algo.denominator", "start"),
    ("overlap.delta.max", 99),
    ("rollout.target_lengths_path", str(tmp_path / "none.txt")),
  ):
    said = refused(ablation.get_config(), workdir, **{key: value})
    assert said.startswith(f"config.{key}={value!r}: must be ")
  config = ablation.get_config()
  with config.unlocked():
    config.algo.no_such_key = 1
  assert refused(config, workdir) == "config.algo.no_such_key: unknown key"
  config = ablation.get_config()
  with config.unlocked():
    del config.algo.lam
  assert refused(config, workdir) == "config.algo.lam: missing"
  assert not workdir.exists()


@pytest.mark.parametrize(
  ("key", "value", "says"),
  [
    ("task_name", "chess", "config.task_name='chess': must be one of"),
    ("task.difficulty", 9, "config.task: difficulty=9: not one of"),
    ("task.data_dir", "x", "config.task: task 'arithmetic': "),
  ],
)
def test_a_bad_task_is_refused_before_anything_is_written(
  key, value, says, tmp_path
):
  config = ablation.get_config()
  with config.unlocked():
    assert refused(config, tmp_path / "run", **{key: value}).startswith(says)
  assert not (tmp_path / "run").exists()


def test_a_data_dir_that_is_not_there_is_named(tmp_path):
  missing = str(tmp_path / "no_such_folder")
  said = refused(
    gsm8k.get_config("tiny"), tmp_path / "run", **{"task.data_dir": missing}
  )
  assert said == f"config.task: gsm8k: data_dir={missing!r} is not a folder"
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("row", "says"),
  [
    ('{"question": "What?", "ans', "not JSON"),
    (dict(question="What?"), "field 'answer' is missing"),
    (dict(question="What?", answer="Two."), "does not end on '#### number'"),
  ],
)
def test_a_malformed_row_is_named_by_file_and_line(row, says, tmp_path):
  data = write_rows(tmp_path / "data", test=[ROW, ROW, row])
  said = refused(gsm8k.get_config("tiny"), tmp_path / "run", **data)
  assert f"{tmp_path / 'data' / 'test.jsonl'}, line 3: " in said
  assert says in said


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_prompt_over_the_limit_is_named_by_row(split, tmp_path):
  long = ROW | dict(question="What is " + "1 + " * 200 + "1?")
  data = write_rows(tmp_path / "data", **{split: [ROW, ROW, long]})
  said = refused(
    gsm8k.get_config("tiny"),
    tmp_path / "run",
    **data,
    **{"rollout.long_prompts": "refuse", "tokenizer.kind": "byte"},
  )
  assert said.startswith("prompt of row 2 has ")
  assert said.endswith("the limit max_prompt_len is 192")


def test_a_character_that_no_training_row_has_is_named(tmp_path):
  odd = ROW | dict(question="What is 1 \u00d7 1?")
  data = write_rows(tmp_path / "data", test=[odd])
  said = refused(
    gsm8k.get_config("tiny"),
    tmp_path / "run",
    **data,
    **{"tokenizer.kind": "char"},
  )
  assert said.startswith("character '\u00d7' is not in the tokenizer's vocab")


@pytest.mark.parametrize(
  ("file", "text"),
  [
    (None, ""),
    ("tokenizer.json", "no JSON"),
    ("tokenizer.json", '{"version": "1.0"}'),
  ],
)
def test_a_tokenizer_that_cannot_be_opened_is_named(file, text, tmp_path):
  path = tmp_path / "tokenizer"
  if file:
    path.mkdir()
    (path / file).write_text(text)
    (path / "tokenizer_config.json").write_text(
      '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
  said = refused(
    ablation.get_config(),
    tmp_path / "run",
    **{"tokenizer.kind": "hf", "tokenizer.path": str(path)},
  )
  assert said.startswith(f"config.tokenizer.path={str(path)!r}: ")
  assert not (tmp_path / "run").exists()


class Killed(Exception):
  """Stands for a kill."""


def cut_short(*_):
  raise Killed


def test_a_stage_of_another_vocabulary_is_named(tmp_path, monkeypatch):
  config = ablation.get_config()
  config.warm_start.sft.num_steps = 1
  config.warm_start.sft.rows = 1
  monkeypatch.setattr(step.flight, "init", cut_short)
  with pytest.raises(Killed):
    train.train(config, tmp_path)
  (stage,) = (tmp_path / "stages").iterdir()
  path = stage / "params.safetensors"
  params = safetensors.load_file(path)
  rows, width = params["embedding"].shape
  params["embedding"] = np.zeros((rows + 8, width), np.float32)
  safetensors.save_file(params, path)
  with pytest.raises(ValueError) as e:
    train.train(config, tmp_path)
  assert str(e.value) == (
    f"{path}: tensor 'embedding' is float32[{rows + 8}, {width}], expected"
    f" float32[{rows}, {width}]"
  )


@pytest.mark.parametrize(
  ("text", "says"),
  [
    ("", "no target lengths"),
    ("3\nfour\n", "line 2: 'four' is no integer"),
    ("3\n97\n", "line 2: target length 97 is not in [1, 96]"),
    ("0\n", "line 1: target length 0 is not in [1, 96]"),
  ],
)
def test_bad_target_lengths_are_named_by_file_and_line(text, says, tmp_path):
  path = tmp_path / "lengths.txt"
  path.write_text(text)
  said = refused(
    ablation.get_config(),
    tmp_path / "run",
    **{"rollout.target_lengths_path": str(path)},
  )
  assert said.startswith(str(path))
  assert said.endswith(says)


@pytest.mark.parametrize("kinds", [("replay", "paper"), ("fixed", "replay")])
def test_a_replay_that_is_too_short_is_refused_at_start(kinds, tmp_path):
  path = tmp_path / "decisions.jsonl"
  writer = metrics.JsonlWriter(path)
  for index in range(19):
    writer.write({"step": index, "delta": 8, "chunk_size": 16})
  writer.close()
  said = refused(
    ablation.get_config(),
    tmp_path / "run",
    **{
      "overlap.chunk.kind": kinds[0],
      "overlap.delta.kind": kinds[1],
      "overlap.replay_path": str(path),
    },
  )
  assert said == (
    f"config.overlap.replay_path={str(path)!r}: holds 19 decisions,"
    " num_steps is 20"
  )
  assert not (tmp_path / "run").exists()
