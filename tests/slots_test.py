# SPDX-License-Identifier: Apache-2.0
"""The overcommit buffer: who leaves, when, with what; and nobody is lost."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_exact

from oppo_jax import flight, score, slots, types

FREE = types.Slots.FREE
ROW_LEN = 8
PROMPT_LEN = 2


def buffer(uid, *, done=None, length=None, **fields):
  """A buffer of these rows; prompts of 2 tokens, token = 10 * uid + column."""
  uid = np.array(uid, np.int32)
  num, used = len(uid), uid != FREE
  row = lambda x, dtype=np.int32: np.array(x, dtype) * np.ones(num, dtype)
  done = row(False if done is None else done, bool)
  length = row(4 if length is None else length) * used
  prompt_len = PROMPT_LEN * used.astype(np.int32)
  columns = np.arange(ROW_LEN)
  inside = columns < length[:, None]
  response = inside & (columns >= prompt_len[:, None])
  built = slots.init(num, ROW_LEN).replace(
    uid=uid,
    tokens=np.where(inside, 10 * uid[:, None] + columns, 0).astype(np.int32),
    prompt_len=prompt_len,
    length=length,
    done=done,
    behavior_logprobs=np.where(response, -1.0 - columns, 0).astype(np.float32),
    token_version=np.where(response, columns, 0).astype(np.int32),
    **{k: row(v) for k, v in fields.items()},
  )
  return jax.tree.map(jnp.asarray, built)


def rule(batch_size, group_size=1, max_staleness=-1):
  return dict(
    batch_size=batch_size, group_size=group_size, max_staleness=max_staleness
  )


def taken(b, rule, version=0):
  """Is the batch complete, and the slots that would leave."""
  complete = slots.is_complete(b, jnp.int32(version), **rule)
  selected = slots.select(b, jnp.int32(version), **rule)
  return bool(complete), np.flatnonzero(selected).tolist()


# Who leaves, and when.


def test_the_first_to_finish_leave_first():
  b = buffer([4, 5, 6, 7], done=[1, 0, 1, 1], finished_tick=[9, 0, 12, 11])
  assert taken(b, rule(1)) == (True, [0])
  assert taken(b, rule(2)) == (True, [0, 3])
  assert taken(b, rule(3)) == (True, [0, 2, 3])
  # Two short of a batch: not complete, and those that are ready are named.
  assert taken(b, rule(4)) == (False, [0, 2, 3])


def test_on_one_tick_the_older_admission_leaves_first():
  b = buffer([7, 5, 6, 4], done=True, finished_tick=[12, 12, 12, 9])
  assert taken(b, rule(2)) == (True, [1, 3])  # uid 4, then 5
  assert taken(b, rule(3)) == (True, [1, 2, 3])


def test_a_row_that_was_ready_but_not_taken_leaves_first_next_time():
  # The drawing in slots.py: B = 2, uid 7 became ready on the last tick.
  b = buffer([4, 5, 6, 7], done=[1, 0, 1, 1], finished_tick=[9, 0, 12, 12])
  assert taken(b, rule(2)) == (True, [0, 2])
  b, _ = slots.harvest(b, jnp.array([1, 0, 1, 0], bool), {}, **SIZED)
  # Later uid 5 is done, too, and a new row in slot 0: uid 7 is before both.
  b = b.replace(
    uid=jnp.array([8, 5, FREE, 7]),
    done=jnp.array([1, 1, 0, 1], bool),
    finished_tick=jnp.array([13, 13, 0, 12]),
  )
  assert taken(b, rule(1)) == (True, [3])
  assert taken(b, rule(2)) == (True, [1, 3])


def test_free_and_unfinished_rows_never_leave():
  b = buffer([FREE, 1, 2, FREE], done=[0, 1, 0, 0], finished_tick=[0, 5, 3, 0])
  assert taken(b, rule(2)) == (False, [1])


def test_a_starving_row_is_waited_for():
  # uid 0 was admitted at version 3; at version 5 it has been deferred twice.
  rows = dict(admitted_at=[3, 5, 5, 5], finished_tick=[0, 2, 3, 4])
  b = buffer([0, 1, 2, 3], done=[0, 1, 1, 1], **rows)
  assert taken(b, rule(2, max_staleness=3), version=5)[0]
  assert not taken(b, rule(2, max_staleness=2), version=5)[0]
  assert taken(b, rule(2, max_staleness=-1), version=100)[0]


def test_a_starving_row_leaves_first_though_it_finished_last():
  rows = dict(admitted_at=[3, 5, 5, 5], finished_tick=[9, 2, 3, 4])
  b = buffer([0, 1, 2, 3], done=True, **rows)
  assert taken(b, rule(2, max_staleness=2), version=5) == (True, [0, 1])
  assert taken(b, rule(2, max_staleness=3), version=5) == (True, [1, 2])


def test_a_free_row_never_starves():
  b = buffer([FREE, 1], done=[0, 1], admitted_at=[0, 9])
  assert taken(b, rule(1, max_staleness=1), version=9) == (True, [1])


def test_a_group_is_ready_when_its_last_row_is():
  # Groups of 2: {0, 1} at tick 7, {2, 3} at tick 5, {4, .} not yet.
  b = buffer(
    [4, 1, 2, 5, 0, 3],
    done=[1, 1, 1, 0, 1, 1],
    finished_tick=[1, 7, 4, 0, 2, 5],
  )
  assert taken(b, rule(2, group_size=2)) == (True, [2, 5])
  assert taken(b, rule(4, group_size=2)) == (True, [1, 2, 4, 5])
  assert taken(b, rule(6, group_size=2)) == (False, [1, 2, 4, 5])


def test_groups_that_are_ready_on_one_tick_are_not_split():
  # Interleaved in the buffer; every row of both groups at tick 6.
  b = buffer([8, 13, 9, 12, 10, 15, 11, 14], done=True, finished_tick=6)
  assert taken(b, rule(4, group_size=4)) == (True, [0, 2, 4, 6])
  assert taken(b, rule(4, group_size=2)) == (True, [0, 2, 4, 6])
  assert taken(b, rule(2, group_size=2)) == (True, [0, 2])


def test_a_starving_group_is_waited_for_as_a_whole():
  rows = dict(admitted_at=[0, 0, 2, 2], finished_tick=[9, 0, 3, 4])
  b = buffer([0, 1, 2, 3], done=[1, 0, 1, 1], **rows)
  waits = rule(2, group_size=2, max_staleness=2)
  assert taken(b, waits, version=1) == (True, [2, 3])
  assert taken(b, waits, version=2)[0] is False
  b = b.replace(done=jnp.ones(4, bool), finished_tick=jnp.array([9, 10, 3, 4]))
  assert taken(b, waits, version=2) == (True, [0, 1])


# Admission.


def test_admission_fills_the_named_rows_and_no_other():
  b = buffer([3, FREE, 5, FREE], done=[0, 0, 1, 0], target_len=[1, 9, 2, 9])
  # What a free row still holds must not survive.
  b = b.replace(token_version=b.token_version.at[1].set(7))
  prompts = np.zeros((4, 3), np.int32)
  prompts[1] = [21, 22, 23]
  after = slots.admit(
    b,
    jnp.array([FREE, 9, FREE, FREE]),
    jnp.asarray(prompts),
    jnp.array([0, 3, 0, 0]),
    jnp.array([0, 4, 0, 0]),
    jnp.int32(6),
  )
  slots.check(after)
  others = np.array([0, 2, 3])
  rows = lambda s, i: jax.tree.map(lambda x: x[i], s.replace(tick=s.uid))
  assert_exact(rows(after, others), rows(b, others))
  new = rows(after, 1)
  assert new.uid == 9
  assert new.tokens.tolist() == [21, 22, 23, 0, 0, 0, 0, 0]
  assert (new.prompt_len, new.length, new.target_len) == (3, 3, 4)
  assert (new.admitted_at, new.finished_tick) == (6, 0)
  assert not new.done
  assert not new.token_version.any()
  assert not new.behavior_logprobs.any()
  assert after.tick == b.tick


# Harvest.

SIZED = dict(batch_size=2, max_response_len=5, eos_ids=(99, 34))


def harvested():
  """uid 6 with 4 response tokens, uid 3 with 2; uid 5 stays."""
  b = buffer([6, 5, 3], done=[1, 0, 1], length=[6, 5, 4], admitted_at=[1, 2, 3])
  b = b.replace(tokens=b.tokens.at[2, 3].set(34), prompt_len=b.prompt_len)
  # Row s says 100 s + p in column p.
  said = 100.0 * jnp.arange(3)[:, None] + jnp.arange(8.0)
  outputs = {
    "critic": said,
    "reference": said + 1000,
    "policy": said + 2000,
    "reward": said + 3000,
  }
  return b, *slots.harvest(b, jnp.array([1, 0, 1], bool), outputs, **SIZED)


def test_a_batch_is_sorted_by_uid_and_holds_whole_rows():
  _, _, batch = harvested()
  assert batch.uid.tolist() == [3, 6]
  assert batch.prompt_len.tolist() == [2, 2]
  assert batch.response_len.tolist() == [2, 4]
  assert batch.admitted_at.tolist() == [3, 1]
  assert batch.sequences.tolist() == [
    [30, 31, 32, 34, 0, 0, 0, 0],
    [60, 61, 62, 63, 64, 65, 0, 0],
  ]
  assert batch.has_eos.tolist() == [True, False]


def test_response_column_t_is_about_response_token_t():
  _, _, batch = harvested()
  # Response token t stands in column 2 + t; values there are -1 - column.
  t, f = True, False
  assert batch.mask.tolist() == [[t, t, f, f, f], [t, t, t, t, f]]
  assert batch.responses.tolist() == [[32, 34, 0, 0, 0], [62, 63, 64, 65, 0]]
  assert batch.behavior_logprobs.tolist() == [
    [-3, -4, 0, 0, 0],
    [-3, -4, -5, -6, 0],
  ]
  assert batch.token_version.tolist() == [[2, 3, 0, 0, 0], [2, 3, 4, 5, 0]]


def test_what_a_scorer_said_before_a_token_belongs_to_that_token():
  _, _, batch = harvested()
  # Token 0 stands in column 2, so the word on it was said in column 1.
  assert batch.ref_logprobs.tolist() == [
    [1201, 1202, 0, 0, 0],
    [1001, 1002, 1003, 1004, 0],
  ]
  assert (batch.start_logprobs - batch.ref_logprobs)[batch.mask].tolist() == [
    1000
  ] * 6
  # The critic's word after the last token is kept, too.
  assert batch.values.tolist() == [[201, 202, 203, 0, 0], [1, 2, 3, 4, 5]]
  # The score is the reward model's word on the last token.
  assert batch.scores.tolist() == [3203, 3005]


def test_the_value_after_a_response_that_fills_the_row_has_no_column():
  b = buffer([0], done=True, length=7)  # 2 + R
  said = {"critic": jnp.arange(8.0)[None]}
  _, batch = slots.harvest(
    b, jnp.array([True]), said, **SIZED | {"batch_size": 1}
  )
  assert batch.values.tolist() == [[1, 2, 3, 4, 5]]
  assert batch.mask.all()


def test_scorers_that_do_not_run_read_as_zeros():
  b = buffer([0, 1], done=True)
  _, batch = slots.harvest(b, jnp.array([True, True]), {}, **SIZED)
  for name in ("values", "ref_logprobs", "start_logprobs", "scores"):
    assert not getattr(batch, name).any()


def test_the_prefix_before_a_token_is_what_it_is_aligned_with():
  # columns of x   0  1  2  3  4  5     prompts of 3 and 1 tokens, R = 4
  x = jnp.arange(6.0) + jnp.array([[10.0], [20.0]])
  aligned = slots.response_aligned(x, jnp.array([3, 1]), max_response_len=4)
  assert aligned.tolist() == [[12, 13, 14, 15], [20, 21, 22, 23]]


def test_a_harvest_frees_its_rows_and_touches_no_other():
  before, after, _ = harvested()
  slots.check(after)
  assert after.uid.tolist() == [FREE, 5, FREE]
  rows = lambda s, i: jax.tree.map(lambda x: x[i], s.replace(tick=s.uid))
  assert_exact(rows(after, 1), rows(before, 1))
  assert_exact(rows(after, 0), rows(slots.init(1, ROW_LEN), 0))
  assert after.tick == before.tick


def test_a_restarted_row_is_its_prompt_again_and_keeps_its_age():
  b = buffer(
    [4, FREE, 6], done=[1, 0, 0], length=[6, 0, 5], admitted_at=[1, 0, 2]
  )
  b = b.replace(finished_tick=jnp.array([8, 0, 0]), tick=jnp.int32(9))
  after = slots.restart(b)
  slots.check(after)
  assert after.tokens.tolist() == [
    [40, 41] + [0] * 6,
    [0] * 8,
    [60, 61] + [0] * 6,
  ]
  assert after.length.tolist() == [2, 0, 2]
  assert after.uid.tolist() == [4, FREE, 6]
  assert after.admitted_at.tolist() == [1, 0, 2]
  assert after.tick == 9
  for gone in (after.done, after.behavior_logprobs, after.token_version):
    assert not gone.any()
  assert not after.finished_tick.any()


# Invariants.


def test_a_sound_buffer_passes_the_check():
  slots.check(slots.init(3, ROW_LEN))
  slots.check(buffer([4, FREE, 6], done=[1, 0, 0]))


@pytest.mark.parametrize(
  ("field", "at", "value"),
  [
    ("uid", 2, 4),  # twice in flight
    ("prompt_len", 1, -1),
    ("prompt_len", 0, 0),  # a used row without a prompt
    ("prompt_len", 0, 5),  # beyond the cursor
    ("length", 0, ROW_LEN + 1),
    ("tokens", (0, 4), 1),  # at the cursor: not yet written
    ("behavior_logprobs", (0, 1), -1.0),  # on the prompt
    ("behavior_logprobs", (0, 5), -1.0),  # beyond the cursor
    ("behavior_logprobs", (0, 2), 0.1),  # a probability above 1
    ("done", 1, True),  # a free row
    ("length", 1, 3),  # a free row
  ],
)
def test_the_check_sees_each_broken_invariant(field, at, value):
  b = buffer([4, FREE, 6], done=[1, 0, 0])
  broken = getattr(b, field).at[at].set(value)
  with pytest.raises(AssertionError):
    slots.check(b.replace(**{field: broken}))


def test_the_check_sees_arrays_of_different_length():
  b = buffer([4, FREE, 6])
  with pytest.raises(AssertionError):
    slots.check(b.replace(token_version=b.token_version[:, :-1]))


# Random walks.

NUM_SLOTS, BATCH_SIZE, MAX_PROMPT_LEN, MAX_RESPONSE_LEN = 8, 4, 3, 6


def token_at(uid, column):
  """What the fake decoder writes: a function of who and where; never 0."""
  return 1 + (7 * uid + 3 * column) % 89


@functools.partial(jax.jit, static_argnames=("group_size", "max_staleness"))
def fake_decode(b, version, *, group_size, max_staleness):
  """Ticks until the batch is complete; rows end at their target length."""
  sized = rule(BATCH_SIZE, group_size, max_staleness)

  def one_tick(b):
    rows = jnp.arange(NUM_SLOTS)
    column = jnp.where(b.is_live, b.length, b.tokens.shape[1])
    put = lambda x, new: x.at[rows, column].set(new, mode="drop")
    length = b.length + b.is_live
    ends = b.is_live & (length - b.prompt_len == b.target_len)
    return b.replace(
      tokens=put(b.tokens, token_at(b.uid, column)),
      behavior_logprobs=put(b.behavior_logprobs, -1.0),
      token_version=put(b.token_version, version),
      length=length,
      done=b.done | ends,
      finished_tick=jnp.where(ends, b.tick + 1, b.finished_tick),
      tick=b.tick + 1,
    )

  complete = lambda b: slots.is_complete(b, version, **sized)
  b = jax.lax.while_loop(lambda b: ~complete(b), one_tick, b)
  return b, slots.select(b, version, **sized)


take_out = jax.jit(
  functools.partial(
    slots.harvest,
    batch_size=BATCH_SIZE,
    max_response_len=MAX_RESPONSE_LEN,
    eos_ids=(0,),
  )
)
admit = jax.jit(slots.admit)


def walk_fns(group_size):
  """As much of the loop's functions as admission needs."""
  nobody = dict.fromkeys(flight.Fns._fields)
  sizes = dict.fromkeys(flight.Sizes._fields) | dict(
    num_slots=NUM_SLOTS,
    batch_size=BATCH_SIZE,
    group_size=group_size,
    max_prompt_len=MAX_PROMPT_LEN,
    row_len=MAX_PROMPT_LEN + MAX_RESPONSE_LEN,
    tile=score.Tile(1, 1, 1),
  )
  init = lambda: (slots.init(NUM_SLOTS, sizes["row_len"]), (), {})
  return flight.Fns(
    **nobody | dict(init=init, admit=admit, sizes=flight.Sizes(**sizes))
  )


