# SPDX-License-Identifier: Apache-2.0
"""Scorers on a second device: the same bits, and computed there.

Two host devices need a process of their own: their number is fixed when JAX
starts.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from configs import ablation
from oppo_jax import assemble

ROOT = pathlib.Path(__file__).parents[1]
RUN = """
import json, pathlib, tempfile
import jax
from configs import ablation
from oppo_jax import assemble, metrics, report, step, warm_start

hashes, places = {}, {}
for placement in ("colocated", "disaggregated"):
  config = ablation.get_config("oppo")
  config.model.num_layers = 1
  config.task.update(num_train=64, num_test=8)
  config.rollout.batch_size = 8
  config.rollout.max_response_len = 40
  config.overlap.delta.update(init=4, max=4, kind="fixed")
  config.overlap.placement = placement
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder)
    s = assemble.setup(config, workdir, log=print)
    params = warm_start.run(config, s.parts, workdir=workdir, log=print)
  state, totals = step.init(config, s, params), report.Totals()
  while state.step < 3:
    got = step.collect(config, s, state, metrics.Timers())
    state, done = step.learn(
      config, s, state, got, metrics.Timers(), began=0.0
    )
    totals.add(done.batch, done.row)
  assert done.row["overlap/deferrals_max"] > 0
  hashes[placement] = [
    totals.batches.hexdigest(), metrics.params_sha256(state.train.params)
  ]
  device = lambda x: sorted(d.id for d in jax.tree.leaves(x)[0].devices())
  places[placement] = {
    "policy": device(state.in_flight.cache),
    "batch": device(got.on_device),
    **{k: device(v) for k, v in state.in_flight.scorers.items()},
  }
print("RESULT" + json.dumps([hashes, places]))
"""


@pytest.fixture(scope="module")
def result():
  flags = "--xla_force_host_platform_device_count=2"
  done = subprocess.run(
    [sys.executable, "-c", RUN],
    cwd=ROOT,
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
  return json.loads(line.removeprefix("RESULT"))


def test_another_placement_changes_no_bit(result):
  hashes, _ = result
  assert hashes["disaggregated"] == hashes["colocated"]


def test_scorers_are_where_they_were_put(result):
  _, places = result
  scorers = {"reward", "reference", "critic"}
  assert set(places["disaggregated"]) == scorers | {"policy", "batch"}
  for name, device in places["disaggregated"].items():
    assert device == [int(name in scorers)]
  assert set(map(tuple, places["colocated"].values())) == {(0,)}


def test_without_a_second_device_it_is_refused(tmp_path):
  config = ablation.get_config("oppo")
  config.overlap.placement = "disaggregated"
  with pytest.raises(ValueError, match=r"placement='disaggregated': needs two"):
    assemble.setup(config, tmp_path, log=print)
