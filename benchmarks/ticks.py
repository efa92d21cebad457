# SPDX-License-Identifier: Apache-2.0
r"""Decode ticks of `oppo` against `serial` on forced, long-tailed lengths.

  python -m benchmarks.ticks --trace=TRACE.csv.gz --out=ticks.json

TRACE is a CSV file with a column `output_tokens`, one row per request. Lengths
are taken in the order of the trace and scaled so that the longest fills the
response. Both arms run the real loop (a tiny random model; what it learns does
not matter) at one batch size; a simulation of the buffer stands beside them.
"""

import csv
import gzip
import json
import pathlib
import sys
import tempfile

import jax
from absl import app, flags

from configs import ablation
from oppo_jax import config as config_lib
from oppo_jax import metrics, train

_TRACE = flags.DEFINE_string("trace", None, "CSV file, may be gzipped.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "B")
_DELTA = flags.DEFINE_integer("delta", 32, "Prompts in flight beyond B.")
_STALENESS = flags.DEFINE_integer("max_staleness", 2, "Bound on deferrals.")
_RESPONSE = flags.DEFINE_integer("max_response_len", 256, "R, tokens.")
_STEPS = flags.DEFINE_integer("steps", 20, "Updates per arm.")


def simulate(lengths, *, batch_size, delta, num_steps, max_staleness):
  """Decode ticks of the buffer, from lengths alone."""
  in_flight, next_uid, total = {}, 0, 0  # uid -> (ticks left, admitted at)
  for step in range(num_steps):
    while len(in_flight) < batch_size + delta:
      in_flight[next_uid] = (lengths[next_uid % len(lengths)], step)
      next_uid += 1
    left = {u: n for u, (n, _) in in_flight.items()}  # <= 0: ready since then
    starving = {
      u for u, (_, at) in in_flight.items() if step - at >= max_staleness
    }
    order = sorted(left, key=lambda u: (left[u], u))
    ticks = max(0, left[order[batch_size - 1]], *(left[u] for u in starving))
    ready = [u for u in order if left[u] <= ticks]
    ready.sort(key=lambda u: (u not in starving, left[u], u))
    for uid in ready[:batch_size]:
      del in_flight[uid]
    in_flight = {u: (n - ticks, at) for u, (n, at) in in_flight.items()}
    total += ticks
  return total


def read_lengths(path, *, max_response_len, num):
  """Response lengths of a trace, in its order, scaled to [1, R]."""
  with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as f:
    tokens = [int(row["output_tokens"]) for row in csv.DictReader(f)]
  scale = max_response_len / max(tokens)
  return [max(1, round(n * scale)) for n in tokens[:num]]


def run_arm(arm, lengths_path, folder):
  """The summary of one real run."""
  config = ablation.get_config(arm)
  config.num_steps = _STEPS.value
  config.rollout.batch_size = _BATCH_SIZE.value
  config.rollout.max_response_len = _RESPONSE.value
  config.rollout.target_lengths_path = str(lengths_path)
  config.overlap.max_staleness = _STALENESS.value
  delta = _DELTA.value if arm == "oppo" else 0
  config.overlap.delta.update(kind="fixed", init=delta, max=delta)
  config_lib.validate(config)
  train.train(config, folder / arm)
  return json.loads((folder / arm / "summary.json").read_text())


def main(argv):
  del argv
  num = _STEPS.value * _BATCH_SIZE.value + _DELTA.value
  lengths = read_lengths(
    _TRACE.value, max_response_len=_RESPONSE.value, num=num
  )
  arms = {}
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    lengths_path = folder / "lengths.txt"
    lengths_path.write_text("".join(f"{n}\n" for n in lengths))
    for arm in ("serial", "oppo"):
      summary = run_arm(arm, lengths_path, folder)
      simulated = simulate(
        lengths,
        batch_size=_BATCH_SIZE.value,
        delta=_DELTA.value if arm == "oppo" else 0,
        num_steps=_STEPS.value,
        max_staleness=_STALENESS.value,
      )
      arms[arm] = {
        "decode_ticks": summary["decode_ticks"],
        "simulated_ticks": simulated,
        "ppo_s": summary["ppo_s"],
        "tokens_trained": summary["tokens_trained"],
      }
  ratio = lambda key: arms["serial"][key] / arms["oppo"][key]
  result = {
    "command": "python -m benchmarks.ticks " + " ".join(sys.argv[1:]),
    "trace": pathlib.Path(_TRACE.value).name,
    "batch_size": _BATCH_SIZE.value,
    "delta": _DELTA.value,
    "max_staleness": _STALENESS.value,
    "max_response_len": _RESPONSE.value,
    "share_at_the_limit": sum(n == _RESPONSE.value for n in lengths)
    / len(lengths),
    "arms": arms,
    "ticks_serial_over_oppo": ratio("decode_ticks"),
    "simulated_serial_over_oppo": ratio("simulated_ticks"),
    "jax": jax.__version__,
    "backend": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
  }
  print(json.dumps(result, indent=2))
  if _OUT.value:
    metrics.write_json(_OUT.value, result)


if __name__ == "__main__":
  flags.mark_flags_as_required(["trace"])
  app.run(main)
