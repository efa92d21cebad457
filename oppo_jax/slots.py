# SPDX-License-Identifier: Apache-2.0
"""The overcommit buffer: pure functions over `types.Slots`.

`admit` puts prompts into free rows, decoding advances them, `harvest` takes the
first B finished rows out as a batch. Knows nothing of models, text or rewards.

Which rows leave, and when (B = 2; numbers are decode ticks):

  slot 0  uid 4   done at tick 9     taken (first)
  slot 1  uid 5   live               deferred: keeps its tokens
  slot 2  uid 6   done at tick 12    taken (second: the buffer stops at tick 12)
  slot 3  uid 7   done at tick 12    ready; same tick, but admitted later: it is
                                     the first to be taken in the next step
"""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from oppo_jax import types
from oppo_jax.types import Slots


def init(num_slots: int, row_len: int) -> Slots:
  """An empty buffer of `num_slots` rows of `row_len` columns."""
  row = lambda dtype, fill=0: jnp.full((num_slots,), fill, dtype)
  cell = lambda dtype: jnp.zeros((num_slots, row_len), dtype)
  return Slots(
    uid=row(jnp.int32, Slots.FREE),
    tokens=cell(jnp.int32),
    prompt_len=row(jnp.int32),
    length=row(jnp.int32),
    done=row(jnp.bool_),
    target_len=row(jnp.int32),
    behavior_logprobs=cell(jnp.float32),
    token_version=cell(jnp.int32),
    admitted_at=row(jnp.int32),
    finished_tick=row(jnp.int32),
    tick=jnp.zeros((), jnp.int32),
  )


def _where_row(condition: jax.Array, new: Slots, old: Slots) -> Slots:
  """Takes whole rows of `new` where `condition` [S]; `tick` stays old."""
  pick = lambda n, o: (
    o
    if o.ndim == 0
    else jnp.where(condition.reshape((-1,) + (1,) * (o.ndim - 1)), n, o)
  )
  return jax.tree.map(pick, new, old)


def admit(
  slots: Slots,
  uid: Int[Array, " S"],
  prompts: Int[Array, "S P"],
  prompt_len: Int[Array, " S"],
  target_len: Int[Array, " S"],
  version: Int[Array, ""],
) -> Slots:
  """Starts new sequences in the rows whose `uid` is not FREE.

  Args:
    slots: buffer; the rows written to must be free.
    uid: identity of the new sequence of each row, FREE = leave the row alone.
    prompts: its prompt, packed from column 0, 0 beyond `prompt_len`.
    prompt_len: in [1, P].
    target_len: response length at which EOS is forced, 0 = none.
    version: policy version now.
  """
  num_slots, row_len = slots.tokens.shape
  fresh = init(num_slots, row_len).replace(
    uid=uid,
    tokens=jnp.pad(prompts, ((0, 0), (0, row_len - prompts.shape[1]))),
    prompt_len=prompt_len,
    length=prompt_len,
    target_len=target_len,
    admitted_at=jnp.full((num_slots,), version, jnp.int32),
  )
  return _where_row(uid != Slots.FREE, fresh, slots)


def _ready(slots: Slots, group_size: int) -> tuple[jax.Array, jax.Array]:
  """Rows whose whole group is done [S], and the tick at which it was."""
  done = slots.done & ~slots.is_free
  if group_size == 1:
    return done, slots.finished_tick
  group = slots.uid // group_size
  same = (group[:, None] == group) & ~slots.is_free[:, None] & ~slots.is_free
  num_done = jnp.sum(same & done, axis=1)
  tick = jnp.max(jnp.where(same, slots.finished_tick, 0), axis=1)
  return num_done == group_size, tick


def _starving(slots: Slots, version: jax.Array, max_staleness: int):
  """Rows that must not be deferred again: the step waits for them."""
  if max_staleness < 0:
    return jnp.zeros_like(slots.done)
  return ~slots.is_free & (version - slots.admitted_at >= max_staleness)


def is_complete(
  slots: Slots,
  version: Int[Array, ""],
  *,
  batch_size: int,
  group_size: int,
  max_staleness: int,
) -> Bool[Array, ""]:
  """True when B rows (whole groups) are ready and no starving row is missing.

  Args:
    slots: buffer.
    version: policy version now.
    batch_size: B, a multiple of `group_size`.
    group_size: responses of a prompt that leave together (uid // group_size).
    max_staleness: updates a row may be deferred; negative = unbounded.
  """
  ready, _ = _ready(slots, group_size)
  missing = _starving(slots, version, max_staleness) & ~ready
  return (jnp.sum(ready) >= batch_size) & ~jnp.any(missing)


def select(
  slots: Slots,
  version: Int[Array, ""],
  *,
  batch_size: int,
  group_size: int,
  max_staleness: int,
) -> Bool[Array, " S"]:
  """The rows a harvest would take now: B of the ready ones, or fewer.

  Starving rows first, then in the order in which they became ready; on one
  tick the older admission first.
  """
  ready, tick = _ready(slots, group_size)
  starving = _starving(slots, version, max_staleness)
  # Last key is the primary one. uid is the order of admission, and keeps the
  # rows of a group side by side (they share every key before it).
  order = jnp.lexsort((slots.uid, tick, ~starving, ~ready))
  rank = jnp.zeros_like(slots.uid).at[order].set(jnp.arange(len(order)))
  return ready & (rank < batch_size)


