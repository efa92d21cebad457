# SPDX-License-Identifier: Apache-2.0
"""PPO against an independent reference, a plain restatement, and by hand."""

import dataclasses
import functools
import json
import pathlib

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from oppo_jax import algos, ops, packing, types
from oppo_jax.algos import losses, microbatch, optim, ppo, ppo_config

CLOSE = dict(rtol=0, atol=1e-5)
REFERENCE_DIR = pathlib.Path(__file__).parents[2] / "shared" / "reference"
PLAIN = dict(temperature=1.0, top_k=0, top_p=1.0)
TABLE = fakes.TableModel(vocab_size=0, width=0, num_positions=0, is_lm=True)
TRL = ppo_config.PRESETS["trl"]
# A large eps makes Adam smooth: its step does not blow up rounding errors.
OPTIM = dict(
  policy_lr=0.5,
  critic_lr=0.2,
  schedule="linear",
  warmup_steps=0,
  clip_norm=1.0,
  b1=0.9,
  b2=0.95,
  eps=1.0,
  weight_decay=0.0,
)

make_targets = jax.jit(ppo.make_targets, static_argnums=2)

# The reference cases.


def load(case):
  path = REFERENCE_DIR / f"case_{case}.npz"
  if not path.exists():
    pytest.skip("the reference cases are not beside this checkout")
  data = dict(np.load(path))
  return data, json.loads(str(data.pop("hp")))


def reference_batch(data, hp):
  """A batch with a prompt of one token; junk outside masks is left in."""
  cast = lambda x: jnp.asarray(x, float)  # float64 under x64 only
  responses = data["out_responses"]
  num_rows, num_columns = responses.shape
  response_len = (data["out_sequence_length"] + 1).astype(np.int32)
  zeros = np.zeros((num_rows, num_columns), np.int32)

  @jax.jit
  def logprobs(logits):
    logits = ops.sampling_logits(
      logits, temperature=hp["temperature"] + 1e-7, top_k=0, top_p=1.0
    )
    return ops.logprobs_from_logits(logits, jnp.asarray(responses))

  batch = types.Batch(
    uid=np.arange(num_rows, dtype=np.int32),
    sequences=np.pad(responses, ((0, 0), (1, 0))),
    prompt_len=np.ones(num_rows, np.int32),
    response_len=response_len,
    has_eos=data["out_contain_eos"],
    responses=responses,
    mask=np.arange(num_columns)[None] < response_len[:, None],
    behavior_logprobs=logprobs(cast(data["in_old_logits"])),
    start_logprobs=cast(zeros),
    ref_logprobs=logprobs(cast(data["in_ref_logits"])),
    values=cast(data["in_values"]),
    scores=cast(data["in_scores"]),
    token_version=zeros,
    admitted_at=zeros[:, 0],
  )
  return jax.tree.map(jnp.asarray, batch)


def reference_config(hp, **changes):
  return ppo.PPOConfig(
    **TRL
    | dict(
      clip_eps=hp["cliprange"],
      value_clip_eps=hp["cliprange_value"],
      missing_eos_penalty=hp["missing_eos_penalty"] or 0.0,
      **{k: hp[k] for k in ("vf_coef", "gamma", "lam", "kl_coef")},
      **{k: hp[k] for k in ("kl_estimator", "whiten_rewards")},
    )
    | changes
  )


def reference_gradient(data, hp, batch, targets, config):
  """Gradient of the packed loss with respect to new logits and values."""
  cast = lambda x: jnp.asarray(x, batch.values.dtype)
  num_rows, num_columns = batch.mask.shape
  params = {
    "policy": cast(np.pad(data["in_new_logits"], ((0, 0), (0, 1), (0, 0)))),
    "critic": cast(np.pad(data["in_new_values"], ((0, 0), (0, 1)))[..., None]),
  }
  plan = packing.plan(
    np.asarray(batch.prompt_len + batch.response_len),
    order_seed=(0,),
    num_epochs=1,
    num_minibatches=1,
    width=2 * num_columns,
    micro_rows=1,
  )
  assert plan.num_micro[0, 0] > 1
  minibatch = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), plan)
  counts = ppo.Counts(
    tokens=jnp.sum(batch.mask).astype(batch.values.dtype),
    values=jnp.sum(targets.value_mask).astype(batch.values.dtype),
  )
  loss_fn = functools.partial(
    ppo.micro_loss,
    batch=batch,
    targets=targets,
    counts=counts,
    config=config,
    policy=TABLE,
    critic=TABLE,
    sampling=PLAIN | dict(temperature=hp["temperature"] + 1e-7),
  )
  accumulate = functools.partial(
    microbatch.accumulate, loss_fn, micro_rows=1, width=2 * num_columns
  )
  grads, sums, _ = jax.jit(accumulate)(params, batch, minibatch)
  return grads, ppo.loss_metrics(sums, counts)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("case", ["a", "b"])
