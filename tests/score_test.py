# SPDX-License-Identifier: Apache-2.0
"""Scoring by tiles: when a tile runs changes nothing, and none runs twice."""

import dataclasses

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import flight, jit_table, metrics, overlap

SIZES = tiny.SIZES
TILE_LEN = SIZES.tile.length
ROW_LEN, NUM_SLOTS = SIZES.row_len, SIZES.num_slots
# One full row, one that ends with a tile, one of a single tile, ...
LENGTHS = np.array([22, 16, 7, 9, 17, 2, 21, 8], np.int32)


@pytest.fixture(scope="module")
def setup():
  return tiny.setup()


@pytest.fixture(scope="module")
def params(setup):
  return setup.frozen | {"critic": setup.start["critic"]}


@pytest.fixture(scope="module")
def tokens():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, tiny.VOCAB, (NUM_SLOTS, ROW_LEN)).astype(np.int32)
  return np.where(np.arange(ROW_LEN) < LENGTHS[:, None], tokens, 0)


def scored(setup, params, tokens, rounds):
  """Scores rows that grow; returns the outputs and what was run.

  Args:
    setup: of `tiny`.
    params: by scorer.
    tokens: of the rows at the end.
    rounds: per round the lengths [S] then, and whether it is the last one.
  """
  state = flight.init(setup.fns)
  state = dataclasses.replace(state, uid=np.arange(NUM_SLOTS, dtype=np.int32))
  ran = dict.fromkeys(state.scorers, 0)
  for length, flush in rounds:
    state = dataclasses.replace(state, length=length, done=length == LENGTHS)
    so_far = np.where(np.arange(ROW_LEN) < length[:, None], tokens, 0)
    state, more, _ = overlap.score_rows(
      *(setup.fns, state, params, so_far),
      dict.fromkeys(params, state.in_flight),
      flush=flush,
    )
    ran = {k: ran[k] + more[k] for k in ran}
  outputs = {k: np.asarray(s.outputs) for k, s in state.scorers.items()}
  return outputs, ran, state


def inside(outputs):
  """The outputs of real columns; what is beyond a row is garbage."""
  return {
    k: [row[:n] for row, n in zip(x, LENGTHS)] for k, x in outputs.items()
  }


def growing(chunk_size):
  """Rows that grow by a chunk per round, each from a prompt of its own."""
  length = np.minimum(LENGTHS, np.arange(1, 9, dtype=np.int32) % 4 + 1)
  while (length < LENGTHS).any():
    length = np.minimum(length + chunk_size, LENGTHS).astype(np.int32)
    yield length, False
  yield LENGTHS, True


@pytest.mark.parametrize("chunk_size", [1, 5, 8, 64])
def test_tiles_scored_as_they_come_say_what_they_say_afterwards(
  setup, params, tokens, chunk_size
):
  afterwards, tiles, _ = scored(setup, params, tokens, [(LENGTHS, True)])
  streamed, tiles_too, _ = scored(setup, params, tokens, growing(chunk_size))
  assert_exact(inside(streamed), inside(afterwards))
  # 22 -> 3, 16 -> 2, 7 -> 1, 9 -> 2, 17 -> 3, 2 -> 1, 21 -> 3, 8 -> 1 tiles.
  assert tiles == tiles_too == dict(reward=16, reference=16, critic=16)


def test_scoring_takes_as_few_calls_as_there_are_tiles(setup, params, tokens):
  # 16 tiles, 3 to a call: 6 calls of each scorer.
  calls = []
  fns = setup.fns._replace(
    append={
      k: lambda *args, k=k, f=f: (calls.append(k), f(*args))[1]
      for k, f in setup.fns.append.items()
    }
  )
  counted = dataclasses.replace(setup, fns=fns)
  scored(counted, params, tokens, [(LENGTHS, True)])
  assert sorted(calls) == ["critic"] * 6 + ["reference"] * 6 + ["reward"] * 6


def test_an_incomplete_call_waits_unless_it_is_the_last(setup, params, tokens):
  # The row of 16 is done, those of 17, 21 and 22 lack one token, the others
  # have not begun. A tile of an unfinished row needs the token after it:
  #   21 of 22 -> 2     16 done -> 2     16 of 17 -> 1     20 of 21 -> 2
  length = np.array([21, 16, 1, 1, 16, 1, 20, 1], np.int32)
  _, ran, state = scored(setup, params, tokens, [(length, False)])
  assert ran["reward"] == state.frontier["reward"].sum() == 6  # of 7
  _, ran, _ = scored(setup, params, tokens, [(length, True)])
  assert ran["reward"] == 7


@jax.jit
def one_shot(params, tokens):
  """What the three scorers say, from one forward pass without a cache."""
  positions = jnp.broadcast_to(jnp.arange(ROW_LEN), tokens.shape)
  segments = jnp.zeros_like(tokens)
  lm, scalar = tiny.model(), tiny.model("scalar")
  said = {}
  for name in ("reward", "critic"):
    hidden = scalar.forward(params[name], tokens, positions, segments)
    said[name] = scalar.head(params[name], hidden)[..., 0]
  p = params["reference"]
  logits = lm.head(p, lm.forward(p, tokens, positions, segments))
  next_token = jnp.roll(tokens, -1, axis=1)[..., None]
  logprobs = jax.nn.log_softmax(logits)
  said["reference"] = jnp.take_along_axis(logprobs, next_token, 2)[..., 0]
  return said


