# SPDX-License-Identifier: Apache-2.0
r"""Predicts a run's schedule and time: python -m oppo_jax.simulate --trace=...

Lengths come from traces or from a finished run, costs from finished runs
(--run, calibrated) or from figures of a model and a device (--params,
--device). Flags that are lists are combined, and each combination is one
simulated run. Ticks, deferrals, staleness and tiles are the engine's, exactly,
for the same lengths (`schedule.py`); seconds are a model (`costs.py` says what
is in it and what is not). Everything printed is simulated.

  python -m oppo_jax.simulate --trace=lengths.csv.gz --batch_size=64,112 \
      --arm=serial,oppo --delta=8,16,32,64 --chunk=64,256,1024

--run brings its rules, too; a flag that is given goes before. Rules for delta
look at scores: those of the run, or a made-up curve, 1 - exp(-step /
score_rise) plus noise.
"""

import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags

from oppo_jax import calibrate, cli, costs, delta, schedule, sweep, traces


def define_flags() -> None:
  """The flags of this command; lists are combined with each other."""
  many, whole, real = (
    flags.DEFINE_list,
    flags.DEFINE_integer,
    flags.DEFINE_float,
  )
  rules = sorted(set(delta.RULES) - {"replay"})
  many("trace", [], "Traces, see traces.py.")
  many("run", [], "Workdirs: costs and rules; the first one's lengths, too.")
  flags.DEFINE_string("where", "", "column=value: these lines of the traces.")
  flags.DEFINE_boolean("shuffle", True, "Draw the requests of a trace.")
  whole("max_prompt_len", 0, "P: longer prompts are cut; 0 = no limit.")
  whole("max_response_len", 0, "R; 0 = no limit.")
  flags.DEFINE_enum("fit", "clip", ["clip", "scale"], "How R is kept.")
  whole("prompt_len", 128, "Of prompts, where the trace has none.")
  whole("seed", 0, "Of draws and made-up scores.")
  whole("steps", 100, "Updates.")

  many("arm", ["serial", "oppo"], "Of the six arms.")
  many("batch_size", ["64"], "B.")
  many("delta", ["32"], "Prompts beyond B at step 0.")
  flags.DEFINE_enum("delta_rule", "fixed", rules, "See delta.py.")
  whole("delta_max", 0, "0 = the delta of step 0.")
  whole("delta_window", 8, "Steps the rule looks at.")
  whole("delta_step", 2, "How far delta moves.")
  real("dead_band", 2.0, "Standard errors, of the rule robust.")
  many("chunk", ["256"], "C, ticks.")
  flags.DEFINE_enum(
    "chunk_rule", "fixed", ["fixed", "tuned"], "tuned: --chunk are its sizes."
  )
  whole("chunk_period", 50, "Steps between two rounds of trials.")
  whole("max_staleness", 2, "Updates a row may be deferred; -1 = unbounded.")
  whole("group_size", 1, "Responses that leave together.")
  whole("tile_rows", 16, "Q.")
  whole("tile_len", 128, "T.")
  many("scorers", ["reward", "reference", "critic"], "Or policy, too.")
  flags.DEFINE_enum("decode_loop", "while", ["while", "fori"], "See decode.py.")
  real("score_rise", 50.0, "Made-up scores: steps to 63 % of the rise.")
  real("score_noise", 0.02, "Made-up scores: deviation; the rise is 1.")

  many("devices", ["2"], "1, or 2: the scorers have their own.")
  many("params", ["7e9"], "Weights of each model.")
  flags.DEFINE_enum("device", "h100", sorted(costs.DEVICES), "Figures.")
  whole("shards", 1, "Devices that share each model.")
  whole("epochs", 1, "Passes of an update.")
  many("link_latency_s", ["1e-5"], "From the policy to the scorers.")
  whole("skip", 2, "First steps of --run that compile.")
  flags.DEFINE_string("out", "", "JSON file for all runs.")


def numbers(args: flags.FlagValues, name: str, kind: type, *, least: float):
  """A list flag as numbers.

  Raises:
    ValueError: names the flag.
  """
  values = []
  for text in args[name].value:
    try:
      values.append(kind(text))
    except ValueError:
      raise ValueError(f"--{name}: {text!r} is no {kind.__name__}") from None
    if not values[-1] >= least:
      raise ValueError(f"--{name}={text}: must be >= {least:g}")
  if not values:
    raise ValueError(f"--{name}: must not be empty")
  return values


