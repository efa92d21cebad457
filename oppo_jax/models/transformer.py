# SPDX-License-Identifier: Apache-2.0
"""A Llama-family decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The cache is an explicit pytree in the layout [rows, K, row_len, D/H], one pair
per layer, written in place when donated. Layers are unrolled.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from oppo_jax import types
from oppo_jax.schema import BOOL, choice, integer, number

MASKED = -1e30  # finite, so that a row with every key masked stays finite


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes and choices of one decoder.

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
    attention_block: 0 = cached attention reads the whole row; n > 0 = it reads
      blocks of n columns up to the longest row in use (online softmax).
    remat: recompute each layer's activations in the backward pass.
    head: "lm" (logits) or "scalar" (a value or a score).
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
  attention_block: int
  remat: bool
  head: str


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
  "attention_block": integer(0),  # 0 = dense attention over the whole row
  "remat": BOOL,
}


def conflicts(c):
  """Rules over several keys of config.model, as `config` wants them."""
  is_uneven, is_odd = c.num_heads % c.num_kv_heads != 0, c.head_dim % 2 != 0
  divisor = f"a divisor of num_heads={c.num_heads}"
  yield is_uneven, "model.num_kv_heads", divisor
  yield is_odd, "model.head_dim", "even: rotary embeddings turn pairs"


class Norm(nn.Module):
  """x / rms(x) * scale, in float32 (Zhang & Sennrich 2019)."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * scale).astype(x.dtype)


def rope(x, positions, *, theta):
  """Rotates pairs (i, i + half) of each head by position * theta^(-i / half).

  x: [rows, C, heads, dim], positions: [rows, C]. Su et al. 2021, in the
  half-split pairing of the Hugging Face checkpoints.
  """
  half = x.shape[-1] // 2
  frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  cos, sin = jnp.cos(angle), jnp.sin(angle)  # [rows, C, 1, half]
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return rotated.astype(x.dtype)


def write(cache, new, start, slots):
  """Puts new [rows, C, K, dim] into cache [S, K, L, dim] at column `start`.

  With `slots` given, row i goes to row slots[i] of the cache, and rows whose
  slot is out of range are dropped.
  """
  new = new.astype(cache.dtype)
  if slots is None:
    put = lambda c, n, at: lax.dynamic_update_slice(c, n, (0, at, 0))
    return jax.vmap(put)(cache, new.swapaxes(1, 2), start)
  columns = start[:, None] + jnp.arange(new.shape[1])  # [rows, C]
  return cache.at[slots[:, None], :, columns].set(new, mode="drop")


def read(cache, slots):
  """Rows `slots` of the cache; out-of-range slots read some valid row."""
  return cache if slots is None else cache.at[slots].get(mode="clip")


def attend(q, k, v, mask):
  """Softmax attention over whole rows, statistics in float32.

  q: [rows, C, K, H/K, dim]; k, v: [rows, K, L, dim];
  mask: [rows, 1, 1, C, L], true = may be seen.
  """
  scores = jnp.einsum(
    "rckgd,rkld->rkgcl", q, k, preferred_element_type=jnp.float32
  )
  scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("rkgcl,rkld->rckgd", weights, v)


def attend_blocks(q, k, v, positions, slots, *, block):
  """The same over blocks of columns, up to the longest prefix of this call.

  An online softmax (Milakov & Gimelshein 2018) over fixed blocks. A block that
  lies wholly beyond a row leaves that row's sums as they are, bit for bit
  (exp(0) = 1 times the old sum, plus exact zeros), so a row's result does not
  depend on how far the other rows make the loop run.

    block        0        1        2
    row 0   [x x x x][x . . .][. . . .]     third block: exact no-op
    row 1   [x x x x][x x x x][x x . .]
  """
  rows, c, kv, group, dim = q.shape
  scale = dim**-0.5

  def one_block(j, carry):
    top, total, acc = carry
    cut = lambda x: read(
      lax.dynamic_slice_in_dim(x, j * block, block, 2), slots
    )
    kb, vb = cut(k), cut(v)
    s = jnp.einsum(
      "rckgd,rkld->rkgcl", q, kb, preferred_element_type=jnp.float32
    )
    seen = j * block + jnp.arange(block) <= positions[:, None, None, :, None]
    s = jnp.where(seen, s * scale, MASKED)
    new_top = jnp.maximum(top, s.max(axis=-1))
    # With nothing to see, add exact zeros, not exp(MASKED - MASKED).
    p = jnp.where(seen, jnp.exp(s - new_top[..., None]), 0.0)
    keep = jnp.exp(top - new_top)
    total = total * keep + p.sum(axis=-1)
    new = jnp.einsum(
      "rkgcl,rkld->rkgcd",
      p.astype(vb.dtype),
      vb,
      preferred_element_type=jnp.float32,
    )
    return new_top, total, acc * keep[..., None] + new

  shape = (rows, kv, group, c)
  carry = (
    jnp.full(shape, MASKED, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, dim), jnp.float32),
  )
  num_blocks = jnp.max(positions) // block + 1
  _, total, acc = lax.fori_loop(0, num_blocks, one_block, carry)
  return jnp.moveaxis(acc / total[..., None], 3, 1).astype(q.dtype)


