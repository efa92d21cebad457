# SPDX-License-Identifier: Apache-2.0
"""PPO for RLHF: rewards, advantages, the loss and the update.

The whole algorithm, from a harvested batch to new parameters: Schulman et al.
2017 (arXiv 1707.06347) with the per-token KL reward of Ziegler et al. 2019
(arXiv 1909.08593). Knows nothing of slots, chunks or deferral: what those leave
behind is that a token's behavior log-prob may be several versions old.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from oppo_jax import ops, rewards, types
from oppo_jax.algos import base, losses, microbatch, optim
from oppo_jax.algos.ppo_config import PRESETS, SCHEMA, PPOConfig
from oppo_jax.models import base as models

__all__ = ["PRESETS", "SCHEMA", "PPOConfig", "make"]


class Targets(NamedTuple):
  """What stays fixed during an update, response-aligned.

  Attributes:
    scores: after clip and penalty.
    kl: of the rollout to the reference, per token, 0 outside the mask.
    rewards: token rewards, whitened if asked.
    advantages: weight of each token in the policy loss.
    values: of the rollout, 0 outside `value_mask`.
    returns: what values are regressed on.
    value_mask: columns that have a value.
    denominator: log-probs the ratio is taken to.
  """

  scores: Float[Array, " B"]
  kl: Float[Array, "B R"]
  rewards: Float[Array, "B R"]
  advantages: Float[Array, "B R"]
  values: Float[Array, "B R"]
  returns: Float[Array, "B R"]
  value_mask: Bool[Array, "B R"]
  denominator: Float[Array, "B R"]


def make_targets(
  batch: types.Batch, kl_coef: float | Float[Array, ""], config: PPOConfig
) -> Targets:
  """Scores and log-probs -> rewards -> advantages and returns.

  The KL is taken between the denominator and the reference: where behavior
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
  values = jnp.where(value_mask, batch.values, 0)
  advantages, returns = ops.gae(
    token_rewards,
    values,
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
    weight = losses.truncated_ratio(
      batch.start_logprobs - batch.behavior_logprobs,
      cap=config.behavior_weight_cap,
    )
    advantages = jnp.where(batch.mask, weight * advantages, 0)
  return Targets(
    scores=scores,
    kl=kl,
    rewards=token_rewards,
    advantages=advantages,
    values=values,
    returns=returns,
    value_mask=value_mask,
    denominator=denominator,
  )


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


def make(
  algo: Mapping[str, Any],
  optimizer: Mapping[str, Any],
  *,
  policy: models.Model,
  critic: models.Model,
  temperature: float,
  top_k: int,
  top_p: float,
  num_updates: int,
  bin_width: int,
  micro_rows: int,
) -> base.Algorithm:
  """PPO with these numbers, for these models.

  Args:
    algo: fields of `PPOConfig`.
    optimizer: fields of `optim.OptimConfig`.
    policy: with an "lm" head.
    critic: with a "scalar" head; has its own parameters and optimizer.
    temperature: of the sampling distribution, see `ops.sampling_logits`.
    top_k: of the sampling distribution.
    top_p: of the sampling distribution.
    num_updates: updates of the whole run, for the schedule.
    bin_width: W, tokens per packed row; as given to `packing.plan`.
    micro_rows: packed rows per forward and backward pass; likewise.
  """
  config = PPOConfig(**algo)
  steps_per_update = config.num_epochs * config.num_minibatches
  optimizers = optim.make(
    optim.OptimConfig(**optimizer), total_steps=num_updates * steps_per_update
  )
  loss = functools.partial(
    micro_loss,
    config=config,
    policy=policy,
    critic=critic,
    sampling=dict(temperature=temperature, top_k=top_k, top_p=top_p),
  )

  def init(params: types.Params) -> types.TrainState:
    return types.TrainState(
      params=params,
      opt_state=optim.init(optimizers, params),
      version=jnp.zeros((), jnp.int32),
      algo_state={"kl_coef": jnp.asarray(config.kl_coef, jnp.float32)},
    )

  def gradients_of(params, batch, targets, minibatch):
    """Gradients of one minibatch, and what its loss says of it."""
    counts = Counts(
      tokens=ops.count(batch.mask[minibatch.row]),
      values=ops.count(targets.value_mask[minibatch.row]),
    )
    grads, sums, maxima = microbatch.accumulate(
      functools.partial(loss, batch=batch, targets=targets, counts=counts),
      params,
      batch,
      minibatch,
      micro_rows=micro_rows,
      width=bin_width,
    )
    return grads, (sums, counts, maxima)

  def gradients(
    state: types.TrainState, batch: types.Batch, packing: types.Packing
  ) -> types.Params:
    targets = make_targets(batch, state.algo_state["kl_coef"], config)
    first = jax.tree.map(lambda x: x[0, 0], packing)
    return gradients_of(state.params, batch, targets, first)[0]

  def update(
    state: types.TrainState, batch: types.Batch, packing: types.Packing
  ) -> tuple[types.TrainState, base.Metrics]:
    planned = (config.num_epochs, config.num_minibatches)
    if packing.row.shape[:2] != planned:
      raise ValueError(f"packing is for {packing.row.shape[:2]}, not {planned}")
    kl_coef = state.algo_state["kl_coef"]
    targets = make_targets(batch, kl_coef, config)

    def one_minibatch(carry, minibatch):
      params, opt_state = carry
      grads, seen = gradients_of(params, batch, targets, minibatch)
      params, opt_state, norms = optim.step(
        optimizers, params, opt_state, grads
      )
      return (params, opt_state), (*seen, norms)

    # Epochs and minibatches are one axis: optimizer steps.
    minibatches = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), packing)
    (params, opt_state), (sums, counts, maxima, norms) = jax.lax.scan(
      one_minibatch, (state.params, state.opt_state), minibatches
    )
    total = functools.partial(jax.tree.map, jnp.sum)
    first_step = state.version * steps_per_update
    metrics = {
      **rollout_metrics(batch, targets, kl_coef),
      **loss_metrics(total(sums), total(counts)),
      "policy/ratio_first": maxima["ratio_deviation"][0],
      "policy/grad_norm": jnp.mean(norms["policy"]),
      "val/grad_norm": jnp.mean(norms["critic"]),
      "policy/lr": optimizers["policy"].schedule(first_step),
      "val/lr": optimizers["critic"].schedule(first_step),
    }
    if config.kl_target:
      kl_coef = adaptive_kl_coef(
        kl_coef,
        metrics["objective/kl"],
        target=config.kl_target,
        horizon=config.kl_horizon,
        num_responses=batch.uid.shape[0],
      )
    state = types.TrainState(
      params=params,
      opt_state=opt_state,
      version=state.version + 1,
      algo_state={"kl_coef": kl_coef},
    )
    return state, {k: v.astype(jnp.float32) for k, v in metrics.items()}

  scorers = {"critic", "reference", "reward"}
  if config.denominator in ("start", "decoupled"):
    scorers.add("policy")
  return base.Algorithm(
    scorers=frozenset(scorers),
    group_size=1,
    init=init,
    update=update,
    gradients=gradients,
  )


