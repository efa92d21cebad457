# SPDX-License-Identifier: Apache-2.0
"""What a finished run says to the simulator: its rules, lengths, scores, costs.

Reads files of the workdir only (config.json, metrics.jsonl, rollouts.jsonl and
the file of forced lengths); no JAX, no device.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from oppo_jax import auto, costs, schedule, traces


class Run(NamedTuple):
  """A run, as far as the simulator asks.

  Attributes:
    rules: of its schedule.
    overlap: its section of the config: arm and controllers.
    rows: of metrics.jsonl.
    scores: mean score of step 0, 1, ...
    lengths: by uid.
    num_logged: uids whose lengths were logged; the others are drawn from these.
    decode_loop: "while" or "fori".
  """

  rules: schedule.Rules
  overlap: dict[str, Any]
  rows: list[dict[str, Any]]
  scores: list[float]
  lengths: traces.Lengths
  num_logged: int
  decode_loop: str


def read(workdir: str) -> Run:
  """Reads a workdir; a run that is not finished will do.

  Raises:
    ValueError: names the file and what it lacks.
    OSError: a file cannot be read.
  """
  folder = pathlib.Path(workdir)
  rows = list(traces.read_rows(folder / "metrics.jsonl"))
  if not rows:
    raise ValueError(f"{folder / 'metrics.jsonl'}: no steps")
  try:
    config = json.loads((folder / "config.json").read_text())
    o, rollout, tile = config["overlap"], config["rollout"], config["score"]
    slots = rollout["batch_size"] + o["delta"]["max"]
    width = config["optim"]["pack_width"]
    width = width or rollout["max_prompt_len"] + rollout["max_response_len"]
    summary, backend = folder / "summary.json", "cpu"
    if summary.exists():
      backend = json.loads(summary.read_text())["backend"]
    rules = schedule.Rules(
      num_slots=math.ceil(slots / 8) * 8,
      batch_size=rollout["batch_size"],
      group_size=1,
      max_staleness=o["max_staleness"],
      intra=o["intra"],
      restarts=o["inter"] == "restart",
      tile_rows=tile["tile_rows"],
      tile_len=tile["tile_len"],
      scorers=tuple(
        k.removeprefix("score/tiles_")
        for k in rows[0]
        if k.startswith("score/tiles_")
      ),
      keep_policy_cache=o["policy_cache"] == "keep",
      keep_critic_cache=o["critic_cache"] == "keep",
      speculates=auto.speculates(
        o["placement"], auto.dispatch(o["dispatch"], backend)
      ),
      update=schedule.Update(
        num_epochs=config["algo"]["num_epochs"],
        num_minibatches=config["algo"]["num_minibatches"],
        micro_rows=auto.micro_rows(
          config["optim"]["micro_rows"],
          backend,
          width=width,
          mlp_dim=config["model"].get("mlp_dim"),
          minibatch_rows=rollout["batch_size"]
          // config["algo"]["num_minibatches"],
        ),
        width=width,
      ),
    )
    weights = dict(config["reward"])
    by_name = dict(weights.pop("rules", {}))
    by_name |= {k.removesuffix("_weight"): w for k, w in weights.items()}
    scores = [
      sum(w * row[f"reward/{name}"] for name, w in by_name.items() if w)
      for row in rows
    ]
    forced = None
    if rollout["target_lengths_path"]:
      path = rollout["target_lengths_path"]
      forced = traces.load(path, where="", prompt_len=1).response_len
    logged = traces.read_rows(folder / "rollouts.jsonl")
    lengths, num_logged = traces.of_run(logged, forced, seed=config["seed"])
  except (json.JSONDecodeError, KeyError) as e:
    raise ValueError(f"--run={workdir}: not the workdir of a run: {e}") from e
  decode_loop = auto.decode_loop(rollout["decode_loop"], backend)
  return Run(rules, o, rows, scores, lengths, num_logged, decode_loop)


def work(run: Run) -> tuple[list[costs.Work], bool]:
  """What each step is charged for, and whether it is exact.

  Exact is: the lengths give back the ticks of every step. Else the counts of
  metrics.jsonl are taken, see `costs.work_of_row`; prefill is approximate.
  """
  decisions = [
    (int(row["overlap/delta"]), int(row["overlap/chunk_size"]))
    for row in run.rows
  ]
  steps = list(schedule.replay(run.rules, run.lengths.of, decisions))
  if all(s.ticks == r["overlap/ticks"] for s, r in zip(steps, run.rows)):
    exact = dict(decode_loop=run.decode_loop)
    return [costs.work_of(s, run.rules, **exact) for s in steps], True
  counted = dict(
    prompt_len=float(run.lengths.prompt_len.mean()),
    decode_loop=run.decode_loop,
  )
  return [
    costs.work_of_row(row, run.rules, prefill_calls=s.prefill_calls, **counted)
    for s, row in zip(steps, run.rows)
  ], False


def fit(runs: Sequence[Run], *, skip: int) -> costs.Costs:
  """Costs of runs of one model with one number of slots on one machine.

  Args:
    runs: one at least.
    skip: first steps of each that compile.

  Raises:
    ValueError: the runs have different slots or tiles, or too few steps.
  """
  fields = ("num_slots", "tile_rows", "tile_len")
  sizes = {tuple(getattr(r.rules, f) for f in fields) for r in runs}
  if len(sizes) > 1:
    raise ValueError(f"runs of different {fields}: {sorted(sizes)}")
  all_work: list[costs.Work] = []
  all_rows: list[dict[str, Any]] = []
  for run in runs:
    all_work += work(run)[0][skip:]
    all_rows += run.rows[skip:]
  return costs.fit(all_work, all_rows)


def relative_error(run: Run, fitted: costs.Costs, *, skip: int) -> np.ndarray:
  """Of each step's seconds on one device, against those measured."""
  seconds = np.array([costs.seconds(w, fitted) for w in work(run)[0][skip:]])
  return seconds / [row["time/step_s"] for row in run.rows[skip:]] - 1
