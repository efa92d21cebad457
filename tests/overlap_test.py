# SPDX-License-Identifier: Apache-2.0
"""The guarantees of the loop: streaming, chunks and slots change no bit;
nothing is lost, nothing is trained on twice, nobody waits for ever.

A run here is real PPO on a tiny transformer, with deferrals.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import flight, inverse_cdf, metrics, overlap, packing
from oppo_jax.algos import microbatch, ppo

NUM_STEPS = 7
DELTAS = (3, 4, 0, 2, 4, 1, 4)  # B = 4, S = 8
BATCH_SIZE = tiny.SIZES.batch_size


def train(s, num_steps=NUM_STEPS, delta=DELTAS.__getitem__, **options):
  return tiny.train(s, num_steps=num_steps, delta=delta, **options)


def same(a, b):
  """Batches, metrics of the updates and parameters: the same bits."""
  assert_exact(a.batches, b.batches)
  assert_exact(a.seen, b.seen)
  assert_exact(a.params, b.params)


@pytest.fixture(scope="module")
def setup():
  return tiny.setup()


@pytest.fixture(scope="module")
def streamed(setup):
  """Intra-step and inter-step overlap: the run that others are held against."""
  return train(setup)


def test_rows_are_deferred_and_updates_matter(setup, streamed):
  # Else the tests of this file would say little.
  assert [r.deferred for r in streamed.rollouts] == list(DELTAS)
  staleness = [
    step - b.token_version[b.mask] for step, b in enumerate(streamed.batches)
  ]
  assert max(x.max() for x in staleness) == 2
  mixed = [
    len(set(versions[mask].tolist())) > 1
    for b in streamed.batches
    for versions, mask in zip(b.token_version, b.mask)
  ]
  assert sum(mixed) >= 5  # responses that several policies wrote
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(), setup.start, streamed.params
  )
  assert min(jax.tree.leaves(moved)) > 1e-3
  assert {b.has_eos.all() for b in streamed.batches} == {True, False}


# G1, G2, G3: bits.


@pytest.mark.parametrize("intra", ["none", "sequence"])
def test_streaming_changes_no_bit(setup, streamed, intra):
  same(train(setup, intra=intra), streamed)


@pytest.mark.parametrize(
  "sizes", [(1,) * 7, (7,) * 7, (64,) * 7, (3, 1, 64, 7, 2, 5, 11)]
)
def test_chunk_size_changes_no_bit(setup, streamed, sizes):
  same(train(setup, chunk_size=sizes.__getitem__), streamed)


def test_chunk_size_changes_no_bit_without_streaming(setup, streamed):
  same(train(setup, chunk_size=lambda step: 1, intra="none"), streamed)


@pytest.mark.parametrize(
  "order", [(7, 6, 5, 4, 3, 2, 1, 0), (3, 6, 1, 0, 7, 5, 2, 4)]
)
def test_slots_change_no_bit(setup, streamed, order):
  same(train(setup, slot_order=np.array(order)), streamed)


def test_the_form_of_the_decode_loop_changes_no_bit(setup, streamed):
  same(train(tiny.variant(decode_loop="fori")), streamed)


def test_streaming_changes_no_bit_of_the_first_gradient(setup, streamed):
  sizes = setup.fns.sizes
  batch = streamed.batches[0]
  plan = packing.plan(
    batch.prompt_len + batch.response_len,
    order_seed=(0, 0),
    num_epochs=1,
    num_minibatches=1,
    width=sizes.row_len,
    micro_rows=2,
  )
  config = ppo.PPOConfig(**tiny.PPO)

  @jax.jit
  def gradient(batch):
    targets = ppo.make_targets(batch, config.kl_coef, config)
    loss = functools.partial(
      ppo.micro_loss,
      batch=batch,
      targets=targets,
      counts=ppo.Counts(
        tokens=jnp.sum(batch.mask).astype(float),
        values=jnp.sum(targets.value_mask).astype(float),
      ),
      config=config,
      policy=tiny.model(),
      critic=tiny.model("scalar"),
      sampling=dict(temperature=1.0, top_k=0, top_p=1.0),
    )
    minibatch = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), plan)
    return microbatch.accumulate(
      *(loss, setup.start, batch, minibatch),
      micro_rows=2,
      width=sizes.row_len,
    )[0]

  want = jax.device_get(gradient(batch))
  assert all(np.abs(g).max() > 1e-6 for g in jax.tree.leaves(want))
  for changes in (
    dict(intra="none"),
    dict(intra="sequence", chunk_size=lambda step: 1),
  ):
    other = train(setup, num_steps=1, **changes).batches[0]
    assert_exact(jax.device_get(gradient(other)), want)


def test_the_optimizer_remembers_the_same_gradients(setup, streamed):
  moments = []
  for intra in ("none", "chunk"):
    train(
      setup,
      num_steps=3,
      intra=intra,
      on_step=lambda state, in_flight: moments.append(
        metrics.fetch(state.opt_state)
      ),
    )
  assert_exact(moments[:3], moments[3:])
  assert len(moments) == 6


# G4: delta = 0.


@pytest.fixture(scope="module")
def serial(setup):
  """Plain PPO: nothing beyond B in flight, scored after generation."""
  return train(setup, intra="none", delta=lambda step: 0)


def test_delta_0_is_plain_ppo(serial):
  # The prompts in their order, one policy version per batch, nobody deferred.
  assert [r.deferred for r in serial.rollouts] == [0] * NUM_STEPS
  for step, batch in enumerate(serial.batches):
    first = step * BATCH_SIZE
    assert batch.uid.tolist() == list(range(first, first + BATCH_SIZE))
    assert (batch.token_version[batch.mask] == step).all()
    assert (batch.admitted_at == step).all()


@pytest.mark.parametrize(
  "changes",
  [
    dict(),
    dict(max_staleness=-1),
    dict(restarts=True),
    dict(keep_policy_cache=True, keep_critic_cache=True),
  ],
  ids=lambda changes: ",".join(changes) or "resume",
)
def test_delta_0_is_the_serial_baseline_bit_for_bit(setup, serial, changes):
  arm = tiny.variant(**changes)
  same(train(arm, delta=lambda step: 0), serial)


def test_the_first_ratio_of_a_step_is_one(serial):
  # Decode step against packed forward, float32: no more than rounding.
  assert max(seen["policy/ratio_first"] for seen in serial.seen) < 1e-4


# What is in a batch.


@pytest.fixture(scope="module")
def versions(setup):
  """Parameters of version 0, 1, ... of the streamed run."""
  found = [metrics.fetch(setup.start)]
  train(
    setup,
    on_step=lambda state, in_flight: found.append(metrics.fetch(state.params)),
  )
  return found


@functools.partial(jax.jit, static_argnames="head")
def forward(params, sequences, head):
  """Outputs [B, L, .] of a forward pass without cache, tiles or slots."""
  model = tiny.model(head)
  positions = jnp.broadcast_to(jnp.arange(sequences.shape[1]), sequences.shape)
  segments = jnp.zeros_like(sequences)
  return model.head(
    params, model.forward(params, sequences, positions, segments)
  )


def before_each_token(batch, x):
  """Response-aligned [B, R, .]: what was said before token t."""
  columns = batch.prompt_len[:, None] - 1 + np.arange(batch.mask.shape[1])
  return np.asarray(x)[np.arange(len(x))[:, None], columns]


def log_softmax(logits, tokens):
  logits = logits.astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  return np.take_along_axis(logits, tokens[..., None], -1)[..., 0]


def test_each_token_was_drawn_from_one_policy_version(streamed, versions):
  # Of the *whole* prefix, also where an earlier version wrote it: the policy
  # cache of a deferred row is that of the version that goes on.
  for batch in streamed.batches:
    for version in set(batch.token_version[batch.mask].tolist()):
      logits = forward(versions[version]["policy"], batch.sequences, "lm")
      said = log_softmax(before_each_token(batch, logits), batch.responses)
      is_its = batch.mask & (batch.token_version == version)
      assert_close(
        batch.behavior_logprobs[is_its], said[is_its].astype(np.float32)
      )


def test_a_row_is_a_function_of_seed_uid_and_policy_versions(
  streamed, versions
):
  # Every token is drawn once more, from nothing else: no slots, no cache.
  draws = 0
  key = jax.random.key(tiny.RUN_KEY_SEED)
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  redraw = jax.jit(
    lambda uid, column, logits: inverse_cdf.draw(
      logits, jax.vmap(jax.random.fold_in)(fold(key, uid), column)
    )
  )
  for batch in streamed.batches:
    for version in set(batch.token_version[batch.mask].tolist()):
      logits = forward(versions[version]["policy"], batch.sequences, "lm")
      logits = before_each_token(batch, logits)
      for t in range(batch.mask.shape[1]):
        is_its = batch.mask[:, t] & (batch.token_version[:, t] == version)
        drawn = redraw(batch.uid, batch.prompt_len + t, logits[:, t])
        assert_exact(np.asarray(drawn)[is_its], batch.responses[:, t][is_its])
        draws += is_its.sum()
  assert draws == sum(b.mask.sum() for b in streamed.batches) > 150


def test_values_are_those_of_the_critic_before_the_update(streamed, versions):
  # Also of rows that an earlier critic had begun to score.
  for step, batch in enumerate(streamed.batches):
    said = forward(versions[step]["critic"], batch.sequences, "scalar")[..., 0]
    said = before_each_token(batch, said)
    # One value more than there are tokens: after the last one, if it fits.
    valid = np.arange(batch.mask.shape[1]) <= batch.response_len[:, None]
    assert_close(batch.values[valid], said[valid])
    assert not batch.values[~valid].any()


def test_frozen_models_say_the_same_at_any_time(setup, streamed):
  for batch in streamed.batches:
    logits = forward(setup.frozen["reference"], batch.sequences, "lm")
    said = log_softmax(before_each_token(batch, logits), batch.responses)
    want = np.where(batch.mask, said, 0).astype(np.float32)
    assert_close(batch.ref_logprobs, want)
    said = forward(setup.frozen["reward"], batch.sequences, "scalar")[..., 0]
    last = batch.prompt_len + batch.response_len - 1
    assert_close(batch.scores, np.asarray(said)[np.arange(BATCH_SIZE), last])


def test_batches_are_sorted_by_uid(streamed):
  for batch, rollout in zip(streamed.batches, streamed.rollouts):
    assert batch.uid.tolist() == sorted(batch.uid.tolist())
    assert_exact(
      rollout.row_len, (batch.prompt_len + batch.response_len).astype(np.int32)
    )


def test_a_deferred_row_keeps_its_tokens(streamed):
  for step, batch in enumerate(streamed.batches):
    for uid, admitted, versions, mask, sequence, n in zip(
      batch.uid,
      batch.admitted_at,
      batch.token_version,
      batch.mask,
      batch.sequences,
      batch.prompt_len,
    ):
      assert sequence[:n].tolist() == tiny.prompt_of(uid).tokens.tolist()
      versions = versions[mask]
      assert versions[0] == admitted  # it was begun when it was admitted,
      assert (np.diff(versions) >= 0).all()  # and went on from there
      assert versions[-1] <= step


def test_a_rollout_counts_what_it_did(streamed):
  generated = sum(r.generated for r in streamed.rollouts)
  state = streamed.in_flight
  on_the_way = (state.length - state.prompt_len)[state.in_flight].sum()
  assert generated == on_the_way + sum(b.mask.sum() for b in streamed.batches)
  assert sum(r.ticks for r in streamed.rollouts) == state.tick
  for rollout in streamed.rollouts:
    # Chunks of 5 ticks; a look is needed even where nothing was to be decoded.
    assert rollout.chunks == max(1, -(-rollout.ticks // 5))


# G5: nobody is lost.


def check_nobody_is_lost(run, max_staleness):
  uids = run.uids
  state = run.in_flight
  in_flight = state.uid[state.in_flight].tolist()
  assert sorted(uids + in_flight) == list(range(state.next_uid))
  if max_staleness >= 0:
    for step, batch in enumerate(run.batches):
      assert (step - batch.admitted_at <= max_staleness).all()


def test_every_prompt_is_trained_on_once_or_still_in_flight(streamed):
  check_nobody_is_lost(streamed, tiny.SIZES.max_staleness)


def forced(lengths):
  """Prompts whose responses have these lengths, over and over."""
  return lambda uid: tiny.prompt_of(uid, lengths[uid % len(lengths)])


@hypothesis.settings(max_examples=40)
@hypothesis.given(
  lengths=st.lists(st.integers(1, 17), min_size=1, max_size=15),
  deltas=st.lists(st.integers(0, 4), min_size=3, max_size=7),
  max_staleness=st.sampled_from([1, 2, -1]),
  chunk_size=st.integers(1, 20),
)
def test_no_row_is_lost_doubled_or_starved(
  lengths, deltas, max_staleness, chunk_size
):
  prompt_of = forced(lengths)
  run = tiny.roll(
    tiny.light_loop(max_staleness=max_staleness),
    deltas=deltas,
    prompt_of=prompt_of,
    chunk_sizes=[chunk_size] * len(deltas),
  )
  check_nobody_is_lost(run, max_staleness)
  for batch in run.batches:
    want = [prompt_of(uid).target_len for uid in batch.uid]
    assert batch.response_len.tolist() == want


def long_row_run(max_staleness):
  """uid 0 has 17 tokens to say, all others 2."""
  target_len = lambda uid: 17 if uid == 0 else 2
  return tiny.roll(
    tiny.light_loop(max_staleness=max_staleness),
    deltas=(4,) * 9,
    prompt_of=lambda uid: tiny.prompt_of(uid, target_len(uid)),
    chunk_sizes=(6,) * 9,
  )


def test_a_starving_row_is_waited_for():
  run = long_row_run(max_staleness=2)
  # Step 0: rows 1 to 7 are done at tick 2; 1 2 3 4 leave, 5 6 7 are ready.
  # Step 1: 8 9 10 11 come in and are done 2 ticks later; 5 6 7 8 leave.
  # Step 2: uid 0 has 4 of its 17 tokens and has been deferred twice. It needs
  # 13 ticks more, and leaves first; then 9 10 11.
  assert [r.ticks for r in run.rollouts[:3]] == [2, 2, 13]
  uids = [b.uid.tolist() for b in run.batches[:3]]
  assert uids == [[1, 2, 3, 4], [5, 6, 7, 8], [0, 9, 10, 11]]


def test_without_a_bound_nobody_is_waited_for():
  run = long_row_run(max_staleness=-1)
  # 2 ticks a step; uid 0 has its 17 tokens at the first tick of step 8.
  assert [r.ticks for r in run.rollouts] == [2] * 8 + [1]
  assert [0 in b.uid for b in run.batches] == [False] * 8 + [True]


def test_a_batch_that_would_split_a_group_is_refused():
  with pytest.raises(ValueError, match="group_size=3"):
    tiny.light_loop(group_size=3)


# The other arms.


def test_restarted_rows_are_strictly_on_policy_and_not_lost(setup):
  arm = tiny.variant(restarts=True)
  run = train(arm)
  assert [r.deferred for r in run.rollouts] == list(DELTAS)
  check_nobody_is_lost(run, tiny.SIZES.max_staleness)
  for step, batch in enumerate(run.batches):
    assert (batch.token_version[batch.mask] == step).all()
  ages = [step - b.admitted_at.min() for step, b in enumerate(run.batches)]
  assert max(ages) >= 1  # somebody did start again
  assert max(seen["policy/ratio_first"] for seen in run.seen) < 1e-4
  same(train(arm, intra="none", chunk_size=lambda step: 2), run)


def test_a_kept_policy_cache_changes_no_bit_with_streaming(setup, streamed):
  arm = tiny.variant(keep_policy_cache=True)
  run = train(arm)
  check_nobody_is_lost(run, tiny.SIZES.max_staleness)
  same(train(arm, intra="none", chunk_size=lambda step: 2), run)
  # But it is another run: new queries meet old keys.
  pairs = list(zip(run.batches, streamed.batches))
  assert_exact(*pairs[0])
  assert any((a.scores != b.scores).any() for a, b in pairs[1:])


def test_a_kept_critic_cache_loses_nobody_and_scores_no_tile_twice(setup):
  run = train(tiny.variant(keep_critic_cache=True))
  check_nobody_is_lost(run, tiny.SIZES.max_staleness)
  assert sum(r.deferred for r in run.rollouts) > 0
  for rollout in run.rollouts:
    assert rollout.tiles["critic"] == rollout.tiles["reward"]


@pytest.mark.xfail(
  strict=True,
  reason="a kept value is of the critic that ran first: that depends on intra",
)
def test_a_kept_critic_cache_changes_no_bit_with_streaming(setup):
  arm = tiny.variant(keep_critic_cache=True)
  same(train(arm, intra="none"), train(arm))


def test_ratios_to_the_start_of_the_update_are_one_with_deferrals():
  s = tiny.setup(denominator="start")
  assert "policy" in s.fns.append
  run = train(s)
  stale = [
    (b.token_version < step)[b.mask].any() for step, b in enumerate(run.batches)
  ]
  assert sum(stale) >= 3
  assert max(seen["policy/ratio_first"] for seen in run.seen) < 1e-4
  same(train(s, intra="none", chunk_size=lambda step: 3), run)


def test_groups_leave_together(setup):
  # Two responses per group: uids 2k and 2k + 1.
  arm = tiny.variant(group_size=2)
  run = train(arm)
  for batch in run.batches:
    pairs = batch.uid.reshape(-1, 2)
    assert (pairs[:, 0] % 2 == 0).all()
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()
  check_nobody_is_lost(run, tiny.SIZES.max_staleness)
  assert sum(r.deferred for r in run.rollouts) > 0
  assert all(r.deferred % 2 == 0 for r in run.rollouts)
  same(train(arm, intra="none", chunk_size=lambda step: 1), run)
  same(train(arm, slot_order=np.arange(8)[::-1]), run)


# What the loop tells of rows that have ended.


@pytest.mark.parametrize("inter", ["resume", "restart"])
def test_a_row_that_ended_is_told_as_it_is_trained_on(
  setup, streamed, monkeypatch, inter
):
  told, rollout = [], overlap.rollout
  on_done = lambda uid, tokens: told.append((uid, tokens.tolist()))
  monkeypatch.setattr(
    overlap, "rollout", functools.partial(rollout, on_done=on_done)
  )
  s = setup
  if inter == "restart":
    s = tiny.variant(restarts=True)
  run = train(s)
  last = dict(told)
  for batch in run.batches:
    for uid, tokens, n in zip(batch.uid, batch.responses, batch.response_len):
      assert last[int(uid)] == tokens[:n].tolist()
  if inter == "resume":
    assert len(last) == len(told)  # once, however long it waited to be taken
    for batch, expected in zip(run.batches, streamed.batches):
      np.testing.assert_array_equal(batch.responses, expected.responses)


# When things are dispatched.


def dispatches(monkeypatch, s, intra):
  """What one rollout with chunks of 4 ticks does, in order.

  d = a chunk is dispatched, r = a report is read, s = tiles are dispatched
  (all scorers and calls of one round are one s).
  """
  events = []

  def log(event, f):
    def logged(*args, **kwargs):
      if event != "s" or events[-1:] != ["s"]:
        events.append(event)
      return f(*args, **kwargs)

    return logged

  fns = s.fns._replace(
    decode_chunk=log("d", s.fns.decode_chunk),
    append={k: log("s", f) for k, f in s.fns.append.items()},
  )
  # Prompts of 5 tokens; 4 of 8 rows are done at tick 14: reports at ticks 4, 8,
  # 12 and 14. Tiles are of 8 tokens, 3 to a call:
  #
  #   tick                        4        8       12       14
  #   row 0   2 tokens         done
  #   row 2   6                         done
  #   row 3  10                                  done
  #   row 4  14                                           done
  #   length, others              9       13       17       19
  lengths = (2, 17, 6, 10, 14, 17, 17, 17)
  state = flight.admit(
    fns,
    flight.init(fns),
    num_in_flight=8,
    prompt_of=lambda uid: flight.Prompt(np.arange(5) + 9, lengths[uid]),
    version=0,
  )
  with monkeypatch.context() as patched:
    patched.setattr(metrics, "fetch", log("r", metrics.fetch))
    overlap.rollout(
      fns,
      state,
      s.start | s.frozen,
      version=0,
      run_key=jax.random.key(3),
      chunk_size=4,
      intra=intra,
      timers=metrics.Timers(),
    )
  return "".join(events)


def test_reports_are_read_one_round_late(setup, monkeypatch):
  # A chunk is always on its way while the host reads the one before. The last
  # is dispatched in vain. All tiles run after it.
  assert dispatches(monkeypatch, setup, "none") == "d" + 4 * "dr" + "s"


def test_chunks_are_scored_while_the_next_is_decoded(setup, monkeypatch):
  # Report 1: 8 rows have a first tile (a row of 9 tokens; row 0 is done): 2
  # calls, 2 tiles wait. Report 2: one more, the second of row 2: a call.
  # Report 3: 6 more. Report 4: the last one of row 4, and no row waits.
  assert dispatches(monkeypatch, setup, "chunk") == "d" + 4 * "drs"


def test_finished_rows_are_scored_while_others_decode(setup, monkeypatch):
  # Report 1: one tile of row 0 waits. Report 2: two of row 2: a call. Report 3:
  # two of row 3 wait. Report 4: three of row 4: all that is left.
  assert dispatches(monkeypatch, setup, "sequence") == "ddrdrsdrdrs"
