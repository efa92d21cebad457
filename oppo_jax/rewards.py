# SPDX-License-Identifier: Apache-2.0
"""Scores of responses and per-token KL -> token rewards.

One score per response comes in (reward model and rules, already added up); the
critic's view of it, one reward per token, goes out. Knows nothing of models,
text or advantages. Everything is float from the start: a reward array with the
dtype of token ids would truncate scores to integers.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from oppo_jax import ops

SCORE_POSITIONS = ("last", "after_eos")

# Rules of every task: (tokens of the response, ended by an EOS, R) -> number.
RULES = {
  "length": lambda response_len, has_eos, limit: -response_len / limit,
  "ended": lambda response_len, has_eos, limit: has_eos,
}


def weighted_sum(
  parts: dict[str, np.ndarray], weights: dict[str, Any]
) -> np.ndarray:
  """Scores [B] of several rewards: sum of weight * part.

  On the host, in float32: parts come from the device (learned) and from rules.

  Args:
    parts: by name: "model", "rule", and further rules.
    weights: `config.reward`: "model_weight", "rule_weight", and "rules", the
      weights of further rules by name. A rule without one is not added.
  """
  total = np.zeros(len(next(iter(parts.values()))), np.float32)
  further = {k: v for k, v in weights["rules"].items() if v}
  for name, scores in parts.items():
    if name in ("model", "rule"):
      weight = weights[f"{name}_weight"]
    elif name in further:
      weight = further[name]
    else:
      continue
    total += np.float32(weight) * scores.astype(np.float32)
  return total


def check_rules(weights: dict[str, float], task_rules: Sequence[str]) -> None:
  """Raises ValueError if a weight is of a rule that there is not."""
  known = (*RULES, *task_rules)
  for name in weights:
    if name not in known:
      close = difflib.get_close_matches(name, known, n=1)
      hint = f"; did you mean {close[0]!r}?" if close else ""
      raise ValueError(
        f"config.reward.rules.{name}: unknown rule, not one of {known}{hint}"
      )


def rule_parts(
  names: Iterable[str],
  response_len: Int[np.ndarray, " B"],
  has_eos: Bool[np.ndarray, " B"],
  *,
  max_response_len: int,
) -> dict[str, np.ndarray]:
  """Those of `RULES` that are named, [B] each; on the host."""
  return {
    name: np.float32(RULES[name](response_len, has_eos, max_response_len))
    for name in names
    if name in RULES
  }


def final_scores(
  scores: Real[Array, " B"],
  has_eos: Bool[Array, " B"],
  *,
  missing_eos_penalty: float,
  score_clip: float,
) -> Float[Array, " B"]:
  """Clips scores, then takes the penalty off those that never ended.

  The penalty comes after the clip, so that it always counts.

  Args:
    scores: one per response.
    has_eos: the response ended by itself, not at the length limit.
    missing_eos_penalty: subtracted where it did not; 0 = off.
    score_clip: bound on the absolute score; 0 = off.
  """
  scores = ops.at_least_float32(scores)
  if score_clip:
    scores = jnp.clip(scores, -score_clip, score_clip)
  return jnp.where(has_eos, scores, scores - missing_eos_penalty)


def score_column(
  mask: Bool[Array, "B R"], *, position: str
) -> Int[Array, " B"]:
  """Column in which the score of each response lands.

    mask         1 1 1 .  |  1 1 1 1
    last             ^    |        ^
    after_eos          ^  |        ^      no room: the last token

  Args:
    mask: true on response tokens, contiguous from column 0.
    position: "last" = on the last token (OpenRLHF, verl), "after_eos" = one
      after it if that is inside the R columns (TRL).

  Returns:
    columns; -1 for an empty response whose score lands on its last token.
  """
  response_len = jnp.sum(mask, axis=-1, dtype=jnp.int32)
  match position:
    case "last":
      return response_len - 1
    case "after_eos":
      return jnp.minimum(response_len, mask.shape[-1] - 1)
    case _:
      raise ValueError(f"score position {position!r}: not in {SCORE_POSITIONS}")


def value_mask(
  mask: Bool[Array, "B R"], *, position: str
) -> Bool[Array, "B R"]:
  """Columns that have a value and a reward: up to where the score can land.

  The mask itself for "last"; one column longer (if it fits) for "after_eos".
  """
  columns = jnp.arange(mask.shape[-1], dtype=jnp.int32)[None, :]
  return mask | (columns == score_column(mask, position=position)[:, None])


def token_rewards(
  scores: Real[Array, " B"],
  kl: Float[Array, "B R"],
  mask: Bool[Array, "B R"],
  *,
  kl_coef: float | Float[Array, ""],
  position: str,
) -> Float[Array, "B R"]:
  """r_t = -kl_coef * kl_t on response tokens, plus the score in its column.

  Ziegler et al. 2019, section 2 (arXiv 1909.08593).

  Args:
    scores: one per response, any real dtype.
    kl: per-token estimates in nats; ignored outside `mask`.
    mask: true on response tokens, contiguous from column 0.
    kl_coef: >= 0.
    position: see `score_column`.

  Returns:
    rewards; 0 outside `value_mask`.
  """
  penalty = jnp.where(mask, -kl_coef * ops.at_least_float32(kl), 0)
  columns = jnp.arange(mask.shape[-1], dtype=jnp.int32)[None, :]
  is_scored = columns == score_column(mask, position=position)[:, None]
  landed = ops.at_least_float32(scores)[:, None]
  return penalty + jnp.where(is_scored, landed, 0)