def test_tiles_say_what_a_one_shot_forward_says(setup, params, tokens):
  tiles, _, _ = scored(setup, params, tokens, growing(5))
  said = jax.device_get(one_shot(params, tokens))
  assert min(x.std() for x in said.values()) > 0.1
  # The reference's word on the last token is about one that does not exist.
  for name, x in said.items():
    for row, n in enumerate(LENGTHS):
      end = n - 1 if name == "reference" else n
      assert_close(tiles[name][row, :end], x[row, :end])


def test_prefill_writes_the_cache_that_scoring_writes(setup, params, tokens):
  state = flight.init(setup.fns)
  slot, tile = np.array([0, 0, 3], np.int32), np.array([0, 1, 0], np.int32)
  lm_params = params["reference"]
  cache = setup.fns.prefill(lm_params, state.cache, tokens, slot, tile)
  scorer = setup.fns.append["reference"](
    lm_params, state.scorers["reference"], tokens, slot, tile
  )
  assert_exact(cache, scorer.cache)


def test_the_policy_cache_is_prefilled_up_to_the_cursor(setup, params, tokens):
  # Live rows of n tokens need columns 0 .. n - 2: ceil((n - 1) / 8) tiles.
  state = flight.init(setup.fns)
  state = dataclasses.replace(
    state,
    slots=state.slots.replace(tokens=jnp.asarray(tokens)),
    uid=np.array([0, 1, 2, 3, 4, 5, -1, 7], np.int32),
    length=LENGTHS,
    done=np.array([0, 0, 0, 0, 0, 1, 0, 0], bool),
  )
  pairs = []

  def prefill(params, cache, tokens, slot, tile):
    pairs.extend((s, t) for s, t in zip(slot.tolist(), tile.tolist()) if s < 8)
    return cache

  fns = setup.fns._replace(prefill=prefill)
  state = overlap.prefill_policy(fns, state, None)
  expected = {0: 3, 1: 2, 2: 1, 3: 1, 4: 2, 7: 1}
  assert sorted(pairs) == [
    (s, t) for s, n in expected.items() for t in range(n)
  ]
  overlap.prefill_policy(fns, state, None)
  assert len(pairs) == 10  # decoding goes on from there: nothing is redone


def tiles_of(length):
  return int(np.sum(-(-np.asarray(length) // TILE_LEN)))


@pytest.mark.parametrize("intra", ["none", "chunk"])
def test_frozen_scorers_never_score_a_tile_twice(setup, intra):
  deltas = (3, 4, 0, 4, 2, 4)
  run = tiny.train(setup, num_steps=6, intra=intra, delta=deltas.__getitem__)
  assert [r.deferred for r in run.rollouts] == list(deltas)
  harvested = sum(tiles_of(b.prompt_len + b.response_len) for b in run.batches)
  state = run.in_flight
  for name in ("reward", "reference"):
    ran = sum(r.tiles[name] for r in run.rollouts)
    assert ran == harvested + int(state.frontier[name][state.in_flight].sum())
  if intra == "chunk":
    # Rows were scored before they were deferred, else this shows nothing; the
    # critic has changed since, so its tiles of deferred rows were run again.
    assert sum(r.tiles["critic"] for r in run.rollouts) > ran


def test_a_critic_that_waits_for_the_batch_says_the_same_with_less_work():
  what = dict(num_steps=6, delta=lambda step: 4)
  ahead = tiny.train(tiny.variant(speculates=True), **what)
  waits = tiny.train(tiny.variant(speculates=False), **what)
  assert_exact(waits.params, ahead.params)
  assert_exact(waits.batches, ahead.batches)
  tiles = lambda run, name: [r.tiles[name] for r in run.rollouts]
  of_batch = [tiles_of(b.prompt_len + b.response_len) for b in waits.batches]
  assert tiles(waits, "critic") == of_batch
  assert sum(of_batch) < sum(tiles(ahead, "critic"))
  assert tiles(waits, "reward") == tiles(ahead, "reward")


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"),
  [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (0.7, 10, 0.9)],
)
def test_the_kl_to_an_equal_reference_is_zero(temperature, top_k, top_p):
  model = fakes.EmbeddingModel(tiny.VOCAB, 8, 24, is_lm=True)
  sampling = tiny.SAMPLING._replace(
    temperature=temperature, top_k=top_k, top_p=top_p
  )
  fns = jit_table.make_fns(
    sizes=SIZES,
    sampling=sampling,
    policy=model,
    scorers={"reference": model},
    algorithm=None,
  )
  params = model.init(jax.random.key(1))
  state = flight.admit(
    fns, flight.init(fns), num_in_flight=8, prompt_of=tiny.prompt_of, version=0
  )
  _, batch, _ = overlap.rollout(
    fns,
    state,
    dict(policy=params, reference=params),
    version=0,
    run_key=jax.random.key(7),
    chunk_size=6,
    intra="chunk",
    timers=metrics.Timers(),
  )
  batch = jax.device_get(batch)
  assert batch.behavior_logprobs.min() < -1
  assert_close(batch.ref_logprobs, batch.behavior_logprobs)


def test_the_kl_of_the_transformer_to_itself_is_zero(setup):
  batch = tiny.train(setup, num_steps=1).batches[0]
  assert batch.behavior_logprobs.min() < -1
  assert_close(batch.ref_logprobs, batch.behavior_logprobs)
