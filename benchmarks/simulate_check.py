# SPDX-License-Identifier: Apache-2.0
r"""Holds the simulator against real runs: schedule exactly, seconds by ratio.

  python -m benchmarks.simulate_check --traces=A.csv.gz,B.csv.gz,C.csv.gz \
      --out=simulate_check.json

Every run is the real loop (a small random model) with response lengths forced
to those of a trace, scaled so that the longest fills the response. Costs are
fitted to runs of the FIRST trace alone: `serial` and `oppo`, at a small and at
a large chunk size. All other traces are predicted from their lengths, at a
chunk size that was not in the fit. The first steps of a run compile and are
left out on both sides.

Seconds are compared as a mean over a run's steps, and only as a ratio; they
mean something on a machine that does nothing else.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
from absl import app, flags

from configs import ablation
from oppo_jax import calibrate, metrics, schedule, traces, train
from oppo_jax import config as config_lib

_TRACES = flags.DEFINE_list("traces", None, "CSV files; the first calibrates.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "B")
_DELTA = flags.DEFINE_integer("delta", 16, "Prompts in flight beyond B.")
_RESPONSE = flags.DEFINE_integer("max_response_len", 256, "R, tokens.")
_STEPS = flags.DEFINE_integer("steps", 14, "Updates per run.")
_SKIP = flags.DEFINE_integer("skip", 2, "First steps left out: they compile.")
_FIT_CHUNKS = (8, 64)
_CHUNK = 24
ARMS = ("serial", "oppo")


def config_of(arm, chunk_size, lengths_path):
  config = ablation.get_config(arm)
  config.num_steps = _STEPS.value
  config.rollout.batch_size = _BATCH_SIZE.value
  config.rollout.max_response_len = _RESPONSE.value
  config.rollout.target_lengths_path = str(lengths_path)
  config.overlap.chunk.size = chunk_size
  config.overlap.delta.update(kind="fixed", init=_DELTA.value, max=_DELTA.value)
  config.log.rollouts_per_step = _BATCH_SIZE.value  # prompt lengths
  config_lib.validate(config)
  return config


def lengths_file(path, folder):
  """Forced lengths of a trace, one per line."""
  lengths = traces.shuffled(
    traces.load(path, where="", prompt_len=1), seed=_STEPS.value
  )
  num = _STEPS.value * _BATCH_SIZE.value + _DELTA.value
  lengths = traces.limited(
    traces.Lengths(*(x[:num] for x in lengths)),
    max_prompt_len=0,
    max_response_len=_RESPONSE.value,
    fit="scale",
  ).response_len
  name = pathlib.Path(path).name.partition(".")[0]
  target = folder / f"{name}.txt"
  target.write_text("".join(f"{n}\n" for n in lengths))
  return name, target


def is_exact(run):
  """Ticks, deferrals and tiles of every step are the engine's.

  Prompt lengths are known of rows that were trained on, so tiles are compared
  as long as all that were in flight were trained on later.
  """
  steps = schedule.replay(
    run.rules,
    run.lengths.of,
    [(r["overlap/delta"], r["overlap/chunk_size"]) for r in run.rows],
  )
  with_tiles = len(run.rows) - run.rules.max_staleness
  differ = []
  for i, (step, row) in enumerate(zip(steps, run.rows, strict=True)):
    said = {
      "overlap/ticks": step.ticks,
      "overlap/chunks": step.chunks,
      "overlap/deferred": step.deferred,
      "overlap/deferrals_max": int(step.deferrals.max()),
      "overlap/staleness_max": step.staleness_max,
      "tokens/generated": step.generated,
      "tokens/trained": int(step.response_len.sum()),
    }
    if i < with_tiles:
      tiles = step.tiles(run.rules)
      said |= {f"score/tiles_{k}": n for k, n in tiles.items()}
    differ += [(i, k) for k, n in said.items() if row[k] != n]
  return not differ


def main(argv):
  del argv
  results = []
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary)
    for key, value in {
      "jax_compilation_cache_dir": str(folder / "compiled"),
      "jax_persistent_cache_min_compile_time_secs": 0,
    }.items():
      jax.config.update(key, value)

    def finished(name, path, arm, chunk_size):
      workdir = folder / f"{name}-{arm}-{chunk_size}"
      train.train(config_of(arm, chunk_size, path), workdir)
      return calibrate.read(workdir)

    files = dict(lengths_file(p, folder) for p in _TRACES.value)
    first, *others = files
    fitted_on = [
      finished(first, files[first], arm, chunk_size)
      for arm in ARMS
      for chunk_size in _FIT_CHUNKS
    ]
    fitted = calibrate.fit(fitted_on, skip=_SKIP.value)
    for name in (first, *others):
      for arm in ARMS:
        run = finished(name, files[name], arm, _CHUNK)
        error = calibrate.relative_error(run, fitted, skip=_SKIP.value)
        measured = np.array([r["time/step_s"] for r in run.rows[_SKIP.value :]])
        predicted = float(((1 + error) * measured).mean())
        results.append(
          {
            "trace": name,
            "arm": arm,
            "trace_in_fit": name == first,
            "ticks": int(sum(r["overlap/ticks"] for r in run.rows)),
            "schedule_is_exact": is_exact(run),
            "measured_step_s": float(measured.mean()),
            "predicted_step_s": predicted,
            "predicted_over_measured": predicted / float(measured.mean()),
            "worst_step": float(abs(error).max()),
          }
        )
  print(
    f"\n{'trace':26s} arm      ticks  schedule  predicted / measured step time"
  )
  for r in results:
    print(
      f"{r['trace']:26s} {r['arm']:6s} {r['ticks']:7d}"
      f"  {'exact' if r['schedule_is_exact'] else 'DIFFERS':8s}"
      f"  {r['predicted_over_measured']:.3f}"
      f"{'   (trace of the fit)' if r['trace_in_fit'] else ''}"
    )
  unseen = [r for r in results if not r["trace_in_fit"]]
  result = {
    "command": "python -m benchmarks.simulate_check " + " ".join(sys.argv[1:]),
    "runs": results,
    "largest_error_on_unseen_traces": max(
      (abs(r["predicted_over_measured"] - 1) for r in unseen), default=None
    ),
    "costs": dataclasses.asdict(fitted),
    "jax": jax.__version__,
    "backend": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
  }
  print(json.dumps({k: v for k, v in result.items() if k != "runs"}, indent=2))
  if _OUT.value:
    metrics.write_json(_OUT.value, result)


if __name__ == "__main__":
  flags.mark_flags_as_required(["traces"])
  app.run(main)
