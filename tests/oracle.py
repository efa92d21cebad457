# SPDX-License-Identifier: Apache-2.0
"""One PPO step, written plainly: the specification the engine is held to.

Python lists and NumPy float64. No cache: every token is drawn after a forward
pass over the whole row. No slots: what is in flight is a list of rows. No
chunks: time goes by in ticks. No tiles, no padding, no masks: every row has its
own length. No jit.

  admit      which rows are begun
  rollout    which rows leave, with which tokens
  score      what the models say of them
  shape      -> rewards, advantages, returns
  losses     -> both losses and what is logged

The models are functions from a sequence of token ids to what is said at each of
its positions: logits [T, V] or one number each [T]. What was said at position
p is about the token at p + 1.
"""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass
class Row:
  """One prompt, from admission to the batch it is trained in.

  Attributes:
    uid: identity, in the order of admission.
    prompt: token ids.
    target_len: response length at which EOS is forced; 0 = none.
    admitted_at: policy version when it was admitted.
    response: token ids so far.
    logprobs: of each token under the distribution it was drawn from.
    versions: policy version that drew each token.
    finished_at: tick at which the response ended; None = not yet.
  """

  uid: int
  prompt: list[int]
  target_len: int
  admitted_at: int
  response: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  finished_at: int | None = None

  @property
  def sequence(self) -> list[int]:
    return self.prompt + self.response

  def restart(self) -> None:
    """Back to the prompt; its age stays."""
    self.response, self.logprobs, self.versions = [], [], []
    self.finished_at = None


@dataclasses.dataclass
class Sampler:
  """The distribution tokens are drawn from, and the noise of the draws.

  Attributes:
    temperature: > 0.
    top_k: 0 = off.
    top_p: 1 = off.
    eos_ids: token ids that end a response; the first one is forced.
    max_response_len: R.
    noise: (uid, position) -> a random number in (0, 1].
    margin: how close the closest decision was to falling the other way. An
      engine that rounds may decide otherwise where this is tiny.
  """

  temperature: float
  top_k: int
  top_p: float
  eos_ids: tuple[int, ...]
  max_response_len: int
  noise: Callable[[int, int], float]
  margin: float = np.inf

  def decide(self, *distances: float) -> None:
    self.margin = min(self.margin, *map(float, np.abs(distances)))

  def shaped(self, logits: np.ndarray, keep: int | None = None) -> np.ndarray:
    """Logits [V] of the sampling distribution; -inf = cannot be drawn.

    Over the temperature; of those the `top_k` largest; of those the fewest
    that hold `top_p` of what is left. `keep` stays in whatever its rank.
    """
    logits = logits / self.temperature
    order = np.argsort(-logits)
    if 0 < self.top_k < len(order):
      self.decide(logits[order[self.top_k - 1]] - logits[order[self.top_k]])
      order = order[: self.top_k]
    if self.top_p < 1:
      probs = np.exp(logits[order] - logits[order[0]])
      probs = probs / probs.sum()
      before = np.cumsum(probs) - probs
      self.decide(*(before - self.top_p))
      order = order[before < self.top_p]
    shaped = np.full(len(logits), -np.inf)
    shaped[order] = logits[order]
    if keep is not None:
      shaped[keep] = logits[keep]
    return shaped

  def logprobs(self, logits: np.ndarray, keep: int) -> np.ndarray:
    """Log-probs [V] under the sampling distribution."""
    shaped = self.shaped(logits, keep)
    top = shaped.max()
    return shaped - top - np.log(np.exp(shaped - top).sum())

  def draw(self, row: Row, logits: np.ndarray, version: int, tick: int) -> None:
    """One more token for the row, which ends at an EOS or when it is full."""
    length = len(row.response) + 1  # with the new token
    if row.target_len and length == row.target_len:
      token = self.eos_ids[0]
    else:
      choices = self.shaped(logits)
      if row.target_len and length < row.target_len:
        choices[list(self.eos_ids)] = -np.inf
      # The first token up to which that much of the probability lies.
      u = self.noise(row.uid, len(row.sequence))
      probs = np.exp(choices - choices.max())
      probs /= probs.sum()
      token = int(np.argmax((probs > 0) & (np.cumsum(probs) >= u)))
      before = probs[:token].sum()
      self.decide(u - before, u - before - probs[token])
    # Forcing changes what is drawn, not the distribution that is asked.
    row.logprobs.append(self.logprobs(logits, token)[token])
    row.response.append(token)
    row.versions.append(version)
    if token in self.eos_ids or length == self.max_response_len:
      row.finished_at = tick


