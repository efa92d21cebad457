# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules and the optimizer: AdamW behind a global-norm clip.

Schedules count optimizer steps (minibatches), not updates.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from oppo_jax import types

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


class Optimizer(NamedTuple):
  """One model's optimizer, and its schedule for the log."""

  schedule: optax.Schedule
  transform: optax.GradientTransformation


def make(config: OptimConfig, *, total_steps: int) -> dict[str, Optimizer]:
  """Optimizers of the policy and the critic: own state, own clip."""
  result = {}
  for name in ("policy", "critic"):
    schedule = make_schedule(
      peak=getattr(config, f"{name}_lr"),
      schedule=config.schedule,
      warmup_steps=config.warmup_steps,
      total_steps=total_steps,
    )
    transform = make_adamw(
      schedule,
      clip_norm=config.clip_norm,
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
    )
    result[name] = Optimizer(schedule, transform)
  return result


def init(
  optimizers: dict[str, Optimizer], params: types.Params
) -> dict[str, optax.OptState]:
  """One state per optimizer, of the entry of `params` that has its name."""
  return {k: v.transform.init(params[k]) for k, v in optimizers.items()}


def step(
  optimizers: dict[str, Optimizer],
  params: types.Params,
  opt_state: dict[str, optax.OptState],
  grads: types.Params,
) -> tuple[types.Params, dict[str, optax.OptState], dict[str, jax.Array]]:
  """One step of every optimizer.

  Returns:
    parameters, states, and the norms of the gradients before clipping.
  """
  new_params, new_state, norms = {}, {}, {}
  for name, optimizer in optimizers.items():
    updates, new_state[name] = optimizer.transform.update(
      grads[name], opt_state[name], params[name]
    )
    new_params[name] = optax.apply_updates(params[name], updates)
    norms[name] = optax.tree.norm(grads[name])
  return new_params, new_state, norms


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


def make_adamw(
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
