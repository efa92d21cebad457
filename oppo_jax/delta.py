# SPDX-License-Identifier: Apache-2.0
"""How many prompts beyond B are in flight: the delta controllers.

Plain Python on plain numbers: frozen state in, frozen state out, saved as JSON.
A rule is one function from (state, observation) to the delta it wants; to try
another, write it and give it a line in `RULES`. `update` keeps the history and
the bounds.

Every rule but `fixed` and `replay` looks at the mean scores of the last w + 1
steps; until there are so many, delta stays. With w = 2, step = 1, max = 8:

  step            0  1  2  3  4  5
  mean score      3  5  4  6  6  5
  R_t - R_{t-2}         1  1  2 -1
  delta           4  4  4  5  6  7  6     (the last one is for step 6)
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepObservation:
  """What a finished step tells a rule.

  Attributes:
    mean_score: mean of the batch's scores.
    deferred: rows left in flight when the batch was cut.
    step_s: seconds the step took. A rule that looks at it makes the run
      irreproducible, but for `replay`.
  """

  mean_score: float
  deferred: int
  step_s: float


@dataclasses.dataclass(frozen=True)
class DeltaState:
  """All that a controller remembers.

  Attributes:
    delta: in force for the coming step; read it through `overcommit`.
    history: mean scores of the last w + 1 steps, oldest first.
    num_steps: steps observed so far = index of the coming step.
    log: `replay` only: delta of step 0, 1, ...
  """

  delta: int
  history: tuple[float, ...] = ()
  num_steps: int = 0
  log: tuple[int, ...] = ()


def fixed(state: DeltaState, observed: StepObservation, **_: Any) -> int:
  """Delta stays as it is."""
  return state.delta


def paper(
  state: DeltaState,
  observed: StepObservation,
  *,
  window: int,
  step: int,
  **_: Any,
) -> int:
  """Up while the mean score rises, down when it stalls or falls.

  The slope is the mean of the last w differences R_i - R_{i-1}. That sum
  telescopes, so only its ends count: slope = (R_t - R_{t-w}) / w. At a plateau
  its sign is that of the difference of two noisy numbers: a coin flip. Rule of
  the main text of arXiv 2509.25762.
  """
  if len(state.history) <= window:
    return state.delta
  is_rising = state.history[-1] > state.history[-1 - window]
  return state.delta + (step if is_rising else -step)


def paper_proportional(
  state: DeltaState, observed: StepObservation, *, step: int, **kwargs: Any
) -> int:
  """As `paper`, by a quarter of delta: max(1, floor(delta / 4)), not `step`.

  4 -> 5 -> 6 -> 7 -> 8 -> 10 -> 12 -> 15     while the score rises
  """
  return paper(state, observed, step=max(1, state.delta // 4), **kwargs)


def robust(
  state: DeltaState,
  observed: StepObservation,
  *,
  window: int,
  step: int,
  dead_band: float,
  **_: Any,
) -> int:
  """Least-squares slope over the last w + 1 scores; moves only if it is clear.

  slope = sum (i - mean i)(R_i - mean R) / Sxx,  Sxx = sum (i - mean i)^2
  error = sqrt(sum residual^2 / (w - 1) / Sxx)   its standard error
  up if slope > dead_band * error, down if slope < -dead_band * error

  R = 0 1 1 2    slope 0.6, error 0.14: 4.2 errors above 0, up
  R = 0 2 0 1    slope 0.1, error 0.52: noise, stays (`paper` goes up)
  """
  if len(state.history) <= window:
    return state.delta
  # Taken off first, so that equal scores give a slope of exactly 0.
  scores = [r - state.history[0] for r in state.history]
  mean = sum(scores) / len(scores)
  x = [i - window / 2 for i in range(window + 1)]
  sxx = sum(a * a for a in x)
  slope = sum(a * r for a, r in zip(x, scores)) / sxx
  residuals = [r - mean - slope * a for a, r in zip(x, scores)]
  error = (sum(r * r for r in residuals) / (window - 1) / sxx) ** 0.5
  if slope > dead_band * error:
    return state.delta + step
  return state.delta - step if slope < -dead_band * error else state.delta


def replay(state: DeltaState, observed: StepObservation, **_: Any) -> int:
  """What the log says; past its end the last one, which nobody may use."""
  return state.log[min(state.num_steps, len(state.log) - 1)]


RULES: dict[str, Callable[..., int]] = {
  "fixed": fixed,
  "paper": paper,
  "paper_proportional": paper_proportional,
  "robust": robust,
  "replay": replay,
}


def init(
  *,
  kind: str,
  init: int,
  min: int,
  max: int,
  window: int,
  step: int,
  dead_band: float,
  log: Sequence[int] = (),
) -> DeltaState:
  """The controller before step 0.

  Args:
    kind: of `RULES`.
    init: delta of step 0 (`replay`: the log has it).
    min: >= 0.
    max: >= min; the slots for B + max rows are always allocated.
    window: w, >= 1 steps; >= 2 for `robust`.
    step: >= 1, how far one change goes.
    dead_band: >= 0 standard errors, `robust` only; about 2.
    log: `replay` only: delta of step 0, 1, ...

  Raises:
    ValueError: out of range; names the key.
  """
  least_window = 2 if kind == "robust" else 1
  for key, value, is_valid, expected in (
    ("kind", kind, kind in RULES, f"one of {tuple(RULES)}"),
    ("min", min, min >= 0, ">= 0"),
    ("max", max, max >= min, f">= min={min}"),
    ("init", init, min <= init <= max, f"in [min, max] = [{min}, {max}]"),
    ("window", window, window >= least_window, f">= {least_window}"),
    ("step", step, step >= 1, ">= 1"),
    ("dead_band", dead_band, dead_band >= 0, ">= 0"),
    ("log", log, log or kind != "replay", "the deltas to replay"),
  ):
    if not is_valid:
      raise ValueError(f"overlap.delta.{key}={value!r}: must be {expected}")
  if kind != "replay":
    return DeltaState(delta=init)
  for i, delta in enumerate(log):
    if not min <= delta <= max:
      raise ValueError(
        f"overlap.delta.kind='replay': delta={delta} of step {i} is not in "
        f"[min, max] = [{min}, {max}]"
      )
  return DeltaState(delta=log[0], log=tuple(log))


def update(
  state: DeltaState,
  observed: StepObservation,
  *,
  kind: str,
  min: int,
  max: int,
  window: int,
  step: int,
  dead_band: float,
  **_: Any,
) -> DeltaState:
  """The controller after one more step: the rule's wish, clipped to the bounds.

  Takes the keywords of `init`, so that one dict serves both.
  """
  seen = dataclasses.replace(
    state,
    history=(*state.history, observed.mean_score)[-(window + 1) :],
    num_steps=state.num_steps + 1,
  )
  wish = RULES[kind](
    seen, observed, window=window, step=step, dead_band=dead_band
  )
  return dataclasses.replace(seen, delta=sorted((min, wish, max))[1])


def overcommit(state: DeltaState) -> int:
  """Prompts in flight beyond B in the coming step.

  Raises:
    ValueError: `replay`, and the log ends before that step.
  """
  if state.log and state.num_steps >= len(state.log):
    raise ValueError(
      f"overlap.delta.kind='replay': no decision for step {state.num_steps}, "
      f"the log ends at step {len(state.log) - 1}"
    )
  return state.delta


def to_json(state: DeltaState) -> dict[str, Any]:
  """A dict that `json` can write; `from_json` is its inverse."""
  return dataclasses.asdict(state)


def from_json(saved: Mapping[str, Any]) -> DeltaState:
  """The state that `to_json` described, also after a trip through a file."""
  lists = {"history": tuple(saved["history"]), "log": tuple(saved["log"])}
  return DeltaState(**{**saved, **lists})
