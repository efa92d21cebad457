# SPDX-License-Identifier: Apache-2.0
"""PPO for RLHF: rewards, advantages, losses and the update.

The whole algorithm, from a harvested batch to new parameters: Schulman et al.
2017 (arXiv 1707.06347) with the per-token KL reward of Ziegler et al. 2019
(arXiv 1909.08593). Knows nothing of slots, chunks or deferral: what those leave
behind is that a token's behaviour log-prob may be several versions old.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from oppo_jax import ops, rewards, types
from oppo_jax.algos import base, microbatch, optim
from oppo_jax.models import base as models

DENOMINATORS = ("behavior", "start", "decoupled", "tis")


@dataclasses.dataclass(frozen=True)
class PPOConfig:
  """Numbers of the algorithm. `PRESETS` has three full sets of them.

  Attributes:
    clip_eps: bound on |ratio - 1| in the clipped surrogate.
    value_clip_eps: bound on how far a value moves from the rollout's; 0 = off.
    vf_coef: weight of the value loss.
    gamma: discount.
    lam: lambda of GAE.
    kl_coef: weight of the KL in the rewards; where an adaptive one starts.
    kl_estimator: estimator of that KL, "k1", "k2" or "k3".
    kl_inner_clip: see `ops.kl`; 0 = off.
    kl_outer_clip: see `ops.kl`; 0 = off.
    kl_target: nats per response that an adaptive kl_coef aims at; 0 = fixed.
    kl_horizon: responses over which it adapts.
    kl_loss_coef: weight of the KL as a loss; 0 = off.
    kl_loss_estimator: as `kl_estimator`, of the loss.
    kl_loss_inner_clip: as `kl_inner_clip`, of the loss.
    kl_loss_outer_clip: as `kl_outer_clip`, of the loss.
    log_ratio_clip: bound on |log ratio| before the exponential; 0 = off.
    entropy_coef: weight of the entropy bonus; 0 = off.
    whiten_advantages: over the response tokens of the whole batch.
    whiten_rewards: likewise, around their mean.
    whitening: "unbiased" or "population", see `ops.whiten`.
    score_clip: bound on |score|; 0 = off.
    missing_eos_penalty: taken off the score of a response cut at the limit.
    score_position: "last" or "after_eos", see `rewards.score_column`.
    num_epochs: passes over a batch.
    num_minibatches: optimizer steps per pass.
    denominator: of the ratio. "behavior": the log-prob stored at sampling.
      "start": recomputed at the start of the update. "decoupled": start, times
      min(start / behavior, cap) (Hilton et al. 2022, arXiv 2110.00641).
      "tis": no clipped surrogate, but the policy gradient times
      min(ratio to behavior, cap) (truncated importance sampling).
    behavior_weight_cap: the cap of the last two.
    logprob_chunk: tokens whose logits exist at one time.
  """

  clip_eps: float
  value_clip_eps: float
  vf_coef: float
  gamma: float
  lam: float
  kl_coef: float
  kl_estimator: str
  kl_inner_clip: float
  kl_outer_clip: float
  kl_target: float
  kl_horizon: float
  kl_loss_coef: float
  kl_loss_estimator: str
  kl_loss_inner_clip: float
  kl_loss_outer_clip: float
  log_ratio_clip: float
  entropy_coef: float
  whiten_advantages: bool
  whiten_rewards: bool
  whitening: str
  score_clip: float
  missing_eos_penalty: float
  score_position: str
  num_epochs: int
  num_minibatches: int
  denominator: str
  behavior_weight_cap: float
  logprob_chunk: int

  def __post_init__(self):
    for field, choices in (
      ("kl_estimator", ops.KL_ESTIMATORS),
      ("kl_loss_estimator", ops.KL_ESTIMATORS),
      ("whitening", ops.WHITENINGS),
      ("score_position", rewards.SCORE_POSITIONS),
      ("denominator", DENOMINATORS),
    ):
      if getattr(self, field) not in choices:
        raise ValueError(f"{field}={getattr(self, field)!r}: not in {choices}")


# The arithmetic of TRL 1.12, OpenRLHF 0.11 and verl 0.10; what none of them has
# (denominator, chunk) is ours. TRL samples at temperature 0.7, the others at 1.
PRESETS: dict[str, dict[str, Any]] = {
  "trl": dict(
    clip_eps=0.2,
    value_clip_eps=0.2,
    vf_coef=0.1,
    gamma=1.0,
    lam=0.95,
    kl_coef=0.05,
    kl_estimator="k1",
    kl_inner_clip=0.0,
    kl_outer_clip=0.0,
    kl_target=0.0,
    kl_horizon=10_000.0,
    kl_loss_coef=0.0,
    kl_loss_estimator="k3",
    kl_loss_inner_clip=0.0,
    kl_loss_outer_clip=0.0,
    log_ratio_clip=0.0,
    entropy_coef=0.0,
    whiten_advantages=True,
    whiten_rewards=False,
    whitening="unbiased",
    score_clip=0.0,
    missing_eos_penalty=0.0,
    score_position="after_eos",
    num_epochs=4,
    num_minibatches=1,
    denominator="behavior",
    behavior_weight_cap=2.0,
    logprob_chunk=1024,
  ),
}
PRESETS["openrlhf"] = PRESETS["trl"] | dict(
  value_clip_eps=0.5,
  vf_coef=1.0,
  lam=1.0,
  kl_coef=0.01,
  kl_outer_clip=10.0,
  kl_loss_outer_clip=10.0,
  log_ratio_clip=20.0,
  whitening="population",
  score_position="last",
  num_epochs=1,
)
PRESETS["verl"] = PRESETS["trl"] | dict(
  value_clip_eps=0.5,
  vf_coef=1.0,
  lam=1.0,
  kl_coef=0.001,
  kl_loss_inner_clip=20.0,  # verl clamps k3 alone, and its reward KL is k1
  kl_loss_outer_clip=10.0,
  log_ratio_clip=20.0,
  score_position="last",
  num_epochs=1,
)


class Targets(NamedTuple):
  """What stays fixed during an update, response-aligned.

  Attributes:
    scores: after clip and penalty.
    kl: of the rollout to the reference, per token, 0 outside the mask.
    rewards: token rewards, whitened if asked.
    advantages: weight of each token in the policy loss.
    returns: what values are regressed on.
    value_mask: columns that have a value.
    denominator: log-probs the ratio is taken to.
  """

  scores: Float[Array, " B"]
  kl: Float[Array, "B R"]
  rewards: Float[Array, "B R"]
  advantages: Float[Array, "B R"]
  returns: Float[Array, "B R"]
  value_mask: Bool[Array, "B R"]
  denominator: Float[Array, "B R"]


def make_targets(
  batch: types.Batch, kl_coef: Float[Array, ""], config: PPOConfig
) -> Targets:
  """Scores and log-probs -> rewards -> advantages and returns.

  The KL is taken between the denominator and the reference: where behaviour
  log-probs come from another program than the reference's (decode steps in
  bfloat16), "start" and "decoupled" keep it exactly 0 for equal models.
  """
  is_start = config.denominator in ("start", "decoupled")
  denominator = batch.start_logprobs if is_start else batch.behavior_logprobs
  scores = rewards.final_scores(
    batch.scores,
    batch.has_eos,
    missing_eos_penalty=config.missing_eos_penalty,
    score_clip=config.score_clip,
  )
  kl = ops.kl(
    denominator,
    batch.ref_logprobs,
    estimator=config.kl_estimator,
    inner_clip=config.kl_inner_clip,
    outer_clip=config.kl_outer_clip,
  )
  kl = jnp.where(batch.mask, kl, 0)
  position = config.score_position
  token_rewards = rewards.token_rewards(
    scores, kl, batch.mask, kl_coef=kl_coef, position=position
  )
  value_mask = rewards.value_mask(batch.mask, position=position)
  whitening = config.whitening
  if config.whiten_rewards:
    token_rewards = ops.whiten(
      token_rewards, value_mask, keep_mean=True, whitening=whitening
    )
  advantages, returns = ops.gae(
    token_rewards,
    batch.values,
    value_mask,
    gamma=config.gamma,
    lam=config.lam,
  )
  if config.whiten_advantages:
    advantages = ops.whiten(
      advantages, batch.mask, keep_mean=False, whitening=whitening
    )
  if config.denominator == "decoupled":
    # A weight >= 0 may be folded into the advantage: max(-wA·r, -wA·clip(r)).
    weight = truncated_ratio(
      batch.start_logprobs - batch.behavior_logprobs,
      cap=config.behavior_weight_cap,
    )
    advantages = jnp.where(batch.mask, weight * advantages, 0)
  return Targets(
    scores=scores,
    kl=kl,
    rewards=token_rewards,
    advantages=advantages,
    returns=returns,
    value_mask=value_mask,
    denominator=denominator,
  )


def log_ratio(
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
  # min before exp: no overflow.
  return jax.lax.stop_gradient(
    jnp.exp(jnp.minimum(log_ratio, jnp.log(cap).astype(log_ratio.dtype)))
  )


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
  return -advantages * weight * unit, log_ratio > jnp.log(cap)


def value_loss(
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


def adaptive_kl_coef(
  kl_coef: Float[Array, ""],
  observed_kl: Float[Array, ""],
  *,
  target: float,
  horizon: float,
  num_responses: int,
) -> Float[Array, ""]:
  """The coefficient of the next batch: up if the KL is above its target.

    e = clip(KL / target - 1, ±0.2)      β ← β · (1 + e · responses / horizon)

  Ziegler et al. 2019, section 2.2 (there with K_β = responses / horizon).
  """
  error = jnp.clip(observed_kl / target - 1, -0.2, 0.2)
  return kl_coef * (1 + error * num_responses / horizon)