def test_arithmetic_equals_the_reference(case, x64):
  data, hp = load(case)
  close = functools.partial(
    np.testing.assert_allclose,
    rtol=1e-9 if x64 else 5e-6,
    atol=1e-9 if x64 else 5e-6,
  )
  with jax.enable_x64(x64):
    batch = reference_batch(data, hp)
    assert batch.values.dtype == (jnp.float64 if x64 else jnp.float32)
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(mask, ~data["out_padding_mask"])
    for name in ("logprobs", "ref_logprobs"):
      got = (
        batch.behavior_logprobs if name == "logprobs" else batch.ref_logprobs
      )
      close(np.where(mask, got, 1.0), data[f"out_{name}"])

    config = reference_config(hp)
    kl_coef = jnp.asarray(hp["kl_coef"], batch.values.dtype)
    targets = make_targets(batch, kl_coef, config)
    np.testing.assert_array_equal(
      targets.value_mask, ~data["out_padding_mask_p1"]
    )
    for name in ("scores", "kl", "rewards", "values", "advantages", "returns"):
      close(getattr(targets, name), data[f"out_{name}"], err_msg=name)
    metrics = jax.jit(ppo.rollout_metrics)(batch, targets, kl_coef)
    close(metrics["objective/kl"], data["out_objective_kl"])
    close(metrics["objective/rlhf_reward"], data["out_objective_rlhf_reward"])
    close(metrics["objective/entropy"], data["out_objective_entropy"])

    raw = dataclasses.replace(config, whiten_advantages=False)
    got = make_targets(batch, kl_coef, raw).advantages
    close(got, data["out_advantages_raw"])
    raw = dataclasses.replace(config, whiten_rewards=False)
    got = make_targets(batch, kl_coef, raw).rewards
    close(got, data["out_rewards_shaped"])

    grads, metrics = reference_gradient(data, hp, batch, targets, config)
    close(grads["policy"][:, :-1], data["grad_new_logits"])
    close(grads["critic"][:, :-1, 0], data["grad_new_values"])
    for name, key in {
      "pg_loss": "loss/policy_avg",
      "pg_clipfrac": "policy/clipfrac_avg",
      "vf_loss": "loss/value_avg",
      "vf_clipfrac": "val/clipfrac_avg",
      "approxkl_masked": "policy/approxkl_avg",
      "entropy_mean_masked": "policy/entropy_avg",
    }.items():
      close(metrics[key], data[f"out_{name}"], err_msg=name)
    loss = (
      metrics["loss/policy_avg"] + hp["vf_coef"] * metrics["loss/value_avg"]
    )
    close(loss, data["out_loss"])


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("case", ["a", "b"])
def test_other_score_position_and_whitening_equal_the_reference(case, x64):
  data, hp = load(case)
  tol = 1e-9 if x64 else 5e-6
  close = functools.partial(np.testing.assert_allclose, rtol=tol, atol=tol)
  with jax.enable_x64(x64):
    batch = reference_batch(data, hp)
    kl_coef = jnp.asarray(hp["kl_coef"], batch.values.dtype)
    for whitening in ("unbiased", "population"):
      config = reference_config(
        hp,
        score_position="last",
        whitening=whitening,
        whiten_rewards=False,
      )
      raw = dataclasses.replace(config, whiten_advantages=False)
      targets = make_targets(batch, kl_coef, raw)
      close(targets.rewards, data["out_alt_rewards"])
      close(targets.advantages, data["out_alt_advantages_raw"])
      close(targets.returns, data["out_alt_returns"])
      got = make_targets(batch, kl_coef, config).advantages
      close(got, data[f"out_alt_advantages_{whitening}"])


# The update, held against a plain restatement: every row padded by itself, all
# logits at once, Python loops over epochs and minibatches.