class Attention(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, positions, mask, start, cache, slots):
    c = self.config
    rows, length, _ = x.shape

    def project(name, heads):
      y = nn.Dense(
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
    q = rope(q, positions, theta=c.rope_theta)
    k = rope(k, positions, theta=c.rope_theta)
    group = c.num_heads // c.num_kv_heads
    q = q.reshape(rows, length, c.num_kv_heads, group, c.head_dim)
    if cache is None:
      out = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    else:
      # All rows are written before any row is read: one call may hold several
      # tiles of the same slot, and a later one sees the earlier ones.
      cache = write(cache[0], k, start, slots), write(cache[1], v, start, slots)
      if c.attention_block:
        out = attend_blocks(
          q, *cache, positions, slots, block=c.attention_block
        )
      else:
        out = attend(q, read(cache[0], slots), read(cache[1], slots), mask)
    out = out.reshape(rows, length, c.num_heads * c.head_dim)
    return nn.Dense(c.width, use_bias=False, dtype=x.dtype, name="o")(
      out
    ), cache


class Block(nn.Module):
  config: Config

  @nn.compact
  def __call__(self, x, positions, mask, start, cache, slots):
    c = self.config
    dense = lambda size, name: nn.Dense(
      size, use_bias=False, dtype=x.dtype, name=name
    )
    y = Norm(c.norm_eps, name="attention_norm")(x)
    y, cache = Attention(c, name="attention")(
      y, positions, mask, start, cache, slots
    )
    x = x + y
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
    block = nn.remat(Block) if c.remat else Block
    self.layers = [block(c, name=f"layer_{i}") for i in range(c.num_layers)]
    self.norm = Norm(c.norm_eps)
    if c.head == "scalar":
      # The scale that TRL gives its reward heads: scores of order one.
      init = nn.initializers.normal((c.width + 1) ** -0.5)
      self.out = self.param("out", init, (c.width, 1))
    elif not c.tie_embeddings:
      init = nn.initializers.normal(0.02)
      self.out = self.param("out", init, (c.width, c.vocab_size))

  def hidden(self, tokens, positions, mask, start=None, cache=None, slots=None):
    x = self.embedding[tokens].astype(self.config.dtype)  # [rows, C, D]
    new_cache = []
    for i, layer in enumerate(self.layers):
      pair = None if cache is None else cache[i]
      x, pair = layer(x, positions, mask, start, pair, slots)
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
    hidden, _ = self.hidden(tokens, positions, jnp.ones((1, 1, 1, 1, 1), bool))
    return self.head(hidden)


@dataclasses.dataclass(frozen=True)
class Transformer:
  """The `Model` made of a `Decoder`: pure functions of (params, arrays)."""

  config: Config

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
    return Decoder(self.config).init(rng, tokens)["params"]

  def init_cache(self, num_rows: int, row_len: int) -> types.KVCache:
    c = self.config
    if c.attention_block:  # whole blocks only
      row_len = -(-row_len // c.attention_block) * c.attention_block
    shape = (num_rows, c.num_kv_heads, row_len, c.head_dim)
    zeros = lambda: jnp.zeros(shape, c.dtype)
    return tuple((zeros(), zeros()) for _ in range(c.num_layers))

  def apply(self, params, tokens, start, cache, slots=None):
    positions = start[:, None] + jnp.arange(tokens.shape[1])  # [rows, C]
    columns = jnp.arange(cache[0][0].shape[2])
    mask = columns <= positions[:, None, None, :, None]  # [rows, 1, 1, C, L]
    return Decoder(self.config).apply(
      {"params": params},
      *(tokens, positions, mask, start, cache, slots),
      method="hidden",
    )

  def forward(self, params, tokens, positions, segments):
    width = tokens.shape[1]
    causal = jnp.arange(width)[:, None] >= jnp.arange(width)
    mask = causal & (segments[:, :, None] == segments[:, None, :])
    hidden, _ = Decoder(self.config).apply(
      {"params": params},
      *(tokens, positions, mask[:, None, None]),
      method="hidden",
    )
    return hidden

  def head(self, params, hidden):
    return Decoder(self.config).apply({"params": params}, hidden, method="head")


def make(**kwargs) -> Transformer:
  """Takes the fields of `Config`."""
  return Transformer(Config(**kwargs))
