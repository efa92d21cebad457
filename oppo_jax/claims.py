# SPDX-License-Identifier: Apache-2.0
"""The guarantees, each as a comparison of short runs on one's own config.

A run here is a few updates by `step.py`, the code that `train` runs: what it
batched, the gradients of its first update and the parameters after its last.
Runs that must be the same are compared bit by bit, in the order in which things
happen, so that the first difference is the one that matters.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
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
  one_shot,
  step,
  types,
)

# Fields of a batch in the order in which they come to be.
FIELDS = (
  *("uid", "admitted_at", "prompt_len", "response_len", "sequences"),
  *("responses", "mask", "has_eos", "token_version", "behavior_logprobs"),
  *("ref_logprobs", "start_logprobs", "values", "scores"),
)
# Which model's cache to look into if a field differs.
SAID_BY = {
  "sequences": flight.POLICY_CACHE,
  "responses": flight.POLICY_CACHE,
  "behavior_logprobs": flight.POLICY_CACHE,
  "ref_logprobs": "reference",
  "start_logprobs": "policy",
  "values": "critic",
  "scores": "reward",
}


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


class Row(NamedTuple):
  """One comparison.

  Attributes:
    claim: "G1" to "G7".
    what: what was held against what.
    part: what of it: batches, gradients ...; "" = all there is.
    promised: "EXACT" or "CLOSE".
    found: "EXACT", "CLOSE" or "FAIL".
    max_abs: largest difference.
    max_ulp: the same in representable numbers.
    where: the first difference; "" = none.
    seconds: what it took.
  """

  claim: str
  what: str
  part: str
  promised: str
  found: str
  max_abs: float
  max_ulp: int
  where: str
  seconds: float

  @property
  def holds(self) -> bool:
    return self.found in ("EXACT", self.promised)


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
  """Runs it, through `step.py`.

  Args:
    bench: what all runs share.
    way: how.
    num_updates: fewer than the bench says: the last one is not carried out.
    keep_caches: fetch the caches as the last rollout left them.
  """
  s, config = bench.s, fixed(bench.config, way)
  sizes, state = s.fns.sizes, step.init(bench.config, s, bench.params)
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


def locate(
  bench: Bench, ways: Sequence[Way], update: int, field: str, row: int
) -> str:
  """Runs both ways again up to a batch that differs, and looks further back.

  Returns:
    the uid and the token of the first difference, and the first column of the
    first layer in which the caches behind it differ.
  """
  a, b = (
    run(bench, way, num_updates=update + 1, keep_caches=True) for way in ways
  )
  x, y = a.batches[update], b.batches[update]
  uid = int(x.uid[row])
  text = f"uid {uid}"
  if uid != y.uid[row]:
    return f"{text} where the other has uid {int(y.uid[row])}"
  left, right = getattr(x, field)[row], getattr(y, field)[row]
  if left.ndim:
    token = int(np.argmax(difference.ulps(left, right) != 0))
    text += f", token {token}"
  name = SAID_BY.get(field)
  if name not in a.caches:
    return text
  length = int(x.prompt_len[row] + x.response_len[row])
  row_of = lambda trace: jax.tree.map(
    lambda leaf: leaf[trace.slot_of[uid], :, :length].swapaxes(0, 1),
    trace.caches[name],
  )
  seen = difference.between(row_of(a), row_of(b))
  if seen.is_exact:
    return f"{text}; the cache of {name} is equal, so it is in its head"
  return (
    f"{text}; the cache of {name} parts in leaf {seen.path}, column "
    + str(seen.index[0])
  )


def row(
  bench: Bench,
  claim: str,
  what: str,
  seen: difference.Difference,
  *,
  part: str = "",
  promised: str,
  where: str = "",
  began: float,
) -> Row:
  """A comparison, judged."""
  found = "FAIL"
  if seen.is_exact:
    found = "EXACT"
  elif seen.max_abs <= bench.tolerance:
    found = "CLOSE"
  return Row(
    claim,
    what,
    part,
    promised,
    found,
    seen.max_abs,
    seen.max_ulp,
    where or str(seen),
    time.perf_counter() - began,
  )


def same(
  bench: Bench, claim: str, what: str, ways: tuple[Way, Way], traces: "Traces"
) -> Iterator[Row]:
  """Two ways to run, which must give the same bits: three rows."""
  began = time.perf_counter()
  seen = compare(*(traces.of(way) for way in ways))
  where, names = "", [name for name, d in seen if not d.is_exact]
  if names and names[0].startswith("update"):
    update, field = int(names[0].split()[1][:-1]), names[0].split()[-1]
    first = dict(seen)[names[0]]
    place = locate(bench, ways, update, field, first.index[0])
    where = f"{first} ({place})"
  parts = {"batches": [], "gradients": [], "parameters": []}
  for name, d in seen:
    parts[name if name in parts else "batches"].append(d)
  num = len(jax.tree.leaves(traces.of(ways[0]).gradients))
  for part, text in (
    ("batches", f"{bench.num_updates} batches"),
    ("gradients", f"gradients of update 0, {num} leaves"),
    ("parameters", f"parameters after {bench.num_updates} updates"),
  ):
    whole = functools.reduce(difference.worse, parts[part])
    place = where if part == "batches" else ""
    yield row(
      bench,
      claim,
      what,
      whole,
      part=text,
      promised="EXACT",
      where=place,
      began=began,
    )
    began = time.perf_counter()


class Traces:
  """Runs, each made once."""

  def __init__(self, bench: Bench):
    self._bench = bench
    self._made: dict[Way, Trace] = {}

  def of(self, way: Way) -> Trace:
    if way not in self._made:
      self._made[way] = run(self._bench, way)
    return self._made[way]


def streaming(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G1: when scorers run changes no bit; and what they say is right."""
  way = base_way(bench.config)
  for intra in ("none", "sequence"):
    what = f"intra {way.intra} = {intra} ({way.inter}, delta {way.delta})"
    other = way._replace(intra=intra)
    yield from same(bench, "G1", what, (way, other), traces)
  yield from plain_scores(bench, traces.of(way))


