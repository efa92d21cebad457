# SPDX-License-Identifier: Apache-2.0
"""The plug-ins that CONTRIBUTING.md shows, as it shows them, in one run.

Each code block becomes a module, and gets its one line in the registry; then a
whole run uses them all.
"""

import json
import pathlib
import re
import sys
import types

import pytest

from configs import ablation
from oppo_jax import algos, chunking, delta, models, schema, tasks, train
from oppo_jax import config as config_lib

TEXT = (pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def block(mark):
  """The code block that has `mark` in it."""
  blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
  (found,) = [b for b in blocks if mark in b]
  return found


def module(name, mark, monkeypatch):
  made = types.ModuleType(name)
  monkeypatch.setitem(sys.modules, name, made)  # dataclasses look there
  exec(compile(block(mark), "CONTRIBUTING.md", "exec"), made.__dict__)
  return made


@pytest.fixture
def plugged(monkeypatch):
  """All five, registered; what was fixed at import is made anew."""
  add = monkeypatch.setitem
  add(algos.ALGOS, "grouped", module("grouped", "group_size", monkeypatch))
  add(models.MODELS, "last_token", module("last", "LastToken", monkeypatch))
  double = module("double", "Doubling", monkeypatch)
  add(tasks.TASKS, "double", double.make)
  for rules, name in ((delta, "best"), (chunking, "rotate")):
    space = dict(vars(rules))
    exec(block(f"def {name}("), space)
    add(rules.RULES, name, space[name])
  for key, registry in (
    ("algo_name", algos.ALGOS),
    ("model_name", models.MODELS),
    ("task_name", tasks.TASKS),
    ("overlap.delta.kind", delta.RULES),
    ("overlap.chunk.kind", chunking.RULES),
  ):
    add(config_lib.SCHEMA, key, schema.choice(*registry))


def test_the_plug_ins_shown_work_together(plugged, tmp_path):
  config = ablation.get_config("oppo")
  config.num_steps = 3
  config.task_name, config.task = "double", dict(num_train=100, num_test=8)
  config.model_name = "last_token"
  config.model = dict(width=16, dtype="float32")
  config.algo_name = "grouped"
  config.algo.group_size = 4
  config.overlap.delta.kind = "best"
  config.overlap.chunk.update(kind="rotate", sizes=(4, 8))
  config.rollout.max_response_len = 24
  config_lib.validate(config)
  train.train(config, tmp_path)

  read = lambda name: [
    json.loads(line) for line in (tmp_path / name).read_text().splitlines()
  ]
  decisions = read("decisions.jsonl")
  assert [d["chunk_size"] for d in decisions[1:]] == [8, 4]
  assert len({d["delta"] for d in decisions}) > 1
  rows = read("rollouts.jsonl")
  assert all(row["prompt"].startswith("2*") for row in rows)
  config.algo.group_size = 5  # no divisor of the batch
  with pytest.raises(ValueError, match="group would be split"):
    train.train(config, tmp_path / "again")


def test_a_key_that_a_plug_in_does_not_know_is_refused(plugged):
  config = ablation.get_config("oppo")
  config.model_name = "last_token"
  with pytest.raises(ValueError, match=r"config\.model\.\w+: unknown key"):
    config_lib.validate(config)
