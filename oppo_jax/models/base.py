# SPDX-License-Identifier: Apache-2.0
"""What a model is to the rest of the package: four pure functions.

Linen inside, pure outside. One entry, `apply`, serves decoding (C = 1), tiles
of prefill (C = T) and a one-shot forward (C = L from an empty cache); `forward`
is the cache-free form used where gradients are taken.
"""

from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from oppo_jax import types


@runtime_checkable
class Model(Protocol):
  """A causal decoder with one head: "lm" (logits) or "scalar" (one number)."""

  vocab_size: int
  dtype: str
  is_lm: bool

  def init(self, rng: jax.Array) -> types.Params:
    """Draws float32 parameters: a nested dict of arrays."""
    ...

  def init_cache(self, num_rows: int, row_len: int) -> types.KVCache:
    """Zeros; per layer one (key, value) pair [num_rows, K, row_len, D/H]."""
    ...

  def apply(
    self,
    params: types.Params,
    tokens: Int[Array, "rows C"],
    start: Int[Array, " rows"],
    cache: types.KVCache,
    slots: Int[Array, " rows"] | None = None,
  ) -> tuple[Float[Array, "rows C D"], types.KVCache]:
    """Appends C tokens per row at columns start .. start + C - 1.

    Without `slots` the rows are the cache's rows. With it, row i belongs to
    cache row slots[i]; several rows may be successive pieces of one slot (all
    keys are written before any is read), and rows whose slot is out of range
    write nothing. A row's result depends on its own tokens and prefix alone.

    The caller guarantees start + C <= row_len: writes past the end would be
    clamped onto valid columns.
    """
    ...

  def forward(
    self,
    params: types.Params,
    tokens: Int[Array, "rows W"],
    positions: Int[Array, "rows W"],
    segments: Int[Array, "rows W"],
  ) -> Float[Array, "rows W D"]:
    """Hidden states of packed rows, no cache; attention stays in a segment."""
    ...

  def head(
    self, params: types.Params, hidden: Float[Array, "*b D"]
  ) -> Float[Array, "*b out"]:
    """float32: logits [..., V] of an "lm", [..., 1] of a "scalar" head."""
    ...
