# SPDX-License-Identifier: Apache-2.0
"""The paper's algorithm: one host loop that decodes, scores and defers.

OPPO (arXiv 2509.25762): while chunk k is decoded, the scorers prefill what
chunk k - 1 added (intra-step overlap); B + delta prompts are in flight and the
first B that finish are trained on, the others keep their tokens (inter-step
overlap).

  host     d0 d1 . s0 d2 . s1 d3 . s2   h  u      d = dispatch a chunk
  report         r0      r1      r2               s = dispatch tiles of a report
                  one round late                  h = harvest, u = update

Every arm runs through this loop; they differ in *when* tiles are dispatched
(`intra`) and in what becomes of unfinished rows (`inter`), never in what is
computed. The host only enqueues; it waits in `metrics.fetch` alone.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from oppo_jax import flight, metrics, slots, tiling, types
from oppo_jax.flight import Fns, OverlapState


class Rollout(NamedTuple):
  """What one rollout did, beside its batch.

  Attributes:
    ticks: decode ticks.
    generated: tokens sampled.
    chunks: decode chunks whose report was read.
    deferred: rows left in flight.
    tiles: by scorer, tiles run.
    slot: [B] slot of each row of the batch, in its order.
    row_len: [B] its tokens.
  """

  ticks: int
  generated: int
  chunks: int
  deferred: int
  tiles: dict[str, int]
  slot: np.ndarray
  row_len: np.ndarray


class Held(NamedTuple):
  """One call of tiles of every scorer, to go with the next chunk.

  Attributes:
    tokens: [S, L] of the report that the tiles are of.
    slot: by scorer, [Q]; see `score.prefill`.
    tile: likewise.
  """

  tokens: jax.Array
  slot: dict[str, np.ndarray]
  tile: dict[str, np.ndarray]


def score_rows(
  fns: Fns,
  state: OverlapState,
  params: dict[str, types.Params],
  tokens: jax.Array,
  rows: dict[str, np.ndarray],
  *,
  flush: bool,
  hold: bool = False,
) -> tuple[OverlapState, dict[str, int], Held | None]:
  """Dispatches to every scorer the pending tiles of its `rows`.

  Args:
    fns: jitted functions.
    state: in flight.
    params: by scorer.
    tokens: of the report that says how long rows are.
    rows: by scorer, [S] which of them.
    flush: see `tiling.calls_of`.
    hold: keep the last call of every scorer back, if each has one.

  Returns:
    The state, the number of tiles run by each scorer, and what is held back:
    the caller dispatches that before anything else of these scorers.
  """
  tile = fns.sizes.tile
  scorers, frontier, num_tiles = dict(state.scorers), dict(state.frontier), {}
  calls = {}
  for name in scorers:
    limit = tiling.limits(
      state.length, state.done, rows[name], tile_len=tile.length
    )
    calls[name], after = tiling.calls_of(
      frontier[name], limit, num_rows=tile.rows, flush=flush
    )
    num_tiles[name] = int((after - frontier[name]).sum())
    frontier[name] = after
  held = None
  if hold and all(calls.values()):
    last = {name: of.pop() for name, of in calls.items()}
    slot, index = ({k: v[i] for k, v in last.items()} for i in (0, 1))
    held = Held(tokens, slot, index)
  if any(calls.values()):
    tokens = fns.for_scorers(tokens)
  for name, of in calls.items():
    for slot, index in of:
      scorers[name] = fns.append[name](
        params[name], scorers[name], tokens, slot, index
      )
  state = dataclasses.replace(state, scorers=scorers, frontier=frontier)
  return state, num_tiles, held


def prefill_policy(
  fns: Fns, state: OverlapState, params: types.Params
) -> OverlapState:
  """Brings the policy cache up to the cursor of every row still decoding.

  A live row of n tokens needs columns [0, n - 1): the first tick feeds and
  writes column n - 1 itself.
  """
  tile = fns.sizes.tile
  live = state.in_flight & ~state.done
  limit = np.where(live, -(-(state.length - 1) // tile.length), 0)
  done = state.frontier[flight.POLICY_CACHE]
  calls, after = tiling.calls_of(done, limit, num_rows=tile.rows, flush=True)
  cache = state.cache
  for slot, index in calls:
    cache = fns.prefill(params, cache, state.slots.tokens, slot, index)
  # Decoding itself goes on from here; the frontier only says "not to redo".
  after = np.where(live, np.iinfo(np.int32).max, after)
  frontier = {**state.frontier, flight.POLICY_CACHE: after}
  return dataclasses.replace(state, cache=cache, frontier=frontier)


def rollout(
  fns: Fns,
  state: OverlapState,
  params: dict[str, types.Params],
  *,
  version: int,
  run_key: jax.Array,
  chunk_size: int,
  intra: str,
  timers: metrics.Timers,
  debug: bool = False,
  on_done: Callable[[int, np.ndarray], None] | None = None,
) -> tuple[OverlapState, types.Batch, Rollout]:
  """Decodes until B rows are ready, scores them, takes them out.

  Args:
    fns: jitted functions.
    state: in flight, at least B rows.
    params: "policy" and every scorer's, in the dtype they are used in.
    version: policy version of this step.
    run_key: key of the run.
    chunk_size: C, ticks between two looks of the host.
    intra: when tiles are dispatched: "none" = after the batch is complete,
      "sequence" = when their row is done, "chunk" = as soon as they exist.
    timers: gets "decode" (until the batch is complete; what is scored
      meanwhile included) and "score" (what was left to score then).
    debug: check the buffer's invariants after every chunk (syncs).
    on_done: is told uid and response tokens of every row as soon as the host
      knows that it has ended, those that are not taken included. A row that
      starts again is told again. Nothing waits for it, and it decides nothing.

  Returns:
    What is still in flight, the batch (on the device), and what was done.
  """
  first_tick, before = state.tick, int(state.length[state.in_flight].sum())
  state = prefill_policy(fns, state, params["policy"])
  scorer_params = fns.for_scorers({k: params[k] for k in state.scorers})
  num_tiles = dict.fromkeys(state.scorers, 0)
  waiting = flight.waiting(fns.sizes, state)

  def run_scorers(state, tokens, rows, *, flush, hold):
    state, more, held = score_rows(
      *(fns, state, scorer_params, tokens, rows), flush=flush, hold=hold
    )
    for name, n in more.items():
      num_tiles[name] += n
    return state, held

  def dispatch(state, held):
    chunk = (state.slots, state.cache, np.int32(version), run_key)
    chunk = (params["policy"], *chunk)
    if held is None:
      buffer, cache, report = fns.decode_chunk(*chunk, chunk_size=chunk_size)
      return dataclasses.replace(state, slots=buffer, cache=cache), report
    buffer, cache, report, scorers = fns.decode_and_append(
      *(*chunk, scorer_params, state.scorers, *held), chunk_size=chunk_size
    )
    state = dataclasses.replace(
      state, slots=buffer, cache=cache, scorers=scorers
    )
    return state, report

  num_chunks, held = 0, None
  is_fused = fns.decode_and_append is not None
  with timers("decode"):
    state, ahead = dispatch(state, held)
    is_complete = False
    while not is_complete:
      report = ahead
      state, ahead = dispatch(state, held)  # ahead of what the host knows
      seen = metrics.fetch(report.replace(tokens=None))
      num_chunks += 1
      is_complete = seen.is_complete
      if debug:
        slots.check(state.slots)
      ended = np.flatnonzero(seen.done & ~state.done)
      state = dataclasses.replace(state, length=seen.length, done=seen.done)
      rows = {
        "none": np.zeros_like(seen.done),
        "sequence": seen.done,
        "chunk": state.in_flight,
      }[intra]
      rows = {k: rows & (k not in waiting) for k in num_tiles}
      # The last dispatch is behind us once the batch is complete.
      hold = is_fused and not is_complete
      state, held = run_scorers(
        state, report.tokens, rows, flush=False, hold=hold
      )
      if on_done is not None and ended.size:
        tokens = metrics.fetch(report.tokens)
        for slot in ended:
          response = slice(state.prompt_len[slot], state.length[slot])
          on_done(int(state.uid[slot]), tokens[slot, response])
  with timers("score"):
    rows = dict.fromkeys(num_tiles, seen.selected)
    state, _ = run_scorers(state, report.tokens, rows, flush=True, hold=False)

  outputs = {name: s.outputs for name, s in state.scorers.items()}
  outputs = fns.for_policy(outputs)
  buffer, batch = fns.harvest(state.slots, outputs, np.int32(version))
  after = int(state.length[state.in_flight].sum())
  taken = np.flatnonzero(seen.selected)
  taken = taken[np.argsort(state.uid[taken])]
  row_len = state.length[taken]
  state = dataclasses.replace(
    state,
    slots=buffer,
    uid=np.where(seen.selected, types.Slots.FREE, state.uid).astype(np.int32),
    prompt_len=np.where(seen.selected, 0, state.prompt_len),
    length=np.where(seen.selected, 0, state.length),
    done=state.done & ~seen.selected,
    tick=int(seen.tick),
  )
  return (
    state,
    batch,
    Rollout(
      ticks=state.tick - first_tick,
      generated=after - before,
      chunks=num_chunks,
      deferred=int(state.in_flight.sum()),
      tiles=num_tiles,
      slot=taken,
      row_len=row_len,
    ),
  )
