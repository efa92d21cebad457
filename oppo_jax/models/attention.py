# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a key/value cache.

The cache is an explicit pytree in the layout [rows, K, row_len, D/H], one pair
per layer, written in place when donated.
"""

import jax
import jax.numpy as jnp
from jax import lax

from oppo_jax.models import remat, rowwise

MASKED = -1e30  # finite, so that a row with every key masked stays finite
QUERY_BLOCKS = 4  # without a cache; more save little and compile longer


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


def attend_causal(q, k, v, mask):
  """The same for a causal mask, without most of what it hides.

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
    seen = mask[..., start:end, :end]
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


def causal(q, k, v, positions, mask, start, cache, slots, *, block):
  """Causal attention of C new tokens, with their keys put into the cache.

  q: [rows, C, H, dim]; k, v: [rows, C, K, dim]; cache: a pair, or None: then
  attention is among the new tokens, as `mask` says (causal, or less). The
  result is [rows, C, H * dim], and the new pair.
  """
  rows, length, num_heads, dim = q.shape
  kv = k.shape[2]
  q = q.reshape(rows, length, kv, num_heads // kv, dim)
  if cache is None:
    out = attend_causal(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
  else:
    # All rows are written before any row is read: one call may hold several
    # tiles of the same slot, and a later one sees the earlier ones.
    cache = write(cache[0], k, start, slots), write(cache[1], v, start, slots)
    if block:
      out = attend_blocks(q, *cache, positions, slots, block=block)
    else:
      out = attend(q, read(cache[0], slots), read(cache[1], slots), mask)
  return remat.keep(out.reshape(rows, length, num_heads * dim)), cache