def response_aligned(
  x: Float[Array, "B L"], prompt_len: Int[Array, " B"], *, max_response_len: int
) -> Float[Array, "B R"]:
  """Column t of the result is what the prefix before response token t said.

  columns of x    0  1  2  3  4  5       prompt_len = 3
  response token  .  .  0  1  2  .       the prefix [0, 2] predicts token 0
  """
  columns = prompt_len[:, None] - 1 + jnp.arange(max_response_len)
  return jnp.take_along_axis(x, columns, axis=1, mode="fill", fill_value=0)


def harvest(
  slots: Slots,
  selected: Bool[Array, " S"],
  outputs: dict[str, jax.Array],
  *,
  batch_size: int,
  max_response_len: int,
  eos_ids: tuple[int, ...],
) -> tuple[Slots, types.Batch]:
  """Takes the selected rows out, as a batch sorted by uid.

  Args:
    slots: buffer.
    selected: exactly `batch_size` rows, all done.
    outputs: per scorer its [S, L] outputs (see `types.ScorerState`); of
      "reward", "reference", "critic" and "policy", absent ones read as zeros.
    batch_size: B.
    max_response_len: R.
    eos_ids: token ids that end a response.

  Returns:
    The buffer with those rows free, and the batch.
  """
  uid = jnp.where(selected, slots.uid, jnp.iinfo(jnp.int32).max)
  rows = jnp.argsort(uid)[:batch_size]
  prompt_len, length = slots.prompt_len[rows], slots.length[rows]
  response_len = length - prompt_len
  mask = jnp.arange(max_response_len) < response_len[:, None]
  align = lambda x: response_aligned(
    x, prompt_len, max_response_len=max_response_len
  )
  token = lambda x: align(x[rows, 1:])  # what is stored at the token's column
  said = lambda name: (
    align(outputs[name][rows])
    if name in outputs
    else jnp.zeros(mask.shape, jnp.float32)
  )
  only = lambda x: jnp.where(mask, x, jnp.zeros((), x.dtype))
  responses = only(token(slots.tokens))
  last = jnp.take_along_axis(slots.tokens[rows], length[:, None] - 1, axis=1)
  scores = jnp.zeros((batch_size,), jnp.float32)
  if "reward" in outputs:
    scores = outputs["reward"][rows, length - 1]
  # The critic's word after the last token is kept too: presets that put the
  # score one after the EOS train it.
  with_end = jnp.arange(max_response_len) <= response_len[:, None]
  batch = types.Batch(
    uid=slots.uid[rows],
    sequences=slots.tokens[rows],
    prompt_len=prompt_len,
    response_len=response_len,
    has_eos=jnp.isin(last[:, 0], jnp.asarray(eos_ids, jnp.int32)),
    responses=responses,
    mask=mask,
    behavior_logprobs=only(token(slots.behavior_logprobs)),
    start_logprobs=only(said("policy")),
    ref_logprobs=only(said("reference")),
    values=jnp.where(with_end, said("critic"), 0.0),
    scores=scores,
    token_version=only(token(slots.token_version)),
    admitted_at=slots.admitted_at[rows],
  )
  empty = init(*slots.tokens.shape)
  return _where_row(selected, empty, slots), batch


def restart(slots: Slots) -> Slots:
  """Sends every row back to its prompt; it stays admitted since when it was."""
  in_prompt = jnp.arange(slots.tokens.shape[1]) < slots.prompt_len[:, None]
  return slots.replace(
    tokens=jnp.where(in_prompt, slots.tokens, 0),
    length=slots.prompt_len,
    done=jnp.zeros_like(slots.done),
    behavior_logprobs=jnp.zeros_like(slots.behavior_logprobs),
    token_version=jnp.zeros_like(slots.token_version),
    finished_tick=jnp.zeros_like(slots.finished_tick),
  )


def check(slots: Slots) -> None:
  """Raises AssertionError if an invariant of the buffer is broken (host side).

  0 <= prompt_len <= length <= L; uids unique or FREE; nothing but zeros beyond
  `length`; log-probs only in response columns; free rows are empty.
  """
  s = jax.device_get(slots)
  row_len = s.tokens.shape[1]
  chex.assert_equal_shape([s.tokens, s.behavior_logprobs, s.token_version])
  used = s.uid != Slots.FREE
  uids = s.uid[used].tolist()
  assert len(set(uids)) == len(uids), f"uid twice in flight: {sorted(uids)}"
  assert (s.prompt_len >= 0).all(), s.prompt_len
  assert (s.prompt_len[used] >= 1).all(), s.prompt_len
  assert (s.prompt_len <= s.length).all(), (s.prompt_len, s.length)
  assert (s.length <= row_len).all(), s.length
  columns = jnp.arange(row_len)
  beyond = columns >= s.length[:, None]
  assert not (s.tokens * beyond).any(), "tokens beyond the cursor"
  response = ~beyond & (columns >= s.prompt_len[:, None])
  assert not (s.behavior_logprobs * ~response).any(), "log-probs off response"
  assert (s.behavior_logprobs <= 0).all(), "a log-prob above 0"
  assert not s.done[~used].any(), "a free row is done"
  assert not s.length[~used].any(), "a free row has tokens"
