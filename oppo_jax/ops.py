# SPDX-License-Identifier: Apache-2.0
"""Masked maths of RLHF: log-probs, KL estimators, whitening, GAE.

Knows arrays and masks only: no batch, no model, no algorithm. Statistics are
in float32 or better (float64 inputs stay float64); masks are bool and applied
with `where`, so that junk outside a mask, NaN included, reaches no result.

Every log-prob of the system (at sampling, of the reference, at the start of
the update, in the loss) is of one distribution, that of `sampling_logits`: the
KL to an equal model is then 0 at any temperature and truncation.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Real, Shaped

MASKED_LOGIT = -1e9  # finite: probability 0, but no NaN in 0 * logit
KL_ESTIMATORS = ("k1", "k2", "k3")
WHITENINGS = ("unbiased", "population")


def at_least_float32(x: Shaped[Array, "*b"]) -> Float[Array, "*b"]:
  """Casts bools, integers and half precision to float32; leaves float64."""
  return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def sampling_logits(
  logits: Float[Array, "*b V"],
  *,
  temperature: float,
  top_k: int,
  top_p: float,
  keep: Int[Array, "*b"] | None = None,
) -> Float[Array, "*b V"]:
  """Logits of the distribution that tokens are sampled from.

  Divided by the temperature; then tokens outside the `top_k` largest, and
  outside the smallest set of those that holds `top_p` of their probability
  (Holtzman et al. 2020, arXiv 1904.09751), get `MASKED_LOGIT`. Equal logits
  are in or out together.

    probabilities    0.5  0.3  0.15  0.05      top_p = 0.7
    before the token 0.0  0.5  0.8   0.95      kept while below top_p

  Args:
    logits: of the model, any float dtype.
    temperature: > 0. The three numbers are static: a sort is compiled only if
      one of them asks for it.
    top_k: 0 = off.
    top_p: in (0, 1]; 1 = off.
    keep: one token per position that stays whatever its rank. Name the token
      whose log-prob is asked for: another model than the sampler's may have it
      outside its own nucleus, and the KL must stay finite.
  """
  if temperature <= 0:
    raise ValueError(f"temperature must be > 0, got {temperature}")
  if not 0 < top_p <= 1:
    raise ValueError(f"top_p must be in (0, 1], got {top_p}")
  logits = at_least_float32(logits) / temperature
  vocab_size = logits.shape[-1]
  is_top_k = 0 < top_k < vocab_size
  if not is_top_k and top_p == 1:
    return logits
  frozen = jax.lax.stop_gradient(logits)
  if is_top_k:
    ordered, _ = jax.lax.top_k(frozen, top_k)  # [*b, top_k], descending
  else:
    ordered = jnp.sort(frozen, axis=-1, descending=True)
  if top_p < 1:
    probs = jax.nn.softmax(ordered, axis=-1)
    is_kept = jnp.cumsum(probs, axis=-1) - probs < top_p
    ordered = jnp.where(is_kept, ordered, jnp.inf)
  is_kept = frozen >= jnp.min(ordered, axis=-1, keepdims=True)
  if keep is not None:
    is_kept |= jax.nn.one_hot(keep, vocab_size, dtype=bool)
  return jnp.where(is_kept, logits, MASKED_LOGIT)


def logprobs_from_logits(
  logits: Float[Array, "*b V"], targets: Int[Array, "*b"]
) -> Float[Array, "*b"]:
  """Log-prob (nats) of each target: its logit minus the log-sum-exp.

  The logit is selected by comparison, not gathered: the gradient is then
  elementwise instead of a scatter, and the value has the same bits.
  """
  logits = at_least_float32(logits)
  is_target = jax.nn.one_hot(targets, logits.shape[-1], dtype=bool)
  target_logits = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
  return target_logits - jax.nn.logsumexp(logits, axis=-1)


def entropy_from_logits(logits: Float[Array, "*b V"]) -> Float[Array, "*b"]:
  """Entropy (nats) of the softmax: minus the mean log-prob."""
  logits = at_least_float32(logits)
  logprobs = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  return -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def token_logprobs(
  hidden: Float[Array, "N D"],
  targets: Int[Array, " N"],
  head_fn: Callable[[Float[Array, "chunk D"]], Float[Array, "chunk V"]],
  *,
  chunk: int,
  temperature: float,
  top_k: int,
  top_p: float,
  with_entropy: bool,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
  """Log-probs of targets under the sampling distribution, chunk by chunk.

  No [N, V] array is ever built: logits exist for `chunk` tokens at a time and
  are recomputed in the backward pass.

  Args:
    hidden: last hidden states, one per token; N need not divide by `chunk`.
    targets: the token that follows each position.
    head_fn: hidden states to logits; may close over parameters that are
      differentiated.
    chunk: tokens per chunk, >= 1.
    temperature: as in `sampling_logits`.
    top_k: as in `sampling_logits`.
    top_p: as in `sampling_logits`.
    with_entropy: also compute the entropy of the sampling distribution.

  Returns:
    log-probs (nats) and entropies (nats; 0 without `with_entropy`).
  """
  num_tokens, width = hidden.shape
  chunk = min(chunk, num_tokens)
  num_chunks = -(-num_tokens // chunk)
  padding = num_chunks * chunk - num_tokens
  hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
  targets = jnp.pad(targets, (0, padding))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def one_chunk(args):
    chunk_hidden, chunk_targets = args
    logits = sampling_logits(
      head_fn(chunk_hidden),
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      keep=chunk_targets,
    )
    logprobs = logprobs_from_logits(logits, chunk_targets)
    if not with_entropy:
      return logprobs, jnp.zeros(logprobs.shape, logprobs.dtype)
    return logprobs, entropy_from_logits(logits)

  logprobs, entropy = jax.lax.map(
    one_chunk,
    (
      hidden.reshape(num_chunks, chunk, width),
      targets.reshape(num_chunks, chunk),
    ),
  )
  return logprobs.reshape(-1)[:num_tokens], entropy.reshape(-1)[:num_tokens]


def kl(
  logprobs: Float[Array, "*b"],
  ref_logprobs: Float[Array, "*b"],
  *,
  estimator: str,
  inner_clip: float | None,
  outer_clip: float | None,
) -> Float[Array, "*b"]:
  """Per-token estimate of KL(policy || reference) from samples of the policy.

    d = logprobs - ref_logprobs
    k1 = d                      unbiased, of either sign
    k2 = d^2 / 2                biased, never negative
    k3 = exp(-d) - 1 + d        unbiased, never negative

  Schulman 2020, joschu.net/blog/kl-approx.html.

  Args:
    logprobs: of the sampled tokens under the policy.
    ref_logprobs: of the same tokens under the reference.
    estimator: one of `KL_ESTIMATORS`.
    inner_clip: bound on |d| before anything else; None or 0 = off.
    outer_clip: bound on the absolute result; None or 0 = off.
  """
  difference = at_least_float32(logprobs) - at_least_float32(ref_logprobs)
  if inner_clip:
    difference = jnp.clip(difference, -inner_clip, inner_clip)
  match estimator:
    case "k1":
      result = difference
    case "k2":
      result = jnp.square(difference) / 2
    case "k3":
      result = jnp.expm1(-difference) + difference
    case _:
      raise ValueError(f"KL estimator {estimator!r}: not in {KL_ESTIMATORS}")
  if outer_clip:
    result = jnp.clip(result, -outer_clip, outer_clip)
  return result


def count(mask: Bool[Array, "*b"]) -> Float[Array, ""]:
  """Number of entries in the mask, float32, at least 1: safe to divide by."""
  return jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(jnp.float32)


def masked_mean(
  x: Real[Array, "*b"], mask: Bool[Array, "*b"]
) -> Float[Array, ""]:
  """Mean over all entries in the mask; 0 if there are none."""
  x = jnp.where(mask, at_least_float32(x), 0)
  return jnp.sum(x) / count(mask).astype(x.dtype)


def masked_var(
  x: Real[Array, "*b"], mask: Bool[Array, "*b"], *, unbiased: bool
) -> Float[Array, ""]:
  """Variance over the mask; `unbiased` divides by the count minus one.

  The correction n / (n - 1) is a float32 number also for float64 data, as in
  TRL's `masked_var`: 1e-8 of the variance, more than the 1e-9 we hold.
  """
  centered = at_least_float32(x) - masked_mean(x, mask)
  var = masked_mean(jnp.square(centered), mask)
  if not unbiased:
    return var
  n = count(mask)
  correction = n / jnp.maximum(n - 1, 1)
  return var * correction.astype(var.dtype)


def whiten(
  x: Float[Array, "*b"],
  mask: Bool[Array, "*b"],
  *,
  keep_mean: bool,
  whitening: str,
) -> Float[Array, "*b"]:
  """Shifts to mean 0 and scales to variance 1 over the mask; 0 outside it.

    unbiased      (x - mean) / sqrt(var + 1e-8)        var over n - 1
    population    (x - mean) / sqrt(max(var, 1e-8))    var over n

  The first is TRL's and verl's, the second OpenRLHF's.

  Args:
    x: advantages or rewards.
    mask: entries the statistics are over.
    keep_mean: scale only around the mean, which is added back (rewards).
    whitening: one of `WHITENINGS`.
  """
  x = at_least_float32(x)
  mean = masked_mean(x, mask)
  match whitening:
    case "unbiased":
      scale = jax.lax.rsqrt(masked_var(x, mask, unbiased=True) + 1e-8)
    case "population":
      var = masked_var(x, mask, unbiased=False)
      scale = jax.lax.rsqrt(jnp.maximum(var, 1e-8))
    case _:
      raise ValueError(f"whitening {whitening!r}: not in {WHITENINGS}")
  whitened = (x - mean) * scale
  if keep_mean:
    whitened += mean
  return jnp.where(mask, whitened, 0)


def gae(
  rewards: Float[Array, "B R"],
  values: Float[Array, "B R"],
  mask: Bool[Array, "B R"],
  *,
  gamma: float,
  lam: float,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
  """Generalized advantage estimates for right-padded responses.

    δ_t = r_t + γ·V_{t+1} − V_t          V after the last valid token is 0
    A_t = δ_t + γλ·A_{t+1}

  Schulman et al. 2016, eq. 16 (arXiv 1506.02438). A response is one episode:
  no bootstrapping, also when it was cut at the length limit (as TRL does).

  Args:
    rewards: token rewards; entries outside `mask` are ignored.
    values: critic *before* token t, in reward units; ignored outside `mask`.
    mask: true on valid response tokens, contiguous from column 0. With scores
      one after the last token, one column more (`rewards.value_mask`).
    gamma: discount; 1.0 in RLHF.
    lam: 0 = one-step, 1 = Monte Carlo.

  Returns:
    advantages and returns (= advantages + values); 0 outside `mask`.
  """
  rewards = jnp.where(mask, at_least_float32(rewards), 0)
  values = jnp.where(mask, at_least_float32(values), 0)
  next_values = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))
  deltas = rewards + gamma * next_values - values

  def one_token_back(advantage, delta):
    advantage = delta + gamma * lam * advantage
    return advantage, advantage

  start = jnp.zeros(deltas.shape[:1], deltas.dtype)
  _, advantages = jax.lax.scan(one_token_back, start, deltas.T, reverse=True)
  advantages = jnp.where(mask, advantages.T, 0)
  return advantages, advantages + values


def explained_variance(
  values: Float[Array, "*b"],
  returns: Float[Array, "*b"],
  mask: Bool[Array, "*b"],
) -> Float[Array, ""]:
  """1 - var(returns - values) / var(returns); 0 if the returns are constant.

  1: the critic predicts every return; 0: no better than their mean.
  """
  var = masked_var(returns, mask, unbiased=False)
  residual = at_least_float32(returns) - at_least_float32(values)
  unexplained = masked_var(residual, mask, unbiased=False)
  return jnp.where(var > 0, 1 - unexplained / jnp.where(var > 0, var, 1), 0)
