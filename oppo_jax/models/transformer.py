# SPDX-License-Identifier: Apache-2.0
"""A Llama-family decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Layers are unrolled. `models.gpt` is its sibling for what came before Llama.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from oppo_jax import types
from oppo_jax.models import attention, remat, rope, rowwise
from oppo_jax.models.dense import Dense
from oppo_jax.schema import BOOL, choice, integer, number


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and choices of one decoder.

  The fields with a default are properties of published checkpoints, and none
  of a config's.

  Attributes:
    vocab_size: V.
    num_layers: N.
    width: D, size of the residual stream.
    num_heads: H query heads.
    num_kv_heads: K key/value heads; divides H.
    head_dim: size of a head (D / H in most checkpoints, not in all).
    mlp_dim: hidden size of the SwiGLU block.
    rope_theta: base of the rotary frequencies.
    norm_eps: epsilon inside the RMS norms.
    qkv_bias: biases on the query, key and value projections (Qwen2).
    qk_norm: RMS norm on every query and key head (Qwen3).
    tie_embeddings: the LM head is the embedding, transposed.
    dtype: of activations and caches; parameters are kept in float32.
    attention: how attention is computed, see `models.attention`.
    attention_block: 0 = cached attention reads the whole row; n > 0 = it reads
      blocks of n columns up to the longest row in use (online softmax), or,
      where attention is "flash", up to the end of each row.
    remat: what the backward pass computes again, of `remat.CHOICES`.
    head: "lm" (logits) or "scalar" (a value or a score).
    o_bias: a bias on the output projection of attention too.
    mlp_bias: biases in the SwiGLU block.
    rope_scaling: how the rotary frequencies were changed for longer rows.
    max_row_len: longer rows are refused, 0 = none: within the width of its
      sliding window a model attends to everything.
  """

  vocab_size: int
  num_layers: int
  width: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float
  norm_eps: float
  qkv_bias: bool
  qk_norm: bool
  tie_embeddings: bool
  dtype: str
  attention: str
  attention_block: int
  remat: str
  head: str
  o_bias: bool = False
  mlp_bias: bool = False
  rope_scaling: rope.Scaling | None = None
  max_row_len: int = 0


SCHEMA = {  # of config.model; vocab_size and head are not the user's to set
  "num_layers": integer(1),
  "width": integer(1),
  "num_heads": integer(1),
  "num_kv_heads": integer(1),
  "head_dim": integer(1),
  "mlp_dim": integer(1),
  "rope_theta": number(above=0.0),
  "norm_eps": number(above=0.0),
  "qkv_bias": BOOL,
  "qk_norm": BOOL,
  "tie_embeddings": BOOL,
  "dtype": choice("float32", "bfloat16"),
  "remat": choice(*remat.CHOICES),
  **attention.SCHEMA,
}


def conflicts(c):
  """Rules over several keys of config.model, as `config` wants them."""
  is_uneven, is_odd = c.num_heads % c.num_kv_heads != 0, c.head_dim % 2 != 0
  divisor = f"a divisor of num_heads={c.num_heads}"
  yield is_uneven, "model.num_kv_heads", divisor
  yield is_odd, "model.head_dim", "even: rotary embeddings turn pairs"
  yield from attention.conflicts(c)


