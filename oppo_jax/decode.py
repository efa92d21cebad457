# SPDX-License-Identifier: Apache-2.0
"""Advances every live slot by up to C tokens, and stops in token time.

Knows nothing about text, rewards or deferral: only tokens, a policy, and the
condition under which a batch is complete.

One tick feeds each row the token at its cursor and samples the next one:

  column      0  1  2  3  4  5        length = 4
  tokens      p  p  r  r  .  .        feed column 3 (writes its key and value),
                          ^           sample column 4, length becomes 5

A row that must stand still (done, free, or after the batch is complete) may be
fed too, since shapes are fixed, but changes nothing: its token and cursor stay,
and the cache column it writes is one that is written anew before it is ever
read. `decode_rows` says how many rows go through the model at once:

  live slots       0 . . 3 4 . . 7 8 . . .     12 slots, 5 of them live
  decode_rows=0    one call of all 12
  decode_rows=4    a call of (7, 0, 3, 8), then one of (4, -, -, -)

The second form pays for live rows only, shortest prefix first, and since every
call has the same shape, a row's bits do not depend on how many slots there are.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oppo_jax import inverse_cdf, ops, types
from oppo_jax.models import base
from oppo_jax.types import Slots


class Sampling(NamedTuple):
  """How tokens are drawn; static.

  Attributes:
    temperature: > 0 divides the logits; 0 = greedy (evaluation only).
    top_k: keep the k likeliest tokens, 0 = all.
    top_p: keep the smallest set of at least this mass, 1.0 = all.
    eos_ids: tokens that end a response.
    max_response_len: R; a row with R response tokens is done.
  """

  temperature: float
  top_k: int
  top_p: float
  eos_ids: tuple[int, ...]
  max_response_len: int


def sample(
  logits: Float[Array, "S V"],
  uid: Int[Array, " S"],
  position: Int[Array, " S"],
  force_eos: Bool[Array, " S"],
  forbid_eos: Bool[Array, " S"],
  run_key: jax.Array,
  *,
  sampling: Sampling,
) -> tuple[Int[Array, " S"], Float[Array, " S"]]:
  """Draws one token per row and says how likely it was.

  The key of a draw is fold_in(fold_in(run_key, uid), position): a function of
  what is drawn, not of the slot, the tick or the neighbours.

  Args:
    logits: raw logits of the next token.
    uid: identity of the row.
    position: column the token will stand in.
    force_eos: the token is the first EOS id whatever was drawn.
    forbid_eos: EOS ids cannot be drawn.
    run_key: key of the run.
    sampling: how to draw.

  Returns:
    Tokens, and their log-prob under the sampling distribution. Forcing and
    forbidding (benchmarks only) change the draw, not the distribution the
    log-prob is taken of, so that PPO ratios keep their meaning.
  """
  distribution = dict(
    temperature=sampling.temperature or 1.0,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
  )
  shaped = ops.sampling_logits(logits, **distribution)
  eos = jnp.asarray(sampling.eos_ids, jnp.int32)
  is_eos = jnp.zeros((logits.shape[-1],), jnp.bool_).at[eos].set(True)
  choices = jnp.where(forbid_eos[:, None] & is_eos, -1e30, shaped)
  if sampling.temperature == 0.0:
    tokens = jnp.argmax(choices, axis=-1)
  else:
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(jax.random.fold_in)(fold(run_key, uid), position)
    tokens = inverse_cdf.draw(choices, keys)
  tokens = jnp.where(force_eos, eos[0], tokens).astype(jnp.int32)
  shaped = ops.sampling_logits(
    logits, **distribution, keep=tokens
  )  # a forced token may lie outside the truncated set; others do not
  return tokens, ops.logprobs_from_logits(shaped, tokens)


def _draw(
  params: types.Params,
  slots: Slots,
  cache: types.KVCache,
  run_key: jax.Array,
  rows: Int[Array, " n"] | None,
  *,
  policy: base.Model,
  sampling: Sampling,
) -> tuple[types.KVCache, jax.Array, jax.Array]:
  """Next token and its log-prob for slots `rows` (None = all of them).

  A slot out of range stands for no row: it writes nothing.
  """
  pick = lambda x: x if rows is None else x.at[rows].get(mode="clip")
  is_live = pick(slots.is_live)
  if rows is not None:
    is_live &= rows < slots.uid.shape[0]
  length = pick(slots.length)
  # Rows that will never decode again need no place of their own; 0 keeps them
  # from stretching the prefix that attention has to read.
  at = jnp.where(is_live, length - 1, 0)
  fed = jnp.take_along_axis(pick(slots.tokens), at[:, None], axis=1)
  hidden, cache = policy.apply(params, fed, at, cache, rows)
  target_len = pick(slots.target_len)
  response_len = length - pick(slots.prompt_len) + 1  # with the new token
  token, logprob = sample(
    policy.head(params, hidden[:, 0]),
    pick(slots.uid),
    length,
    (target_len > 0) & (response_len == target_len),
    (target_len > 0) & (response_len < target_len),
    run_key,
    sampling=sampling,
  )
  return cache, token, logprob


def _draw_live(
  params: types.Params,
  slots: Slots,
  cache: types.KVCache,
  run_key: jax.Array,
  is_frozen: Bool[Array, ""],
  *,
  policy: base.Model,
  sampling: Sampling,
  decode_rows: int,
) -> tuple[types.KVCache, jax.Array, jax.Array]:
  """`_draw` for live slots, `decode_rows` at a time; junk for the others."""
  num_slots, row_len = slots.tokens.shape
  # Rows of like length share a call, and with it the prefix that is read.
  order = jnp.argsort(jnp.where(slots.is_live, slots.length, row_len + 1))
  num_live = jnp.where(is_frozen, 0, jnp.sum(slots.is_live))

  def one_call(i, carry):
    cache, token, logprob = carry
    index = i * decode_rows + jnp.arange(decode_rows)
    rows = order.at[index].get(mode="clip")
    rows = jnp.where(index < num_live, rows, num_slots)
    cache, new_token, new_logprob = _draw(
      *(params, slots, cache, run_key, rows), policy=policy, sampling=sampling
    )
    put = lambda x, new: x.at[rows].set(new, mode="drop")
    return cache, put(token, new_token), put(logprob, new_logprob)

  num_calls = (num_live + decode_rows - 1) // decode_rows
  zeros = lambda dtype: jnp.zeros((num_slots,), dtype)
  carry = (cache, zeros(jnp.int32), zeros(jnp.float32))
  return lax.fori_loop(0, num_calls, one_call, carry)


def tick(
  params: types.Params,
  slots: Slots,
  cache: types.KVCache,
  version: Int[Array, ""],
  run_key: jax.Array,
  is_frozen: Bool[Array, ""],
  *,
  policy: base.Model,
  sampling: Sampling,
  decode_rows: int,
) -> tuple[Slots, types.KVCache]:
  """One token for every live row; nothing at all if `is_frozen`."""
  num_slots, row_len = slots.tokens.shape
  rows = jnp.arange(num_slots)
  what = dict(policy=policy, sampling=sampling)
  if decode_rows:
    cache, token, logprob = _draw_live(
      *(params, slots, cache, run_key, is_frozen),
      **what,
      decode_rows=decode_rows,
    )
  else:
    cache, token, logprob = _draw(params, slots, cache, run_key, None, **what)
  advance = slots.is_live & ~is_frozen
  column = jnp.where(advance, slots.length, row_len)  # row_len: dropped
  put = lambda x, new: x.at[rows, column].set(new, mode="drop")
  is_eos = jnp.isin(token, jnp.asarray(sampling.eos_ids, jnp.int32))
  response_len = slots.length - slots.prompt_len + 1
  ends = advance & (is_eos | (response_len == sampling.max_response_len))
  now = slots.tick + jnp.where(is_frozen, 0, 1)
  slots = slots.replace(
    tokens=put(slots.tokens, token),
    length=slots.length + advance,
    done=slots.done | ends,
    behavior_logprobs=put(slots.behavior_logprobs, logprob),
    token_version=put(slots.token_version, version),
    finished_tick=jnp.where(ends, now, slots.finished_tick),
    tick=now,
  )
  return slots, cache


def decode_chunk(
  params: types.Params,
  slots: Slots,
  cache: types.KVCache,
  version: Int[Array, ""],
  run_key: jax.Array,
  chunk_size: Int[Array, ""] | int,
  *,
  policy: base.Model,
  sampling: Sampling,
  is_complete: Callable[[Slots, jax.Array], jax.Array],
  select: Callable[[Slots, jax.Array], jax.Array],
  loop: str,
  decode_rows: int,
) -> tuple[Slots, types.KVCache, types.ChunkReport]:
  """Up to `chunk_size` ticks; stops at the tick that completes the batch.

  A chunk dispatched after that tick changes nothing, so the host may run one
  chunk ahead of what it has seen, and chunk size does not change any result.

  Args:
    params: policy parameters in the dtype they are used in.
    slots: buffer (donated).
    cache: policy cache (donated); columns [0, length - 1) of live rows hold.
    version: version of `params`.
    run_key: key of the run.
    chunk_size: C >= 1; may be traced if loop == "while".
    policy: model of the policy.
    sampling: how tokens are drawn.
    is_complete: `slots.is_complete` with its sizes bound.
    select: `slots.select` with its sizes bound.
    loop: "while" leaves the loop early; "fori" runs all C ticks with rows
      masked (no data-dependent trip count: on a GPU that would cost a sync
      with the host per token). Same bits.
    decode_rows: rows that go through the model at once; 0 = all slots. With
      another number a row's log-probs move in the last bit.

  Returns:
    Buffer, cache, and the report that the host reads one round later.
  """
  step = lambda slots, cache, frozen: tick(
    params,
    slots,
    cache,
    version,
    run_key,
    frozen,
    policy=policy,
    sampling=sampling,
    decode_rows=decode_rows,
  )

  if loop == "while":

    def goes_on(carry):
      i, complete, _, _ = carry
      return (i < chunk_size) & ~complete

    def one_tick(carry):
      i, complete, slots, cache = carry
      slots, cache = step(slots, cache, complete)
      return i + 1, is_complete(slots, version), slots, cache

    start = (jnp.int32(0), is_complete(slots, version), slots, cache)
    _, complete, slots, cache = lax.while_loop(goes_on, one_tick, start)
  else:

    def one_masked_tick(_, carry):
      complete, slots, cache = carry
      slots, cache = step(slots, cache, complete)
      return is_complete(slots, version), slots, cache

    start = (is_complete(slots, version), slots, cache)
    complete, slots, cache = lax.fori_loop(
      0, chunk_size, one_masked_tick, start
    )
  report = types.ChunkReport(
    uid=slots.uid,
    length=slots.length,
    done=slots.done,
    selected=select(slots, version),
    is_complete=complete,
    tick=slots.tick,
    tokens=slots.tokens,
  )
  return slots, cache, report
