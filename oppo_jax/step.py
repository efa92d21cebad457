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
  grading,
  keys,
  metrics,
  overlap,
  packing,
  report,
  rewards,
  types,
)
from oppo_jax import config as config_lib


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


class Collected(NamedTuple):
  """A graded batch, before anything was learned from it.

  Attributes:
    on_device: the batch, with the total scores.
    batch: the same, fetched.
    texts: the responses, decoded.
    in_flight: what was left in flight.
    rollout: what the loop did.
    decision: delta and chunk size.
    row: metrics known so far.
  """

  on_device: types.Batch
  batch: types.Batch
  texts: list[str]
  in_flight: flight.OverlapState
  rollout: overlap.Rollout
  decision: dict[str, int]
  row: dict[str, float]


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
    params: "policy", "reward" and "critic", float32; not donated. Without a
      "reference" it is a copy of the policy.

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
      name: s.fns.for_scorers(s.fns.cast(start))
      for name, start in (
        ("reference", params.get("reference", params["policy"])),
        ("reward", params["reward"]),
      )
    },
  )


def grade(
  s: assemble.Setup, batch: types.Batch, weights: dict[str, float]
) -> tuple[np.ndarray, dict[str, float], list[str]]:
  """Total scores [B] of a fetched batch, the mean of each part, the texts.

  Args:
    s: setup.
    batch: fetched; its scores are the reward model's.
    weights: `config.reward`, see `rewards.weighted_sum`.

  Raises:
    ValueError: see `grading.Grader.results`.
  """
  task = s.parts.task
  rows = zip(batch.uid, batch.responses, batch.response_len)
  items = [item_of(s, uid, response[:n]) for uid, response, n in rows]
  parts = {"model": batch.scores}
  if task.reward is not None:
    found = s.grader.results(items)
    for name in ("rule", *task.rules):
      parts[name] = np.array([grades[name] for grades in found], np.float32)
  parts |= rewards.rule_parts(
    [name for name, weight in weights["rules"].items() if weight],
    batch.response_len,
    batch.has_eos,
    max_response_len=s.max_response_len,
  )
  total = rewards.weighted_sum(parts, weights)
  means = {f"reward/{k}": float(v.mean()) for k, v in parts.items()}
  return total, means, [item.text for item in items]


def item_of(s: assemble.Setup, uid: int, response: np.ndarray) -> grading.Item:
  """A response as the rule sees it."""
  example = s.examples[s.row_of(uid)]
  return grading.Item(int(uid), example, s.parts.tokens.decode(response))


def read_again(
  s: assemble.Setup, params: types.Params, batch: types.Batch
) -> np.ndarray:
  """What a reward model that reads text says of a fetched batch: [B]."""
  decode = s.parts.tokens.decode_after
  rows = zip(
    batch.sequences, batch.prompt_len, batch.responses, batch.response_len
  )
  return s.rescore_fn(
    params,
    [s.examples[s.row_of(uid)].prompt for uid in batch.uid],
    [decode(row[:p], r[:n]) for row, p, r, n in rows],
    batch.has_eos,
  )


def plan_of(
  config: ml_collections.ConfigDict,
  row_len: np.ndarray,
  step: int,
) -> types.Packing:
  """How the batch of a step is cut into micro-batches."""
  return packing.plan(
    row_len,
    order_seed=(config.seed, step),
    num_epochs=config.algo.num_epochs,
    num_minibatches=config.algo.num_minibatches,
    width=config_lib.pack_width(config),
    micro_rows=assemble.micro_rows(config),
  )


def collect(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  state: RunState,
  timers: metrics.Timers,
  *,
  slot_order: np.ndarray | None = None,
  debug: bool = False,
) -> Collected:
  """Fills the slots, rolls out, grades; `state.in_flight` is used up.

  Args:
    config: validated.
    s: of `config`.
    state: before the step.
    timers: gets "decode", "score" and "grade".
    slot_order: see `flight.admit`.
    debug: see `overlap.rollout`.
  """
  fns, step = s.fns, state.step
  decision = state.controllers.decision()
  in_flight = flight.admit(
    fns,
    state.in_flight,
    num_in_flight=fns.sizes.batch_size + decision["delta"],
    prompt_of=s.prompt_of,
    version=step,
    slot_order=slot_order,
  )
  num_in_flight = int(in_flight.in_flight.sum())
  trained = {k: fns.cast(v) for k, v in state.train.params.items()}
  grade_early = lambda uid, tokens: s.grader.submit(item_of(s, uid, tokens))
  in_flight, on_device, done = overlap.rollout(
    fns,
    in_flight,
    trained | state.frozen,
    version=step,
    run_key=keys.named(config.seed, "rollout"),
    chunk_size=decision["chunk_size"],
    intra=config.overlap.intra,
    timers=timers,
    debug=debug,
    on_done=grade_early if s.grader.is_early else None,
  )
  with timers("score"):
    batch = metrics.fetch(on_device)
    if s.rescore_fn is not None:
      batch = batch.replace(scores=read_again(s, state.frozen["reward"], batch))
  with timers("grade"):
    scores, parts, texts = grade(s, batch, config.reward.to_dict())
  batch = batch.replace(scores=scores)
  row = parts | report.step_row(
    step, batch, done, in_flight=num_in_flight, **decision
  )
  on_device = on_device.replace(scores=scores)
  return Collected(on_device, batch, texts, in_flight, done, decision, row)


def learn(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  state: RunState,
  got: Collected,
  timers: metrics.Timers,
  *,
  began: float,
) -> tuple[RunState, Done]:
  """Updates on what was collected; uses up `state.train` and `got.in_flight`.

  Args:
    config: validated.
    s: of `config`.
    state: before the step.
    got: of `collect(config, s, state, timers)`.
    timers: gets "update", and is emptied.
    began: `time.perf_counter()` when the step began.
  """
  in_flight = flight.before_update(s.fns, got.in_flight)
  with timers("update"):
    plan = plan_of(config, got.rollout.row_len, state.step)
    train, seen = s.fns.update(state.train, got.on_device, plan)
    seen = metrics.fetch(seen)
  step_s = time.perf_counter() - began

  row = {"step": state.step, **{k: float(v) for k, v in seen.items()}}
  row |= got.row | timers.take() | {"time/step_s": step_s}
  mean_score, did = float(got.batch.scores.mean()), got.rollout
  chunk_size = got.decision["chunk_size"]
  after = dataclasses.replace(
    state,
    step=state.step + 1,
    in_flight=flight.after_update(s.fns, in_flight),
    train=train,
    controllers=state.controllers.observe(
      delta.StepObservation(mean_score, did.deferred, step_s),
      chunking.ChunkObservation(step_s, did.generated, chunk_size),
    ),
  )
  return after, Done(got.batch, got.texts, got.decision, row)


def run(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  state: RunState,
  timers: metrics.Timers,
) -> tuple[RunState, Done]:
  """The next step; `state.train` and `state.in_flight` are used up."""
  began = time.perf_counter()
  got = collect(config, s, state, timers)
  return learn(config, s, state, got, timers, began=began)
