# SPDX-License-Identifier: Apache-2.0
"""Many simulated runs: every combination of a few lists, and the best of them.

Knows no flags and prints nothing: lists in, one dict per run out. A row says
"simulated": true.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from oppo_jax import (
  chunking,
  controllers,
  costs,
  delta,
  predict,
  schedule,
  traces,
)

# As in a config (`config.ARMS`, which a test compares): (intra, inter).
ARMS = {
  "serial": ("none", "none"),
  "sequence": ("sequence", "none"),
  "intra": ("chunk", "none"),
  "inter": ("none", "resume"),
  "restart": ("none", "restart"),
  "oppo": ("chunk", "resume"),
}


class Figures(NamedTuple):
  """What costs are made of where none were measured.

  Attributes:
    params: weights of each model; several sizes are compared.
    device: of `costs.DEVICES`.
    num_shards: devices that share each model.
    num_epochs: passes of an update.
  """

  params: list[float]
  device: str
  num_shards: int
  num_epochs: int


class Lists(NamedTuple):
  """What is combined.

  Attributes:
    arm: of `ARMS`.
    batch_size: B.
    delta: prompts beyond B at step 0; none in arms without deferral.
    chunk: C. Under the rule "tuned" the sizes that it tries, of one run.
    num_devices: 1 or 2.
    link_latency_s: one way; only with 2 devices.
  """

  arm: list[str]
  batch_size: list[int]
  delta: list[int]
  chunk: list[int]
  num_devices: list[int]
  link_latency_s: list[float]


class Common(NamedTuple):
  """What all runs share.

  Attributes:
    rules: of the schedule; slots, B, `intra` and `restarts` are filled in,
      and `speculates` with two devices.
    delta_rule: keywords of `delta.init`; "init" is filled in.
    chunk_rule: keywords of `chunking.init`; "size" and "sizes" are filled in.
    decode_loop: "while" or "fori".
    num_steps: updates.
    score_of: makes a function step -> mean score, for each run anew.
  """

  rules: schedule.Rules
  delta_rule: dict[str, Any]
  chunk_rule: dict[str, Any]
  decode_loop: str
  num_steps: int
  score_of: Callable[[], Callable[[int], float]]


def made_up_scores(
  *, rise: float, noise: float, seed: int
) -> Callable[[int], float]:
  """Scores that rise by 1 and level off, plus noise."""
  rng = np.random.default_rng(seed)
  return lambda step: (
    1 - math.exp(-step / rise) + noise * float(rng.standard_normal())
  )


def rules_of(
  arm: str, batch_size: int, most: int, num_devices: int, rules: schedule.Rules
) -> schedule.Rules:
  """Rules of an arm with room for B + `most` rows, on 1 or 2 devices."""
  intra, inter = ARMS[arm]
  return rules._replace(
    num_slots=math.ceil((batch_size + most) / 8) * 8,
    batch_size=batch_size,
    intra=intra,
    restarts=inter == "restart",
    speculates=rules.speculates or num_devices == 2,
  )


def deciding_of(
  arm: str, extra: int, sizes: list[int], common: Common
) -> controllers.Controllers:
  """The engine's controllers, before step 0."""
  rule = common.delta_rule | dict(init=extra)
  rule["max"] = max(extra, rule["max"])
  if ARMS[arm][1] == "none":
    rule |= dict(kind="fixed", init=0, max=0)
  chunk = common.chunk_rule | dict(size=sizes[0], sizes=tuple(sizes))
  return controllers.Controllers(
    delta.init(**rule), chunking.init(**chunk), rule, chunk
  )