def adopt(args: flags.FlagValues, run: calibrate.Run) -> None:
  """Sets the flags that were not given to what the run was made with."""
  o, rules = run.overlap, run.rules
  rule_of = lambda rule: "fixed" if rule["kind"] == "replay" else rule["kind"]
  is_tuned = o["chunk"]["kind"] == "tuned"
  sizes = o["chunk"]["sizes"] if is_tuned else [o["chunk"]["size"]]
  arms = {choices: arm for arm, choices in sweep.ARMS.items()}
  values = {
    "arm": [arms.get((o["intra"], o["inter"]), "oppo")],
    "batch_size": [str(rules.batch_size)],
    "delta": [str(o["delta"]["init"])],
    "delta_rule": rule_of(o["delta"]),
    "delta_max": o["delta"]["max"],
    "delta_window": o["delta"]["window"],
    "delta_step": o["delta"]["step"],
    "dead_band": o["delta"]["dead_band"],
    "chunk": [str(size) for size in sizes],
    "chunk_rule": rule_of(o["chunk"]),
    "chunk_period": o["chunk"]["period"],
    "max_staleness": rules.max_staleness,
    "tile_rows": rules.tile_rows,
    "tile_len": rules.tile_len,
    "scorers": list(rules.scorers),
    "decode_loop": run.decode_loop,
    "devices": ["1"],
    "steps": len(run.rows),
  }
  for name, value in values.items():
    if not args[name].present:
      args[name].value = value


def sources(
  args: flags.FlagValues, runs: Sequence[calibrate.Run]
) -> dict[str, traces.Lengths]:
  """Lengths by name: those of the traces, else those of the first run.

  Raises:
    ValueError: neither is given, or a trace cannot be read.
  """
  if not args.trace and not runs:
    raise ValueError("--trace or --run: one of them is needed")
  if not args.trace:
    return {pathlib.Path(args.run[0]).name: runs[0].lengths}
  found = {}
  for path in args.trace:
    lengths = traces.load(path, where=args.where, prompt_len=args.prompt_len)
    if args.shuffle:
      lengths = traces.shuffled(lengths, seed=args.seed)
    found[pathlib.Path(path).name.partition(".")[0]] = traces.limited(
      lengths,
      max_prompt_len=args.max_prompt_len,
      max_response_len=args.max_response_len,
      fit=args.fit,
    )
  return found


def lists_of(args: flags.FlagValues) -> sweep.Lists:
  """What is combined."""
  devices = numbers(args, "devices", int, least=1)
  if max(devices) > 2:
    raise ValueError(f"--devices={max(devices)}: must be 1 or 2")
  return sweep.Lists(
    arm=args.arm,
    batch_size=numbers(args, "batch_size", int, least=1),
    delta=numbers(args, "delta", int, least=0),
    chunk=numbers(args, "chunk", int, least=1),
    num_devices=devices,
    link_latency_s=numbers(args, "link_latency_s", float, least=0),
  )


def common_of(
  args: flags.FlagValues, runs: Sequence[calibrate.Run]
) -> sweep.Common:
  """What all simulated runs share."""
  for name in args.scorers:
    if name not in ("reward", "reference", "critic", "policy"):
      raise ValueError(f"--scorers: no scorer {name!r}")
  # Figures charge an update by the token, so its cut does not matter there.
  update = runs[0].rules.update if runs else schedule.Update(1, 1, 1, 1)
  rules = schedule.Rules(
    num_slots=0,
    batch_size=0,
    group_size=args.group_size,
    max_staleness=args.max_staleness,
    intra="none",
    restarts=False,
    tile_rows=args.tile_rows,
    tile_len=args.tile_len,
    scorers=tuple(args.scorers),
    keep_policy_cache=bool(runs) and runs[0].rules.keep_policy_cache,
    keep_critic_cache=bool(runs) and runs[0].rules.keep_critic_cache,
    speculates=bool(runs) and runs[0].rules.speculates,
    update=update,
  )

  def score_of() -> Callable[[int], float]:
    if runs:
      scores = runs[0].scores
      return lambda step: scores[min(step, len(scores) - 1)]
    return sweep.made_up_scores(
      rise=args.score_rise, noise=args.score_noise, seed=args.seed
    )

  return sweep.Common(
    rules=rules,
    delta_rule=dict(
      kind=args.delta_rule,
      min=0,
      max=args.delta_max,
      window=args.delta_window,
      step=args.delta_step,
      dead_band=args.dead_band,
    ),
    chunk_rule=dict(kind=args.chunk_rule, period=args.chunk_period),
    decode_loop=args.decode_loop,
    num_steps=args.steps,
    score_of=score_of,
  )


