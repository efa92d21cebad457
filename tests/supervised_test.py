# SPDX-License-Identifier: Apache-2.0
"""Packing loses nothing, and packed losses are those of separate rows."""

import dataclasses
import functools
import itertools

import fakes
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import metrics, supervised, texts
from oppo_jax.texts import Text

WIDTH = 12
# prompt and response lengths of a text that fits into a row
LENGTHS = st.tuples(st.integers(1, 4), st.integers(1, 8))


def texts_of(lengths):
  """Texts whose tokens all differ: text i of item j counts from 1 upwards."""
  count = itertools.count(1)
  return [
    tuple(
      Text(np.array([next(count) for _ in range(p + r)], np.int32), p)
      for p, r in item
    )
    for item in lengths
  ]


def packed_items(items, *, rows, num_items, width=WIDTH):
  """What lands in the batch, and how many items were taken off the stream."""
  stream = iter(items)
  batch = texts.pack(stream, rows=rows, width=width, num_items=num_items)
  return batch, len(items) - len(list(stream))


@hypothesis.given(
  lengths=st.lists(st.lists(LENGTHS, min_size=2, max_size=2), min_size=1),
  rows=st.integers(2, 4),
  num_items=st.integers(1, 6),
)
def test_packing_neither_overlaps_nor_loses(lengths, rows, num_items):
  items = texts_of(lengths)
  batch, seen = packed_items(items, rows=rows, num_items=num_items)
  num = int(batch.item_mask.sum())
  assert 1 <= num <= num_items
  assert batch.item_mask[:num].all()
  assert num <= seen <= num + 1  # one that did not fit is dropped
  placed = [text for item in items[:num] for text in item]
  assert (batch.segments >= 0).sum() == sum(len(t.tokens) for t in placed)
  for segment, text in enumerate(placed):
    row, column = np.nonzero(batch.segments == segment)
    assert len(set(row)) == 1
    np.testing.assert_array_equal(np.diff(column), 1)
    cells = batch.segments == segment
    np.testing.assert_array_equal(batch.tokens[cells], text.tokens)
    np.testing.assert_array_equal(
      batch.positions[cells], np.arange(len(text.tokens))
    )
  ends = batch.tokens.reshape(-1)[batch.last[:num]]
  np.testing.assert_array_equal(
    ends, [[text.tokens[-1] for text in item] for item in items[:num]]
  )


@hypothesis.given(
  lengths=st.lists(st.lists(LENGTHS, min_size=1, max_size=1), min_size=1),
  rows=st.integers(1, 3),
)
def test_targets_are_response_tokens_of_the_same_sequence(lengths, rows):
  items = texts_of(lengths)
  batch, _ = packed_items(items, rows=rows, num_items=len(items))
  placed = [text for (text,) in items[: int(batch.item_mask.sum())]]
  following = np.roll(batch.tokens, -1, axis=1)[batch.is_target]
  expected = [text.tokens[text.prompt_len :] for text in placed]
  assert sorted(following) == sorted(np.concatenate(expected))


def test_a_small_batch_by_hand():
  """Rows of 8; the second pair's longer text opens the second row."""
  items = texts_of([[(1, 2), (2, 2)], [(1, 1), (1, 4)], [(4, 4), (1, 1)]])
  batch, seen = packed_items(items, rows=2, num_items=5, width=8)
  assert seen == 3  # the last pair does not fit: dropped
  np.testing.assert_array_equal(
    batch.tokens,
    [[1, 2, 3, 4, 5, 6, 7, 0], [8, 9, 10, 11, 12, 13, 14, 0]],
  )
  np.testing.assert_array_equal(
    batch.segments,
    [[0, 0, 0, 1, 1, 1, 1, -1], [2, 2, 3, 3, 3, 3, 3, -1]],
  )
  np.testing.assert_array_equal(
    batch.positions,
    [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 0]],
  )
  o, x = False, True
  np.testing.assert_array_equal(
    batch.is_target,
    [[x, x, o, o, x, x, o, o], [x, o, x, x, x, x, o, o]],
  )
  np.testing.assert_array_equal(batch.last[:2], [[2, 6], [9, 14]])
  np.testing.assert_array_equal(batch.item_mask, [x, x, o, o, o])


def test_a_pair_is_placed_as_a_whole():
  """The first text of the second pair would fit, its second would not."""
  items = texts_of([[(1, 5), (1, 5)], [(1, 1), (1, 6)]])
  batch, _ = packed_items(items, rows=2, num_items=2, width=8)
  assert batch.item_mask.tolist() == [True, False]
  assert set(batch.tokens.flatten()) == {0, *range(1, 13)}


