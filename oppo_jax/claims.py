# SPDX-License-Identifier: Apache-2.0
"""The guarantees, each as a comparison of short runs on one's own config.

Runs that must be the same are compared bit by bit; where they part, the first
difference is traced back to a row, a token, a layer and a column.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from oppo_jax import difference, flight, one_shot, short_runs, step
from oppo_jax.short_runs import Bench, Trace, Traces, Way

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


def locate(
  bench: Bench, ways: Sequence[Way], update: int, field: str, row: int
) -> str:
  """Runs both ways again up to a batch that differs, and looks further back.

  Returns:
    the uid and the token of the first difference, and the first column of the
    first layer in which the caches behind it differ.
  """
  a, b = (
    short_runs.run(bench, way, num_updates=update + 1, keep_caches=True)
    for way in ways
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
  bench: Bench, claim: str, what: str, ways: tuple[Way, Way], traces: Traces
) -> Iterator[Row]:
  """Two ways to run, which must give the same bits: three rows."""
  began = time.perf_counter()
  seen = short_runs.compare(*(traces.of(way) for way in ways))
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


def streaming(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G1: when scorers run changes no bit; and what they say is right."""
  way = short_runs.base_way(bench.config)
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
  way = short_runs.base_way(bench.config)
  limit = bench.config.rollout.max_response_len
  for sizes in ((1,), (7,), (limit,), (limit, 7, 1)):
    what = f"chunk {way.chunk_sizes[0]} = " + (
      f"chunk {sizes[0]}" if len(sizes) == 1 else f"chunks {sizes} in turn"
    )
    other = way._replace(chunk_sizes=sizes)
    yield from same(bench, "G2", what, (way, other), traces)


def neighbors(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G3: a row follows from its uid, not from its slot or its company."""
  way = short_runs.base_way(bench.config)
  other = way._replace(is_reversed=True)
  what = "slots filled from the first = from the last"
  yield from same(bench, "G3", what, (way, other), traces)

  began = time.perf_counter()
  alone = way._replace(inter="none", delta=0)
  x, y = (traces.of(w).batches[0] for w in (way, alone))
  shared, i, j = np.intersect1d(x.uid, y.uid, return_indices=True)
  seen, at = difference.Difference(), ""
  for field in short_runs.FIELDS:
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
  way = short_runs.base_way(bench.config)._replace(delta=0)
  plain = way._replace(intra="none", inter="none")
  what = f"{way.inter}, intra {way.intra} at delta 0 = serial"
  yield from same(bench, "G4", what, (way, plain), traces)


def exactly_once(bench: Bench, traces: Traces) -> Iterator[Row]:
  """G5: nothing is lost, doubled or kept waiting too long."""
  began = time.perf_counter()
  trace = traces.of(short_runs.base_way(bench.config))
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