def plain_scores(bench: Bench, trace: Trace) -> Iterator[Row]:
  """What the last batch was told of itself, against a forward pass per row.

  The last one: it has rows that were deferred, and models that were updated.
  """
  config, batch = bench.config, trace.batches[-1]
  cast, algorithm = bench.s.fns.cast, bench.s.algorithm
  last = len(trace.batches) - 1
  length = batch.prompt_len + batch.response_len
  parts, params = bench.s.parts, bench.params
  rows = np.arange(len(length))[:, None]
  # Column of the prefix that comes before response token t.
  before = batch.prompt_len[:, None] - 1 + np.arange(batch.mask.shape[1])
  before = np.minimum(before, batch.sequences.shape[1] - 1)

  models = {
    "policy": (parts.policy, trace.params_before["policy"]),
    "reference": (
      parts.reference,
      params.get("reference", params["policy"]),
    ),
    "critic": (parts.critic, trace.params_before["critic"]),
    "reward": (parts.reward, params["reward"]),
  }

  def said(name):
    model, params = models[name]
    return one_shot.outputs(
      model,
      cast(params),
      batch.sequences,
      length,
      chunk=config.score.logprob_chunk,
      temperature=config.rollout.temperature,
      top_k=config.rollout.top_k,
      top_p=config.rollout.top_p,
    )

  for claim, field, name in (
    ("G7", "behavior_logprobs", "policy"),
    ("G1", "ref_logprobs", "reference"),
    ("G1", "values", "critic"),
    ("G1", "scores", "reward"),
  ):
    if SAID_BY[field] not in (flight.POLICY_CACHE, *algorithm.scorers):
      continue
    began = time.perf_counter()
    mine, plain = getattr(batch, field), said(name)
    if field == "scores":
      plain = batch.replace(scores=plain[rows[:, 0], length - 1])
      plain, _, _ = step.grade(bench.s, plain, config.reward.to_dict())
    else:
      asked = batch.mask
      if name == "policy":  # other tokens are of policies that are gone
        asked = asked & (batch.token_version == last)
      plain = np.where(asked, plain[rows, before], 0)
      mine = np.where(asked, mine, 0)
    seen = difference.between(mine, plain.astype(mine.dtype), name=field)
    where = ""
    if not seen.is_exact:
      i, *token = seen.index
      where = (
        f"{seen} (uid {batch.uid[i]}{''.join(f', token {t}' for t in token)})"
      )
    yield row(
      bench,
      claim,
      f"update {last} = one forward pass per row",
      seen,
      part=field,
      promised="CLOSE",
      where=where,
      began=began,
    )


