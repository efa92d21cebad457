# SPDX-License-Identifier: Apache-2.0
r"""Proves the guarantees on a config, a model and a device of one's own.

  python -m oppo_jax.verify --config=configs/quickstart.py
  python -m oppo_jax.verify --config=... --claims=G1,G2 --out=verify.json
  python -m oppo_jax.verify --config=... --workdir=RUN      (its warm start)
  python -m oppo_jax.verify --audit=RUN                     (its log-probs)

One row per comparison. EXACT: the same bits. CLOSE: within the tolerance that
stands above the table. The exit code is 0 only if everything holds that the
backend promises.

Without --workdir parameters are random, and response lengths are drawn from a
long-tailed distribution and forced: a random policy says nothing of lengths.
"""

import math
import os
import pathlib
import sys
import tempfile
import time

import jax
import ml_collections
import numpy as np
from absl import flags

from oppo_jax import (
  assemble,
  audit,
  claims,
  cli,
  compile_cache,
  flight,
  metrics,
  one_shot,
  short_runs,
  warm_start,
)
from oppo_jax import config as config_lib

# What makes a GPU program give the same bits twice.
GPU_FLAGS = (
  "--xla_gpu_deterministic_ops=true",
  "--xla_gpu_exclude_nondeterministic_ops=true",
)


def define_flags() -> None:
  """See the module."""
  cli.define_config()
  flags.DEFINE_list("claims", list(claims.CLAIMS), "Of G1 to G5.")
  flags.DEFINE_integer("updates", 3, "Updates per run, >= 2.")
  flags.DEFINE_string("workdir", None, "Run to take stages from.")
  flags.DEFINE_string("audit", None, "Workdir of a finished run.")
  flags.DEFINE_string("out", None, "JSON file for the report.")


def forced_lengths(prompt_of, *, max_response_len: int, seed: int):
  """The prompts, with a lognormal response length for each uid."""

  def prompt(uid: int) -> flight.Prompt:
    rng = np.random.default_rng((seed, 11, uid))
    n = round(math.exp(rng.normal(math.log(max_response_len / 4), 1.0)))
    return prompt_of(uid)._replace(target_len=min(max(n, 1), max_response_len))

  return prompt


def make_bench(
  config: ml_collections.ConfigDict,
  *,
  workdir: str | None,
  temporary: str,
  num_updates: int,
) -> short_runs.Bench:
  """Sets everything up, with parameters of `workdir` or random ones."""
  config = config.copy_and_resolve_references()
  if not config.overlap.delta.max:  # arms are compared with deferral, too
    extra = -(-config.rollout.batch_size // 4)
    config.overlap.delta.update(init=extra, max=extra)
  if workdir is None:
    for stage in config.warm_start.values():
      stage.num_steps = 0
  elif not (pathlib.Path(workdir) / "stages").is_dir():
    raise ValueError(f"--workdir={workdir}: holds no stages")
  folder = pathlib.Path(workdir or temporary)
  s = assemble.setup(config, folder, log=cli.say)
  params = warm_start.run(config, s.parts, workdir=folder, log=cli.say)
  if workdir is None:
    limit = config.rollout.max_response_len
    forced = forced_lengths(
      s.prompt_of, max_response_len=limit, seed=config.seed
    )
    s = s._replace(prompt_of=forced)
  tolerance = one_shot.TOLERANCE[config.model.dtype]
  return short_runs.Bench(config, s, params, num_updates, tolerance)


def conditions(bench: short_runs.Bench) -> dict[str, object]:
  """What the proof ran under, and what that promises."""
  found = os.environ.get("XLA_FLAGS", "")
  is_gpu = jax.default_backend() == "gpu"
  return {
    **metrics.backend(),
    "devices": jax.device_count(),
    "cores": os.cpu_count(),
    "dtype": bench.config.model.dtype,
    "matmul_precision": str(jax.config.jax_default_matmul_precision),
    "XLA_FLAGS": found,
    "tolerance": bench.tolerance,
    "exact_is_promised": not is_gpu or any(f in found for f in GPU_FLAGS),
  }


def is_kept(row: claims.Row, *, exact_is_promised: bool) -> bool:
  """Whether the row is as good as the backend promises."""
  return row.holds or (row.found == "CLOSE" and not exact_is_promised)


def lines(row: claims.Row, *, is_kept: bool) -> list[str]:
  """One row of the table; if it does not hold, also where it breaks."""
  verdict = row.found if is_kept else "FAIL"
  numbers = f"{row.max_abs:8.1e} {row.max_ulp:6d}"
  if row.found == "EXACT":
    numbers = f"{'0':>8} {'0':>6}"
  text = f"{verdict:6s} {numbers} {row.seconds:6.1f}  {row.claim}  {row.what}"
  text += f": {row.part}" if row.part else ""
  return [text] if is_kept else [text, f"{'':28s}first: {row.where}"]


def main(args: flags.FlagValues) -> None:
  """Runs the claims, prints the table, and exits."""
  if args.audit:
    sys.exit(0 if audit.run(pathlib.Path(args.audit), log=cli.say) else 1)
  if args.config is None:
    raise ValueError("--config: must be given, or --audit")
  unknown = [c for c in args.claims if c not in claims.CLAIMS]
  if unknown or not args.claims:
    known = ", ".join(claims.CLAIMS)
    raise ValueError(f"--claims={','.join(args.claims)}: must be of {known}")
  if args.updates < 2:
    raise ValueError(f"--updates={args.updates}: must be an integer >= 2")
  config_lib.validate(args.config)
  began = time.perf_counter()
  with tempfile.TemporaryDirectory() as temporary:
    compile_cache.enable(args.config.compile_cache, pathlib.Path(temporary))
    bench = make_bench(
      args.config,
      workdir=args.workdir,
      temporary=temporary,
      num_updates=args.updates,
    )
    under = conditions(bench)
    for name, value in under.items():
      cli.say(f"{name:18s} {value}")
    if not under["exact_is_promised"]:
      cli.say(f"for EXACT on this backend: XLA_FLAGS={GPU_FLAGS[0]}")
    cli.say(f"\n{'':6s} {'largest':>8} {'ulp':>6} {'s':>6}")
    traces, rows, kept = short_runs.Traces(bench), [], []
    promised = under["exact_is_promised"]
    for name in args.claims:
      for row in claims.CLAIMS[name](bench, traces):
        rows.append(row)
        kept.append(is_kept(row, exact_is_promised=promised))
        for line in lines(row, is_kept=kept[-1]):
          cli.say(line)
  seconds = time.perf_counter() - began
  cli.say(f"\n{sum(kept)} of {len(rows)} hold, {seconds:.0f} s")
  if args.out:
    report = {"conditions": under, "rows": [r._asdict() for r in rows]}
    metrics.write_json(args.out, report | {"seconds": seconds})
  sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
  cli.run(main, define_flags, required=[])
