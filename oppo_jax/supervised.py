# SPDX-License-Identifier: Apache-2.0
"""Supervised stages before PPO: next-token learning and preference learning.

Sequences are packed into rows of fixed shape, so one program is compiled per
stage and what a step costs is tokens. The two losses:

  language model  -mean over response tokens of log p(token | prefix)
  reward model    -mean over pairs of log sigmoid(s(chosen) - s(rejected)) with
                  scores s; Bradley & Terry 1952, Ouyang et al. 2022, eq. 1
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from oppo_jax import metrics, ops, types
from oppo_jax.algos import optim
from oppo_jax.models import base


class Text(NamedTuple):
  """One training sequence.

  Attributes:
    tokens: prompt, then response, the EOS included.
    prompt_len: tokens that are not learned from.
  """

  tokens: np.ndarray
  prompt_len: int


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


@struct.dataclass
class Packed:
  """Items laid end to end in rows of fixed width; padding has segment -1.

  Attributes:
    tokens: token ids.
    positions: position in the own sequence.
    segments: index of the sequence in this batch, -1 = padding.
    is_target: the next token belongs to the response of the same sequence.
    last: flat index of the last token of sequence i of item j, [items, i].
    item_mask: items in use.
  """

  tokens: jax.Array  # [rows, W] int32
  positions: jax.Array  # [rows, W] int32
  segments: jax.Array  # [rows, W] int32
  is_target: jax.Array  # [rows, W] bool
  last: jax.Array  # [items, k] int32
  item_mask: jax.Array  # [items] bool


def pack(
  items: Iterator[tuple[Text, ...]], *, rows: int, width: int, num_items: int
) -> Packed:
  """Fills rows with items until one does not fit; that one is dropped.

  Args:
    items: an item is placed as a whole (a pair: both or neither).
    rows: rows per batch.
    width: tokens per row.
    num_items: most items per batch.
  """
  cells = lambda fill: np.full((rows, width), fill, np.int32)
  tokens, positions, segments = cells(0), cells(0), cells(-1)
  is_target = np.zeros((rows, width), bool)
  used = np.zeros(rows, int)
  last: list[list[int]] = []
  num_segments = 0
  while len(last) < num_items:
    item, ends, trial = next(items, None), [], used.copy()
    if item is None:
      break
    for text in item:
      fits = np.flatnonzero(trial + len(text.tokens) <= width)
      if not len(fits):
        break
      row, n = fits[0], len(text.tokens)
      ends.append((row, trial[row], n))
      trial[row] += n
    if len(ends) < len(item):
      break
    used = trial
    for text, (row, at, n) in zip(item, ends):
      cut = slice(at, at + n)
      tokens[row, cut] = text.tokens
      positions[row, cut] = np.arange(n)
      segments[row, cut] = num_segments
      is_target[row, at + text.prompt_len - 1 : at + n - 1] = True
      num_segments += 1
    last.append([row * width + at + n - 1 for row, at, n in ends])
  mask = np.arange(num_items) < len(last)
  last += [[0] * len(last[0])] * (num_items - len(last))
  return Packed(
    tokens, positions, segments, is_target, np.array(last, np.int32), mask
  )


def shuffled(items: Sequence, *, seed: tuple[int, ...]) -> Iterator:
  """Endless passes over the items, each in its own order."""
  epoch = 0
  while True:
    for i in np.random.default_rng((*seed, epoch)).permutation(len(items)):
      yield items[i]
    epoch += 1


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


def fit(
  params: types.Params,
  loss_fn: Callable[[types.Params, Packed], tuple[jax.Array, dict]],
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
  if not items:
    raise ValueError("nothing to learn from: no items")
  longest = max(len(text.tokens) for item in items for text in item)
  if longest > config.width:
    raise ValueError(f"a sequence of {longest} tokens > width {config.width}")
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

  params = jax.tree.map(jnp.copy, params)  # the caller's stay undonated
  opt_state = optimizer.init(params)
  shortest = min(sum(len(t.tokens) for t in item) for item in items)
  num_items = max(1, config.rows * config.width // shortest)
  stream = shuffled(items, seed=seed)
  for i in range(config.num_steps):
    batch = pack(
      stream, rows=config.rows, width=config.width, num_items=num_items
    )
    params, opt_state, seen = step(params, opt_state, batch)
    if (i + 1) % log_every == 0 or i + 1 == config.num_steps:
      log(i + 1, {k: float(v) for k, v in metrics.fetch(seen).items()})
  return params
