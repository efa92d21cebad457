# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules and the optimizer: AdamW behind a global-norm clip.

Schedules count optimizer steps (minibatches), not updates.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """How parameters move.

  Attributes:
    policy_lr: peak learning rate of the policy.
    critic_lr: peak learning rate of the critic.
    schedule: one of `SCHEDULES`; the last two end at 0.
    warmup_steps: optimizer steps of linear warm-up; 0 = off.
    clip_norm: bound on the global norm of each model's gradient; 0 = off.
    b1: decay of Adam's first moment.
    b2: decay of Adam's second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled, on matrices only; 0 = off.
  """

  policy_lr: float
  critic_lr: float
  schedule: str
  warmup_steps: int
  clip_norm: float
  b1: float
  b2: float
  eps: float
  weight_decay: float


def make_schedule(
  *, peak: float, schedule: str, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """Learning rate of optimizer step 0, 1, ...

    warm-up    peak · (step + 1) / warmup_steps       never 0: step 0 learns
    then       peak · {1, 1 − x, (1 + cos πx) / 2}    x from 0 to 1

  Args:
    peak: largest learning rate.
    schedule: one of `SCHEDULES`.
    warmup_steps: 0 = none.
    total_steps: step at which linear and cosine reach 0.
  """
  if schedule not in SCHEDULES:
    raise ValueError(f"schedule {schedule!r}: not in {SCHEDULES}")

  def learning_rate(step):
    step = jnp.asarray(step, jnp.float32)
    warmth = jnp.minimum((step + 1) / max(warmup_steps, 1), 1)
    x = jnp.clip(
      (step - warmup_steps) / max(total_steps - warmup_steps, 1), 0, 1
    )
    match schedule:
      case "constant":
        decay = 1.0
      case "linear":
        decay = 1 - x
      case "cosine":
        decay = (1 + jnp.cos(jnp.pi * x)) / 2
    return peak * warmth * decay

  return learning_rate


def make_optimizer(
  learning_rate: optax.Schedule,
  *,
  clip_norm: float,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
) -> optax.GradientTransformation:
  """AdamW on the gradient clipped by its global norm; see `OptimConfig`."""
  adamw = optax.adamw(
    learning_rate,
    b1=b1,
    b2=b2,
    eps=eps,
    weight_decay=weight_decay,
    mask=lambda params: jax.tree.map(lambda x: x.ndim >= 2, params),
  )
  if not clip_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
