# SPDX-License-Identifier: Apache-2.0
"""Decoding: what is drawn depends on who draws, never on the company."""

import functools
import types as python_types

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import decode, generation, score, slots, types
from oppo_jax.tasks import base as tasks_base

NUM_SLOTS, MAX_PROMPT_LEN, ROW_LEN = 8, 5, 22
RUN_KEY = jax.random.key(7)
TRANSFORMER = tiny.model()
EMBEDDING = fakes.EmbeddingModel(tiny.VOCAB, 8, 24, is_lm=True)
SCRIPTED = fakes.ScriptedModel(tiny.VOCAB)
PARAMS = {
  TRANSFORMER: tiny.params(TRANSFORMER, 0),
  EMBEDDING: EMBEDDING.init(jax.random.key(1)),
}
VERSION = np.int32(3)
EVERYBODY = tuple(range(NUM_SLOTS))
FREE = types.Slots.FREE


@functools.lru_cache
def chunk_fn(
  model,
  sampling=tiny.SAMPLING,
  loop="while",
  batch_size=NUM_SLOTS,
  decode_rows=0,
):
  """A jitted `decode_chunk` that stops when `batch_size` rows are done."""
  rule = dict(batch_size=batch_size, group_size=1, max_staleness=-1)
  return jax.jit(
    functools.partial(
      decode.decode_chunk,
      policy=model,
      sampling=sampling,
      is_complete=functools.partial(slots.is_complete, **rule),
      select=functools.partial(slots.select, **rule),
      loop=loop,
      decode_rows=decode_rows,
    ),
    static_argnames="chunk_size" if loop == "fori" else (),
  )


admit = jax.jit(slots.admit)
prefill = jax.jit(
  functools.partial(score.prefill, tile_len=8), static_argnames="model"
)


def start(model, params, uids, target_len=lambda uid: 0):
  """Slots and cache with these uids' prompts, in this order of slots."""
  num_slots = len(uids)
  prompts = np.zeros((num_slots, MAX_PROMPT_LEN), np.int32)
  prompt_len = np.zeros(num_slots, np.int32)
  for slot, uid in enumerate(uids):
    if uid != FREE:
      tokens = tiny.prompt_of(uid).tokens
      prompts[slot, : len(tokens)], prompt_len[slot] = tokens, len(tokens)
  targets = np.array([target_len(uid) for uid in uids], np.int32)
  buffer = admit(
    slots.init(num_slots, ROW_LEN),
    np.array(uids, np.int32),
    *(prompts, prompt_len, targets, VERSION),
  )
  everyone, first = np.arange(num_slots), np.zeros(num_slots, int)
  cache = model.init_cache(num_slots, score.cache_len(ROW_LEN, 8))
  return buffer, prefill(
    params, cache, buffer.tokens, everyone, first, model=model
  )


def run(fn, params, state, chunk_sizes):
  """Chunks of these sizes, the last one for ever, until the stop.

  Returns:
    buffer, cache, the last report, and the number of chunks.
  """
  buffer, cache = state
  for i in range(10_000):
    chunk_size = chunk_sizes[min(i, len(chunk_sizes) - 1)]
    buffer, cache, report = fn(
      *(params, buffer, cache, VERSION, RUN_KEY), chunk_size=chunk_size
    )
    if report.is_complete:
      return buffer, cache, report, i + 1
  raise AssertionError("the batch never was complete")


def decoded(model=TRANSFORMER, uids=EVERYBODY, chunk_sizes=(64,), **options):
  """All rows from their prompts to their ends."""
  target_len = options.pop("target_len", lambda uid: 0)
  params = options.pop("params", PARAMS.get(model))
  state = start(model, params, uids, target_len)
  buffer, *_ = run(chunk_fn(model, **options), params, state, chunk_sizes)
  slots.check(buffer)
  return jax.device_get(buffer)


def by_uid(buffer):
  """uid -> all that is known of its row."""
  rows = buffer.replace(tick=buffer.uid)
  return {
    int(uid): jax.tree.map(lambda x, i=i: x[i], rows)
    for i, uid in enumerate(buffer.uid)
  }


