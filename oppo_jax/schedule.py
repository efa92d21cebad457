# SPDX-License-Identifier: Apache-2.0
"""The loop in token time: who is in flight, when a step ends, which tiles run.

Plain NumPy, no model and no clock: a row is a prompt length and a response
length. What `overlap.rollout` does to rows is done here to numbers, so that
ticks, deferrals, staleness and the number of tiles of a step are those of the
engine, exactly. What they cost is the business of `costs.py`.

One step with B = 2, delta = 1, chunks of 4 ticks, T = 4, prompts of 1 token:

  tick       1  2  3  4 | 5  6
  uid 0      r  r  r  E |              4 tokens: done at tick 4
  uid 1      r  r  r  r | r  E         the second to end: the step has 6 ticks
  uid 2      r  r  r  r | r  r         deferred, 6 tokens are kept
  round 0 ends at tick 4, round 1 at tick 6 (it is cut short)
  tiles      uid 0: 2, uid 1: 1 | uid 1: 1     a tile waits for one token more
             uid 2: 1                          than it holds, or for the end

Prompts and responses come from a function of the uid; nothing here is random.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from oppo_jax import tile_calls

FREE = -1  # uid of a slot that holds nothing
NEVER = np.iinfo(np.int64).max // 4  # ticks a free slot has left
KEPT = ("reward", "reference")  # frozen models: what is scored stays


class Update(NamedTuple):
  """How an update cuts its batch into micro-batches.

  Attributes:
    num_epochs: passes over the batch.
    num_minibatches: optimizer steps per pass.
    micro_rows: packed rows per micro-batch.
    width: tokens per packed row.
  """

  num_epochs: int
  num_minibatches: int
  micro_rows: int
  width: int

  def micro_batches(self, row_len: np.ndarray) -> int:
    """Micro-batches of an update, not exact: at least so many.

    Packed rows are as few as their tokens, and as rows that are too long to
    share one, allow; `packing.first_fit` needs one more now and then.
    """
    filled = -(-int(row_len.sum()) // self.width)
    bins = max(filled, int((2 * row_len > self.width).sum()))
    micro = -(-bins // (self.num_minibatches * self.micro_rows))
    return self.num_epochs * self.num_minibatches * micro


class Rules(NamedTuple):
  """What decides a schedule, beside lengths, delta and chunk size.

  Attributes:
    num_slots: S, at least B + the largest delta.
    batch_size: B.
    group_size: G, responses that leave together; divides B.
    max_staleness: updates a row may be deferred, negative = unbounded.
    intra: when tiles run: "none", "sequence" or "chunk".
    restarts: unfinished rows start again from their prompt at an update.
    tile_rows: Q, tiles per call.
    tile_len: T, tokens per tile.
    scorers: of "reward", "reference", "critic", "policy".
    keep_policy_cache: a deferred row's policy cache survives the update.
    keep_critic_cache: a deferred row's values survive the update.
    speculates: scorers that the update makes stale run tiles of rows that may
      yet be deferred.
    update: how a batch is cut.
  """

  num_slots: int
  batch_size: int
  group_size: int
  max_staleness: int
  intra: str
  restarts: bool
  tile_rows: int
  tile_len: int
  scorers: tuple[str, ...]
  keep_policy_cache: bool
  keep_critic_cache: bool
  speculates: bool
  update: Update

  def class_of(self, scorer: str) -> str:
    """Scorers of one class have run the same tiles at all times."""
    is_kept = scorer in KEPT or (scorer == "critic" and self.keep_critic_cache)
    return "kept" if is_kept else "dropped"

  def intra_of(self, name: str, num_in_flight: int) -> str:
    """When tiles of a class of scorers run: `flight.waiting`."""
    is_stale = name == "dropped" or self.restarts
    may_be_lost = is_stale and num_in_flight > self.batch_size
    return "none" if may_be_lost and not self.speculates else self.intra


@dataclasses.dataclass(frozen=True)
class Buffer:
  """What is in flight between two steps; arrays are replaced, not written.

  Attributes:
    uid: FREE or the sequence of the slot.
    prompt_len: tokens of its prompt.
    target: tokens its response will have.
    left: ticks until it ends; at most 0 = it ended that many ticks ago, so
      that the order of `left` is the order in which rows ended.
    admitted_at: policy version at which it was admitted.
    first_version: policy version of its first response token.
    version_sum: sum over its response tokens of their policy versions.
    frontier: by class of scorers, tiles of the row that have been run.
    next_uid: of the next prompt to be admitted.
  """

  uid: np.ndarray  # [S] int64
  prompt_len: np.ndarray  # [S] int64
  target: np.ndarray  # [S] int64
  left: np.ndarray  # [S] int64
  admitted_at: np.ndarray  # [S] int64
  first_version: np.ndarray  # [S] int64
  version_sum: np.ndarray  # [S] int64
  frontier: dict[str, np.ndarray]  # "kept", "dropped" -> [S] int64
  next_uid: int


class Step(NamedTuple):
  """What happened in one step.

  Attributes:
    version: policy version of the step.
    in_flight: rows while decoding.
    chunk_size: C.
    ticks: decode ticks.
    columns: sum over ticks of the longest prefix that was being decoded.
    chunks: rounds; at least 1.
    generated: tokens sampled.
    deferred: rows left in flight.
    uid: [B] rows taken, by uid.
    row_len: [B] their tokens, prompts included.
    response_len: [B] of these, response tokens.
    deferrals: [B] updates since they were admitted.
    staleness_sum: over their response tokens, updates since sampling.
    staleness_max: the largest of these.
    prefill_calls: calls that brought the policy cache up to date.
    calls: by class of scorers.
    micro_batches: of the update, see `Update.micro_batches`.
  """

  version: int
  in_flight: int
  chunk_size: int
  ticks: int
  columns: int
  chunks: int
  generated: int
  deferred: int
  uid: np.ndarray
  row_len: np.ndarray
  response_len: np.ndarray
  deferrals: np.ndarray
  staleness_sum: int
  staleness_max: int
  prefill_calls: int
  calls: dict[str, tile_calls.Calls]
  micro_batches: int

  def tiles(self, rules: Rules) -> dict[str, int]:
    """Tiles run, by scorer."""
    return {s: self.calls[rules.class_of(s)].tiles for s in rules.scorers}


def init(rules: Rules) -> Buffer:
  """Nothing in flight.

  Raises:
    ValueError: a group would be split between batches.
  """
  if rules.batch_size % rules.group_size:
    raise ValueError(
      f"batch_size={rules.batch_size}: must be a multiple of"
      f" group_size={rules.group_size}"
    )
  full = lambda value: np.full(rules.num_slots, value, np.int64)
  classes = {rules.class_of(s) for s in rules.scorers}
  return Buffer(
    uid=full(FREE),
    prompt_len=full(0),
    target=full(0),
    left=full(NEVER),
    admitted_at=full(0),
    first_version=full(0),
    version_sum=full(0),
    frontier={name: full(0) for name in sorted(classes)},
    next_uid=0,
  )


def admit(
  buffer: Buffer,
  rules: Rules,
  lengths_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
  *,
  num_in_flight: int,
  version: int,
) -> Buffer:
  """Fills free slots until `num_in_flight` rows (whole groups) are in flight.

  Args:
    buffer: in flight now.
    rules: of the schedule.
    lengths_of: uids -> prompt lengths >= 1 and response lengths >= 1.
    num_in_flight: B + delta.
    version: policy version now.
  """
  is_free = buffer.uid == FREE
  missing = num_in_flight - (rules.num_slots - int(is_free.sum()))
  missing -= missing % rules.group_size
  free = np.flatnonzero(is_free)[: max(missing, 0)]
  if not len(free):
    return buffer
  uid = np.arange(buffer.next_uid, buffer.next_uid + len(free))
  prompt_len, target = lengths_of(uid)

  def put(array, value):
    array = array.copy()
    array[free] = value
    return array

  return Buffer(
    uid=put(buffer.uid, uid),
    prompt_len=put(buffer.prompt_len, prompt_len),
    target=put(buffer.target, target),
    left=put(buffer.left, target),
    admitted_at=put(buffer.admitted_at, version),
    first_version=put(buffer.first_version, version),
    version_sum=put(buffer.version_sum, 0),
    frontier={k: put(v, 0) for k, v in buffer.frontier.items()},
    next_uid=buffer.next_uid + len(free),
  )


def run_step(
  buffer: Buffer, rules: Rules, *, version: int, chunk_size: int
) -> tuple[Buffer, Step]:
  """Decodes until B rows are ready, scores them, takes them out, updates.

  Returns:
    What is in flight after the update, and what was done.

  Raises:
    ValueError: fewer than B rows are in flight.
  """
  b, batch_size = buffer, rules.batch_size
  used = b.uid != FREE
  num_used = int(used.sum())
  if num_used < batch_size:
    raise ValueError(f"{num_used} rows in flight, batch_size={batch_size}")
  ready_at = b.left
  if rules.group_size > 1:
    ready_at = _with_group(b, rules.group_size)
  starving = None
  ticks = max(0, int(np.partition(ready_at, batch_size - 1)[batch_size - 1]))
  if rules.max_staleness >= 0:
    starving = used & (version - b.admitted_at >= rules.max_staleness)
    ticks = max(ticks, int(ready_at[starving].max(initial=0)))
  taken = _select(b.uid, ready_at, starving, ticks=ticks, num=batch_size)

  sampled = np.clip(b.left, 0, ticks) * used
  held = np.where(used, b.target - np.maximum(b.left, 0), 0)
  began = b.prompt_len + held  # tokens of each row when the step began
  length = began + sampled
  left = np.where(used, b.left - ticks, NEVER)
  first = np.where(held == 0, version, b.first_version)
  version_sum = b.version_sum + version * sampled
  chunks = max(1, -(-ticks // chunk_size))

  calls, frontier = {}, {}
  rows = tile_calls.Rows(
    used, began, left=b.left, length=length, is_done=left <= 0, taken=taken
  )
  for name, ran in b.frontier.items():
    calls[name], frontier[name] = tile_calls.of_step(
      rows,
      ran,
      intra=rules.intra_of(name, num_used),
      tile_rows=rules.tile_rows,
      tile_len=rules.tile_len,
      chunks=chunks,
      chunk_size=chunk_size,
    )
  target = b.target[taken]
  step = Step(
    version=version,
    in_flight=num_used,
    chunk_size=chunk_size,
    ticks=ticks,
    columns=_columns(b.left, began, ticks),
    chunks=chunks,
    generated=int(sampled.sum()),
    deferred=num_used - batch_size,
    uid=b.uid[taken],
    row_len=length[taken],
    response_len=target,
    deferrals=version - b.admitted_at[taken],
    staleness_sum=int(version * target.sum() - version_sum[taken].sum()),
    staleness_max=int(version - first[taken].min()),
    prefill_calls=_prefill_calls(b, rules, began, version),
    calls=calls,
    micro_batches=rules.update.micro_batches(length[taken]),
  )

  uid = b.uid.copy()
  uid[taken] = FREE
  left[taken] = NEVER
  if rules.restarts:
    left = np.where(uid != FREE, b.target, NEVER)
    version_sum = np.zeros_like(version_sum)
  if rules.restarts or "dropped" in frontier:
    forget = frontier if rules.restarts else ("dropped",)
    frontier |= {name: np.zeros_like(left) for name in forget}
  return dataclasses.replace(
    b,
    uid=uid,
    left=left,
    first_version=first,
    version_sum=version_sum,
    frontier=frontier,
  ), step


def replay(
  rules: Rules,
  lengths_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
  decisions: Iterable[tuple[int, int]],
) -> Iterator[Step]:
  """The steps that follow from (delta, chunk size) of step 0, 1, ..."""
  buffer = init(rules)
  for version, (delta, chunk_size) in enumerate(decisions):
    num_in_flight = rules.batch_size + delta
    buffer = admit(
      *(buffer, rules, lengths_of),
      num_in_flight=num_in_flight,
      version=version,
    )
    buffer, step = run_step(
      buffer, rules, version=version, chunk_size=chunk_size
    )
    yield step


def _with_group(b: Buffer, group_size: int) -> np.ndarray:
  """Ticks until the last row of each row's group ends [S]."""
  order = np.argsort(b.uid, kind="stable")
  order = order[np.searchsorted(b.uid[order], 0) :]  # groups, side by side
  last = b.left[order].reshape(-1, group_size).max(axis=1)
  ready_at = np.full_like(b.left, NEVER)
  ready_at[order] = np.repeat(last, group_size)
  return ready_at


