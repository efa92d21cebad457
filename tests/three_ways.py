# SPDX-License-Identifier: Apache-2.0
"""What a model says of rows of uneven length, computed in three ways.

Whole rows without a cache; tiles into a cache, all at once and in slots out of
order; and token by token. Caches have columns to spare and are full of garbage.
"""

import jax
import jax.numpy as jnp
import numpy as np

from oppo_jax import hf, score

TILE = 8


def capacity(tokens):
  """Columns of the caches: whole tiles, and one more than the rows need."""
  return (tokens.shape[1] // TILE + 1) * TILE


def model_of(folder, *, block=0, dtype="float32"):
  """The model of a folder, its head as its name says."""
  head = "scalar" if folder.name.endswith("_reward") else "lm"
  changes = dict(dtype=dtype, attention_block=block)
  return hf.make_model(folder, head=head, **hf.PLAIN | changes)


def full_of_garbage(cache):
  rng = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  return jax.tree.map(draw, cache)


def say_whole(model, params, tokens, length):
  """No cache: every row alone in its bin."""
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  segments = np.where(positions < length[:, None], 0, -1)
  run = jax.jit(lambda p: model.head(p, model.forward(p, *where)))
  where = tokens, positions, segments
  return np.asarray(run(params))


def say_tiles(model, params, tokens, length):
  """Prefill: all tiles of all rows in one call, into slots out of order."""
  num = len(tokens)
  columns = capacity(tokens) // TILE
  padded = np.pad(tokens, ((0, 0), (0, columns * TILE - tokens.shape[1])))
  row, tile = (x.ravel() for x in np.mgrid[:num, :columns])
  slot = (row + 1) % num
  is_there = tile * TILE < length[row]
  slot = np.where(is_there, slot, num).astype(np.int32)
  pieces = padded[row].reshape(len(row), columns, TILE)
  pieces = pieces[np.arange(len(row)), tile]
  cache = full_of_garbage(model.init_cache(num, columns * TILE))

  def run(params, cache):
    start = (tile * TILE).astype(np.int32)
    hidden, _ = model.apply(params, pieces, start, cache, slot)
    return model.head(params, hidden)

  said = np.asarray(jax.jit(run)(params, cache))
  said = said.reshape(num, columns * TILE, -1)
  return said[:, : tokens.shape[1]]


def say_decode(model, params, tokens, length):
  """Token by token; a row that has ended stands still."""
  cache = full_of_garbage(model.init_cache(len(tokens), capacity(tokens)))
  said = np.zeros((*tokens.shape, model.vocab_size), np.float32)

  @jax.jit
  def run(params, fed, start, cache):
    hidden, cache = model.apply(params, fed, start, cache)
    return model.head(params, hidden), cache

  rows = np.arange(len(tokens))
  for column in range(tokens.shape[1]):
    at = np.minimum(column, length - 1).astype(np.int32)
    out, cache = run(params, tokens[rows, at][:, None], at, cache)
    said[rows, at] = out[:, 0]
  return said


def say_scores(model, params, tokens, length):
  """Of a "scalar" head at the last token, by the scorer of the loop: [rows]."""
  columns = capacity(tokens)
  tokens = np.pad(tokens, ((0, 0), (0, columns - tokens.shape[1])))
  state = score.init(
    model, num_slots=len(tokens), row_len=columns, tile_len=TILE
  )
  row, tile = (x.ravel() for x in np.mgrid[: len(tokens), : columns // TILE])
  state = score.prefill_append(
    params,
    state,
    *(jnp.asarray(x, jnp.int32) for x in (tokens, row, tile)),
    model=model,
    tile_len=TILE,
    logprob_chunk=16,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
  )
  return np.asarray(state.outputs)[np.arange(len(tokens)), length - 1]
