# SPDX-License-Identifier: Apache-2.0
"""One PPO step: admit prompts, roll out, grade, update.

`RunState` is all that goes from one step to the next, and `run` is a function
from one to the other: what a checkpoint holds, and what a proof compares.
"""

import dataclasses
import time
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from oppo_jax import (
  assemble,
  chunking,
  controllers,
  delta,
  flight,
  keys,
  metrics,
  overlap,
  packing,
  report,
  rewards,
  types,
)


@dataclasses.dataclass(frozen=True)
class RunState:
  """What goes from step to step.

  Attributes:
    step: index of the coming step = policy version.
    controllers: delta and chunk size.
    in_flight: rows, caches and scores that are not yet trained on.
    train: parameters and optimizer; donated to the update.
    frozen: parameters of "reference" and "reward", in the dtype of use.
  """

  step: int
  controllers: controllers.Controllers
  in_flight: flight.OverlapState
  train: types.TrainState
  frozen: dict[str, types.Params]


class Done(NamedTuple):
  """What a step leaves for the record.

  Attributes:
    batch: fetched, with the total scores.
    texts: the responses, decoded.
    decision: delta and chunk size.
    row: the step's metrics.
  """

  batch: types.Batch
  texts: list[str]
  decision: dict[str, int]
  row: dict[str, float]


def init(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  params: dict[str, types.Params],
) -> RunState:
  """Before step 0.

  Args:
    config: validated.
    s: of `config`.
    params: "policy", "reward" and "critic", float32; not donated.

  Raises:
    ValueError: see `controllers.make`.
  """
  # Copies, since updates donate what they replace.
  copy = lambda tree: jax.tree.map(jax.numpy.copy, tree)
  return RunState(
    step=0,
    controllers=controllers.make(config.overlap, num_steps=config.num_steps),
    in_flight=flight.init(s.fns),
    train=s.algorithm.init({k: copy(params[k]) for k in ("policy", "critic")}),
    frozen={
      "reference": s.fns.cast(params["policy"]),
      "reward": s.fns.cast(params["reward"]),
    },
  )


def grade(
  s: assemble.Setup, batch: types.Batch, weights: dict[str, float]
) -> tuple[np.ndarray, dict[str, float], list[str]]:
  """Total scores [B] of a fetched batch, the mean of each part, the texts."""
  task, examples, decode = s.parts.task, s.examples, s.parts.tokens.decode
  texts = [decode(r[:n]) for r, n in zip(batch.responses, batch.response_len)]
  by_rule = [
    task.reward(examples[s.row_of(u)], text)
    for u, text in zip(batch.uid, texts)
  ]
  parts = {"model": batch.scores, "rule": np.array(by_rule, np.float32)}
  total = rewards.weighted_sum(parts, weights)
  means = {f"reward/{k}": float(v.mean()) for k, v in parts.items()}
  return total, means, texts


def plan_of(
  config: ml_collections.ConfigDict,
  sizes: flight.Sizes,
  row_len: np.ndarray,
  step: int,
) -> types.Packing:
  """How the batch of a step is cut into micro-batches."""
  return packing.plan(
    row_len,
    order_seed=(config.seed, step),
    num_epochs=config.algo.num_epochs,
    num_minibatches=config.algo.num_minibatches,
    width=config.optim.pack_width or sizes.row_len,
    micro_rows=config.optim.micro_rows,
  )


def run(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  state: RunState,
  timers: metrics.Timers,
) -> tuple[RunState, Done]:
  """The next step; `state.train` and what is in flight are used up."""
  began = time.perf_counter()
  fns, step = s.fns, state.step
  decision = state.controllers.decision()
  in_flight = flight.admit(
    fns,
    state.in_flight,
    num_in_flight=fns.sizes.batch_size + decision["delta"],
    prompt_of=s.prompt_of,
    version=step,
  )
  num_in_flight = int(in_flight.in_flight.sum())
  trained = {k: fns.cast(v) for k, v in state.train.params.items()}
  in_flight, on_device, done = overlap.rollout(
    fns,
    in_flight,
    trained | state.frozen,
    version=step,
    run_key=keys.named(config.seed, "rollout"),
    chunk_size=decision["chunk_size"],
    intra=config.overlap.intra,
    timers=timers,
  )
  with timers("score"):
    batch = metrics.fetch(on_device)
  scores, parts, texts = grade(s, batch, config.reward.to_dict())
  batch = batch.replace(scores=scores)
  with timers("update"):
    plan = plan_of(config, fns.sizes, done.row_len, step)
    train, seen = fns.update(
      state.train, on_device.replace(scores=scores), plan
    )
    seen = metrics.fetch(seen)
  step_s = time.perf_counter() - began

  row = {"step": step, **{k: float(v) for k, v in seen.items()}, **parts}
  row |= report.step_row(step, batch, done, in_flight=num_in_flight, **decision)
  row |= timers.take() | {"time/step_s": step_s}
  after = dataclasses.replace(
    state,
    step=step + 1,
    in_flight=flight.after_update(fns, in_flight),
    train=train,
    controllers=state.controllers.observe(
      delta.StepObservation(float(scores.mean()), done.deferred, step_s),
      chunking.ChunkObservation(step_s, done.generated, decision["chunk_size"]),
    ),
  )
  return after, Done(batch, texts, decision, row)
