# SPDX-License-Identifier: Apache-2.0
r"""Time of a PPO step, arm by arm, on forced response lengths.

  python -m benchmarks.step --workloads=lognormal,full --out=step.json
  python -m benchmarks.step --workloads=trace.csv.gz --batch_size=64 --delta=32

Arms run in turn, those of all workloads, a step each, so that whatever else the
machine does meets all of them alike; ratios are to the first arm, and of
workloads to the first one. The first steps compile and fill the slots, and are
left out. `serial`, `sequence` and `intra` have B slots, `inter` and `oppo` B +
delta.

Each step's wall time is split into decode (until the batch is complete; tiles
scored meanwhile included), score (what was left to score), update, and host
(the rest); cpu_s is CPU time of all threads. Two shares of a step say what
Python costs: in `python` the host did not wait for the device, but the device
may have been at work; in `idle` no device executed anything. That takes a
profile, of --profiled more steps.
"""

import itertools
import statistics
import sys

from absl import app, flags

from benchmarks import bench, busy

_WORKLOADS = flags.DEFINE_list("workloads", ["lognormal"], "See bench.py.")
_ARMS = flags.DEFINE_list(
  "arms", ["serial", "sequence", "intra", "inter", "oppo"], "Of configs."
)
_MODEL = flags.DEFINE_enum("model", "peer", list(bench.MODELS), "Its shape.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "B")
_DELTA = flags.DEFINE_integer("delta", 8, "Prompts in flight beyond B.")
_STALENESS = flags.DEFINE_integer("max_staleness", 2, "Bound on deferrals.")
_PROMPT = flags.DEFINE_integer("prompt_len", 32, "P, tokens.")
_RESPONSE = flags.DEFINE_integer("response_len", 256, "R, tokens.")
_STEPS = flags.DEFINE_integer("steps", 8, "Measured steps per arm.")
_WARM_UP = flags.DEFINE_integer("warm_up", 3, "Steps before.")
_PROFILED = flags.DEFINE_integer("profiled", 0, "Further steps, for `idle`.")
_SET = flags.DEFINE_list("set", [], "Config keys: score.tile_len=64, ...")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")


def overrides():
  """--set as a dict; numbers as numbers."""
  found = {}
  for pair in _SET.value:
    key, _, text = pair.partition("=")
    for kind in (int, float, str):
      try:
        found[key] = kind(text)
        break
      except ValueError:
        continue
  return found


def make(workload, arm):
  """An arm at work on a workload."""
  num = (_STEPS.value + _WARM_UP.value + 1) * _BATCH_SIZE.value + _DELTA.value
  config = bench.config_of(
    arm,
    model=_MODEL.value,
    batch_size=_BATCH_SIZE.value,
    delta=_DELTA.value,
    prompt_len=bench.prompt_len_of(workload, _PROMPT.value),
    response_len=_RESPONSE.value,
    staleness=_STALENESS.value,
    **overrides(),
  )
  lengths = bench.lengths_of(workload, limit=_RESPONSE.value, num=num)
  return bench.Arm(config, lengths)


def run():
  """By (workload, arm): raw rows as they ran, and idle shares."""
  pairs = itertools.product(_WORKLOADS.value, _ARMS.value)
  arms = {pair: make(*pair) for pair in pairs}
  rows = {pair: [] for pair in arms}
  for index in range(_WARM_UP.value + _STEPS.value):
    for name, arm in arms.items():
      row = arm.step()
      if index >= _WARM_UP.value:
        rows[name].append(row)
  idle = {pair: [] for pair in arms}
  for _ in range(_PROFILED.value):
    for name, arm in arms.items():
      idle[name].append(busy.idle(busy.profile(arm.step)))
  return rows, idle


def summary(rows, idle):
  """Medians over the steps of one arm; ticks and tokens as means."""
  median = lambda of: statistics.median(map(of, rows))
  mean = lambda key: statistics.mean(r[key] for r in rows)
  phases = ("time/decode_s", "time/score_s", "time/update_s")
  return {
    "wall_s": median(lambda r: r["wall_s"]),
    "cpu_s": median(lambda r: r["cpu_s"]),
    "decode_s": median(lambda r: r["time/decode_s"]),
    "score_s": median(lambda r: r["time/score_s"]),
    "update_s": median(lambda r: r["time/update_s"]),
    "host_s": median(lambda r: r["wall_s"] - sum(r[p] for p in phases)),
    "python_s": median(
      lambda r: (
        r["wall_s"] - sum(r[p.removesuffix("_s") + "_wait_s"] for p in phases)
      )
    ),
    "idle": statistics.median(idle) if idle else None,
    "ticks": mean("overlap/ticks"),
    "tokens": mean("tokens/trained"),
    "staleness": mean("overlap/staleness_mean"),
    "mean_wall_s": mean("wall_s"),
    "mean_cpu_s": mean("cpu_s"),
    "tokens_per_s": mean("tokens/trained") / mean("wall_s"),
  }


def table(workload, arms):
  """Lines for people."""
  yield (
    f"{workload}: mean of {_STEPS.value} steps, B = {_BATCH_SIZE.value},"
    f" delta {_DELTA.value}, R = {_RESPONSE.value}, model {_MODEL.value}"
  )
  yield (
    f"{'arm':9s} {'wall s':>7s} {'CPU s':>7s} {'decode':>7s} {'score':>7s}"
    f" {'update':>7s} {'host':>7s} {'python':>7s} {'idle':>6s} {'ticks':>6s}"
    f" {'tok/s':>7s} {'speed':>6s} {'stale':>6s}"
  )
  first = next(iter(arms.values()))
  for name, s in arms.items():
    # Steps are unequal, so speed is tokens trained per second.
    speed = s["tokens_per_s"] / first["tokens_per_s"]
    idle = "-" if s["idle"] is None else f"{s['idle']:.1%}"
    yield (
      f"{name:9s} {s['mean_wall_s']:7.3f} {s['mean_cpu_s']:7.3f}"
      f" {s['decode_s']:7.3f} {s['score_s']:7.3f} {s['update_s']:7.3f}"
      f" {s['host_s']:7.3f} {s['python_s'] / s['wall_s']:7.1%} {idle:>6s}"
      f" {s['ticks']:6.1f} {s['tokens_per_s']:7.0f}"
      f" {speed:5.2f}x {s['staleness']:6.2f}"
    )


def main(argv):
  del argv
  result = bench.conditions() | {"workloads": {}}
  rows, idle = run()
  first = None
  for workload in _WORKLOADS.value:
    raw = {arm: rows[workload, arm] for arm in _ARMS.value}
    shares = {arm: idle[workload, arm] for arm in _ARMS.value}
    arms = {arm: summary(raw[arm], shares[arm]) for arm in _ARMS.value}
    result["workloads"][workload] = {
      "arms": arms,
      "raw": raw,
      "raw_idle": shares,
    }
    sys.stdout.write("\n".join(table(workload, arms)) + "\n")
    now = arms[_ARMS.value[0]]
    first = first or now
    if now is not first:
      wall, cpu = (first[k] / now[k] for k in ("mean_wall_s", "mean_cpu_s"))
      sys.stdout.write(
        f"{_WORKLOADS.value[0]} takes {wall:.2f} times its wall time,"
        f" {cpu:.2f} times its CPU time\n"
      )
    sys.stdout.write("\n")
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
