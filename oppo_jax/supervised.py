# SPDX-License-Identifier: Apache-2.0
"""Supervised stages before PPO: next-token learning and preference learning.

Batches are packed (`texts.py`), so one program is compiled per stage and what
a step costs is tokens. The two losses:

  language model  -mean over response tokens of log p(token | prefix)
  reward model    -mean over pairs of log sigmoid(s(chosen) - s(rejected)) with
                  scores s; Bradley & Terry 1952, Ouyang et al. 2022, eq. 1

Parameters, gradients and optimizer are float32; what a model computes in is its
own dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from oppo_jax import metrics, ops, texts, types
from oppo_jax.algos import optim
from oppo_jax.models import base
from oppo_jax.texts import Packed, Text

LossFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class FitConfig:
  """One supervised stage.

  Attributes:
    num_steps: optimizer steps; 0 = the stage is skipped.
    rows: packed rows per step.
    width: tokens per row; the longest sequence must fit.
    lr: peak learning rate, cosine to 0.
    warmup_steps: linear warm-up.
    weight_decay: decoupled, on matrices.
    clip_norm: bound on the gradient's global norm.
  """

  num_steps: int
  rows: int
  width: int
  lr: float
  warmup_steps: int
  weight_decay: float
  clip_norm: float


def fit_config(section: Mapping[str, Any]) -> FitConfig:
  """The fields of `FitConfig` of a section of a config, which has more."""
  fields = FitConfig.__dataclass_fields__
  return FitConfig(**{k: section[k] for k in fields})


def language_model_loss(
  params: types.Params, batch: Packed, *, model: base.Model, logprob_chunk: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Mean negative log-prob of response tokens, nats per token."""
  hidden = model.forward(params, batch.tokens, batch.positions, batch.segments)
  targets = jnp.roll(batch.tokens, -1, axis=1)
  logprobs, _ = ops.token_logprobs(
    hidden.reshape(-1, hidden.shape[-1]),
    targets.reshape(-1),
    lambda h: model.head(params, h),
    chunk=logprob_chunk,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    with_entropy=False,
  )
  loss = -ops.masked_mean(logprobs, batch.is_target.reshape(-1))
  return loss, {"loss": loss}


def pair_scores(
  params: types.Params, batch: Packed, *, model: base.Model
) -> jax.Array:
  """Scores at the last token of every sequence: [items, 2]."""
  hidden = model.forward(params, batch.tokens, batch.positions, batch.segments)
  return model.head(params, hidden).reshape(-1)[batch.last]