@pytest.fixture(scope="module")
def whole():
  """Uids 0 to 7 in slots 0 to 7, decoded to their ends in one chunk."""
  return decoded()


def test_rows_are_of_uneven_length(whole):
  # Else the tests of this file would say little.
  response_len = whole.length - whole.prompt_len
  assert len(set(response_len.tolist())) >= 4
  assert response_len.max() == tiny.SAMPLING.max_response_len
  assert whole.done.all()
  assert (whole.token_version[whole.behavior_logprobs < 0] == VERSION).all()


# Bits.


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 1, 9, 2)])
def test_tokens_do_not_depend_on_chunk_size(whole, sizes):
  assert_exact(decoded(chunk_sizes=sizes), whole)


def test_tokens_do_not_depend_on_the_slot(whole):
  permuted = decoded(uids=(3, 7, 0, 5, 1, 6, 4, 2))
  assert permuted.uid[0] == 3
  assert_exact(by_uid(permuted), by_uid(whole))


def test_tokens_do_not_depend_on_the_neighbours(whole):
  others = by_uid(decoded(uids=(30, 31, 5, 32, 33, 34, 2, 35)))
  for uid in (2, 5):
    assert_exact(others[uid], by_uid(whole)[uid])


def test_both_loops_draw_the_same_tokens(whole):
  # 13 ticks at a time: the second chunk runs on after the last row is done.
  assert_exact(decoded(chunk_sizes=(13,), loop="fori"), whole)


@pytest.mark.parametrize("loop", ["while", "fori"])
def test_a_chunk_after_the_batch_is_complete_changes_nothing(loop):
  params, fn = (
    PARAMS[TRANSFORMER],
    chunk_fn(TRANSFORMER, loop=loop, batch_size=4),
  )
  state = start(TRANSFORMER, params, EVERYBODY)
  buffer, cache, report, _ = run(fn, params, state, (13,))
  assert not buffer.done.all()  # somebody would go on
  again, _, report_again = fn(
    *(params, buffer, cache, VERSION, RUN_KEY), chunk_size=13
  )
  assert_exact(again, buffer)
  assert_exact(report_again, report)


@pytest.mark.parametrize("loop", ["while", "fori"])
def test_rows_that_were_stopped_go_on_as_if_they_had_not_been(whole, loop):
  params, fn = (
    PARAMS[TRANSFORMER],
    chunk_fn(TRANSFORMER, loop=loop, batch_size=4),
  )
  state = start(TRANSFORMER, params, EVERYBODY)
  buffer, cache, _, _ = run(fn, params, state, (13,))
  buffer, cache, _ = fn(
    *(params, buffer, cache, VERSION, RUN_KEY), chunk_size=13
  )  # a chunk ahead of what the host knows
  rest = chunk_fn(TRANSFORMER)  # to the last row
  buffer, *_ = run(rest, params, (buffer, cache), (64,))
  assert_exact(buffer, whole)


# A few live rows at a time.


@pytest.fixture(scope="module", params=[1, 3, 4])
def few(request):
  """(rows per call, uids 0 to 7 decoded that way)."""
  return request.param, decoded(decode_rows=request.param)


def test_a_few_rows_at_a_time_say_the_same(few, whole):
  _, buffer = few
  for name in ("tokens", "length", "done", "finished_tick"):
    assert_exact(getattr(buffer, name), getattr(whole, name))
  assert_close(buffer.behavior_logprobs, whole.behavior_logprobs)


def test_a_few_rows_at_a_time_depend_on_no_chunk_slot_or_neighbor(few):
  n, buffer = few
  rows = by_uid(buffer)
  assert_exact(decoded(chunk_sizes=(3, 1, 9), decode_rows=n), buffer)
  assert_exact(decoded(chunk_sizes=(13,), loop="fori", decode_rows=n), buffer)
  permuted = decoded(uids=(3, 7, 0, 5, 1, 6, 4, 2), decode_rows=n)
  assert_exact(by_uid(permuted), rows)
  others = by_uid(decoded(uids=(30, 31, 5, 32, 33, 34, 2, 35), decode_rows=n))
  for uid in (2, 5):
    assert_exact(others[uid], rows[uid])


