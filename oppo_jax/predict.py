# SPDX-License-Identifier: Apache-2.0
"""A simulated run: the schedule, the engine's own controllers, and the clock.

Delta and chunk size are decided by `delta.py` and `chunking.py`, the files that
training uses; the schedule is `schedule.py`, and what it costs `costs.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from oppo_jax import chunking, controllers, costs, delta, schedule, traces


class Machine(NamedTuple):
  """What a schedule is timed on."""

  costs: costs.Costs
  num_devices: int
  decode_loop: str


class Point(NamedTuple):
  """One step of a simulated run: decisions, schedule, seconds per machine."""

  delta: int
  step: schedule.Step
  times: list[costs.Times]


def run(
  rules: schedule.Rules,
  lengths: traces.Lengths,
  deciding: controllers.Controllers,
  machines: Sequence[Machine],
  *,
  score_of: Callable[[int], float],
  num_steps: int,
) -> Iterator[Point]:
  """Simulates a run step by step, in memory of the size of the buffer.

  Args:
    rules: of the schedule.
    lengths: by uid.
    deciding: delta and chunk size before step 0. A rule that looks at the clock
      looks at that of the first machine.
    machines: one at least.
    score_of: mean score of a step.
    num_steps: updates.
  """
  buffer = schedule.init(rules)
  for version in range(num_steps):
    decided = deciding.decision()
    buffer = schedule.admit(
      *(buffer, rules, lengths.of),
      num_in_flight=rules.batch_size + decided["delta"],
      version=version,
    )
    buffer, step = schedule.run_step(
      buffer, rules, version=version, chunk_size=decided["chunk_size"]
    )
    times = [
      costs.times(
        *(step, rules, m.costs),
        num_devices=m.num_devices,
        decode_loop=m.decode_loop,
      )
      for m in machines
    ]
    step_s = times[0].step_s
    deciding = deciding.observe(
      delta.StepObservation(score_of(version), step.deferred, step_s),
      chunking.ChunkObservation(step_s, step.generated, step.chunk_size),
    )
    yield Point(decided["delta"], step, times)


def summarize(
  points: Iterator[Point], rules: schedule.Rules, *, num_machines: int
) -> list[dict[str, Any]]:
  """Totals and means of a simulated run, one dict per machine."""
  sums = dict.fromkeys(
    ("ticks", "chunks", "generated", "trained", "deferred", "staleness"), 0
  )
  room, staleness_max, num_steps, chunk_sizes = 0, 0, 0, {}
  tiles = dict.fromkeys(rules.scorers, 0)
  deferrals = np.zeros(1, np.int64)
  seconds = np.zeros((num_machines, len(costs.Times._fields)))
  deltas = 0
  for delta_now, step, times in points:
    num_steps += 1
    deltas += delta_now
    for name in ("ticks", "chunks", "generated", "deferred"):
      sums[name] += getattr(step, name)
    sums["trained"] += int(step.response_len.sum())
    sums["staleness"] += step.staleness_sum
    staleness_max = max(staleness_max, step.staleness_max)
    room += step.ticks * step.in_flight
    for name, n in step.tiles(rules).items():
      tiles[name] += n
    counts = np.bincount(step.deferrals, minlength=len(deferrals))
    counts[: len(deferrals)] += deferrals
    deferrals = counts
    chunk_sizes[step.chunk_size] = chunk_sizes.get(step.chunk_size, 0) + 1
    seconds += times
  shared = {
    "steps": num_steps,
    "ticks": sums["ticks"],
    "chunks": sums["chunks"],
    "tokens_generated": sums["generated"],
    "tokens_trained": sums["trained"],
    "tiles": tiles,
    "deferred_mean": sums["deferred"] / num_steps,
    "deferrals": (deferrals / deferrals.sum()).tolist(),
    "staleness_mean": sums["staleness"] / sums["trained"],
    "staleness_max": staleness_max,
    "slot_fill": sums["generated"] / max(room, 1),
    "delta_mean": deltas / num_steps,
    "delta_last": delta_now,
    "chunk_sizes": chunk_sizes,
  }
  made = []
  for step_s, rollout_s, policy_s, scorer_s in seconds:
    idle = [1 - busy / step_s for busy in (policy_s, scorer_s) if busy]
    made.append(
      shared
      | {
        "step_s": step_s / num_steps,
        "rollout_s": rollout_s / num_steps,
        "trained_per_s": sums["trained"] / step_s,
        "idle": idle,
      }
    )
  return made