class Counts(NamedTuple):
  """Tokens, and tokens with a value, of a minibatch: what sums divide by."""

  tokens: Float[Array, ""]
  values: Float[Array, ""]


def micro_loss(
  params: types.Params,
  micro: microbatch.MicroBatch,
  *,
  batch: types.Batch,
  targets: Targets,
  counts: Counts,
  config: PPOConfig,
  policy: models.Model,
  critic: models.Model,
  sampling: Mapping[str, Any],
) -> tuple[Float[Array, ""], tuple[dict[str, jax.Array], dict[str, jax.Array]]]:
  """One micro-batch's share of the loss of its minibatch.

    policy + vf_coef · value + kl_loss_coef · kl - entropy_coef · entropy

  Each term is a sum over tokens, divided by the count of the *minibatch*: how
  that is cut into micro-batches changes no mean.

  Returns:
    The loss; sums over tokens by name, and maxima by name.
  """
  take, shape = micro.take, micro.tokens.shape
  packed = (micro.tokens, micro.positions, micro.segments)
  hidden = policy.forward(params["policy"], *packed)  # [rows, W, D]
  logprobs, entropy = ops.token_logprobs(
    hidden.reshape(-1, hidden.shape[-1]),
    take(batch.responses).reshape(-1),
    functools.partial(policy.head, params["policy"]),
    chunk=config.logprob_chunk,
    with_entropy=True,
    **sampling,
  )
  logprobs, entropy = logprobs.reshape(shape), entropy.reshape(shape)
  hidden = critic.forward(params["critic"], *packed)
  values = critic.head(params["critic"], hidden)[..., 0]

  mask = micro.is_inside & take(batch.mask)
  log_ratio = losses.masked_log_ratio(
    logprobs, take(targets.denominator), mask, clip=config.log_ratio_clip
  )
  advantages = take(targets.advantages)
  if config.denominator == "tis":
    policy_loss, is_clipped = losses.truncated_surrogate(
      log_ratio, advantages, cap=config.behavior_weight_cap
    )
  else:
    policy_loss, is_clipped = losses.clipped_surrogate(
      log_ratio, advantages, clip_eps=config.clip_eps
    )
  kl = ops.kl(
    jnp.where(mask, logprobs, 0),
    jnp.where(mask, take(batch.ref_logprobs), 0),
    estimator=config.kl_loss_estimator,
    inner_clip=config.kl_loss_inner_clip,
    outer_clip=config.kl_loss_outer_clip,
  )
  value_loss, is_value_clipped = losses.clipped_value_loss(
    values,
    take(targets.values),
    take(targets.returns),
    value_clip_eps=config.value_clip_eps,
  )

  ratio = jnp.exp(log_ratio)
  over = lambda mask, terms: {
    k: jnp.sum(jnp.where(mask, ops.at_least_float32(x), 0))
    for k, x in terms.items()
  }
  sums = over(
    mask,
    dict(
      policy_loss=policy_loss,
      kl=kl,
      entropy=entropy,
      ratio=ratio,
      squared_log_ratio=jnp.square(log_ratio),
      is_clipped=is_clipped,
    ),
  ) | over(
    micro.is_inside & take(targets.value_mask),
    dict(value_loss=value_loss, is_value_clipped=is_value_clipped),
  )
  loss = sums["policy_loss"] / counts.tokens
  loss += config.vf_coef * sums["value_loss"] / counts.values
  if config.kl_loss_coef:
    loss += config.kl_loss_coef * sums["kl"] / counts.tokens
  if config.entropy_coef:
    loss -= config.entropy_coef * sums["entropy"] / counts.tokens
  deviation = jnp.where(mask, jnp.abs(ratio - 1), 0)
  return loss, (sums, {"ratio_deviation": jnp.max(deviation)})


