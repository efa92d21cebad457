# SPDX-License-Identifier: Apache-2.0
r"""How the cost of a PPO step grows with the batch, the responses, the model.

  python -m benchmarks.scaling --axes=batch_size,response_len,width

One axis at a time, the others at their base. Of every phase the exponent of a
power law, fitted to medians: 1 = twice the size, twice the time. Sizes of an
axis take turns. CPU seconds have an exponent of their own: with threads that
wait, wall time grows slower than work.
"""

import statistics
import sys

import numpy as np
from absl import app, flags

from benchmarks import bench

SIZES = {
  "batch_size": [8, 16, 32, 64],
  "response_len": [64, 128, 256, 512],
  "width": [64, 128, 256, 512],
}
BASE = {"batch_size": 16, "response_len": 128, "width": 128}
PHASES = {
  "decode": "time/decode_s",
  "score": "time/score_s",
  "update": "time/update_s",
  "wall": "wall_s",
  "CPU": "cpu_s",
}

_AXES = flags.DEFINE_list("axes", list(SIZES), "Of those.")
_WORKLOAD = flags.DEFINE_string("workload", "lognormal", "See bench.py.")
_ARM = flags.DEFINE_string("arm", "serial", "Of configs.")
_LAYERS = flags.DEFINE_integer("layers", 2, "Of the model.")
_STEPS = flags.DEFINE_integer("steps", 3, "Measured steps of each.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")


def arm_of(axis, size):
  """An arm with one size changed; heads of 64, an MLP of four widths."""
  sizes = BASE | {axis: size}
  width = sizes["width"]
  heads = max(width // 64, 1)
  lengths = bench.lengths_of(
    _WORKLOAD.value, limit=sizes["response_len"], num=sizes["batch_size"]
  )
  config = bench.config_of(
    _ARM.value,
    model="peer",
    batch_size=sizes["batch_size"],
    delta=0,
    prompt_len=32,
    response_len=sizes["response_len"],
    staleness=-1,
    **{
      "model.num_layers": _LAYERS.value,
      "model.width": width,
      "model.num_heads": heads,
      "model.num_kv_heads": heads,
      "model.mlp_dim": 4 * width,
      "optim.policy_lr": 0.0,  # every step the same work
      "optim.micro_rows": 1,
    },
  )
  return bench.Arm(config, lengths)


def measured(axis):
  """Medians of every size of an axis, and the exponents over them."""
  arms = {size: arm_of(axis, size) for size in SIZES[axis]}
  rows = {size: [] for size in arms}
  for index in range(1 + _STEPS.value):
    for size, arm in arms.items():
      row = arm.step()
      if index:  # the first compiles
        rows[size].append(row)
  median = {
    size: {
      name: statistics.median(r[key] for r in of)
      for name, key in PHASES.items()
    }
    for size, of in rows.items()
  }
  logs = lambda xs: np.log(np.asarray(list(xs), float))
  exponent = {
    name: float(
      np.polyfit(logs(median), logs(m[name] for m in median.values()), 1)[0]
    )
    for name in PHASES
  }
  return {"medians": median, "exponent": exponent, "raw": rows}


def main(argv):
  del argv
  result = bench.conditions() | {"base": BASE, "axes": {}}
  for axis in _AXES.value:
    seen = result["axes"][axis] = measured(axis)
    sys.stdout.write(
      f"{axis:14s}" + "".join(f" {name:>8s}" for name in PHASES) + "\n"
    )
    for size, row in seen["medians"].items():
      cells = "".join(f" {row[name]:8.3f}" for name in PHASES)
      sys.stdout.write(f"{size:14d}{cells}\n")
    cells = "".join(f" {seen['exponent'][name]:8.2f}" for name in PHASES)
    sys.stdout.write(f"{'exponent':14s}{cells}\n\n")
    sys.stdout.flush()
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