B, P, R, V = 6, 3, 6, 11
POLICY = fakes.EmbeddingModel(V, width=4, num_positions=P + R, is_lm=True)
CRITIC = fakes.EmbeddingModel(V, width=3, num_positions=P + R, is_lm=False)
SAMPLING = dict(temperature=0.7, top_k=8, top_p=1.0)
ONE_STEP = TRL | dict(num_epochs=1, num_minibatches=1, logprob_chunk=5)
TIS = ONE_STEP | dict(denominator="tis", behavior_weight_cap=1.1)
# Six optimizer steps, every term in the loss, an adaptive coefficient.
ALGO = ONE_STEP | dict(
  num_epochs=2,
  num_minibatches=3,
  kl_loss_coef=0.3,
  entropy_coef=0.02,
  kl_target=1e3,
  kl_horizon=60.0,
)


@functools.cache
def initial_params():
  rng = jax.random.key(0)
  return {
    "policy": jax.jit(POLICY.init)(jax.random.fold_in(rng, 0)),
    "critic": jax.jit(CRITIC.init)(jax.random.fold_in(rng, 1)),
  }


def forward(params, sequences):
  """Hidden states of rows that are not packed."""
  positions = jnp.broadcast_to(jnp.arange(P + R)[None], sequences.shape)
  segments = jnp.zeros(sequences.shape, jnp.int32)
  policy = POLICY.forward(params["policy"], sequences, positions, segments)
  critic = CRITIC.forward(params["critic"], sequences, positions, segments)
  logits = ops.sampling_logits(
    POLICY.head(params["policy"], policy)[:, :-1],
    keep=sequences[:, 1:],
    **SAMPLING,
  )
  return logits, CRITIC.head(params["critic"], critic)[:, :-1, 0]


def align(x, prompt_len):
  """[B, L - 1] by predicted column -> [B, R] by response token."""
  columns = prompt_len[:, None] - 1 + np.arange(R)[None]
  return x[np.arange(len(x))[:, None], columns.clip(max=P + R - 2)]


@functools.cache
def rollout():
  """A batch of uneven rows, sampled as the initial policy would score it."""
  rng = np.random.default_rng(3)
  prompt_len = np.array([3, 1, 2, 3, 1, 2], np.int32)
  response_len = np.array([6, 1, 4, 2, 6, 3], np.int32)
  length = prompt_len + response_len
  sequences = rng.integers(0, V, size=(B, P + R), dtype=np.int32)
  sequences = np.where(np.arange(P + R)[None] < length[:, None], sequences, 0)
  mask = np.arange(R)[None] < response_len[:, None]

  @jax.jit
  def score(params):
    logits, values = forward(params, jnp.asarray(sequences))
    logprobs = ops.logprobs_from_logits(logits, jnp.asarray(sequences[:, 1:]))
    return align(logprobs, prompt_len), align(values, prompt_len)

  logprobs, values = jax.tree.map(np.array, score(initial_params()))
  noise = rng.normal(size=(3, B, R)).astype(np.float32) * np.float32(0.3)
  only = lambda x: np.where(mask, x, 0)
  batch = types.Batch(
    uid=np.arange(B, dtype=np.int32),
    sequences=sequences,
    prompt_len=prompt_len,
    response_len=response_len,
    has_eos=response_len < R,
    responses=only(align(sequences[:, 1:], prompt_len)),
    mask=mask,
    behavior_logprobs=only(logprobs),
    start_logprobs=only(logprobs + noise[0]),
    ref_logprobs=only(logprobs + noise[1]),
    values=values + noise[2],
    scores=rng.normal(size=B).astype(np.float32),
    token_version=np.zeros((B, R), np.int32),
    admitted_at=np.zeros(B, np.int32),
  )
  return jax.tree.map(jnp.asarray, batch)


def plan(width, micro_rows, algo=ALGO):
  batch = rollout()
  return packing.plan(
    np.asarray(batch.prompt_len + batch.response_len),
    order_seed=(5,),
    num_epochs=algo["num_epochs"],
    num_minibatches=algo["num_minibatches"],
    width=width,
    micro_rows=micro_rows,
  )


def make(width, micro_rows, algo=ALGO, policy=POLICY, **optim_changes):
  return algos.make(
    "ppo",
    algo,
    OPTIM | optim_changes,
    policy=policy,
    critic=CRITIC,
    num_updates=10,
    bin_width=width,
    micro_rows=micro_rows,
    **SAMPLING,
  )