class Norm(nn.Module):
  """See `rowwise.rms_norm`."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return rowwise.rms_norm(x, scale, self.eps)


class Attention(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, turns, where, cache):
    c = self.config
    rows, length, _ = x.shape

    def project(name, heads):
      y = Dense(
        heads * c.head_dim, use_bias=c.qkv_bias, dtype=x.dtype, name=name
      )(x)
      return y.reshape(rows, length, heads, c.head_dim)

    q = project("q", c.num_heads)
    k, v = project("k", c.num_kv_heads), project("v", c.num_kv_heads)
    if c.qk_norm:
      q, k = (
        Norm(c.norm_eps, name="q_norm")(q),
        Norm(c.norm_eps, name="k_norm")(k),
      )
    q, k = rope.rotate(q, *turns), rope.rotate(k, *turns)
    out, cache = attention.causal(
      *(q, k, v, where, cache), kind=c.attention, block=c.attention_block
    )
    out = Dense(c.width, use_bias=c.o_bias, dtype=x.dtype, name="o")(out)
    return out, cache


class Block(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, turns, where, cache):
    c = self.config
    dense = lambda size, name: Dense(
      size, use_bias=c.mlp_bias, dtype=x.dtype, name=name
    )
    y = Norm(c.norm_eps, name="attention_norm")(x)
    y, cache = Attention(c, name="attention")(y, turns, where, cache)
    x = remat.keep(x + y)
    y = Norm(c.norm_eps, name="mlp_norm")(x)
    y = nn.silu(dense(c.mlp_dim, "gate")(y)) * dense(c.mlp_dim, "up")(y)
    return x + dense(c.width, "down")(y), cache


class Decoder(nn.Module):
  config: Config

  def setup(self):
    c = self.config
    self.embedding = self.param(
      "embedding",
      nn.initializers.normal(c.width**-0.5),  # tied logits of order one
      (c.vocab_size, c.width),
    )
    block = remat.wrap(Block, c.remat)
    self.layers = [block(c, name=f"layer_{i}") for i in range(c.num_layers)]
    self.norm = Norm(c.norm_eps)
    if c.head == "scalar":
      # The scale that TRL gives its reward heads: scores of order one.
      init = nn.initializers.normal((c.width + 1) ** -0.5)
      self.out = self.param("out", init, (c.width, 1))
    elif not c.tie_embeddings:
      init = nn.initializers.normal(0.02)
      self.out = self.param("out", init, (c.width, c.vocab_size))

  def hidden(self, tokens, where, cache=None):
    c = self.config
    x = self.embedding[tokens].astype(c.dtype)  # [rows, C, D]
    row_len = tokens.shape[1] if cache is None else cache[0][0].shape[2]
    turns = rope.turns(
      *(where.positions, row_len, c.head_dim),
      theta=c.rope_theta,
      scaling=c.rope_scaling,
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


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The `Model` made of a decoder: pure functions of (params, arrays)."""

  config: Config
  decoder: type[nn.Module] = Decoder

  @property
  def vocab_size(self) -> int:
    return self.config.vocab_size

  @property
  def dtype(self) -> str:
    return self.config.dtype

  @property
  def is_lm(self) -> bool:
    return self.config.head == "lm"

  def init(self, rng: jax.Array) -> types.Params:
    tokens = jnp.zeros((1, 1), jnp.int32)
    return self.decoder(self.config).init(rng, tokens)["params"]

  def init_cache(self, num_rows: int, row_len: int) -> types.KVCache:
    c = self.config
    if 0 < c.max_row_len < row_len:
      raise ValueError(
        f"a row of {row_len} columns is too long for this model: at most"
        f" {c.max_row_len}"
      )
    if c.attention_block:  # whole blocks only
      row_len = -(-row_len // c.attention_block) * c.attention_block
    shape = (num_rows, c.num_kv_heads, row_len, c.head_dim)
    zeros = lambda: jnp.zeros(shape, c.dtype)
    return tuple((zeros(), zeros()) for _ in range(c.num_layers))

  def apply(self, params, tokens, start, cache, slots=None):
    positions = start[:, None] + jnp.arange(tokens.shape[1])  # [rows, C]
    where = attention.Where(positions, start=start, slots=slots)
    return self.decoder(self.config).apply(
      {"params": params}, tokens, where, cache, method="hidden"
    )

  def forward(self, params, tokens, positions, segments):
    where = attention.Where(positions, segments=segments)
    hidden, _ = self.decoder(self.config).apply(
      {"params": params}, tokens, where, method="hidden"
    )
    return hidden

  def head(self, params, hidden):
    return self.decoder(self.config).apply(
      {"params": params}, hidden, method="head"
    )


def make(*, rope_scaling=None, **kwargs) -> Transformer:
  """Takes the fields of `Config`; `rope_scaling` as a dict of its fields."""
  if rope_scaling is not None:
    rope_scaling = rope.Scaling(**rope_scaling)
  return Transformer(Config(rope_scaling=rope_scaling, **kwargs))