def table(made: list[dict[str, Any]], *, most: int) -> list[str]:
  """Lines: every run, or the best of each arm if they are more than `most`."""
  lines: list[str] = []
  groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
  for row in made:
    groups.setdefault(sweep.group_of(row), []).append(row)
  for group, rows in groups.items():
    rows = sorted(rows, key=lambda row: -row["trained_per_s"])
    best = rows[0]
    if len(made) > most:
      first = {}
      for row in rows:
        first.setdefault(row["arm"], row)
      rows = list(first.values())
    lines += ["", "{}, B = {}, {}".format(*group)]
    lines.append(
      "  arm       delta  chunk   step s  x serial  ticks/step  deferred"
      "  staleness  idle %   deferrals 0, 1, ... %"
    )
    for row in rows:
      chunk = "/".join(str(c) for c in row["chunk"])
      idle = "/".join(f"{100 * x:.0f}" for x in row["idle"])
      times = (
        f"{row['over_serial']:8.2f}" if "over_serial" in row else "       -"
      )
      histogram = " ".join(f"{100 * x:.1f}" for x in row["deferrals"])
      lines.append(
        f"  {row['arm']:9s} {row['delta_mean']:5.3g} {chunk:>6s}"
        f" {row['step_s']:8.4g}  {times} {row['ticks'] / row['steps']:11.1f}"
        f" {row['deferred_mean']:9.1f} {row['staleness_mean']:10.3f}"
        f" {idle:>7s}   {histogram}{'   best' if row is best else ''}"
      )
  return lines


def room(
  args: flags.FlagValues,
  made: list[dict[str, Any]],
  found: dict[str, traces.Lengths],
  rules: schedule.Rules,
) -> Iterator[str]:
  """A line per model size: what it needs of the devices' memory, and has."""
  longest = max(
    int((x.prompt_len + x.response_len).max()) for x in found.values()
  )
  slots = max(row["batch_size"] + row["delta"] for row in made)
  have = costs.DEVICES[args.device].memory_bytes * args.shards
  for params in numbers(args, "params", float, least=1):
    for devices in numbers(args, "devices", int, least=1):
      need = costs.memory_bytes(
        params=params,
        rules=rules._replace(num_slots=slots),
        row_len=longest,
        num_devices=devices,
      )
      sides = " + ".join(f"{x / 1e9:.0f}" for x in need if x)
      fits = "fits" if max(need) <= have else "DOES NOT FIT: take more --shards"
      yield (
        f"{params:.3g} weights: {sides} GB (weights, optimizer, caches of"
        f" {slots} rows of {longest} tokens); {have / 1e9:.0f} GB each: {fits}"
      )


def main(args: flags.FlagValues) -> None:
  """Reads, simulates, prints."""
  began = time.perf_counter()
  least = dict.fromkeys(("steps", "group_size", "tile_rows", "tile_len"), 1)
  least |= dict.fromkeys(("shards", "epochs", "prompt_len", "chunk_period"), 1)
  least |= dict.fromkeys(("max_prompt_len", "max_response_len", "skip"), 0)
  least |= dict(delta_max=0, max_staleness=-1, seed=0)
  for name, low in least.items():
    if args[name].value < low:
      raise ValueError(f"--{name}={args[name].value}: must be >= {low}")
  if not args.score_rise > 0:
    raise ValueError(f"--score_rise={args.score_rise}: must be > 0")
  runs = [calibrate.read(path) for path in args.run]
  costs_from = f"figures of {args.device}, {args.shards} a model"
  if runs:
    adopt(args, runs[0])
    priced = calibrate.fit(runs, skip=args.skip)
    costs_from = "runs " + ", ".join(args.run)
  else:
    params = numbers(args, "params", float, least=1)
    priced = sweep.Figures(params, args.device, args.shards, args.epochs)
  found, common = sources(args, runs), common_of(args, runs)
  made = sweep.simulate(found, lists_of(args), common, priced)
  is_made_up = not runs and args.delta_rule != "fixed"
  cli.say(
    f"SIMULATED: {len(made)} runs of {args.steps} steps; costs from"
    f" {costs_from}"
  )
  if runs:
    cli.say(f"calibrated: {priced}")
    exact = sum(calibrate.work(run)[1] for run in runs)
    cli.say(f"lengths give back the ticks of {exact} of {len(runs)} runs")
  if is_made_up:
    cli.say(
      f"scores are MADE UP: 1 - exp(-step / {args.score_rise:g}), deviation"
      f" {args.score_noise:g}"
    )
  for line in table(made, most=60):
    cli.say(line)
  cli.say("")
  if not runs:
    for line in room(args, made, found, common.rules):
      cli.say(line)
  used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  seconds = time.perf_counter() - began
  cli.say(f"took {seconds:.1f} s, {used:.0f} MiB at most (this process)")
  if args.out:
    scores = "made up" if is_made_up else "of the run" if runs else "unused"
    result = {
      "simulated": True,
      "command": "python -m oppo_jax.simulate " + " ".join(sys.argv[1:]),
      "costs_from": costs_from,
      "scores": scores,
      "seconds": seconds,
      "peak_mib": used,
      "runs": made,
    }
    pathlib.Path(args.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
  cli.run(main, define_flags, required=[])
