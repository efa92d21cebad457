# SPDX-License-Identifier: Apache-2.0
"""What a scorer says of whole rows in one forward pass: no cache, no tiles.

The plain way to score. Proofs and audits hold the streamed scores to it; in
training it serves a reward model that cannot be streamed (`rescore.py`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oppo_jax import metrics, ops, types
from oppo_jax.models import base

ROWS = 16  # rows per call
# How far a decode step or a tile may be from it: nats, values.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@functools.partial(jax.jit, static_argnames=("model", "chunk", "sampling"))
def _outputs(params, tokens, length, *, model, chunk, sampling):
  columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  row = jnp.arange(tokens.shape[0])[:, None]
  segments = jnp.where(columns < length[:, None], row, -1)
  hidden = model.forward(params, tokens, columns, segments)
  if not model.is_lm:
    return model.head(params, hidden)[..., 0]
  following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
  said, _ = ops.token_logprobs(
    hidden.reshape(-1, hidden.shape[-1]),
    following.reshape(-1),
    lambda h: model.head(params, h),
    chunk=chunk,
    with_entropy=False,
    **dict(sampling),
  )
  return said.reshape(tokens.shape)


def outputs(
  model: base.Model,
  params: types.Params,
  tokens: Int[Array, "B L"],
  length: Int[Array, " B"],
  *,
  chunk: int,
  temperature: float = 1.0,
  top_k: int = 0,
  top_p: float = 1.0,
) -> Float[np.ndarray, "B L"]:
  """Column p: the scorer's word on the prefix [0, p], as `ScorerState.outputs`.

  Args:
    model: the scorer, hashable.
    params: its parameters, in the dtype of use.
    tokens: rows from column 0, 0 beyond.
    length: tokens of each row; what stands beyond is junk.
    chunk: tokens whose logits exist at one time.
    temperature: of the sampling distribution, as of an "lm" head.
    top_k: likewise.
    top_p: likewise.
  """
  sampling = (("temperature", temperature), ("top_k", top_k), ("top_p", top_p))
  num, missing = len(tokens), -len(tokens) % ROWS
  tokens = np.pad(tokens, ((0, missing), (0, 0)))
  length = np.pad(length, (0, missing), constant_values=1)
  run = functools.partial(_outputs, model=model, chunk=chunk, sampling=sampling)
  parts = [
    metrics.fetch(run(params, tokens[i : i + ROWS], length[i : i + ROWS]))
    for i in range(0, num, ROWS)
  ]
  return np.concatenate(parts)[:num]