def _select(uid, ready_at, starving, *, ticks, num):
  """Slots of the rows that leave, by uid: `slots.select`."""
  ready = np.flatnonzero(ready_at <= ticks)
  if len(ready) > num:
    waits = np.zeros(len(ready)) if starving is None else ~starving[ready]
    order = np.lexsort((uid[ready], ready_at[ready], waits))
    ready = ready[order[:num]]
  return ready[np.argsort(uid[ready])]


def _columns(left, began, ticks) -> int:
  """Sum over ticks of the longest row that is still decoding.

  Tick i (from 1) feeds a row of began + i - 1 tokens, as long as left >= i.
  """
  rows = np.flatnonzero((left > 0) & (left < NEVER))
  rows = rows[np.argsort(left[rows])]
  until = np.minimum(left[rows], ticks)
  longest = np.maximum.accumulate(began[rows][::-1])[::-1]
  base = int((np.diff(until, prepend=0) * longest).sum())
  return base + ticks * (ticks - 1) // 2


def _prefill_calls(b: Buffer, rules: Rules, began, version) -> int:
  """Calls of `overlap.prefill_policy`: rows that decode need n - 1 columns."""
  stale = (b.left > 0) & (b.uid != FREE)
  if rules.keep_policy_cache and not rules.restarts:
    stale &= b.admitted_at == version
  tiles = -(-(began[stale] - 1) // rules.tile_len)
  return -(-int(tiles.sum()) // rules.tile_rows)