def test_a_few_rows_at_a_time_depend_on_no_number_of_slots(few):
  # All slots at once would move log-probs in the last bit here.
  n, buffer = few
  uids = (FREE, 3, FREE, 7, 0, FREE, 5, 1, FREE, 6, 4, 2, FREE)
  found = by_uid(decoded(uids=uids, decode_rows=n))
  del found[FREE]
  assert_exact(found, by_uid(buffer))


def test_only_live_rows_go_through_the_model():
  lengths = [1, 1, 1, 2, 2, 3, 3, 9]
  state = start(EMBEDDING, PARAMS[EMBEDDING], EVERYBODY, lengths.__getitem__)
  calls = []

  def apply(params, tokens, start, cache, slots):
    jax.debug.callback(lambda rows: calls.append(rows.tolist()), slots)
    return EMBEDDING.apply(params, tokens, start, cache, slots)

  model = python_types.SimpleNamespace(apply=apply, head=EMBEDDING.head)
  fn = chunk_fn.__wrapped__(model, decode_rows=4)
  run(fn, PARAMS[EMBEDDING], state, (64,))
  jax.effects_barrier()
  live = [[slot for slot in rows if slot < NUM_SLOTS] for rows in calls]
  # Eight rows, five, three, then the last one alone for six ticks.
  assert list(map(len, live)) == [4, 4, 4, 1, 3] + [1] * 6
  assert sorted(live[0] + live[1]) == list(EVERYBODY)
  assert sorted(live[2] + live[3]) == [3, 4, 5, 6, 7]
  assert live[5:] == [[7]] * 6


# Token time.


def plain_stop(lengths, batch_size):
  """Ticks until `batch_size` rows are done, and how far each row then is."""
  tick, have = 0, [0] * len(lengths)
  while sum(h == n for h, n in zip(have, lengths)) < batch_size:
    tick += 1
    have = [min(h + 1, n) for h, n in zip(have, lengths)]
  return tick, have


