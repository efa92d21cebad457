# SPDX-License-Identifier: Apache-2.0
r"""Time of an update's gradients: packed against padded, and its knobs.

  python -m benchmarks.update --workload=lognormal --rows=1,2,4,8

"padded" is what a batch of fixed shape would cost: every row at prompt +
response limit, through the same code. The others pack rows end to end into
bins, `micro_rows` bins at a time. Programs take turns.
"""

import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import bench
from oppo_jax import metrics, packing, step

_WORKLOAD = flags.DEFINE_string("workload", "lognormal", "See bench.py.")
_ROWS = flags.DEFINE_list("rows", ["1", "2", "4", "8"], "optim.micro_rows.")
_MODEL = flags.DEFINE_enum("model", "peer", list(bench.MODELS), "Its shape.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "B")
_RESPONSE = flags.DEFINE_integer("response_len", 256, "R, tokens.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measurements of each.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")


class Case:
  """One way to lay the same batch out."""

  def __init__(self, name, micro_rows, *, is_padded=False, remat="none"):
    self.name, self.wall, self.cpu = name, [], []
    config = bench.config_of(
      "serial",
      model=_MODEL.value,
      batch_size=_BATCH_SIZE.value,
      delta=0,
      prompt_len=32,
      response_len=_RESPONSE.value,
      staleness=2,
      **{"optim.micro_rows": micro_rows, "model.remat": remat},
    )
    lengths = bench.lengths_of(
      _WORKLOAD.value, limit=_RESPONSE.value, num=_BATCH_SIZE.value
    )
    arm = bench.Arm(config, lengths)
    got = step.collect(config, arm.setup, arm.state, metrics.Timers())
    row_len = got.rollout.row_len
    self.tokens = int(row_len.sum())
    width = arm.setup.fns.sizes.row_len
    if is_padded:
      row_len = np.full_like(row_len, width)
    plan = packing.plan(
      row_len,
      order_seed=(0, 0),
      num_epochs=config.algo.num_epochs,
      num_minibatches=config.algo.num_minibatches,
      width=width,
      micro_rows=micro_rows,
    )
    self.computed = int(plan.num_micro.sum()) * micro_rows * width
    gradients = jax.jit(arm.setup.algorithm.gradients)
    args = (arm.state.train, got.on_device, plan)
    compiled = gradients.lower(*args).compile()
    self.temporary = compiled.memory_analysis().temp_size_in_bytes
    self._run = lambda: jax.block_until_ready(compiled(*args))

  def measure(self):
    wall, cpu = time.perf_counter(), time.process_time()
    self._run()
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)


def main(argv):
  del argv
  rows = [int(x) for x in _ROWS.value]
  cases = [Case("padded", rows[0], is_padded=True)]
  cases += [Case(f"packed, {n} rows", n) for n in rows]
  cases += [
    Case(f"packed, {rows[0]} rows, remat {how}", rows[0], remat=how)
    for how in ("attention", "layer")
  ]
  for _ in range(1 + _ROUNDS.value):
    for case in cases:
      case.measure()
  result = bench.conditions() | {"workload": _WORKLOAD.value, "cases": []}
  sys.stdout.write(
    f"{_WORKLOAD.value}: {cases[0].tokens} tokens, {_BATCH_SIZE.value} rows\n"
    f"{'':29s} {'wall s':>7s} {'CPU s':>7s} {'computed':>9s} {'MiB':>6s}\n"
  )
  for case in cases:
    wall, cpu = case.wall[1:], case.cpu[1:]
    seen = {
      "wall_s": statistics.median(wall),
      "cpu_s": statistics.median(cpu),
      "tokens_computed": case.computed,
      "temporary_bytes": case.temporary,
    }
    sys.stdout.write(
      f"{case.name:29s} {seen['wall_s']:7.3f} {seen['cpu_s']:7.3f}"
      f" {case.computed:9d} {case.temporary / 2**20:6.0f}\n"
    )
    raw = {"raw_wall_s": wall, "raw_cpu_s": cpu}
    result["cases"].append({"name": case.name} | seen | raw)
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
