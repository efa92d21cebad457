# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a key/value cache.

The cache is an explicit pytree in the layout [rows, K, row_len, D/H], one pair
per layer, written in place when donated.

`model.attention` is one of:

  xla    matrix products and a softmax, in the form that `attention_block` says
  flash  kernels that keep scores to themselves, see `flash`
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from oppo_jax.models import flash, remat, rowwise
from oppo_jax.schema import choice, integer

SCHEMA = {  # of config.model
  "attention": choice("auto", "xla", "flash"),
  "attention_block": integer(-1),  # -1 = auto, 0 = the whole row
}
MASKED = -1e30  # finite, so that a row with every key masked stays finite
QUERY_BLOCKS = 4  # without a cache; more save little and compile longer


class Where(NamedTuple):
  """Where the tokens of a call stand; what they may see follows from it.

  Attributes:
    positions: [rows, C] column of each in its row, or place in its segment.
    segments: [rows, C] without a cache: a token sees those of its own number.
    start: [rows] with a cache: column of a row's first token.
    slots: [rows] row of the cache, see `base.Model.apply`; None = the same.
  """

  positions: jax.Array
  segments: jax.Array | None = None
  start: jax.Array | None = None
  slots: jax.Array | None = None


def conflicts(c):
  """Rules over several keys of config.model."""
  is_flash, block = c.attention == "flash", c.attention_block
  is_part = block >= flash.MIN_BLOCK and not block & (block - 1)
  yield (
    is_flash and c.dtype != "bfloat16",
    "model.dtype",
    "bfloat16 where attention='flash': its products are rounded",
  )
  yield (
    is_flash and block != -1 and not is_part,
    "model.attention_block",
    f"a power of two of at least {flash.MIN_BLOCK}, or -1, where"
    " attention='flash'",
  )


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
  weights = rowwise.softmax(scores).astype(v.dtype)
  return jnp.einsum("rkgcl,rkld->rckgd", weights, v)


def attend_causal(q, k, v, segments):
  """The same for tokens that see what came before them in their segment.

  q: [rows, W, K, H/K, dim]; k, v: [rows, K, W, dim]; segments: [rows, W].

  Queries go by blocks, and a block meets no key that comes after it:

    keys      0 1 2 3 4 5 6 7       QUERY_BLOCKS = 4, W = 8: 40 of the 64
    block 0   x x                   products, and of the memory
    block 1   x x x x
    block 2   x x x x x x
    block 3   x x x x x x x x
  """
  width = q.shape[1]
  block = -(-width // QUERY_BLOCKS)
  parts = []
  for start in range(0, width, block):
    end = min(start + block, width)
    seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)
    seen &= segments[:, start:end, None] == segments[:, None, :end]
    seen = seen[:, None, None]
    parts.append(attend(q[:, start:end], k[:, :, :end], v[:, :, :end], seen))
  return jnp.concatenate(parts, axis=1)


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


def causal(q, k, v, where, cache, *, kind, block):
  """Causal attention of C new tokens, with their keys put into the cache.

  q: [rows, C, H, dim]; k, v: [rows, C, K, dim]; cache: a pair, or None: then
  attention is among the new tokens. `kind` and `block` are the model's
  `attention` and `attention_block`. The result is [rows, C, H * dim], and the
  new pair.
  """
  rows, length, num_heads, dim = q.shape
  kv = k.shape[2]
  q = q.reshape(rows, length, kv, num_heads // kv, dim)
  if cache is None:
    if kind == "flash":
      out = flash.packed(q, k, v, where.segments)
    else:
      by_head = k.swapaxes(1, 2), v.swapaxes(1, 2)
      out = attend_causal(q, *by_head, where.segments)
  else:
    # All rows are written before any row is read: one call may hold several
    # tiles of the same slot, and a later one sees the earlier ones.
    at, slots = where.positions, where.slots
    put = lambda x, new: write(x, new, where.start, slots)
    cache = put(cache[0], k), put(cache[1], v)
    if kind == "flash":
      far = [read(x, slots) for x in cache]
      out = flash.cached(q, *far, k, v, where.start, block=block)
    elif block:
      out = attend_blocks(q, *cache, at, slots, block=block)
    else:
      seen = jnp.arange(cache[0].shape[2]) <= at[:, None, None, :, None]
      out = attend(q, read(cache[0], slots), read(cache[1], slots), seen)
  return remat.keep(out.reshape(rows, length, num_heads * dim)), cache