def admit(
  rows: list[Row],
  next_uid: int,
  prompt_of: Callable[[int], tuple[list[int], int]],
  *,
  num_in_flight: int,
  group_size: int,
  version: int,
) -> list[Row]:
  """New rows, so that B + delta are in flight; whole groups, none if too many.

  Args:
    rows: in flight now.
    next_uid: uid of the first new row.
    prompt_of: uid -> prompt, target_len.
    num_in_flight: B + delta.
    group_size: rows that are admitted together.
    version: policy version now.
  """
  missing = max(num_in_flight - len(rows), 0)
  uids = range(next_uid, next_uid + missing - missing % group_size)
  return [Row(uid, *prompt_of(uid), admitted_at=version) for uid in uids]


def rollout(
  rows: list[Row],
  policy: Callable[[list[int]], np.ndarray],
  sampler: Sampler,
  *,
  version: int,
  tick: int,
  batch_size: int,
  group_size: int,
  max_staleness: int,
) -> tuple[list[Row], list[Row], int]:
  """Ticks until a batch is ready; a tick is one token for every live row.

  Args:
    rows: in flight.
    policy: the model that draws.
    sampler: how.
    version: policy version now.
    tick: ticks so far.
    batch_size: B.
    group_size: rows with one uid // group_size leave together.
    max_staleness: updates a row may be deferred; negative = unbounded.

  Returns:
    The batch, sorted by uid; the rows that are deferred; ticks so far.
  """
  groups: dict[int, list[Row]] = {}
  for row in rows:
    groups.setdefault(row.uid // group_size, []).append(row)
  is_starving = lambda group: any(
    0 <= max_staleness <= version - row.admitted_at for row in group
  )
  is_ready = lambda group: all(row.finished_at is not None for row in group)
  while True:
    ready = [g for g in groups.values() if is_ready(g)]
    waits = any(is_starving(g) and g not in ready for g in groups.values())
    if len(ready) * group_size >= batch_size and not waits:
      break
    tick += 1
    for row in rows:
      if row.finished_at is None:
        sampler.draw(row, policy(row.sequence)[-1], version, tick)
  # Starving first, then the first to be ready, then the first admitted.
  ready.sort(
    key=lambda g: (not is_starving(g), max(r.finished_at for r in g), g[0].uid)
  )
  batch = [row for group in ready for row in group][:batch_size]
  batch.sort(key=lambda row: row.uid)
  return batch, [row for row in rows if row not in batch], tick


@dataclasses.dataclass
class Scored:
  """A row of a batch with n response tokens, and what was said of it.

  Attributes:
    row: the row.
    has_eos: it ended by itself.
    score: the reward model's word on the last token.
    behavior: [n] log-probs at sampling.
    start: [n] log-probs under the policy before the update.
    reference: [n] log-probs under the reference.
    values: of the critic before token t, and after the last one: [n + 1].
  """

  row: Row
  has_eos: bool
  score: float
  behavior: np.ndarray
  start: np.ndarray
  reference: np.ndarray
  values: np.ndarray


def responses_logprobs(row, model, sampler):
  """Log-probs over the vocabulary before each response token: [n, V]."""
  logits = model(row.sequence)
  first = len(row.prompt) - 1
  return np.stack(
    [sampler.logprobs(logits[first + t], x) for t, x in enumerate(row.response)]
  )


def of_tokens(row, model, sampler):
  """Log-probs [n] of the response tokens."""
  said = responses_logprobs(row, model, sampler)
  return said[np.arange(len(row.response)), row.response]


def score(batch, models, sampler) -> list[Scored]:
  """What "reward", "reference", "critic" and "policy" say of a batch."""
  return [
    Scored(
      row=row,
      has_eos=row.response[-1] in sampler.eos_ids,
      score=models["reward"](row.sequence)[-1],
      behavior=np.array(row.logprobs),
      start=of_tokens(row, models["policy"], sampler),
      reference=of_tokens(row, models["reference"], sampler),
      values=models["critic"](row.sequence)[len(row.prompt) - 1 :],
    )
    for row in batch
  ]


def bounded(x, limit):
  return np.clip(x, -limit, limit) if limit else x


def kl(logprobs, reference, *, estimator, inner_clip, outer_clip):
  """Schulman's k1, k2 and k3 of each token."""
  d = bounded(logprobs - reference, inner_clip)
  return bounded(
    {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator], outer_clip
  )


def whiten(rows, *, keep_mean, whitening):
  """Mean 0 (unless kept) and variance 1 over the entries of all rows."""
  every = np.concatenate(rows)
  mean, n = every.mean(), len(every)
  if whitening == "unbiased":
    var = np.sum((every - mean) ** 2) / max(n - 1, 1)
    scale = 1 / np.sqrt(var + 1e-8)
  else:
    scale = 1 / np.sqrt(max(every.var(), 1e-8))
  return [(x - mean) * scale + keep_mean * mean for x in rows]


def gae(rewards, values, *, gamma, lam):
  """Advantages of one response; after its last column all is 0."""
  advantages = np.zeros(len(rewards))
  advantage = next_value = 0.0
  for t in reversed(range(len(rewards))):
    delta = rewards[t] + gamma * next_value - values[t]
    advantage = delta + gamma * lam * advantage
    advantages[t], next_value = advantage, values[t]
  return advantages


@dataclasses.dataclass
class Shaped:
  """What an update holds fixed; lists with one array per row of the batch.

  A row has n tokens and m >= n columns with a value: one more if the score
  lands after the last token.
  """

  scores: list[float]
  kl: list[np.ndarray]  # [n]
  rewards: list[np.ndarray]  # [m]
  advantages: list[np.ndarray]  # [n]
  returns: list[np.ndarray]  # [m]
  values: list[np.ndarray]  # [m]
  denominator: list[np.ndarray]  # [n]


def shape(batch: list[Scored], kl_coef, config, *, max_response_len) -> Shaped:
  """Scores and log-probs -> token rewards -> advantages and returns."""
  is_start = config.denominator in ("start", "decoupled")
  denominator = [s.start if is_start else s.behavior for s in batch]
  penalty = config.missing_eos_penalty
  scores = [
    bounded(s.score, config.score_clip) - (0 if s.has_eos else penalty)
    for s in batch
  ]
  kls, rewards, values = [], [], []
  for s, x, logprobs in zip(batch, scores, denominator):
    n = len(s.behavior)
    at = n if config.score_position == "after_eos" else n - 1
    at = min(at, max_response_len - 1)  # no room: on the last token
    kls.append(
      kl(
        logprobs,
        s.reference,
        estimator=config.kl_estimator,
        inner_clip=config.kl_inner_clip,
        outer_clip=config.kl_outer_clip,
      )
    )
    reward = np.zeros(max(n, at + 1))
    reward[:n] -= kl_coef * kls[-1]
    reward[at] += x
    rewards.append(reward)
    values.append(s.values[: len(reward)])
  if config.whiten_rewards:
    rewards = whiten(rewards, keep_mean=True, whitening=config.whitening)
  advantages = [
    gae(r, v, gamma=config.gamma, lam=config.lam)
    for r, v in zip(rewards, values)
  ]
  returns = [a + v for a, v in zip(advantages, values)]
  advantages = [a[: len(s.behavior)] for a, s in zip(advantages, batch)]
  if config.whiten_advantages:
    advantages = whiten(advantages, keep_mean=False, whitening=config.whitening)
  if config.denominator == "decoupled":
    weights = [np.exp(s.start - s.behavior) for s in batch]
    cap = config.behavior_weight_cap
    advantages = [np.minimum(w, cap) * a for w, a in zip(weights, advantages)]
  return Shaped(scores, kls, rewards, advantages, returns, values, denominator)


def losses(
  batch: list[Scored], fixed: Shaped, models, kl_coef, sampler, config
) -> dict[str, float]:
  """Both losses of the whole batch as one minibatch, and what is logged.

  Args:
    batch: the batch.
    fixed: what was shaped from it, once, before the update.
    models: "policy" and "critic" as they are now.
    kl_coef: weight of the KL in the rewards.
    sampler: the distribution that all log-probs are of.
    config: `PPOConfig`.

  Returns:
    By name: means over the tokens of the batch; "objective/..." over its
    responses; and "loss", what the gradient is taken of.
  """
  logprobs, entropy, values = [], [], []
  for s, v in zip(batch, fixed.values):
    row = s.row
    every = responses_logprobs(row, models["policy"], sampler)
    # A token that cannot be drawn adds 0 · log 0 = 0.
    entropy.append(-np.sum(np.exp(every) * np.maximum(every, -1e9), axis=1))
    logprobs.append(every[np.arange(len(row.response)), row.response])
    said = models["critic"](row.sequence)[len(row.prompt) - 1 :]
    values.append(said[: len(v)])
  join = np.concatenate
  logprobs, advantages = join(logprobs), join(fixed.advantages)
  log_ratio = bounded(logprobs - join(fixed.denominator), config.log_ratio_clip)
  ratio = np.exp(log_ratio)
  if config.denominator == "tis":
    cap = config.behavior_weight_cap
    policy_loss = -advantages * np.minimum(ratio, cap)
    is_clipped = ratio > cap
    sampler.decide(*(ratio - cap))
  else:
    eps = config.clip_eps
    unclipped = -advantages * ratio
    clipped = -advantages * np.clip(ratio, 1 - eps, 1 + eps)
    policy_loss, is_clipped = (
      np.maximum(unclipped, clipped),
      clipped > unclipped,
    )
    sampler.decide(*(np.abs(ratio - 1) - eps))
  kl_loss = kl(
    logprobs,
    join([s.reference for s in batch]),
    estimator=config.kl_loss_estimator,
    inner_clip=config.kl_loss_inner_clip,
    outer_clip=config.kl_loss_outer_clip,
  )
  values, before, returns = map(join, (values, fixed.values, fixed.returns))
  unclipped = clipped = (values - returns) ** 2
  if config.value_clip_eps:
    eps = config.value_clip_eps
    clipped = (np.clip(values, before - eps, before + eps) - returns) ** 2
    sampler.decide(*(np.abs(values - before) - eps))
  value_loss = np.maximum(unclipped, clipped) / 2

  loss = policy_loss.mean() + config.vf_coef * value_loss.mean()
  loss += config.kl_loss_coef * kl_loss.mean()
  loss -= config.entropy_coef * join(entropy).mean()
  per_response = lambda x: np.mean([np.sum(y) for y in x])
  mean_score, mean_kl = np.mean(fixed.scores), per_response(fixed.kl)
  return {
    "loss": loss,
    "loss/policy_avg": policy_loss.mean(),
    "loss/value_avg": value_loss.mean(),
    "policy/approxkl_avg": np.mean(log_ratio**2) / 2,
    "policy/clipfrac_avg": is_clipped.mean(),
    "policy/entropy_avg": join(entropy).mean(),
    "policy/kl_ref_avg": kl_loss.mean(),
    "policy/ratio_first": np.abs(ratio - 1).max(),
    "val/ratio": ratio.mean(),
    "val/clipfrac_avg": np.mean(clipped > unclipped),
    "val/explained_variance": explained_variance(returns, before),
    "objective/kl": mean_kl,
    "objective/entropy": per_response([-x for x in fixed.denominator]),
    "objective/scores": mean_score,
    "objective/rlhf_reward": mean_score - kl_coef * mean_kl,
    "objective/kl_coef": kl_coef,
  }


def explained_variance(returns, values):
  """The share of the returns' variance that values of the rollout explain."""
  var = np.var(returns)
  return 1 - np.var(returns - values) / var if var > 0 else 0.0


def next_kl_coef(kl_coef, mean_kl, num_responses, config):
  """The adaptive coefficient of the next batch (Ziegler et al. 2019)."""
  if not config.kl_target:
    return kl_coef
  error = np.clip(mean_kl / config.kl_target - 1, -0.2, 0.2)
  return kl_coef * (1 + error * num_responses / config.kl_horizon)