def plain_step(rows, tick, version, *, group_size, max_staleness):
  """The same in Python: ticks until B rows of whole groups are ready.

  Args:
    rows: uid -> [tokens still to come, tick it was done at, admitted at].

  Returns:
    the tick then, and the uids that leave.
  """
  groups = {}
  for uid in rows:
    groups.setdefault(uid // group_size, []).append(uid)
  is_old = lambda uid: 0 <= max_staleness <= version - rows[uid][2]
  while True:
    ready = [g for g in groups.values() if not any(rows[u][0] for u in g)]
    waits = any(is_old(u) for g in groups.values() if g not in ready for u in g)
    if len(ready) * group_size >= BATCH_SIZE and not waits:
      break
    tick += 1
    for row in rows.values():
      if row[0]:
        row[0] -= 1
        row[1] = tick
  when = lambda g: (not is_old(g[0]), max(rows[u][1] for u in g), g[0])
  first = sorted(ready, key=when)[: BATCH_SIZE // group_size]
  return tick, sorted(u for g in first for u in g)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  group_size=st.sampled_from([1, 2, 4]),
  max_staleness=st.sampled_from([-1, 1, 2]),
  deltas=st.lists(st.integers(0, 4), min_size=4, max_size=8),
  lengths=st.lists(st.integers(1, MAX_RESPONSE_LEN), min_size=3, max_size=12),
  slot_order=st.permutations(range(NUM_SLOTS)),
)
def test_no_row_is_lost_doubled_split_or_starved(
  group_size, max_staleness, deltas, lengths, slot_order
):
  fns = walk_fns(group_size)
  state = flight.init(fns)
  prompt_of = lambda uid: flight.Prompt(
    np.arange(1, 2 + uid % MAX_PROMPT_LEN, dtype=np.int32),
    lengths[uid % len(lengths)],
  )
  plain, tick, seen = {}, 0, []
  bounds = dict(group_size=group_size, max_staleness=max_staleness)
  for version, delta in enumerate(deltas):
    before = state.next_uid
    state = flight.admit(
      fns,
      state,
      num_in_flight=BATCH_SIZE + delta,
      prompt_of=prompt_of,
      version=version,
      slot_order=np.array(slot_order),
    )
    for uid in range(before, state.next_uid):
      plain[uid] = [prompt_of(uid).target_len, 0, version]
    b, selected = fake_decode(state.slots, jnp.int32(version), **bounds)
    slots.check(b)
    b, batch = take_out(b, selected, {})
    slots.check(b)

    tick, expected = plain_step(plain, tick, version, **bounds)
    assert batch.uid.tolist() == expected
    assert b.tick == tick
    batch = jax.device_get(batch)
    for uid, prompt_len, response_len, row in zip(
      batch.uid, batch.prompt_len, batch.response_len, batch.responses
    ):
      columns = prompt_len + np.arange(response_len)
      assert response_len == prompt_of(uid).target_len
      assert prompt_len == len(prompt_of(uid).tokens)
      assert (row[:response_len] == token_at(uid, columns)).all()
    if max_staleness >= 0:
      assert (version - batch.admitted_at <= max_staleness).all()
    seen += expected
    plain = {u: row for u, row in plain.items() if u not in expected}
    state = dataclasses.replace(state, slots=b, uid=np.asarray(b.uid))
    in_flight = state.uid[state.in_flight].tolist()
    assert sorted(seen + in_flight) == list(range(state.next_uid))
  assert len(seen) == len(deltas) * BATCH_SIZE
