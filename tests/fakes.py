# SPDX-License-Identifier: Apache-2.0
"""Small stand-ins that implement the package's protocols."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class EmbeddingModel:
  """A `Model` without attention: the mean of the prefix's embeddings.

  hidden[p] = tanh(mean over columns <= p of embed[token] + place[position]).
  Causal, segment-aware and position-aware, so that a wrong cache, mask or
  packing shows; and small enough to differentiate by hand.
  """

  vocab_size: int
  width: int
  num_positions: int
  is_lm: bool
  dtype: str = "float32"

  def init(self, rng):
    shapes = dict(
      embed=(self.vocab_size, self.width),
      place=(self.num_positions, self.width),
      head=(self.width, self.vocab_size if self.is_lm else 1),
    )
    return {
      name: jax.random.normal(jax.random.fold_in(rng, i), shape)
      for i, (name, shape) in enumerate(shapes.items())
    }

  def init_cache(self, num_rows, row_len):
    empty = jnp.zeros((num_rows, 1, row_len, self.width), jnp.float32)
    return ((empty, empty[..., :0]),)

  def apply(self, params, tokens, start, cache, slots=None):
    rows = jnp.arange(tokens.shape[0]) if slots is None else slots
    columns = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
    new = params["embed"][tokens] + params["place"][columns]
    keys = cache[0][0].at[rows[:, None], 0, columns].set(new, mode="drop")
    prefix = jnp.cumsum(keys[rows, 0], axis=1)
    total = jnp.take_along_axis(prefix, columns[..., None], axis=1)
    hidden = jnp.tanh(total / (columns[..., None] + 1))
    return hidden, ((keys, cache[0][1]),)

  def forward(self, params, tokens, positions, segments):
    x = params["embed"][tokens] + params["place"][positions]
    width = tokens.shape[1]
    is_seen = segments[:, :, None] == segments[:, None, :]
    is_seen &= jnp.tril(jnp.ones((1, width, width), bool))
    total = jnp.einsum("rqk,rkd->rqd", is_seen.astype(x.dtype), x)
    return jnp.tanh(total / (positions[..., None] + 1))

  def head(self, params, hidden):
    return jnp.einsum("...d,do->...o", hidden, params["head"])


class TableModel(EmbeddingModel):
  """A `Model`, for `forward` only, whose parameters are its outputs.

  params[row, position] is the head's output there, so that a gradient of the
  parameters is the gradient of logits or values.
  """

  def forward(self, params, tokens, positions, segments):
    del tokens
    return params[jnp.maximum(segments, 0), positions]

  def head(self, params, hidden):
    del params
    return hidden


@dataclasses.dataclass(frozen=True)
class ScriptedModel:
  """A `Model` that says what it is told: params[p] are the logits read at p.

  So params[p] decides on the token in column p + 1, of whatever row.
  """

  vocab_size: int
  is_lm: bool = True
  dtype: str = "float32"

  def init_cache(self, num_rows, row_len):
    nothing = jnp.zeros((num_rows, 1, row_len, 0), jnp.float32)
    return ((nothing, nothing),)

  def apply(self, params, tokens, start, cache, slots=None):
    columns = start[:, None] + jnp.arange(tokens.shape[1])[None, :]
    return columns[..., None], cache

  def head(self, params, hidden):
    return params[hidden[..., 0]]