def chunks(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G2: neither the chunk size nor changing it on the way changes a bit."""
  way = base_way(bench.config)
  limit = bench.config.rollout.max_response_len
  for sizes in ((1,), (7,), (limit,), (limit, 7, 1)):
    what = f"chunk {way.chunk_sizes[0]} = " + (
      f"chunk {sizes[0]}" if len(sizes) == 1 else f"chunks {sizes} in turn"
    )
    other = way._replace(chunk_sizes=sizes)
    yield from same(bench, "G2", what, (way, other), traces)


def neighbors(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G3: a row follows from its uid, not from its slot or its company."""
  way = base_way(bench.config)
  other = way._replace(is_reversed=True)
  what = "slots filled from the first = from the last"
  yield from same(bench, "G3", what, (way, other), traces)

  began = time.perf_counter()
  alone = way._replace(inter="none", delta=0)
  x, y = (traces.of(w).batches[0] for w in (way, alone))
  shared, i, j = np.intersect1d(x.uid, y.uid, return_indices=True)
  seen, at = difference.Difference(), ""
  for field in FIELDS:
    new = difference.between(
      getattr(x, field)[i], getattr(y, field)[j], name=field
    )
    if seen.is_exact and not new.is_exact:
      at = f"{new} (uid {shared[new.index[0]]})"
    seen = difference.worse(seen, new)
  what = f"{len(shared)} rows among B + {way.delta} = the same among B"
  yield row(bench, "G3", what, seen, promised="EXACT", where=at, began=began)


def no_delta(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G4: delta = 0 is plain PPO."""
  way = base_way(bench.config)._replace(delta=0)
  plain = way._replace(intra="none", inter="none")
  what = f"{way.inter}, intra {way.intra} at delta 0 = serial"
  yield from same(bench, "G4", what, (way, plain), traces)


def exactly_once(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G5: nothing is lost, doubled or kept waiting too long."""
  began = time.perf_counter()
  trace = traces.of(base_way(bench.config))
  trained = [int(uid) for batch in trace.batches for uid in batch.uid]
  wrong = []
  if sorted(trained + trace.in_flight) != list(range(trace.next_uid)):
    count = lambda uid: trained.count(uid) + trace.in_flight.count(uid)
    bad = next(u for u in range(trace.next_uid) if count(u) != 1)
    wrong.append(f"uid {bad} is there {count(bad)} times")
  bound = bench.config.overlap.max_staleness
  for i, batch in enumerate(trace.batches):
    waited = int((i - batch.admitted_at).max())
    if 0 <= bound < waited:
      wrong.append(f"update {i}: a row was deferred {waited} times > {bound}")
    if (np.diff(batch.uid) <= 0).any():
      wrong.append(f"update {i}: not in order of uid")
  what = (
    f"{len(trained)} trained on, {len(trace.in_flight)} in flight: each once"
  )
  yield Row(
    "G5",
    what,
    "",
    "EXACT",
    "FAIL" if wrong else "EXACT",
    0.0,
    0,
    "; ".join(wrong),
    time.perf_counter() - began,
  )


CLAIMS: dict[str, Callable[[Bench, Traces], Iterator[Row]]] = {
  "G1": streaming,
  "G2": chunks,
  "G3": neighbors,
  "G4": no_delta,
  "G5": exactly_once,
}
