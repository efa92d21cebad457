# SPDX-License-Identifier: Apache-2.0
"""The decoders before Llama: LayerNorm, GELU, biases (GPT-2, GPT-NeoX).

Query, key and value are one projection, [D, 3 * D]: all queries, then all keys,
then all values, head by head.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from oppo_jax.models import attention, remat, rope, rowwise, transformer
from oppo_jax.models.dense import Dense
from oppo_jax.schema import BOOL, choice, integer, number


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and choices of one decoder.

  Attributes:
    vocab_size: V.
    num_layers: N.
    width: D, size of the residual stream.
    num_heads: H; divides D.
    mlp_dim: hidden size of the MLP.
    num_positions: rows of the table of learned positions, and the longest row
      there may be; 0 = no table.
    rotary_dim: dimensions of each head, from the first, that are rotated; 0 =
      none.
    rope_theta: base of the rotary frequencies.
    norm_eps: epsilon inside the layer norms.
    parallel_residual: attention and MLP read the same stream (GPT-NeoX); else
      the MLP reads what attention has added to.
    activation: of the MLP, "gelu" or its approximation "gelu_tanh" (GPT-2).
    attention_bias: biases on the projections of attention.
    tie_embeddings: the LM head is the embedding, transposed.
    dtype: of activations and caches; parameters are kept in float32.
    attention: see `transformer.Config`.
    attention_block: likewise.
    remat: what the backward pass computes again, of `remat.CHOICES`.
    head: "lm" (logits) or "scalar" (a value or a score).
  """

  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  mlp_dim: int
  num_positions: int
  rotary_dim: int
  rope_theta: float
  norm_eps: float
  parallel_residual: bool
  activation: str
  attention_bias: bool
  tie_embeddings: bool
  dtype: str
  attention: str
  attention_block: int
  remat: str
  head: str

  @property
  def num_kv_heads(self) -> int:
    return self.num_heads

  @property
  def head_dim(self) -> int:
    return self.width // self.num_heads

  @property
  def max_row_len(self) -> int:
    return self.num_positions


SCHEMA = {  # of config.model; vocab_size and head are not the user's to set
  "num_layers": integer(1),
  "width": integer(1),
  "num_heads": integer(1),
  "mlp_dim": integer(1),
  "num_positions": integer(0),
  "rotary_dim": integer(0),
  "rope_theta": number(above=0.0),
  "norm_eps": number(above=0.0),
  "parallel_residual": BOOL,
  "activation": choice("gelu", "gelu_tanh"),
  "attention_bias": BOOL,
  "tie_embeddings": BOOL,
  "dtype": choice("float32", "bfloat16"),
  "remat": choice(*remat.CHOICES),
  **attention.SCHEMA,
}


def conflicts(c):
  """Rules over several keys of config.model, as `config` wants them."""
  is_uneven = c.width % c.num_heads != 0
  yield is_uneven, "model.num_heads", f"a divisor of width={c.width}"
  head_dim = c.width // c.num_heads
  yield (
    c.rotary_dim % 2 != 0 or c.rotary_dim > head_dim,
    "model.rotary_dim",
    f"even, and at most the {head_dim} dimensions of a head",
  )
  yield (
    not c.num_positions and not c.rotary_dim,
    "model.num_positions",
    "> 0 where rotary_dim is 0: there are no positions else",
  )
  yield from attention.conflicts(c)


class Norm(nn.Module):
  """(x - mean) / std * scale + bias, in float32 (Ba et al. 2016)."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return (rowwise.rms_norm(y, scale, self.eps) + bias).astype(x.dtype)


class Attention(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, turns, where, cache):
    c = self.config
    dense = lambda size, name: Dense(
      size, use_bias=c.attention_bias, dtype=x.dtype, name=name
    )
    y = dense(3 * c.width, "qkv")(x)
    y = y.reshape(*x.shape[:2], 3, c.num_heads, c.head_dim)
    q, k, v = (y[:, :, i] for i in range(3))

    def turn(x):
      a, rest = x[..., : c.rotary_dim], x[..., c.rotary_dim :]
      a = rope.rotate(a, *turns)
      return jnp.concatenate([a, rest], axis=-1)

    if c.rotary_dim:
      q, k = turn(q), turn(k)
    out, cache = attention.causal(
      *(q, k, v, where, cache), kind=c.attention, block=c.attention_block
    )
    return dense(c.width, "o")(out), cache


class Block(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, turns, where, cache):
    c = self.config
    dense = lambda size, name: Dense(size, dtype=x.dtype, name=name)
    y = Norm(c.norm_eps, name="attention_norm")(x)
    y, cache = Attention(c, name="attention")(y, turns, where, cache)
    stream = remat.keep(x + y)
    y = x if c.parallel_residual else stream
    y = Norm(c.norm_eps, name="mlp_norm")(y)
    y = nn.gelu(dense(c.mlp_dim, "up")(y), c.activation == "gelu_tanh")
    return stream + dense(c.width, "down")(y), cache


class Decoder(nn.Module):
  config: Config

  def setup(self):
    c = self.config
    embedding = nn.initializers.normal(c.width**-0.5)  # see `transformer`
    self.embedding = self.param("embedding", embedding, (c.vocab_size, c.width))
    if c.num_positions:
      self.position_embedding = self.param(
        "position_embedding", embedding, (c.num_positions, c.width)
      )
    block = remat.wrap(Block, c.remat)
    self.layers = [block(c, name=f"layer_{i}") for i in range(c.num_layers)]
    self.norm = Norm(c.norm_eps)
    if c.head == "scalar":
      init = nn.initializers.normal((c.width + 1) ** -0.5)
      self.out = self.param("out", init, (c.width, 1))
    elif not c.tie_embeddings:
      init = nn.initializers.normal(0.02)
      self.out = self.param("out", init, (c.width, c.vocab_size))

  def hidden(self, tokens, where, cache=None):
    c = self.config
    x = self.embedding[tokens]  # [rows, C, D]
    if c.num_positions:
      x = x + self.position_embedding[where.positions]
    x = x.astype(c.dtype)
    turns = None
    if c.rotary_dim:
      row_len = tokens.shape[1] if cache is None else cache[0][0].shape[2]
      turns = rope.turns(
        where.positions, row_len, c.rotary_dim, theta=c.rope_theta
      )
    new_cache = []
    for i, layer in enumerate(self.layers):
      pair = None if cache is None else cache[i]
      x, pair = layer(x, turns, where, pair)
      new_cache.append(pair)
    return self.norm(x), tuple(new_cache)

  def head(self, hidden):
    c = self.config
    tied = c.head == "lm" and c.tie_embeddings
    weight = self.embedding.T if tied else self.out
    return jnp.matmul(
      hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
    )

  def __call__(self, tokens):  # only for `init`: touches every parameter
    positions = jnp.zeros_like(tokens)
    where = attention.Where(positions, segments=positions)
    hidden, _ = self.hidden(tokens, where)
    return self.head(hidden)


def make(**kwargs) -> transformer.Transformer:
  """Takes the fields of `Config`."""
  return transformer.Transformer(Config(**kwargs), Decoder)