def test_every_epoch_is_another_order_of_all_items():
  items = list(range(50))
  drawn = list(itertools.islice(texts.shuffled(items, seed=(1,)), 150))
  epochs = [drawn[i : i + 50] for i in (0, 50, 100)]
  assert all(sorted(epoch) == items for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 3
  again = itertools.islice(texts.shuffled(items, seed=(1,)), 150)
  assert list(again) == drawn
  other = itertools.islice(texts.shuffled(items, seed=(2,)), 50)
  assert list(other) != epochs[0]


def test_batches_drop_nothing_and_go_on_where_they_were():
  items = texts_of([[(2, 3 + i % 5)] for i in range(17)])  # 5 .. 9 tokens
  margins = np.arange(17.0)
  sizes = dict(rows=2, width=WIDTH, seed=(3,))
  first_of = {item[0].tokens[0]: i for i, item in enumerate(items)}
  which = lambda batch: [
    first_of[token]
    for token, position in zip(batch.tokens.flat, batch.positions.flat)
    if position == 0 and token in first_of
  ]
  seen, positions = [], [0]
  for batch, position in texts.batches(items, margins, start=0, **sizes):
    found = which(batch)
    assert position == positions[-1] + len(found) > positions[-1]
    assert sorted(batch.margin[batch.item_mask]) == sorted(margins[found])
    assert not batch.margin[~batch.item_mask].any()
    seen += found
    positions.append(position)
    if position >= 34:
      break
  assert sorted(seen[:17]) == list(range(17))
  assert sorted(seen[17:34]) == list(range(17))
  assert seen[:17] != seen[17:34]
  for start, after in zip(positions, positions[1:]):
    batch, position = next(texts.batches(items, margins, start=start, **sizes))
    assert (which(batch), position) == (seen[start:after], after)


def test_items_in_turn_are_each_there_once():
  items = texts_of([[(1, 1 + i % 7)] for i in range(11)])
  found = []
  for batch in texts.in_turn(items, rows=2, width=WIDTH):
    ends = batch.tokens.reshape(-1)[batch.last[batch.item_mask, 0]]
    found += ends.tolist()
  assert found == [item[0].tokens[-1] for item in items]


# Losses.


def random_texts(num, *, per_item, seed=0):
  rng = np.random.default_rng(seed)

  def text():
    prompt_len, response_len = rng.integers(1, 5), rng.integers(1, 8)
    tokens = rng.integers(0, tiny.VOCAB, prompt_len + response_len)
    return Text(tokens.astype(np.int32), int(prompt_len))

  return [tuple(text() for _ in range(per_item)) for _ in range(num)]


@functools.partial(jax.jit, static_argnums=0)
def outputs(model, params, tokens):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = model.forward(params, tokens, positions, 0 * positions)
  return model.head(params, hidden)


def alone(model, params, text):
  """Outputs of the model on one text in a row of its own: [len, out]."""
  n = len(text.tokens)
  row = np.pad(text.tokens, (0, 24 - n))[None]
  return np.asarray(outputs(model, params, row)[0, :n], np.float64)


def test_the_language_model_loss_is_that_of_separate_rows():
  model = tiny.model()
  params = tiny.params(model, 0)
  items = random_texts(12, per_item=1)
  batch, _ = packed_items(items, rows=6, num_items=12, width=24)
  assert batch.item_mask.all()
  logprobs = []
  for (text,) in items:
    logits = alone(model, params, text)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for column in range(text.prompt_len, len(text.tokens)):
      logprobs.append(logits[column - 1, text.tokens[column]])
  loss, seen = supervised.language_model_loss(
    params, batch, model=model, logprob_chunk=16
  )
  assert_close(float(loss), -float(np.mean(logprobs)))
  assert seen["loss"] == loss


def test_the_preference_loss_is_that_of_separate_rows():
  model = tiny.model("scalar")
  params = tiny.params(model, 1)
  items = random_texts(7, per_item=2)
  batch, _ = packed_items(items, rows=6, num_items=10, width=24)
  assert batch.item_mask.sum() == 7  # three places stay empty
  scores = np.array(
    [[alone(model, params, text)[-1, 0] for text in item] for item in items]
  )
  gap = scores[:, 0] - scores[:, 1]
  loss, seen = supervised.preference_loss(params, batch, model=model)
  assert_close(float(loss), float(np.mean(np.log1p(np.exp(-gap)))))
  assert_close(float(seen["accuracy"]), float(np.mean(gap > 0)))
  got = supervised.pair_scores(params, batch, model=model)
  assert_close(np.asarray(got[:7], np.float64), scores)


def test_margins_and_centering_by_hand():
  """Scores (0.5, -1) with margin 2, and (0.25, 2) with margin 0."""
  table = fakes.TableModel(vocab_size=0, width=0, num_positions=0, is_lm=False)
  items = texts_of([[(1, 2), (2, 2)], [(1, 1), (1, 4)]])
  batch, _ = packed_items(items, rows=2, num_items=3, width=8)
  batch = batch.replace(margin=np.array([2.0, 0.0, 9.0], np.float32))
  params = np.zeros((4, 8, 1), np.float32)
  for at, score in (((0, 2), 0.5), ((1, 3), -1), ((2, 1), 0.25), ((3, 4), 2)):
    params[at] = score
  loss, seen = supervised.centered_preference_loss(
    jnp.asarray(params), batch, model=table, margin_coef=0.5, center_coef=0.1
  )
  fit = [np.log1p(np.exp(-(1.5 - 0.5 * 2))), np.log1p(np.exp(1.75))]
  center = [(0.5 - 1) ** 2, (0.25 + 2) ** 2]
  assert_close(float(loss), np.mean(fit) + 0.1 * np.mean(center))
  assert float(seen["accuracy"]) == 0.5
  assert_close(float(seen["gap"]), (1.5 - 1.75) / 2)
  assert_close(float(seen["score"]), (0.5 - 1 + 0.25 + 2) / 4)
  plain, _ = supervised.preference_loss(jnp.asarray(params), batch, model=table)
  off, _ = supervised.centered_preference_loss(
    jnp.asarray(params), batch, model=table, margin_coef=0.0, center_coef=0.0
  )
  assert float(off) == float(plain)


def test_the_held_out_loss_is_a_mean_over_tokens_of_all_batches():
  model = tiny.model()
  params = tiny.params(model, 0)
  items = random_texts(9, per_item=1)
  got = supervised.mean_nll(
    model, params, items, rows=2, width=24, logprob_chunk=16
  )
  batch, _ = packed_items(items, rows=9, num_items=9, width=24)
  whole, _ = supervised.language_model_loss(
    params, batch, model=model, logprob_chunk=16
  )
  assert_close(got, float(whole))


def test_the_preference_gradient_lifts_the_chosen_and_lowers_the_rejected():
  """d loss / d chosen = -sigmoid(-gap) / pairs, the opposite for rejected."""
  table = fakes.TableModel(vocab_size=0, width=0, num_positions=0, is_lm=False)
  items = texts_of([[(1, 2), (2, 2)], [(1, 1), (1, 4)]])
  batch, _ = packed_items(items, rows=2, num_items=3, width=8)
  scores = np.array([[0.5, -1.0], [0.25, 2.0]])  # gaps 1.5 and -1.75
  # Segments 0 .. 3 are the texts in order, of 3, 4, 2 and 5 tokens.
  params = np.full((4, 8, 1), 9.0, np.float32)
  for segment, (length, score) in enumerate(zip((3, 4, 2, 5), scores.flat)):
    params[segment, length - 1] = score
  grad = jax.grad(
    lambda p: supervised.preference_loss(p, batch, model=table)[0]
  )(jnp.asarray(params))
  pull = 1 / (1 + np.exp(scores[:, 0] - scores[:, 1])) / 2
  expected = np.zeros_like(params)
  expected[0, 2], expected[1, 3] = -pull[0], pull[0]
  expected[2, 1], expected[3, 4] = -pull[1], pull[1]
  assert_close(grad, expected)


# Learning.

FIT = supervised.FitConfig(
  num_steps=30,
  rows=4,
  width=24,
  lr=0.1,
  warmup_steps=3,
  weight_decay=0.0,
  clip_norm=1.0,
)


MODEL = fakes.EmbeddingModel(
  vocab_size=tiny.VOCAB, width=16, num_positions=24, is_lm=True
)


def fit(items, config=FIT, *, seed=(0,), **kwargs):
  params, seen = MODEL.init(jax.random.key(0)), []
  loss = functools.partial(
    supervised.language_model_loss, model=MODEL, logprob_chunk=32
  )
  learned = supervised.fit(
    params,
    loss,
    items,
    config,
    seed=seed,
    log=lambda step, row: seen.append((step, row["loss"])),
    **kwargs,
  )
  return params, learned, seen


def test_fitting_learns_a_few_texts_by_heart():
  items = random_texts(5, per_item=1)
  before, after, seen = fit(items, log_every=10)
  assert [step for step, _ in seen] == [10, 20, 30]
  assert seen[-1][1] < 0.5 * seen[0][1]
  assert_exact(before, MODEL.init(jax.random.key(0)))  # not donated away
  assert not np.array_equal(before["embed"], after["embed"])


def test_fitting_is_a_function_of_its_seed():
  items = random_texts(40, per_item=1)
  short = dataclasses.replace(FIT, num_steps=3)
  once = metrics.params_sha256(fit(items, short)[1])
  assert metrics.params_sha256(fit(items, short)[1]) == once
  assert metrics.params_sha256(fit(items, short, seed=(1,))[1]) != once


def test_the_last_step_is_always_logged():
  _, _, seen = fit(
    random_texts(3, per_item=1), dataclasses.replace(FIT, num_steps=4)
  )
  assert [step for step, _ in seen] == [4]


@pytest.mark.parametrize(
  ("items", "says"),
  [
    ([], "no items"),
    ([(Text(np.ones(25, np.int32), 1),)], "a sequence of 25 tokens > width 24"),
  ],
)
def test_what_cannot_be_learned_is_refused(items, says):
  with pytest.raises(ValueError, match=says):
    fit(items)
