# SPDX-License-Identifier: Apache-2.0
r"""Compares the reward curves of finished runs of two arms, seed by seed.

  python -m benchmarks.curves --serial=runs/s0_serial,runs/s1_serial \
      --oppo=runs/s0_oppo,runs/s1_oppo

Per run: held-out accuracy before and after, the score of the last updates, and
what it cost. Per pair of runs: time and decode ticks that `oppo` needs until
its score (mean over a window of updates) reaches the last one of `serial`.
"""

import json
import pathlib

from absl import app, flags

from oppo_jax import metrics

_SERIAL = flags.DEFINE_list("serial", None, "Workdirs of the serial arm.")
_OPPO = flags.DEFINE_list("oppo", None, "Workdirs of oppo, in the same order.")
_WINDOW = flags.DEFINE_integer("window", 10, "Updates per mean.")


def read(folder):
  """Summary, and per update: score, seconds and ticks spent so far."""
  folder = pathlib.Path(folder)
  summary = json.loads((folder / "summary.json").read_text())
  rows = metrics.read_jsonl(folder / "metrics.jsonl")
  total = lambda key: [
    sum(r[key] for r in rows[: i + 1]) for i in range(len(rows))
  ]
  # The first update compiles: its time is counted as that of the second.
  rows[0]["time/step_s"] = rows[1]["time/step_s"]
  return (
    summary,
    [r["reward/rule"] for r in rows],
    total("time/step_s"),
    total("overlap/ticks"),
  )


def smooth(scores):
  """Mean over the last `window` updates, None before there are so many."""
  w = _WINDOW.value
  return [
    sum(scores[i + 1 - w : i + 1]) / w if i + 1 >= w else None
    for i in range(len(scores))
  ]


def line(name, summary, curve, seconds, ticks):
  before, after = summary["accuracy_before"], summary["accuracy_after"]
  print(
    f"{name:24s} greedy {before['greedy']:.3f} -> {after['greedy']:.3f}"
    f"  sampled {before['sampled']:.3f} -> {after['sampled']:.3f}"
    f"  rule reward, last {_WINDOW.value} updates {curve[-1]:.3f}"
    f"  {seconds[-1]:.0f} s  {ticks[-1]} ticks"
  )


def main(argv):
  del argv
  for a, b in zip(_SERIAL.value, _OPPO.value):
    serial, oppo = read(a), read(b)
    curves = smooth(serial[1]), smooth(oppo[1])
    line(pathlib.Path(a).name, serial[0], curves[0], *serial[2:])
    line(pathlib.Path(b).name, oppo[0], curves[1], *oppo[2:])
    target = curves[0][-1]
    reached = [i for i, x in enumerate(curves[1]) if x and x >= target]
    if not reached:
      print(f"  oppo does not reach the last value of serial, {target:.3f}")
      continue
    i = reached[0]
    print(
      f"  oppo reaches {target:.3f} at update {i + 1}: {oppo[2][i]:.0f} s"
      f" against {serial[2][-1]:.0f} s ({serial[2][-1] / oppo[2][i]:.2f}x),"
      f" {oppo[3][i]} ticks against {serial[3][-1]}"
      f" ({serial[3][-1] / oppo[3][i]:.2f}x)"
    )
    first = next(j for j, x in enumerate(curves[0]) if x and x >= target)
    print(
      f"  serial itself first gets there at update {first + 1}:"
      f" {serial[2][first]:.0f} s, {serial[3][first]} ticks"
    )


if __name__ == "__main__":
  flags.mark_flags_as_required(["serial", "oppo"])
  app.run(main)