@pytest.mark.parametrize("loop", ["while", "fori"])
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_the_buffer_stops_at_the_tick_that_completes_the_batch(
  chunk_size, loop
):
  # The 4th of 1 2 3 5 5 8 9 17 is a 5: five rows are done then, two of them on
  # that tick, of which uid 2 was admitted first.
  lengths = [3, 9, 5, 17, 2, 5, 8, 1]
  tick, have = plain_stop(lengths, 4)
  assert (tick, have) == (5, [3, 5, 5, 5, 2, 5, 5, 1])
  fn = chunk_fn(EMBEDDING, loop=loop, batch_size=4)
  params = PARAMS[EMBEDDING]
  state = start(EMBEDDING, params, EVERYBODY, lengths.__getitem__)
  buffer, _, report, num_chunks = run(fn, params, state, (chunk_size,))
  assert num_chunks == -(-tick // chunk_size)
  assert report.tick == buffer.tick == tick
  assert (report.length - buffer.prompt_len).tolist() == have
  assert np.flatnonzero(report.done).tolist() == [0, 2, 4, 5, 7]
  assert np.flatnonzero(report.selected).tolist() == [0, 2, 4, 7]
  assert buffer.finished_tick.tolist() == [3, 0, 5, 0, 2, 5, 0, 1]
  for name in ("uid", "length", "done", "tokens"):
    assert_exact(getattr(report, name), getattr(buffer, name))


@pytest.mark.parametrize("seed", range(3))
def test_ticks_are_those_that_the_lengths_predict(seed):
  lengths = np.random.default_rng(seed).integers(1, 18, NUM_SLOTS).tolist()
  tick, have = plain_stop(lengths, 4)
  params = PARAMS[EMBEDDING]
  state = start(EMBEDDING, params, EVERYBODY, lengths.__getitem__)
  buffer, *_ = run(chunk_fn(EMBEDDING, batch_size=4), params, state, (6,))
  assert buffer.tick == tick
  assert (buffer.length - buffer.prompt_len).tolist() == have


def test_a_free_slot_stays_free():
  uids = (0, 1, types.Slots.FREE, 3, 4, 5, 6, types.Slots.FREE)
  params = PARAMS[EMBEDDING]
  buffer, cache = start(EMBEDDING, params, EVERYBODY)
  empty = slots.init(NUM_SLOTS, ROW_LEN)
  is_free = np.array(uids) == types.Slots.FREE
  pick = lambda e, x: (
    x
    if x.ndim == 0
    else np.where(is_free.reshape(-1, *[1] * (x.ndim - 1)), e, x)
  )
  buffer = jax.tree.map(pick, empty, buffer)
  fn = chunk_fn(EMBEDDING, batch_size=6)
  buffer, *_ = run(fn, params, (buffer, cache), (64,))
  slots.check(buffer)
  assert buffer.uid.tolist() == list(uids)
  assert int(buffer.done.sum()) == 6


# Distributions.


@jax.jit
def forward_logits(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = TRANSFORMER.forward(
    params, tokens, positions, jnp.zeros_like(tokens)
  )
  return TRANSFORMER.head(params, hidden)


def embedding_logits(params, tokens):
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  hidden = EMBEDDING.forward(params, tokens, positions, np.zeros_like(tokens))
  return EMBEDDING.head(params, hidden)


def plain_distribution(logits, sampling):
  """Log-probs over the vocabulary, one position, float64; -inf = never."""
  logits = np.asarray(logits, np.float64) / sampling.temperature
  order = np.argsort(-logits)[: sampling.top_k or None]
  probs = np.exp(logits[order] - logits.max())
  probs /= probs.sum()
  kept = order[np.cumsum(probs) - probs < sampling.top_p]
  out = np.full(logits.shape, -np.inf)
  out[kept] = logits[kept] - np.log(np.exp(logits[kept]).sum())
  return out


def check_logprobs(buffer, logits, sampling):
  """Every token's stored log-prob is the one that a forward pass gives."""
  for row, length in enumerate(buffer.length):
    for column in range(buffer.prompt_len[row], length):
      said = plain_distribution(logits[row, column - 1], sampling)
      token = buffer.tokens[row, column]
      assert np.isfinite(said[token])  # drawn from what is kept
      stored = buffer.behavior_logprobs[row, column]
      assert_close(stored, np.float32(said[token]))


def test_logprobs_equal_those_of_a_forward_pass(whole):
  logits = np.asarray(forward_logits(PARAMS[TRANSFORMER], whole.tokens))
  check_logprobs(whole, logits, tiny.SAMPLING)


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p"),
  [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (0.7, 10, 0.9)],
)
def test_logprobs_are_of_the_sampling_distribution(temperature, top_k, top_p):
  sampling = tiny.SAMPLING._replace(
    temperature=temperature, top_k=top_k, top_p=top_p
  )
  buffer = decoded(EMBEDDING, sampling=sampling)
  logits = embedding_logits(PARAMS[EMBEDDING], buffer.tokens)
  check_logprobs(buffer, np.asarray(logits), sampling)


def test_tokens_are_drawn_with_their_probabilities():
  probs = np.array([0.5, 0.3, 0.15, 0.05])
  n = 4000
  tokens, logprobs = jax.jit(
    functools.partial(
      decode.sample, sampling=tiny.SAMPLING._replace(eos_ids=(3,))
    )
  )(
    jnp.broadcast_to(jnp.log(probs), (n, 4)).astype(jnp.float32),
    jnp.arange(n) % 50,  # who
    jnp.arange(n) // 50,  # where
    *jnp.zeros((2, n), bool),
    RUN_KEY,
  )
  assert_close(np.asarray(logprobs), np.log(probs)[tokens].astype(np.float32))
  share = np.bincount(tokens, minlength=4) / n
  # Four standard deviations of a share: 4 sqrt(p (1 - p) / n).
  assert (np.abs(share - probs) < 4 * np.sqrt(probs * (1 - probs) / n)).all()


def test_a_draw_is_a_function_of_who_and_where():
  logits = jnp.zeros((6, 1000))
  draw = lambda uid, position, key=RUN_KEY: decode.sample(
    logits,
    jnp.array(uid),
    jnp.array(position),
    *jnp.zeros((2, 6), bool),
    key,
    sampling=tiny.SAMPLING,
  )[0].tolist()
  first = draw([0, 1, 2, 3, 3, 4], [5, 5, 5, 5, 6, 3])
  assert len(set(first)) == 6
  assert draw([4, 3, 3, 2, 1, 0], [3, 6, 5, 5, 5, 5]) == first[::-1]
  # Who and where are not added up: uid 3 in column 4 is not uid 4 in column 3.
  swapped = draw([3, 4] * 3, [4, 3] * 3)
  assert swapped[1] == first[5]
  assert swapped[0] != swapped[1]
  other = draw([0, 1, 2, 3, 3, 4], [5, 5, 5, 5, 6, 3], jax.random.key(8))
  assert all(a != b for a, b in zip(other, first))


def test_greedy_tokens_are_the_argmax_of_a_forward_on_the_growing_prefix():
  sampling = tiny.SAMPLING._replace(temperature=0.0)
  buffer = decoded(sampling=sampling)
  for row in range(3):
    n = int(buffer.prompt_len[row])
    tokens = np.zeros((NUM_SLOTS, ROW_LEN), np.int32)  # one shape, one compile
    tokens[0, :n] = buffer.tokens[row, :n]
    while n < buffer.length[row]:
      logits = forward_logits(PARAMS[TRANSFORMER], tokens)[0, n - 1]
      tokens[0, n] = logits.argmax()
      n += 1
    assert_exact(tokens[0], buffer.tokens[row])


# Ends.

LOUD = 30.0  # a logit that is always drawn: the others have 31 * exp(-30)


def script(*tokens, then):
  """Logits that say `tokens` in columns 1, 2, ..., then `then` for ever."""
  say = np.array([*tokens, *[then] * (24 - len(tokens))])
  return jnp.asarray(LOUD * np.eye(tiny.VOCAB)[say], jnp.float32)


def test_an_eos_is_part_of_the_response():
  # Column   0  1  2  3  4  5  6    the prompt is 1 to 5 tokens long
  #          p  9  9  9  9  9  EOS
  buffer = decoded(SCRIPTED, params=script(9, 9, 9, 9, 9, then=2))
  assert buffer.length.tolist() == [7] * 8
  assert (buffer.tokens[:, 6] == 2).all()
  assert buffer.finished_tick.tolist() == (7 - buffer.prompt_len).tolist()
  batch = slots.harvest(
    buffer,
    jnp.ones(8, bool),
    {},
    batch_size=8,
    max_response_len=17,
    eos_ids=(2,),
  )[1]
  assert batch.response_len.tolist() == (7 - buffer.prompt_len).tolist()
  assert batch.has_eos.all()
  ends = np.take_along_axis(
    np.asarray(batch.responses), np.asarray(batch.response_len)[:, None] - 1, 1
  )
  assert (ends == 2).all()


@pytest.mark.parametrize("eos_id", tiny.EOS_IDS)
def test_each_eos_ends_a_response(eos_id):
  buffer = decoded(SCRIPTED, params=script(9, 9, 9, 9, 9, 9, then=eos_id))
  assert buffer.length.tolist() == [8] * 8


def test_a_response_ends_at_its_limit():
  buffer = decoded(SCRIPTED, params=script(then=9))
  assert (buffer.length - buffer.prompt_len).tolist() == [17] * 8
  assert buffer.done.all()


def test_token_0_counts_like_any_other():
  # It is what lies beyond a cursor, and often the id used for padding.
  buffer = decoded(SCRIPTED, params=script(then=0))
  assert (buffer.length - buffer.prompt_len).tolist() == [17] * 8
  batch = slots.harvest(
    buffer,
    jnp.ones(8, bool),
    {},
    batch_size=8,
    max_response_len=17,
    eos_ids=(2,),
  )[1]
  assert batch.mask.all()
  assert not batch.responses.any()
  assert (batch.response_len == 17).all()


def test_sampled_zeros_inside_a_response_have_a_logprob(whole):
  columns = np.arange(ROW_LEN)
  inside = (columns >= whole.prompt_len[:, None]) & (
    columns < whole.length[:, None]
  )
  zeros = inside & (whole.tokens == 0)
  assert zeros.any()
  assert (whole.behavior_logprobs[zeros] < 0).all()


def test_forced_lengths_end_exactly_there():
  lengths = [3, 9, 5, 17, 2, 5, 8, 1]
  buffer = decoded(EMBEDDING, target_len=lengths.__getitem__)
  assert (buffer.length - buffer.prompt_len).tolist() == lengths
  logits = np.asarray(embedding_logits(PARAMS[EMBEDDING], buffer.tokens))
  for row, (n, length) in enumerate(zip(buffer.prompt_len, buffer.length)):
    response = buffer.tokens[row, n:length]
    assert response[-1] == tiny.EOS_IDS[0]
    assert not np.isin(response[:-1], tiny.EOS_IDS).any()
  # Log-probs stay those of the distribution that nobody forced.
  check_logprobs(buffer, logits, tiny.SAMPLING)


def test_a_forced_end_that_would_never_be_drawn_has_a_finite_logprob():
  # The script is sure of token 9; top_k = 1 leaves nothing else.
  sampling = tiny.SAMPLING._replace(top_k=1)
  buffer = decoded(
    SCRIPTED, params=script(then=9), sampling=sampling, target_len=lambda u: 4
  )
  assert (buffer.length - buffer.prompt_len).tolist() == [4] * 8
  last = np.take_along_axis(
    buffer.behavior_logprobs, buffer.length[:, None] - 1, axis=1
  )
  assert_close(last[:, 0], np.full(8, -LOUD, np.float32))


# Evaluation: the same loop.


@pytest.fixture(scope="module")
def generate():
  fns = generation.make_fns(
    EMBEDDING,
    sampling=tiny.SAMPLING,
    num_slots=NUM_SLOTS,
    max_prompt_len=MAX_PROMPT_LEN,
    tile=score.Tile(rows=3, length=8, logprob_chunk=16),
    decode_loop="while",
    decode_rows=0,
  )
  return lambda prompts: generation.generate(
    fns, PARAMS[EMBEDDING], prompts, run_key=RUN_KEY
  )


def test_evaluation_answers_each_prompt_in_its_place(generate):
  prompts = [tiny.prompt_of(uid).tokens for uid in range(21)]
  responses = generate(prompts)
  assert len(responses) == 21
  # The first eight are those that these uids draw in training.
  rows = by_uid(decoded(EMBEDDING))
  for uid in range(8):
    row = rows[uid]
    want = row.tokens[row.prompt_len : row.length]
    assert responses[uid].tolist() == want.tolist()


def test_an_answer_does_not_depend_on_the_other_prompts(generate):
  prompts = [tiny.prompt_of(uid).tokens for uid in range(21)]
  all_of_them, a_few = generate(prompts), generate(prompts[:3])
  assert_exact(a_few, all_of_them[:3])


def test_accuracy_counts_what_was_cut_at_the_limit():
  right = lambda example, text: float(example == text)
  task = tasks_base.Task("same", None, right, None, None)
  tokens = python_types.SimpleNamespace(
    decode=lambda ids: "".join(map(str, ids)), eos_ids=(9,)
  )
  # Right; wrong and cut; right and ends on the last token: not cut.
  responses = [np.array(x) for x in ([1, 9], [1, 2, 3, 4], [1, 2, 3, 9])]
  got = generation.grade(
    task, ["19", "7", "1239"], responses, tokens=tokens, max_response_len=4
  )
  assert got.accuracy == pytest.approx(2 / 3)
  assert got.mean_len == pytest.approx(10 / 3)
  assert got.truncated == pytest.approx(1 / 3)
