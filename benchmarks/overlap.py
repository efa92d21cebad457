# SPDX-License-Identifier: Apache-2.0
r"""How much of the scoring is hidden behind decoding, per placement.

  python -m benchmarks.overlap --placements=colocated,fused,disaggregated

`serial` decodes, then scores: both alone. `intra` scores while it decodes. Of
the shorter of the two, the share that took no time of its own:

  hidden = (decode alone + score alone - together) / min(decode, score alone)

1 = all of it, 0 = none, below 0 = it is slower than one after the other. All
cases take turns, a step each, on the same forced lengths; medians. On a CPU
"disaggregated" runs on two host devices, which share the cores; "fused" is
colocated, a chunk and its tiles as one program (`overlap.dispatch`).

Then one more step of each is profiled, which is slower and no part of the
above. Per case, and for decoding alone, scoring alone and both together:

  wall s   of the phase, with the profiler
  busy     share of it in which the device executed something, by device
  shared   share in which two programs (on a GPU: kernels or copies) ran at
           once, on one device or on two

`busy.py` says how they are found, and what to set before a GPU is profiled.
"""

import statistics
import sys

import jax
from absl import app, flags

from benchmarks import bench, busy

_PLACEMENTS = flags.DEFINE_list("placements", ["colocated"], "Of PLACEMENTS.")
_WORKLOAD = flags.DEFINE_string("workload", "lognormal", "See bench.py.")
_MODEL = flags.DEFINE_enum("model", "peer", list(bench.MODELS), "Its shape.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "B")
_RESPONSE = flags.DEFINE_integer("response_len", 256, "R, tokens.")
_CHUNK = flags.DEFINE_integer("chunk", 16, "C, ticks.")
_STEPS = flags.DEFINE_integer("steps", 6, "Measured steps of each.")
_WARM_UP = flags.DEFINE_integer("warm_up", 2, "Steps before.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")

PLACEMENTS = {
  "colocated": {},
  "fused": {"overlap.dispatch": "fused"},
  "disaggregated": {"overlap.placement": "disaggregated"},
}


def arm(name, placement):
  lengths = bench.lengths_of(
    _WORKLOAD.value, limit=_RESPONSE.value, num=_BATCH_SIZE.value
  )
  config = bench.config_of(
    name,
    model=_MODEL.value,
    batch_size=_BATCH_SIZE.value,
    delta=0,
    prompt_len=32,
    response_len=_RESPONSE.value,
    staleness=2,
    **{
      "overlap.chunk.size": _CHUNK.value,
      "optim.policy_lr": 0.0,  # every step the same work
      "optim.micro_rows": 1,
      **PLACEMENTS[placement],
    },
  )
  return bench.Arm(config, lengths)


def main(argv):
  del argv
  unknown = set(_PLACEMENTS.value) - PLACEMENTS.keys()
  if unknown:
    raise app.UsageError(
      f"--placements: {sorted(unknown)} not in {[*PLACEMENTS]}"
    )
  if "disaggregated" in _PLACEMENTS.value:
    jax.config.update("jax_num_cpu_devices", 2)  # before any device is used
  arms = {
    (placement, name): arm(name, placement)
    for placement in _PLACEMENTS.value
    for name in ("serial", "intra")
  }
  rows = {key: [] for key in arms}
  for index in range(_WARM_UP.value + _STEPS.value):
    for key, one in arms.items():
      row = one.step()
      if index >= _WARM_UP.value:
        rows[key].append(row)
  result = bench.conditions() | {"devices": jax.device_count(), "cases": {}}
  sys.stdout.write(
    f"{'placement':14s} {'decode':>7s} {'score':>7s} {'together':>8s} hidden\n"
  )
  for placement in _PLACEMENTS.value:
    median = lambda name, of: statistics.median(
      map(of, rows[placement, name])  # noqa: B023
    )
    decode = median("serial", lambda r: r["time/decode_s"])
    score = median("serial", lambda r: r["time/score_s"])
    both = median("intra", lambda r: r["time/decode_s"] + r["time/score_s"])
    hidden = (decode + score - both) / min(decode, score)
    sys.stdout.write(
      f"{placement:14s} {decode:7.3f} {score:7.3f} {both:8.3f} {hidden:6.2f}\n"
    )
    result["cases"][placement] = {
      "decode_s": decode,
      "score_s": score,
      "together_s": both,
      "hidden": hidden,
      "busy": arms[placement, "serial"].busy()
      | {"together": arms[placement, "intra"].busy()["together"]},
      "raw": {name: rows[placement, name] for name in ("serial", "intra")},
    }
  sys.stdout.write("profiled: placement, phase, wall s, busy, shared\n")
  for placement, case in result["cases"].items():
    for phase, of in case["busy"].items():
      sys.stdout.write(
        f"{placement:14s} {phase:8s} {of['wall_s']:7.3f}  {busy.shares(of)}\n"
      )
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