@functools.cache
def compiled(width, micro_rows, algo_items, optim_items):
  algorithm = make(width, micro_rows, dict(algo_items), **dict(optim_items))
  return algorithm.init, jax.jit(algorithm.update)


def run(algo=ALGO, *, width=P + R, micro_rows=1, batch=None, **optim_changes):
  init, update = compiled(
    width, micro_rows, tuple(algo.items()), tuple(optim_changes.items())
  )
  batch = rollout() if batch is None else batch
  return update(init(initial_params()), batch, plan(width, micro_rows, algo))


def assert_close(got, expected):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), got, expected
  )


def oracle_loss(params, batch, targets, rows, algo):
  """The loss of one minibatch, from the text of the papers."""
  take = lambda x: x[rows]
  logits, values = forward(params, take(batch.sequences))
  prompt_len = take(batch.prompt_len)
  shaped = jnp.take_along_axis(
    jax.nn.log_softmax(logits), take(batch.sequences)[:, 1:, None], axis=-1
  )[..., 0]
  logprobs, values = align(shaped, prompt_len), align(values, prompt_len)
  mean = lambda x, mask: jnp.sum(jnp.where(mask, x, 0)) / jnp.sum(mask)
  mask, value_mask = take(batch.mask), take(targets.value_mask)
  logprobs = jnp.where(mask, logprobs, 0)
  ratio = jnp.exp(logprobs - take(batch.behavior_logprobs))
  advantages = take(targets.advantages)
  eps = algo["clip_eps"]
  policy = -jnp.minimum(
    ratio * advantages, jnp.clip(ratio, 1 - eps, 1 + eps) * advantages
  )
  error = values - take(targets.returns)
  change = values - take(batch.values)
  eps = algo["value_clip_eps"]
  clipped = error - change + jnp.clip(change, -eps, eps)
  value = jnp.maximum(error**2, clipped**2) / 2
  difference = take(batch.ref_logprobs) - logprobs
  kl = jnp.exp(difference) - 1 - difference
  entropy = align(ops.entropy_from_logits(logits), prompt_len)
  return (
    mean(policy, mask)
    + algo["vf_coef"] * mean(value, value_mask)
    + algo["kl_loss_coef"] * mean(kl, mask)
    - algo["entropy_coef"] * mean(entropy, mask)
  )


