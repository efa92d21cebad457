# SPDX-License-Identifier: Apache-2.0
"""Attention without an array of scores, by the kernels for GPUs that JAX ships.

  packed   rows without a cache: FlashAttention-2 (Dao 2023, arXiv 2307.08691)
  cached   new tokens over a cache: Flash-Decoding (Dao et al. 2023), of which
           every row reads the columns it has, and no other row's length counts

  cache of a row   [x x x x|x x x x|x x . .|. . . .]     . is not read
  programs          part 0  part 1  part 2    ends at once

A row is computed by programs of its own in an order of its own, so its bits
depend on its own tokens and prefix alone. Matrix products of float32 would be
rounded to TF32: they are meant for bfloat16. Elsewhere than on a GPU kernels
are interpreted, for tests. Not every build of JAX has them, hence imports on
first use.
"""

import functools

import jax.numpy as jnp
from jax import lax

MIN_BLOCK = 16  # columns of a part: a power of two of at least so many
WIDTH = 128  # of packed rows: a multiple of the kernel's blocks


def _run(kernel, *args):
  interpreted = functools.partial(kernel, interpret=True)
  return lax.platform_dependent(
    *args, cuda=kernel, rocm=kernel, default=interpreted
  )


def packed(q, k, v, segments):
  """Causal attention within segments.

  Args:
    q: [rows, W, K, H/K, dim].
    k: [rows, W, K, dim].
    v: likewise.
    segments: [rows, W]; a token sees those of its own number.

  Returns:
    [rows, W, K, H/K, dim].
  """
  from jax.experimental.pallas.ops.gpu import attention

  rows, width, kv, group, dim = q.shape
  more = -width % WIDTH

  def heads(x):  # the kernel knows no grouped queries, and whole blocks only
    x = jnp.broadcast_to(x if x.ndim == 5 else x[:, :, :, None], q.shape)
    x = x.reshape(rows, width, kv * group, dim)
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))

  kernel = functools.partial(attention.mha, sm_scale=dim**-0.5, causal=True)
  segments = jnp.pad(segments, ((0, 0), (0, more)))  # unseen: they come last
  out = _run(kernel, heads(q), heads(k), heads(v), segments)
  return out[:, :width].reshape(q.shape)


def cached(q, k, v, new_k, new_v, start, *, block):
  """Attention of C successive tokens to those before them, and to each other.

  Args:
    q: [rows, C, K, H/K, dim].
    k: [rows, K, L, dim]; columns from `start` on count for nothing.
    v: likewise.
    new_k: [rows, C, K, dim] of the tokens themselves.
    new_v: likewise.
    start: [rows] the column of the first of them.
    block: columns of a part; divides L, a power of two.

  Returns:
    [rows, C, K, H/K, dim].
  """
  from jax.experimental.pallas.ops.gpu import decode_attention

  rows, c, kv, group, dim = q.shape
  scale, num_columns = dim**-0.5, k.shape[2]

  # What lies before: no query of a row differs in what it may see, so tokens
  # and heads are one axis.
  flat = lambda x: x.reshape(rows * kv, -1, dim)
  kernel = functools.partial(
    decode_attention.mqa,
    sm_scale=scale,
    block_h=16 if c == 1 else 64,  # queries of a program
    block_k=min(block, 128),
    k_splits=num_columns // block,
    return_residuals=True,
    normalize_output=False,
  )
  asked = jnp.moveaxis(q, 1, 2)  # [rows, K, C, H/K, dim]
  far, (far_total, far_top) = _run(
    *(kernel, flat(asked), flat(k), flat(v)),
    *(None, jnp.repeat(start, kv)),  # columns from the first to `start`
  )
  shape = (rows, kv, c, group)
  far = far.astype(jnp.float32).reshape(*shape, dim)
  far_total, far_top = far_total.reshape(shape), far_top.reshape(shape)

  # The tokens themselves: C x C scores.
  scores = jnp.einsum(
    "rkcgd,rlkd->rkcgl", asked, new_k, preferred_element_type=jnp.float32
  )
  seen = jnp.arange(c) <= jnp.arange(c)[:, None]
  scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
  top = jnp.maximum(scores.max(axis=-1), far_top)
  weights = jnp.exp(scores - top[..., None])
  near = jnp.einsum(
    "rkcgl,rlkd->rkcgd",
    weights.astype(new_v.dtype),
    new_v,
    preferred_element_type=jnp.float32,
  )
  keep = jnp.exp(far_top - top)
  total = weights.sum(axis=-1) + far_total * keep
  out = (near + far * keep[..., None]) / total[..., None]
  return jnp.moveaxis(out, 2, 1).astype(q.dtype)
