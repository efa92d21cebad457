# SPDX-License-Identifier: Apache-2.0
"""Losses per token, and where they stop a gradient.

Pure functions of arrays of any shape; sums, masks and means are `ppo.py`'s.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_log_ratio(
  logprobs: Float[Array, "*b"],
  denominator: Float[Array, "*b"],
  mask: Bool[Array, "*b"],
  *,
  clip: float,
) -> Float[Array, "*b"]:
  """log π / π_denominator per token; 0, without gradient, outside `mask`.

  The mask comes before the exponential: junk could overflow it, and the
  gradient of a masked infinity is NaN.
  """
  difference = jnp.where(mask, logprobs - denominator, 0)
  return jnp.clip(difference, -clip, clip) if clip else difference


def truncated_ratio(
  log_ratio: Float[Array, "*b"], *, cap: float
) -> Float[Array, "*b"]:
  """min(ratio, cap), a constant to the gradient; `cap` > 0."""
  return jax.lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, math.log(cap))))


def clipped_surrogate(
  log_ratio: Float[Array, "*b"],
  advantages: Float[Array, "*b"],
  *,
  clip_eps: float,
) -> tuple[Float[Array, "*b"], Bool[Array, "*b"]]:
  """max(-A·ratio, -A·clip(ratio, 1 - ε, 1 + ε)) per token.

  Schulman et al. 2017, eq. 7.

  Returns:
    Losses, and where the clipped branch was taken (no gradient there).
  """
  ratio = jnp.exp(log_ratio)
  unclipped = -advantages * ratio
  clipped = -advantages * jnp.clip(ratio, 1 - clip_eps, 1 + clip_eps)
  return jnp.maximum(unclipped, clipped), clipped > unclipped


def truncated_surrogate(
  log_ratio: Float[Array, "*b"],
  advantages: Float[Array, "*b"],
  *,
  cap: float,
) -> tuple[Float[Array, "*b"], Bool[Array, "*b"]]:
  """Loss of gradient -A·min(ratio, cap)·∇log π per token, of value without ∇.

  Truncated importance sampling (Ionides 2008): unlike a clipped surrogate,
  a capped token still learns.

  Returns:
    Losses, and where the ratio is capped.
  """
  weight = truncated_ratio(log_ratio, cap=cap)
  unit = jnp.exp(log_ratio - jax.lax.stop_gradient(log_ratio))
  return -advantages * weight * unit, log_ratio > math.log(cap)


def clipped_value_loss(
  values: Float[Array, "*b"],
  rollout_values: Float[Array, "*b"],
  returns: Float[Array, "*b"],
  *,
  value_clip_eps: float,
) -> tuple[Float[Array, "*b"], Bool[Array, "*b"]]:
  """max((V - G)², (clip(V, V₀ - ε, V₀ + ε) - G)²) / 2 per token.

  As in OpenAI's baselines: `ppo2/model.py`.

  Args:
    values: V, of the critic that is trained.
    rollout_values: V₀, those that the advantages were computed from.
    returns: G.
    value_clip_eps: ε; 0 = no clipping.

  Returns:
    Losses, and where the clipped branch was taken.
  """
  unclipped = jnp.square(values - returns)
  if not value_clip_eps:
    return unclipped / 2, jnp.zeros(values.shape, bool)
  near = jnp.clip(
    values, rollout_values - value_clip_eps, rollout_values + value_clip_eps
  )
  clipped = jnp.square(near - returns)
  return jnp.maximum(unclipped, clipped) / 2, clipped > unclipped