def test_update_equals_a_plain_restatement():
  # Minibatches of 2 rows in up to 2 micro-batches: an optimizer step per
  # minibatch, not per micro-batch, and means over the minibatch.
  state, _ = run()
  batch = rollout()
  targets = make_targets(batch, 0.05, ppo.PPOConfig(**ALGO))
  params = initial_params()
  packed = plan(P + R, 1)
  assert packed.num_micro.max() > 1
  tx = {
    k: optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adam(
        optax.linear_schedule(OPTIM[f"{k}_lr"], 0.0, 60),
        b1=0.9,
        b2=0.95,
        eps=1.0,
      ),
    )
    for k in params
  }
  opt_state = {k: tx[k].init(params[k]) for k in params}

  @jax.jit
  def step(params, opt_state, rows):
    grads = jax.grad(oracle_loss)(params, batch, targets, rows, ALGO)
    new_params, new_state = {}, {}
    for k in params:
      updates, new_state[k] = tx[k].update(grads[k], opt_state[k])
      new_params[k] = optax.apply_updates(params[k], updates)
    return new_params, new_state

  for rows in packed.row.reshape(-1, B // 3):
    params, opt_state = step(params, opt_state, rows)
  assert_close(state.params, params)
  moved = jax.tree.map(
    lambda x, y: float(jnp.max(jnp.abs(x - y))), params, initial_params()
  )
  assert min(jax.tree.leaves(moved)) > 1e-3
  assert state.version == 1


def test_update_does_not_depend_on_the_packing():
  assert plan(16, 2).num_micro.sum() < plan(P + R, 1).num_micro.sum()
  state, metrics = run(width=16, micro_rows=2)
  expected_state, expected_metrics = run()
  assert_close(state.params, expected_state.params)
  assert_close(metrics, expected_metrics)


def test_update_ignores_junk_outside_the_mask():
  batch = rollout()
  junk = lambda x, mask: jnp.where(mask, x, jnp.nan)
  targets = make_targets(batch, 0.05, ppo.PPOConfig(**ALGO))
  dirty = batch.replace(
    behavior_logprobs=junk(batch.behavior_logprobs, batch.mask),
    start_logprobs=junk(batch.start_logprobs, batch.mask),
    ref_logprobs=junk(batch.ref_logprobs, batch.mask),
    values=junk(batch.values, targets.value_mask),
    responses=jnp.where(batch.mask, batch.responses, 7),
  )
  got, expected = run(batch=dirty), run()
  jax.tree.map(np.testing.assert_array_equal, got, expected)


class CountingModel(fakes.EmbeddingModel):
  """Counts how often its forward pass really runs."""

  calls = []

  def forward(self, params, tokens, positions, segments):
    jax.debug.callback(lambda: self.calls.append(1))
    return super().forward(params, tokens, positions, segments)


@functools.cache
def two_updates():
  """Two updates of one jitted function, packed into 2 and into 1 bins."""
  policy = CountingModel(V, width=4, num_positions=P + R, is_lm=True)
  algorithm = make(18, 1, policy=policy)
  update = jax.jit(algorithm.update)
  state = algorithm.init(initial_params())
  history = []
  for packed in (plan(9, 1), plan(18, 1)):
    CountingModel.calls.clear()
    state, metrics = jax.block_until_ready(update(state, rollout(), packed))
    jax.effects_barrier()
    history.append((packed, len(CountingModel.calls), metrics))
  return history, update._cache_size(), state


def test_micro_batches_of_padding_never_run():
  history, num_compilations, _ = two_updates()
  assert history[0][1] > history[1][1]
  for packed, num_calls, _ in history:
    assert num_calls == packed.num_micro.sum()
  assert num_compilations == 1


def test_the_first_minibatch_is_on_policy_and_the_later_ones_are_not():
  _, metrics = run()
  # Behaviour log-probs are those of the initial policy.
  assert metrics["policy/ratio_first"] < 1e-5
  assert metrics["policy/approxkl_avg"] > 1e-4
  assert metrics["policy/clipfrac_avg"] > 0


def test_kl_of_equal_models_is_zero_at_any_temperature_and_truncation():
  batch = rollout()
  equal = batch.replace(ref_logprobs=batch.behavior_logprobs)
  _, metrics = run(ONE_STEP, batch=equal)
  assert metrics["objective/kl"] == 0
  # The loss recomputes log-probs by itself; k3 is about d^2 / 2.
  assert abs(metrics["policy/kl_ref_avg"]) < 1e-6
  assert metrics["policy/ratio_first"] < 1e-5


def test_metrics_are_named_finite_and_scalar():
  _, metrics = run()
  assert set(metrics) >= {
    *("objective/" + k for k in ("kl", "scores", "rlhf_reward", "entropy")),
    "policy/approxkl_avg",
    "policy/clipfrac_avg",
    "loss/policy_avg",
    "loss/value_avg",
    "val/ratio",
    "val/clipfrac_avg",
    "policy/ratio_first",
  }
  for name, x in metrics.items():
    assert x.shape == (), name
    assert x.dtype == jnp.float32, name
    assert np.isfinite(x), name


def test_every_response_token_and_nothing_else_is_trained():
  batch = rollout()
  params = {
    "policy": jnp.zeros((B, P + R, V)),
    "critic": jnp.zeros((B, P + R, 1)),
  }
  no_clip = ONE_STEP | dict(clip_eps=1e9, value_clip_eps=0.0)
  algorithm = algos.make(
    "ppo",
    no_clip,
    OPTIM,
    policy=TABLE,
    critic=TABLE,
    num_updates=1,
    bin_width=16,
    micro_rows=2,
    **PLAIN,
  )
  packed = plan(16, 2, no_clip)
  state, _ = jax.jit(algorithm.update)(algorithm.init(params), batch, packed)
  # Position p predicts p + 1, the EOS (last token) included; the value one
  # after the last token is trained where it fits in R columns.
  position = np.arange(P + R)[None]
  first = np.asarray(batch.prompt_len)[:, None] - 1
  last = first + np.asarray(batch.response_len)[:, None]
  moved = np.any(np.asarray(state.params["policy"]) != 0, axis=-1)
  np.testing.assert_array_equal(moved, (first <= position) & (position < last))
  moved = np.any(np.asarray(state.params["critic"]) != 0, axis=-1)
  fits = np.asarray(batch.response_len)[:, None] < R
  np.testing.assert_array_equal(
    moved, (first <= position) & (position < last + fits)
  )


# Denominators.


def test_start_takes_ratio_and_kl_to_the_recomputed_logprobs():
  batch = rollout()
  _, metrics = run(ONE_STEP | dict(denominator="start"))
  difference = np.where(
    batch.mask, batch.behavior_logprobs - batch.start_logprobs, 0
  )
  expected = np.abs(np.exp(difference) - 1).max()
  np.testing.assert_allclose(metrics["policy/ratio_first"], expected, **CLOSE)
  difference = np.where(
    batch.mask, batch.start_logprobs - batch.ref_logprobs, 0
  )
  expected = difference.sum(axis=-1).mean()
  np.testing.assert_allclose(metrics["objective/kl"], expected, **CLOSE)


def test_decoupled_weights_tokens_by_a_capped_ratio():
  batch = rollout()
  config = ppo.PPOConfig(**ONE_STEP | dict(denominator="start"))
  plain = make_targets(batch, 0.05, config)
  config = dataclasses.replace(
    config, denominator="decoupled", behavior_weight_cap=1.1
  )
  weighted = make_targets(batch, 0.05, config)
  weight = np.exp(batch.start_logprobs - batch.behavior_logprobs)
  assert weight.max() > 1.1
  np.testing.assert_allclose(
    weighted.advantages, plain.advantages * np.minimum(weight, 1.1), **CLOSE
  )
  np.testing.assert_array_equal(weighted.denominator, batch.start_logprobs)


def test_on_policy_every_denominator_gives_one_gradient():
  # start = behaviour = current: all weights and ratios are 1.
  batch = rollout()
  batch = batch.replace(start_logprobs=batch.behavior_logprobs)
  config = ppo.PPOConfig(**ONE_STEP)
  expected = make_targets(batch, 0.05, config)
  for denominator in ppo_config.DENOMINATORS:
    config = dataclasses.replace(config, denominator=denominator)
    assert_close(make_targets(batch, 0.05, config), expected)
  states = [run(algo, batch=batch)[0] for algo in (ONE_STEP, TIS)]
  assert_close(states[0].params, states[1].params)


def test_tis_caps_the_ratio_to_behavior_and_clips_nothing():
  batch = rollout()
  stale = batch.replace(behavior_logprobs=batch.start_logprobs)
  _, metrics = run(TIS, batch=stale)
  ratio = np.exp(batch.behavior_logprobs - batch.start_logprobs)[batch.mask]
  expected = np.mean(ratio > 1.1)
  assert 0 < expected != np.mean(np.abs(ratio - 1) > TIS["clip_eps"])
  np.testing.assert_allclose(metrics["policy/clipfrac_avg"], expected, **CLOSE)


@pytest.mark.parametrize(
  ("denominator", "streams_policy"),
  [("behavior", False), ("tis", False), ("start", True), ("decoupled", True)],
)
def test_the_policy_is_streamed_only_if_it_is_asked_for(
  denominator, streams_policy
):
  algorithm = make(16, 1, ALGO | dict(denominator=denominator))
  assert algorithm.scorers >= {"critic", "reference", "reward"}
  assert ("policy" in algorithm.scorers) == streams_policy
  assert algorithm.group_size == 1


# Losses by hand.


def surrogate_gradient(fn, log_ratio, advantages, **kwargs):
  loss = lambda x: jnp.sum(fn(x, jnp.array(advantages), **kwargs)[0])
  return jax.grad(loss)(jnp.array(log_ratio))


def test_surrogate_by_hand():
  ratio = jnp.array([1.5, 1.5, 0.5, 0.5, 1.1])
  advantages = jnp.array([1.0, -1.0, 1.0, -1.0, 2.0])
  loss, is_clipped = losses.clipped_surrogate(
    jnp.log(ratio), advantages, clip_eps=0.2
  )
  np.testing.assert_allclose(loss, [-1.2, 1.5, -0.5, 0.8, -2.2], **CLOSE)
  np.testing.assert_array_equal(is_clipped, [True, False, False, True, False])


def test_clipped_branch_has_no_gradient():
  got = surrogate_gradient(
    losses.clipped_surrogate,
    np.log([1.5, 1.5, 0.5, 0.5]).astype(np.float32),
    [1.0, -1.0, 1.0, -1.0],
    clip_eps=0.2,
  )
  # Where a step would go on in the same direction: none; else -A * ratio.
  np.testing.assert_allclose(got, [0.0, 1.5, -0.5, 0.0], **CLOSE)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
  advantages = [1.0, -2.0, 0.5]
  for fn, kwargs in (
    (losses.clipped_surrogate, dict(clip_eps=0.2)),
    (losses.truncated_surrogate, dict(cap=2.0)),
  ):
    got = surrogate_gradient(fn, [0.0, 0.0, 0.0], advantages, **kwargs)
    np.testing.assert_array_equal(got, -np.array(advantages))


def test_a_truncated_token_still_learns():
  log_ratio = np.log([0.5, 4.0]).astype(np.float32)
  loss, is_capped = losses.truncated_surrogate(
    jnp.array(log_ratio), jnp.array([1.0, 1.0]), cap=2.0
  )
  np.testing.assert_allclose(loss, [-0.5, -2.0], **CLOSE)
  np.testing.assert_array_equal(is_capped, [False, True])
  got = surrogate_gradient(
    losses.truncated_surrogate, log_ratio, [1.0, 1.0], cap=2.0
  )
  np.testing.assert_allclose(got, [-0.5, -2.0], **CLOSE)


def test_log_ratio_is_masked_before_the_exponential_and_clipped():
  def total(logprobs, clip):
    ratio = losses.masked_log_ratio(
      logprobs,
      jnp.array([-1.0, -jnp.inf, -50.0]),
      jnp.array([True, False, True]),
      clip=clip,
    )
    return jnp.sum(jnp.exp(ratio)), ratio

  grad, ratio = jax.grad(total, has_aux=True)(jnp.zeros(3), 20.0)
  np.testing.assert_array_equal(ratio, [1.0, 0.0, 20.0])
  np.testing.assert_allclose(grad, [np.e, 0.0, 0.0], **CLOSE)
  _, ratio = jax.grad(total, has_aux=True)(jnp.zeros(3), 0.0)
  np.testing.assert_array_equal(ratio, [1.0, 0.0, 50.0])


def test_value_loss_by_hand():
  values = jnp.array([1.0, 1.0, 3.0])
  rollout_values = jnp.array([0.0, 0.0, 3.0])
  returns = jnp.array([2.0, 0.0, 2.0])
  kwargs = dict(value_clip_eps=0.5)
  # Clipped to 0.5, 0.5, 3: errors 1.5 > 1, 0.5 < 1, 1 = 1.
  loss, is_clipped = losses.clipped_value_loss(
    values, rollout_values, returns, **kwargs
  )
  np.testing.assert_allclose(loss, [1.125, 0.5, 0.5], **CLOSE)
  np.testing.assert_array_equal(is_clipped, [True, False, False])
  loss, is_clipped = losses.clipped_value_loss(
    values, rollout_values, returns, value_clip_eps=0.0
  )
  np.testing.assert_allclose(loss, [0.5, 0.5, 0.5], **CLOSE)
  assert not is_clipped.any()


@pytest.mark.parametrize(
  ("kl", "expected"),
  [
    (6.0, 0.1),
    # Ten percent above the target of 6: times 1 + 0.1 * 50 / 100.
    (6.6, 0.105),
    # Errors are clipped at 20 percent: times 1 -+ 0.2 * 50 / 100.
    (60.0, 0.11),
    (0.0, 0.09),
  ],
)
def test_adaptive_kl_coef_by_hand(kl, expected):
  got = ppo.adaptive_kl_coef(
    jnp.array(0.1), jnp.array(kl), target=6.0, horizon=100.0, num_responses=50
  )
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_kl_coefficient_adapts_after_the_batch():
  state, metrics = run()
  # Far below the target: times 1 - 0.2 * 6 / 60.
  np.testing.assert_allclose(metrics["objective/kl_coef"], 0.05, rtol=1e-6)
  np.testing.assert_allclose(
    state.algo_state["kl_coef"], 0.05 * 0.98, rtol=1e-6
  )
  state, _ = run(ONE_STEP)
  np.testing.assert_allclose(state.algo_state["kl_coef"], 0.05, rtol=1e-6)


def test_integer_scores_reach_the_advantages_as_floats():
  batch = rollout()
  config = ppo.PPOConfig(
    **TRL | dict(missing_eos_penalty=0.5, whiten_advantages=False)
  )
  scores = jnp.arange(B, dtype=jnp.int32)
  got = make_targets(batch.replace(scores=scores), 0.05, config)
  expected = scores - np.where(batch.has_eos, 0, 0.5)
  np.testing.assert_array_equal(got.scores, expected)
  assert {str(x.dtype) for x in (got.rewards, got.returns)} == {"float32"}


# Optimizers.


def test_schedules_by_hand():
  rate = lambda schedule, step: float(
    optim.make_schedule(
      peak=2.0, schedule=schedule, warmup_steps=2, total_steps=6
    )(step)
  )
  for schedule in optim.SCHEDULES:  # the first step learns
    assert rate(schedule, 0) == 1.0
    assert rate(schedule, 1) == rate(schedule, 2) == 2.0
  assert rate("constant", 9) == 2.0
  assert [rate("linear", i) for i in (3, 5, 6, 9)] == [1.5, 0.5, 0.0, 0.0]
  np.testing.assert_allclose(rate("cosine", 4), 1.0, rtol=1e-6)
  np.testing.assert_allclose(rate("cosine", 6), 0.0, atol=1e-6)


def test_gradients_are_clipped_and_only_matrices_decay():
  params = {"policy": {"w": jnp.ones((1, 1)), "b": jnp.ones(1)}}
  grads = {"policy": {"w": jnp.full((1, 1), 3.0), "b": jnp.full(1, 4.0)}}
  config = optim.OptimConfig(
    **OPTIM | dict(policy_lr=1.0, weight_decay=0.25, b1=0.0, b2=0.0)
  )
  optimizers = {"policy": optim.make(config, total_steps=1)["policy"]}
  got, _, norms = optim.step(
    optimizers, params, optim.init(optimizers, params), grads
  )
  assert norms["policy"] == 5.0
  # Clipped to 0.6 and 0.8; Adam with eps 1 makes g / (|g| + 1) of them.
  expected = {"w": 1 - 0.6 / 1.6 - 0.25, "b": 1 - 0.8 / 1.8}
  np.testing.assert_allclose(got["policy"]["w"], [[expected["w"]]], rtol=1e-6)
  np.testing.assert_allclose(got["policy"]["b"], [expected["b"]], rtol=1e-6)


def test_the_schedule_counts_optimizer_steps_over_updates():
  history, _, state = two_updates()
  rates = [float(metrics["policy/lr"]) for _, _, metrics in history]
  # 10 updates of 6 steps; the second starts at step 6.
  np.testing.assert_allclose(rates, [0.5, 0.5 * 54 / 60], rtol=1e-6)
  assert state.version == 2


# What is refused, and what the presets hold.


@pytest.mark.parametrize("name", ["trl", "openrlhf", "verl"])
def test_presets_are_full_and_say_what_the_library_does(name):
  config = ppo.PPOConfig(**ppo_config.PRESETS[name])
  expected = {
    "trl": ("after_eos", "unbiased", 0.0, 0.95, 0.05, 0.2),
    "openrlhf": ("last", "population", 20.0, 1.0, 0.01, 0.5),
    "verl": ("last", "unbiased", 20.0, 1.0, 0.001, 0.5),
  }[name]
  assert expected == (
    config.score_position,
    config.whitening,
    config.log_ratio_clip,
    config.lam,
    config.kl_coef,
    config.value_clip_eps,
  )


@pytest.mark.parametrize(
  "field",
  [
    "kl_estimator",
    "kl_loss_estimator",
    "whitening",
    "score_position",
    "denominator",
  ],
)
def test_unknown_choices_are_refused_by_name(field):
  with pytest.raises(ValueError, match=f"{field}='nonsense'.*not in"):
    ppo.PPOConfig(**TRL | {field: "nonsense"})


def test_stray_keys_unknown_names_and_wrong_packings_are_refused():
  with pytest.raises(TypeError, match="clip_epsilon"):
    make(16, 1, ALGO | dict(clip_epsilon=0.2))
  with pytest.raises(ValueError, match=r"'trpo'.*ppo"):
    algos.make("trpo")
  with pytest.raises(ValueError, match="schedule 'step'"):
    make(16, 1, schedule="step")
  algorithm = make(16, 1)
  state = algorithm.init(initial_params())
  packed = plan(16, 1, ALGO | dict(num_epochs=1))
  with pytest.raises(ValueError, match="packing"):
    algorithm.update(state, rollout(), packed)
