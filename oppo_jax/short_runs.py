# SPDX-License-Identifier: Apache-2.0
"""A few updates of one's own config, run in one way or another.

A run here goes through `step.py`, the code that `train` runs. Kept are what it
batched, the gradients of its first update and the parameters after its last;
two runs are compared in the order in which things happen, so that the first
difference is the one that matters.
"""

import dataclasses
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from oppo_jax import (
  assemble,
  controllers,
  difference,
  flight,
  metrics,
  step,
  types,
)

# Fields of a batch in the order in which they come to be.
FIELDS = (
  *("uid", "admitted_at", "prompt_len", "response_len", "sequences"),
  *("responses", "mask", "has_eos", "token_version", "behavior_logprobs"),
  *("ref_logprobs", "start_logprobs", "values", "scores"),
)


class Bench(NamedTuple):
  """What all runs share: one compilation serves them all.

  Attributes:
    config: validated.
    s: of `config`.
    params: "policy", "reward" and "critic" to start from.
    num_updates: of each run, at least 2: rows must get old.
    tolerance: of CLOSE, largest absolute difference.
  """

  config: ml_collections.ConfigDict
  s: assemble.Setup
  params: dict[str, types.Params]
  num_updates: int
  tolerance: float


class Way(NamedTuple):
  """One way to run the same thing.

  Attributes:
    intra: "none", "sequence" or "chunk".
    inter: "none", "resume" or "restart".
    delta: prompts in flight beyond B; 0 with inter "none".
    chunk_sizes: of step 0, 1, ..., repeated.
    is_reversed: free slots are filled from the last one.
  """

  intra: str
  inter: str
  delta: int
  chunk_sizes: tuple[int, ...]
  is_reversed: bool = False


class Trace(NamedTuple):
  """What a short run did.

  Attributes:
    batches: fetched, one per update.
    gradients: of the first minibatch of update 0, per leaf.
    params_before: before the last update: those of the last rollout.
    params: after it.
    in_flight: uids left at the end.
    next_uid: uid of the next prompt.
    caches: after the last rollout, if asked for: name -> cache.
    slot_of: slot of each uid in that rollout.
  """

  batches: list[types.Batch]
  gradients: types.Params
  params_before: types.Params
  params: types.Params
  in_flight: list[int]
  next_uid: int
  caches: dict[str, types.KVCache]
  slot_of: dict[int, int]


def base_way(config: ml_collections.ConfigDict) -> Way:
  """Full overlap, at the config's chunk size and delta; rows are deferred."""
  inter = config.overlap.inter
  extra = config.overlap.delta.init or config.overlap.delta.max
  return Way(
    intra="chunk",
    inter="resume" if inter == "none" else inter,
    delta=extra,
    chunk_sizes=(config.overlap.chunk.size,),
  )


def run(
  bench: Bench,
  way: Way,
  *,
  num_updates: int | None = None,
  keep_caches: bool = False,
) -> Trace:
  """Runs it, through `step.py`; every scorer streams, also one that would wait.

  Args:
    bench: what all runs share.
    way: how.
    num_updates: fewer than the bench says: the last one is not carried out.
    keep_caches: fetch the caches as the last rollout left them.
  """
  config = fixed(bench.config, way)
  sizes = bench.s.fns.sizes._replace(speculates=True)
  s = bench.s._replace(fns=bench.s.fns._replace(sizes=sizes))
  state = step.init(bench.config, s, bench.params)
  order = np.arange(sizes.num_slots)
  gradients_of = jax.jit(s.algorithm.gradients)
  batches, gradients, got = [], None, None
  while state.step < (num_updates or bench.num_updates):
    size = way.chunk_sizes[state.step % len(way.chunk_sizes)]
    config.overlap.chunk.size = size
    chosen = controllers.make(config.overlap, num_steps=0)
    state = dataclasses.replace(state, controllers=chosen)
    timers = metrics.Timers()
    got = step.collect(
      config,
      s,
      state,
      timers,
      slot_order=order[::-1] if way.is_reversed else order,
      debug=True,
    )
    if keep_caches:
      at_end = got.in_flight
      caches = {k: v.cache for k, v in at_end.scorers.items()}
      caches = metrics.fetch(caches | {flight.POLICY_CACHE: at_end.cache})
    if gradients is None:
      plan = step.plan_of(config, got.rollout.row_len, state.step)
      gradients = metrics.fetch(gradients_of(state.train, got.on_device, plan))
    batches.append(got.batch)
    params_before = metrics.fetch(state.train.params)
    state, _ = step.learn(config, s, state, got, timers, began=0.0)
  return Trace(
    batches=batches,
    gradients=gradients,
    params_before=params_before,
    params=metrics.fetch(state.train.params),
    in_flight=[int(u) for u in state.in_flight.uid if u != types.Slots.FREE],
    next_uid=state.in_flight.next_uid,
    caches=caches if keep_caches else {},
    slot_of=dict(zip(got.batch.uid.tolist(), got.rollout.slot.tolist())),
  )


def fixed(
  config: ml_collections.ConfigDict, way: Way
) -> ml_collections.ConfigDict:
  """The config with both controllers at rest, and the arm of `way`."""
  config = config.copy_and_resolve_references()
  config.overlap.update(intra=way.intra, inter=way.inter)
  config.overlap.chunk.kind = config.overlap.delta.kind = "fixed"
  config.overlap.delta.update(init=way.delta, min=0, max=max(way.delta, 1))
  return config


def compare(a: Trace, b: Trace) -> list[tuple[str, difference.Difference]]:
  """All that two runs did, in the order in which it happened, by name."""
  found = []

  def add(name, x, y, prefix=""):
    found.append((name, difference.between(x, y, name=prefix)))

  for i, (x, y) in enumerate(zip(a.batches, b.batches, strict=True)):
    for field in FIELDS:
      name = f"update {i}, {field}"
      add(name, getattr(x, field), getattr(y, field), name)
    if i == 0:
      add("gradients", a.gradients, b.gradients, "gradient of ")
  add("parameters", a.params, b.params, "trained ")
  return found


class Traces:
  """Runs, each made once."""

  def __init__(self, bench: Bench):
    self._bench = bench
    self._made: dict[Way, Trace] = {}

  def of(self, way: Way) -> Trace:
    if way not in self._made:
      self._made[way] = run(self._bench, way)
    return self._made[way]
