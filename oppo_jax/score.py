# SPDX-License-Identifier: Apache-2.0
"""Prefills whole tiles of T tokens into a model's cache, Q tiles per call.

A scorer never processes "the new tokens", but tile k of a row: columns kT to
(k + 1)T - 1, by one compiled function of fixed shape [Q, T]. So what is
computed for a row does not depend on when it is computed, and scoring while the
row is still being decoded gives the bits that scoring afterwards gives.

  columns    0        T        2T       3T          T = 8, length = 19
  row        [tile 0 ][tile 1 ][r r r . . . . . ]
                               ^ partial: runs when the row is done, masked

A call takes any Q pending (row, tile) pairs, several of one row included: what
scoring costs is the number of tiles that exist.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from oppo_jax import ops, types
from oppo_jax.models import base


class Tile(NamedTuple):
  """Static sizes of a prefill call.

  Attributes:
    rows: Q, tiles per call.
    length: T, tokens per tile.
    logprob_chunk: tokens whose logits exist at one time.
  """

  rows: int
  length: int
  logprob_chunk: int


def cache_len(row_len: int, tile_len: int) -> int:
  """Columns a cache needs so that no tile of a row runs past its end."""
  return -(-row_len // tile_len) * tile_len


def _append(params, cache, tokens, slot, tile, *, model, tile_len):
  """Runs tiles: cache, hidden [Q, T, D], columns [Q, T], targets [Q, T]."""
  columns = tile[:, None] * tile_len + jnp.arange(tile_len)  # [Q, T]
  at = lambda c: tokens.at[slot[:, None], c].get(mode="fill", fill_value=0)
  hidden, cache = model.apply(params, at(columns), tile * tile_len, cache, slot)
  return cache, hidden, columns, at(columns + 1)


def prefill(
  params: types.Params,
  cache: types.KVCache,
  tokens: Int[Array, "S L"],
  slot: Int[Array, " Q"],
  tile: Int[Array, " Q"],
  *,
  model: base.Model,
  tile_len: int,
) -> types.KVCache:
  """Writes tiles into a cache, nothing else: how the policy reads prompts.

  Args:
    params: the model's parameters.
    cache: over all slots (donated).
    tokens: of all slots, 0 beyond each row's cursor.
    slot: slot of each tile; S = no tile, nothing is written.
    tile: index of the tile in its row. Earlier tiles of the row are in the
      cache already, or in this call.
    model: whose cache it is.
    tile_len: T.
  """
  run = _append(
    params, cache, tokens, slot, tile, model=model, tile_len=tile_len
  )
  return run[0]


def prefill_append(
  params: types.Params,
  state: types.ScorerState,
  tokens: Int[Array, "S L"],
  slot: Int[Array, " Q"],
  tile: Int[Array, " Q"],
  *,
  model: base.Model,
  tile_len: int,
  logprob_chunk: int,
  temperature: float,
  top_k: int,
  top_p: float,
) -> types.ScorerState:
  """Scores tiles: one number per column into `state.outputs`.

  Of a model with an "lm" head the number is the log-prob of the next token
  under the sampling distribution, of a "scalar" head its output.

  Args:
    params: the scorer's parameters.
    state: the scorer's state over all slots (donated).
    tokens: of all slots, 0 beyond each row's cursor.
    slot: see `prefill`.
    tile: see `prefill`.
    model: the scorer.
    tile_len: T.
    logprob_chunk: tokens whose logits exist at one time.
    temperature: of the sampling distribution.
    top_k: of the sampling distribution.
    top_p: of the sampling distribution.
  """
  cache, hidden, columns, targets = _append(
    params, state.cache, tokens, slot, tile, model=model, tile_len=tile_len
  )
  if model.is_lm:
    said, _ = ops.token_logprobs(
      hidden.reshape(-1, hidden.shape[-1]),
      targets.reshape(-1),
      lambda h: model.head(params, h),
      chunk=logprob_chunk,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      with_entropy=False,
    )
    said = said.reshape(columns.shape)
  else:
    said = model.head(params, hidden)[..., 0]
  return types.ScorerState(
    cache=cache,
    outputs=state.outputs.at[slot[:, None], columns].set(said, mode="drop"),
  )


def init_cache(
  model: base.Model, *, num_slots: int, row_len: int, tile_len: int
) -> types.KVCache:
  """A cache of whole tiles that holds nothing."""
  return model.init_cache(num_slots, cache_len(row_len, tile_len))


def init(
  model: base.Model, *, num_slots: int, row_len: int, tile_len: int
) -> types.ScorerState:
  """A scorer that has seen nothing."""
  return types.ScorerState(
    cache=init_cache(
      model, num_slots=num_slots, row_len=row_len, tile_len=tile_len
    ),
    outputs=jnp.zeros((num_slots, row_len), jnp.float32),
  )
