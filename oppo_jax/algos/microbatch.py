# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of packed rows, built on the device from a `Packing`.

Knows where tokens lie, and no loss. A model reads the packed tokens; position p
of a row predicts token p + 1, so the loss terms of response token t stand where
token t - 1 is read, and a value after the last token stands on that token:

  columns of the bin    0  1  2  3  4  5  6  7
  rows (prompt 2)       a  a  a  a  b  b  b  .      responses of 2 and 1 tokens
  segments              0  0  0  0  1  1  1 -1
  positions             0  1  2  3  0  1  2  0
  predicts token t      .  0  1  2  .  0  1  .      2 and 1: values only
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Shaped

from oppo_jax import ops, types


@struct.dataclass
class MicroBatch:
  """One packed micro-batch of fixed shape, and the way back to [B, R].

  Attributes:
    tokens: input tokens, 0 on padding.
    positions: column of the token in its row, 0 on padding.
    segments: row of the batch, -1 on padding.
    row: row of the batch, 0 on padding.
    column: response token that is predicted here, clipped into [0, R).
    is_inside: `row` and `column` are real, not clipped or padding.
  """

  tokens: jax.Array  # [rows, W] int32
  positions: jax.Array  # [rows, W] int32
  segments: jax.Array  # [rows, W] int32
  row: jax.Array  # [rows, W] int32
  column: jax.Array  # [rows, W] int32
  is_inside: jax.Array  # [rows, W] bool

  def take(self, x: Shaped[Array, "B R"]) -> Shaped[Array, "rows W"]:
    """Entries of a response-aligned array; junk where not `is_inside`."""
    return x[self.row, self.column]


def gather(
  batch: types.Batch,
  minibatch: types.Packing,
  index: Int[Array, ""],
  *,
  micro_rows: int,
  width: int,
) -> MicroBatch:
  """Lays the rows of bins [index * micro_rows, ...) end to end.

  Args:
    batch: all rows.
    minibatch: the packing of one minibatch, its fields of shape [M].
    index: which micro-batch.
    micro_rows: bins per micro-batch.
    width: W, tokens per bin.
  """
  length = (batch.prompt_len + batch.response_len)[minibatch.row]  # [M]
  bins = index * micro_rows + jnp.arange(micro_rows, dtype=jnp.int32)
  columns = jnp.arange(width, dtype=jnp.int32)[:, None]
  start = minibatch.offset[None, :]
  is_span = (start <= columns) & (columns < start + length[None, :])  # [W, M]
  is_bin = bins[:, None] == minibatch.bin[None, :]  # [rows, M]
  is_owner = is_bin[:, None, :] & is_span[None, :, :]  # [rows, W, M]
  is_token = jnp.any(is_owner, axis=-1)  # [rows, W]
  member = jnp.argmax(is_owner, axis=-1)
  row = jnp.where(is_token, minibatch.row[member], 0)
  positions = columns.T - minibatch.offset[member]
  positions = jnp.where(is_token, positions, 0)
  predicted = positions + 1 - batch.prompt_len[row]
  max_response_len = batch.mask.shape[1]
  return MicroBatch(
    tokens=jnp.where(is_token, batch.sequences[row, positions], 0),
    positions=positions,
    segments=jnp.where(is_token, row, -1),
    row=row,
    column=jnp.clip(predicted, 0, max_response_len - 1),
    is_inside=is_token & (0 <= predicted) & (predicted < max_response_len),
  )


def accumulate(
  loss_fn: Callable[[types.Params, MicroBatch], tuple],
  params: types.Params,
  batch: types.Batch,
  minibatch: types.Packing,
  *,
  micro_rows: int,
  width: int,
) -> tuple[types.Params, dict[str, jax.Array], dict[str, jax.Array]]:
  """Adds up gradients over the micro-batches of one minibatch.

  The trip count is `minibatch.num_micro`, read on the device: micro-batches of
  padding never run, and another number of them compiles nothing.

  Args:
    loss_fn: (params, micro) -> loss, (sums, maxima): dicts of scalars that are
      added up, and of which the largest counts. Means must already be over the
      whole minibatch: losses are added, too.
    params: what is differentiated.
    batch: all rows.
    minibatch: the packing of one minibatch, its fields of shape [M].
    micro_rows: see `gather`.
    width: see `gather`.

  Returns:
    gradients (in float32 or better), sums and maxima (from 0 up).
  """
  micro_fn = lambda index: gather(
    batch, minibatch, index, micro_rows=micro_rows, width=width
  )
  zeros = lambda x: ops.at_least_float32(jnp.zeros(x.shape, x.dtype))
  add = lambda x, y: x + y.astype(x.dtype)

  def add_micro(index, carry):
    grads, sums, maxima = carry
    new_grads, (new_sums, new_maxima) = jax.grad(loss_fn, has_aux=True)(
      params, micro_fn(index)
    )
    return (
      jax.tree.map(add, grads, new_grads),
      jax.tree.map(add, sums, new_sums),
      jax.tree.map(jnp.maximum, maxima, new_maxima),
    )

  _, aux = jax.eval_shape(
    lambda: loss_fn(params, micro_fn(jnp.zeros((), jnp.int32)))
  )
  nothing = jax.tree.map(zeros, (params, *aux))
  return jax.lax.fori_loop(0, minibatch.num_micro, add_micro, nothing)