def rollout_metrics(
  batch: types.Batch, targets: Targets, kl_coef: Float[Array, ""]
) -> base.Metrics:
  """What is known before the update; means over responses, as TRL's."""
  per_response = lambda x: jnp.mean(
    jnp.sum(jnp.where(batch.mask, x, 0), axis=-1)
  )
  kl = per_response(targets.kl)
  return {
    "objective/kl": kl,
    "objective/entropy": per_response(-targets.denominator),
    "objective/scores": jnp.mean(targets.scores),
    "objective/rlhf_reward": jnp.mean(targets.scores) - kl_coef * kl,
    "objective/kl_coef": kl_coef,
    "val/explained_variance": ops.explained_variance(
      targets.values, targets.returns, targets.value_mask
    ),
  }


def loss_metrics(sums: dict[str, jax.Array], counts: Counts) -> base.Metrics:
  """What is known after it; means over the tokens of all minibatches."""
  mean = {k: v / counts.tokens for k, v in sums.items()}
  return {
    "policy/approxkl_avg": mean["squared_log_ratio"] / 2,
    "policy/clipfrac_avg": mean["is_clipped"],
    "policy/entropy_avg": mean["entropy"],
    "policy/kl_ref_avg": mean["kl"],
    "loss/policy_avg": mean["policy_loss"],
    "loss/value_avg": sums["value_loss"] / counts.values,
    "val/ratio": mean["ratio"],
    "val/clipfrac_avg": sums["is_value_clipped"] / counts.values,
  }
