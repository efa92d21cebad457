# SPDX-License-Identifier: Apache-2.0
"""The numbers of PPO, their ranges, and three full sets of them.

The presets follow the arithmetic of TRL 1.12, OpenRLHF 0.11 and verl 0.10, so
that a run can be held against one of theirs. What none of them has
(`denominator`, `logprob_chunk`) is ours. Not in here: TRL samples at
temperature 0.7, the other two at 1.
"""

import dataclasses
from typing import Any

from oppo_jax import ops, rewards
from oppo_jax.schema import BOOL, choice, integer, number

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


KL_ESTIMATOR = choice(*ops.KL_ESTIMATORS)
SCHEMA = {  # of config.algo; "auto" see `config.algo`
  "clip_eps": number(above=0.0),
  "value_clip_eps": number(0.0),
  "vf_coef": number(0.0),
  "gamma": number(0.0, 1.0),
  "lam": number(0.0, 1.0),
  "kl_coef": number(0.0),
  "kl_estimator": KL_ESTIMATOR,
  "kl_inner_clip": number(0.0),
  "kl_outer_clip": number(0.0),
  "kl_target": number(0.0),
  "kl_horizon": number(above=0.0),
  "kl_loss_coef": number(0.0),
  "kl_loss_estimator": KL_ESTIMATOR,
  "kl_loss_inner_clip": number(0.0),
  "kl_loss_outer_clip": number(0.0),
  "log_ratio_clip": number(0.0),
  "entropy_coef": number(0.0),
  "whiten_advantages": BOOL,
  "whiten_rewards": BOOL,
  "whitening": choice(*ops.WHITENINGS),
  "score_clip": number(0.0),
  "missing_eos_penalty": number(0.0),
  "score_position": choice(*rewards.SCORE_POSITIONS),
  "num_epochs": integer(1),
  "num_minibatches": integer(1),
  "denominator": choice("auto", *DENOMINATORS),
  "behavior_weight_cap": number(above=0.0),
  "logprob_chunk": integer(1),
}

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