def machines_of(
  rules: schedule.Rules,
  lists: Lists,
  priced: costs.Costs | Figures,
  num_devices: int,
  *,
  decode_loop: str,
) -> dict[str, predict.Machine]:
  """Machines of 1 or 2 devices, by what sets them apart."""
  is_fitted = isinstance(priced, costs.Costs)
  made = {}
  for latency_s, params in itertools.product(
    lists.link_latency_s,
    [0.0] if is_fitted else priced.params,
  ):
    label = "1 device"
    if num_devices == 2:
      label = f"2 devices, link {latency_s:g} s"
    if is_fitted:
      spent = dataclasses.replace(priced, link_latency_s=latency_s)
    else:
      label = f"{params:.3g} weights, {label}"
      spent = costs.from_figures(
        params=params,
        device=costs.DEVICES[priced.device],
        num_shards=priced.num_shards,
        rules=rules,
        num_epochs=priced.num_epochs,
        link_latency_s=latency_s,
      )
    made[label] = predict.Machine(spent, num_devices, decode_loop)
  return made


def combinations(
  lists: Lists, common: Common
) -> list[tuple[str, int, int, list[int]]]:
  """(arm, B, delta, chunk sizes) of every run to simulate.

  A delta over B is left out while staleness is bounded: a batch must hold every
  row that may not be deferred again.

  Raises:
    ValueError: an unknown arm, or nothing is left.
  """
  is_tuned = common.chunk_rule["kind"] == "tuned"
  tries = [lists.chunk] if is_tuned else [[size] for size in lists.chunk]
  made = []
  for batch_size, arm in itertools.product(lists.batch_size, lists.arm):
    if arm not in ARMS:
      raise ValueError(f"--arm: {arm!r} is not one of {sorted(ARMS)}")
    is_deferring = ARMS[arm][1] != "none"
    for extra in lists.delta if is_deferring else [0]:
      most = max(extra, common.delta_rule["max"]) if is_deferring else 0
      if most <= batch_size or common.rules.max_staleness < 0:
        made += [(arm, batch_size, extra, chunks) for chunks in tries]
  if not made:
    raise ValueError("--delta: over --batch_size, with --max_staleness bounded")
  return made


def simulate(
  found: dict[str, traces.Lengths],
  lists: Lists,
  common: Common,
  priced: costs.Costs | Figures,
) -> list[dict[str, Any]]:
  """Every combination, on every machine; one dict each.

  Args:
    found: lengths by name.
    lists: what is combined.
    common: what is shared.
    priced: fitted costs, or what to make them of.
  """
  made: list[dict[str, Any]] = []
  for name, num_devices, (arm, batch_size, extra, chunks) in itertools.product(
    found, lists.num_devices, combinations(lists, common)
  ):
    is_deferring = ARMS[arm][1] != "none"
    most = max(extra, common.delta_rule["max"]) if is_deferring else 0
    rules = rules_of(arm, batch_size, most, num_devices, common.rules)
    machines = machines_of(
      *(rules, lists, priced, num_devices), decode_loop=common.decode_loop
    )
    # A tuned chunk size follows the clock: each machine has a run of its own.
    is_tuned = common.chunk_rule["kind"] == "tuned"
    for labels in [[k] for k in machines] if is_tuned else [list(machines)]:
      points = predict.run(
        *(rules, found[name], deciding_of(arm, extra, chunks, common)),
        [machines[k] for k in labels],
        score_of=common.score_of(),
        num_steps=common.num_steps,
      )
      said = predict.summarize(points, rules, num_machines=len(labels))
      for label, summary in zip(labels, said):
        what = dict(lengths=name, batch_size=batch_size, machine=label)
        what |= dict(arm=arm, delta=extra, chunk=chunks)
        priced_at = dataclasses.asdict(machines[label].costs)
        made.append({"simulated": True, **what, **summary, "costs": priced_at})
  return compared(made)


def group_of(row: dict[str, Any]) -> tuple[str, int, str]:
  """Runs that differ in what one may choose: arm, delta, chunk size."""
  return row["lengths"], row["batch_size"], row["machine"]


def compared(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Adds to each its speed over the best `serial` of its group, if any."""
  serial: dict[tuple[str, int, str], float] = {}
  for row in made:
    if row["arm"] == "serial":
      best = serial.get(group_of(row), 0.0)
      serial[group_of(row)] = max(best, row["trained_per_s"])
  return [
    row
    | (
      {"over_serial": row["trained_per_s"] / serial[group_of(row)]}
      if group_of(row) in serial
      else {}
    )
    for row in made
  ]