def preference_loss(
  params: types.Params, batch: Packed, *, model: base.Model
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Bradley-Terry loss over pairs (chosen, rejected), and their accuracy."""
  scores = pair_scores(params, batch, model=model)
  gap = scores[:, 0] - scores[:, 1]
  loss = -ops.masked_mean(jax.nn.log_sigmoid(gap), batch.item_mask)
  right = ops.masked_mean((gap > 0).astype(jnp.float32), batch.item_mask)
  return loss, {"loss": loss, "accuracy": right}


def centered_preference_loss(
  params: types.Params,
  batch: Packed,
  *,
  model: base.Model,
  margin_coef: float,
  center_coef: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Bradley-Terry with margins, and a pull of scores to mean zero.

    -log sigmoid(gap - margin_coef * margin) + center_coef * (sum of scores)^2

  a pair. The margin is that of Touvron et al. 2023, arXiv 2307.09288, eq. 2;
  the pull that of Eisenstein et al. 2023, arXiv 2312.09244, section 2, as TRL's
  `center_rewards_coefficient`: pairs fix no zero point of the scores.
  """
  scores = pair_scores(params, batch, model=model)
  gap, both = scores[:, 0] - scores[:, 1], scores[:, 0] + scores[:, 1]
  mean = functools.partial(ops.masked_mean, mask=batch.item_mask)
  fit = -mean(jax.nn.log_sigmoid(gap - margin_coef * batch.margin))
  loss = fit + center_coef * mean(both**2)
  right = mean((gap > 0).astype(jnp.float32))
  seen = {"loss": loss, "accuracy": right, "gap": mean(gap)}
  return loss, seen | {"score": mean(both) / 2}


class Learner(NamedTuple):
  """A loss and its optimizer.

  Attributes:
    init: parameters -> (a copy of them, optimizer state).
    step: (parameters, optimizer state, batch) -> the same after one step, and
      what the loss said; the first two are donated.
  """

  init: Callable[[types.Params], tuple[types.Params, optax.OptState]]
  step: Callable[..., tuple[types.Params, optax.OptState, dict]]


def learner(loss_fn: LossFn, config: FitConfig) -> Learner:
  """AdamW on `loss_fn`, with the rates of `config`."""
  rate = optim.make_schedule(
    peak=config.lr,
    schedule="cosine",
    warmup_steps=config.warmup_steps,
    total_steps=config.num_steps,
  )
  optimizer = optim.make_adamw(
    rate,
    clip_norm=config.clip_norm,
    b1=0.9,
    b2=0.98,
    eps=1e-8,
    weight_decay=config.weight_decay,
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch):
    (_, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, seen

  def init(params):
    params = jax.tree.map(jnp.copy, params)  # the caller's stay undonated
    return params, optimizer.init(params)

  return Learner(init, step)


def fit(
  params: types.Params,
  loss_fn: LossFn,
  items: Sequence[tuple[Text, ...]],
  config: FitConfig,
  *,
  seed: tuple[int, ...],
  log: Callable[[int, dict[str, float]], None],
  log_every: int = 100,
) -> types.Params:
  """Minimizes `loss_fn` over packed batches of `items`.

  Args:
    params: float32, left as they are.
    loss_fn: (params, batch) -> loss, metrics.
    items: what an epoch is made of.
    config: sizes and rates.
    seed: of the order of items.
    log: called with (step, metrics) every `log_every` steps.
    log_every: steps between calls of `log`.

  Returns:
    The learned parameters.

  Raises:
    ValueError: no items, or a sequence longer than a row.
  """
  texts.check(items, config.width)
  init, step = learner(loss_fn, config)
  params, opt_state = init(params)
  num_items = texts.most_items(items, cells=config.rows * config.width)
  stream = texts.shuffled(items, seed=seed)
  for i in range(config.num_steps):
    batch = texts.pack(
      stream, rows=config.rows, width=config.width, num_items=num_items
    )
    params, opt_state, seen = step(params, opt_state, batch)
    if (i + 1) % log_every == 0 or i + 1 == config.num_steps:
      log(i + 1, {k: float(v) for k, v in metrics.fetch(seen).items()})
  return params


def score_pairs(
  model: base.Model,
  params: types.Params,
  pairs: Sequence[tuple[Text, Text]],
  *,
  rows: int,
  width: int,
) -> Float[np.ndarray, "N 2"]:
  """Scores of (chosen, rejected) of every pair, in order."""
  scores_of = jax.jit(functools.partial(pair_scores, model=model))
  parts = [np.zeros((0, 2), np.float32)]
  for batch in texts.in_turn(pairs, rows=rows, width=width):
    parts.append(metrics.fetch(scores_of(params, batch))[batch.item_mask])
  return np.concatenate(parts)


def mean_nll(
  model: base.Model,
  params: types.Params,
  items: Sequence[tuple[Text, ...]],
  *,
  rows: int,
  width: int,
  logprob_chunk: int,
) -> float:
  """-log p per response token of all items, nats; float64 over batches."""
  loss_of = jax.jit(
    functools.partial(
      language_model_loss, model=model, logprob_chunk=logprob_chunk
    )
  )
  total, num = 0.0, 0
  for batch in texts.in_turn(items, rows=rows, width=width):
    in_batch = int(batch.is_target.sum())
    total += in_batch * float(metrics.fetch(loss_of(params, batch)[0]))
    num += in_batch
  return total / max(num, 1)
