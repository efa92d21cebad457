# SPDX-License-Identifier: Apache-2.0
"""How many tokens are decoded between two looks of the host.

Plain Python on plain numbers, like `delta.py`: a rule is one function from
(state, observation) to the state of the coming step, with a line in `RULES`.
Chunk size changes no token, batch or gradient, only how long a step takes; so a
rule may look at the clock.

`tuned` with sizes = (100, 500, 3000) and period = 6:

  step         0    1    2     3    4    5  |  6    7    8     9   10   11
  chunk size  100  500 3000   500  500  500 | 100  500 3000   500  500  500
  us/token     9    7    8    `- fastest -'    9    7    8    `- fastest -'
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ChunkObservation:
  """What a finished step tells a rule.

  Attributes:
    step_s: seconds the step took.
    generated: tokens it sampled.
    chunk_size: C it was run with.
  """

  step_s: float
  generated: int
  chunk_size: int


@dataclasses.dataclass(frozen=True)
class ChunkState:
  """All that a controller remembers.

  Attributes:
    size: C of the coming step; read it through `chunk_size`.
    num_steps: steps observed so far = index of the coming step.
    trials: `tuned` only: (size, seconds per token) seen in this period.
    log: `replay` only: C of step 0, 1, ...
  """

  size: int
  num_steps: int = 0
  trials: tuple[tuple[int, float], ...] = ()
  log: tuple[int, ...] = ()


def fixed(
  state: ChunkState, observed: ChunkObservation, **_: Any
) -> ChunkState:
  """The size stays as it is."""
  return state


def tuned(
  state: ChunkState,
  observed: ChunkObservation,
  *,
  sizes: tuple[int, ...],
  period: int,
  **_: Any,
) -> ChunkState:
  """Tries every size for one step, then keeps the fastest for the period.

  Fastest per token sampled, not per step: steps differ in how much they decode.
  Of equals the first listed wins; a step that sampled nothing tells nothing. A
  size's first trial counts its compilation, if that was not done before.
  """
  tried = (state.num_steps - 1) % period  # place of the observed step
  trials = () if tried == 0 else state.trials
  if tried < len(sizes) and observed.generated > 0:
    cost = observed.step_s / observed.generated
    trials = (*trials, (observed.chunk_size, cost))
  coming = state.num_steps % period
  size = state.size
  if coming < len(sizes):
    size = sizes[coming]
  elif trials:
    size, _ = min(trials, key=lambda trial: trial[1])
  return dataclasses.replace(state, size=size, trials=trials)


def replay(
  state: ChunkState, observed: ChunkObservation, **_: Any
) -> ChunkState:
  """What the log says; past its end the last one, which nobody may use."""
  index = min(state.num_steps, len(state.log) - 1)
  return dataclasses.replace(state, size=state.log[index])


RULES: dict[str, Callable[..., ChunkState]] = {
  "fixed": fixed,
  "tuned": tuned,
  "replay": replay,
}


def init(
  *,
  kind: str,
  size: int,
  sizes: tuple[int, ...],
  period: int,
  log: Sequence[int] = (),
) -> ChunkState:
  """The controller before step 0.

  Args:
    kind: of `RULES`.
    size: C >= 1 of `fixed`.
    sizes: candidates of `tuned`, in the order in which they are tried.
    period: steps from one round of trials to the next, > len(sizes).
    log: `replay` only: C of step 0, 1, ...

  Raises:
    ValueError: out of range; names the key.
  """
  is_tuned, is_replay = kind == "tuned", kind == "replay"
  are_sizes = len(sizes) > 0 and all(s >= 1 for s in sizes)
  for key, value, is_valid, expected in (
    ("kind", kind, kind in RULES, f"one of {tuple(RULES)}"),
    ("size", size, size >= 1, ">= 1"),
    ("sizes", sizes, are_sizes or not is_tuned, "sizes >= 1, at least one"),
    (
      "period",
      period,
      period > len(sizes) or not is_tuned,
      f"> {len(sizes)}, the number of sizes to try",
    ),
    ("log", log, log or not is_replay, "the sizes to replay"),
  ):
    if not is_valid:
      raise ValueError(f"overlap.chunk.{key}={value!r}: must be {expected}")
  if is_replay:
    return ChunkState(size=log[0], log=tuple(log))
  return ChunkState(size=sizes[0] if is_tuned else size)


def observe(
  state: ChunkState, observed: ChunkObservation, *, kind: str, **kwargs: Any
) -> ChunkState:
  """The controller after one more step; takes the keywords of `init`."""
  seen = dataclasses.replace(state, num_steps=state.num_steps + 1)
  return RULES[kind](seen, observed, **kwargs)


def chunk_size(state: ChunkState) -> int:
  """C of the coming step.

  Raises:
    ValueError: `replay`, and the log ends before that step.
  """
  if state.log and state.num_steps >= len(state.log):
    raise ValueError(
      f"overlap.chunk.kind='replay': no decision for step {state.num_steps}, "
      f"the log ends at step {len(state.log) - 1}"
    )
  return state.size


def load_decisions(path: str | os.PathLike[str]) -> list[dict[str, int]]:
  """What a run decided at step 0, 1, ...: what `replay` feeds back.

  One JSON object per line with the integers "step", "delta" and "chunk_size";
  other keys are left out. A step that a resumed run took again counts as it was
  taken last. A last line without its line end was cut short, and is dropped.

  Raises:
    ValueError: names the file, and the line or the missing step.
  """
  with open(path, encoding="utf-8") as f:
    lines = f.read().split("\n")[:-1]
  decisions: dict[int, dict[str, int]] = {}
  least = {"step": 0, "delta": 0, "chunk_size": 1}
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
    except json.JSONDecodeError as e:
      raise ValueError(f"{path}, line {number}: not JSON ({e})") from e
    for key, low in least.items():
      value = row.get(key) if isinstance(row, dict) else None
      if type(value) is not int or value < low:
        raise ValueError(
          f'{path}, line {number}: "{key}" must be an integer >= {low}'
        )
    decisions[row["step"]] = {key: row[key] for key in least}
  for step in range(max(decisions, default=0) + 1):
    if step not in decisions:
      raise ValueError(f"{path}: no decision for step {step}")
  return [decisions[step] for step in range(len(decisions))]


def to_json(state: ChunkState) -> dict[str, Any]:
  """A dict that `json` can write; `from_json` is its inverse."""
  return dataclasses.asdict(state)


def from_json(saved: Mapping[str, Any]) -> ChunkState:
  """The state that `to_json` described, also after a trip through a file."""
  lists = {
    "trials": tuple((size, cost) for size, cost in saved["trials"]),
    "log": tuple(saved["log"]),
  }
  return ChunkState(**{**saved, **lists})
