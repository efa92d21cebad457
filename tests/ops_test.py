# SPDX-License-Identifier: Apache-2.0
"""Expected numbers are derived in comments or by loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oppo_jax import ops

CLOSE = dict(rtol=0, atol=1e-5)
PLAIN = dict(temperature=1.0, top_k=0, top_p=1.0)
LOG = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def ragged(lengths, columns):
  return jnp.asarray(np.arange(columns)[None] < np.array(lengths)[:, None])


def kept(**kwargs):
  logits = ops.sampling_logits(jnp.asarray(LOG), **(PLAIN | kwargs))
  return [bool(x) for x in logits > ops.MASKED_LOGIT / 2]


# Sampling distribution.


def test_sampling_divides_by_the_temperature():
  logits = ops.sampling_logits(
    jnp.array([1.0, -3.0]), **PLAIN | {"temperature": 0.5}
  )
  np.testing.assert_allclose(logits, [2.0, -6.0], **CLOSE)


def test_sampling_without_truncation_compiles_no_sort():
  text = str(jax.make_jaxpr(lambda x: ops.sampling_logits(x, **PLAIN))(LOG))
  assert "sort" not in text
  assert "top_k" not in text


@pytest.mark.parametrize(
  ("kwargs", "expected"),
  [
    (dict(top_k=1), [1, 0, 0, 0]),
    (dict(top_k=3), [1, 1, 1, 0]),
    (dict(top_k=4), [1, 1, 1, 1]),
    (dict(top_k=9), [1, 1, 1, 1]),
    # Mass before each token: 0, 0.5, 0.8, 0.95.
    (dict(top_p=0.4), [1, 0, 0, 0]),
    (dict(top_p=0.6), [1, 1, 0, 0]),
    (dict(top_p=0.9), [1, 1, 1, 0]),
    # Of the top 2 (0.625, 0.375), before each: 0, 0.625.
    (dict(top_k=2, top_p=0.6), [1, 0, 0, 0]),
    (dict(top_k=2, top_p=0.7), [1, 1, 0, 0]),
  ],
)
def test_truncation_keeps_the_tokens_it_should(kwargs, expected):
  assert kept(**kwargs) == [bool(x) for x in expected]


def test_the_asked_token_stays_finite_outside_the_nucleus():
  logits = ops.sampling_logits(
    jnp.asarray(LOG)[None], **PLAIN | {"top_k": 1}, keep=jnp.array([3])
  )
  # The set is {0.5, 0.05}: 0.05 / 0.55 = 1 / 11.
  logprobs = ops.logprobs_from_logits(logits, jnp.array([3]))
  np.testing.assert_allclose(logprobs, [-np.log(11)], **CLOSE)


def test_truncated_logits_have_finite_gradients_and_entropy():
  def entropy(x):
    logits = ops.sampling_logits(x, **PLAIN | {"top_k": 2})
    return ops.entropy_from_logits(logits)

  value, grad = jax.value_and_grad(entropy)(jnp.asarray(LOG))
  # Of 0.625, 0.375; the gradient is -p (log p + entropy).
  p = np.array([0.625, 0.375])
  expected = -np.sum(p * np.log(p))
  np.testing.assert_allclose(value, expected, **CLOSE)
  np.testing.assert_allclose(grad[:2], -p * (np.log(p) + expected), **CLOSE)
  np.testing.assert_array_equal(grad[2:], 0)


def test_sampling_is_in_float32_whatever_the_model_dtype():
  logits = ops.sampling_logits(jnp.ones((2, 4), jnp.bfloat16), **PLAIN)
  assert logits.dtype == jnp.float32


@pytest.mark.parametrize("kwargs", [dict(temperature=0.0), dict(top_p=0.0)])
def test_impossible_sampling_is_refused(kwargs):
  with pytest.raises(ValueError, match=next(iter(kwargs))):
    kept(**kwargs)


# Log-probs.


def test_logprobs_and_entropy_of_a_known_softmax():
  logits = jnp.asarray(LOG)[None] + 7.0
  logprobs = ops.logprobs_from_logits(logits, jnp.array([2]))
  np.testing.assert_allclose(logprobs, [np.log(0.15)], **CLOSE)
  entropy = ops.entropy_from_logits(logits)
  np.testing.assert_allclose(entropy, [-np.sum(np.exp(LOG) * LOG)], **CLOSE)


@pytest.fixture(scope="module")
def tokens():
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(10, 6)), jnp.float32)
  head = jnp.asarray(rng.normal(size=(6, 11)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, 11, size=10), jnp.int32)
  return hidden, head, targets


@pytest.mark.parametrize("chunk", [3, 5, 64])
def test_chunked_logprobs_equal_those_of_all_logits(tokens, chunk):
  kwargs = dict(temperature=0.7, top_k=5, top_p=0.9)

  def chunked(hidden, head):
    logprobs, entropy = ops.token_logprobs(
      hidden,
      targets,
      lambda h: h @ head,
      chunk=chunk,
      with_entropy=True,
      **kwargs,
    )
    return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

  def plain(hidden, head):
    logits = ops.sampling_logits(hidden @ head, keep=targets, **kwargs)
    logprobs = ops.logprobs_from_logits(logits, targets)
    entropy = ops.entropy_from_logits(logits)
    return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

  hidden, head, targets = tokens
  got, expected = (
    jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, head)
    for f in (chunked, plain)
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, **CLOSE), got, expected
  )


def test_chunked_logprobs_never_build_all_logits(tokens):
  hidden, head, targets = tokens

  def loss(head):
    logprobs, _ = ops.token_logprobs(
      hidden, targets, lambda h: h @ head, chunk=2, with_entropy=True, **PLAIN
    )
    return jnp.sum(logprobs)

  # All shapes of the gradient's program with a vocabulary axis of 11.
  text = jax.jit(jax.grad(loss)).lower(head).as_text()
  assert "tensor<2x11xf32>" in text
  assert "tensor<10x11xf32>" not in text
  assert "tensor<5x2x11xf32>" not in text


def test_entropy_is_zero_where_nobody_asks_for_it(tokens):
  hidden, head, targets = tokens
  _, entropy = ops.token_logprobs(
    hidden, targets, lambda h: h @ head, chunk=4, with_entropy=False, **PLAIN
  )
  np.testing.assert_array_equal(entropy, np.zeros(10))


# KL.

UNCLIPPED = dict(inner_clip=None, outer_clip=None)


@pytest.mark.parametrize(
  ("estimator", "expected"),
  [
    # d = log-prob - reference = 1 and -2.
    ("k1", [1.0, -2.0]),
    ("k2", [0.5, 2.0]),
    ("k3", [np.exp(-1) - 1 + 1, np.exp(2) - 1 - 2]),
  ],
)
def test_kl_estimators_follow_schulmans_note(estimator, expected):
  got = ops.kl(
    jnp.array([-1.0, -3.0]),
    jnp.array([-2.0, -1.0]),
    estimator=estimator,
    **UNCLIPPED,
  )
  np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.parametrize("estimator", ops.KL_ESTIMATORS)
def test_kl_of_equal_models_is_zero(estimator):
  x = jnp.array([-1.0, -7.0])
  got = ops.kl(x, x, estimator=estimator, **UNCLIPPED)
  np.testing.assert_array_equal(got, [0.0, 0.0])


def test_kl_clips_inside_and_outside():
  kwargs = dict(estimator="k3", inner_clip=2.0)
  got = ops.kl(jnp.array([-9.0]), jnp.array([0.0]), outer_clip=0.0, **kwargs)
  np.testing.assert_allclose(got, [np.exp(2) - 1 - 2], **CLOSE)
  got = ops.kl(jnp.array([-9.0]), jnp.array([0.0]), outer_clip=3.0, **kwargs)
  np.testing.assert_array_equal(got, [3.0])


def test_unknown_kl_estimator_is_refused():
  with pytest.raises(ValueError, match=r"'k4'.*k1"):
    ops.kl(jnp.zeros(1), jnp.zeros(1), estimator="k4", **UNCLIPPED)


# Statistics.

X = jnp.array([[1.0, 2.0, jnp.nan], [6.0, jnp.nan, jnp.nan]])
MASK = jnp.array([[True, True, False], [True, False, False]])


def test_masked_statistics_see_no_junk():
  # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14.
  np.testing.assert_allclose(ops.masked_mean(X, MASK), 3.0, **CLOSE)
  var = ops.masked_var(X, MASK, unbiased=False)
  np.testing.assert_allclose(var, 14 / 3, **CLOSE)
  var = ops.masked_var(X, MASK, unbiased=True)
  np.testing.assert_allclose(var, 7.0, **CLOSE)


def test_statistics_of_nothing_are_zero():
  nothing = jnp.zeros(X.shape, bool)
  assert ops.masked_mean(X, nothing) == 0
  for unbiased in (True, False):
    assert ops.masked_var(X, nothing, unbiased=unbiased) == 0


def test_integers_have_a_float_mean():
  mean = ops.masked_mean(jnp.array([1, 2]), jnp.array([True, True]))
  np.testing.assert_allclose(mean, 1.5, **CLOSE)


@pytest.mark.parametrize(
  ("whitening", "var"), [("unbiased", 7.0), ("population", 14 / 3)]
)
def test_whitening_is_over_the_mask(whitening, var):
  got = ops.whiten(X, MASK, keep_mean=False, whitening=whitening)
  expected = np.array([[-2, -1, 0], [3, 0, 0]]) / np.sqrt(var)
  np.testing.assert_allclose(got, expected, **CLOSE)
  got = ops.whiten(X, MASK, keep_mean=True, whitening=whitening)
  np.testing.assert_allclose(got, expected + 3.0 * np.array(MASK), **CLOSE)


def test_whitening_a_constant_gives_zeros():
  x, mask = jnp.full((2, 2), 5.0), jnp.ones((2, 2), bool)
  for whitening in ops.WHITENINGS:
    got = ops.whiten(x, mask, keep_mean=False, whitening=whitening)
    np.testing.assert_array_equal(got, np.zeros((2, 2)))


def test_unknown_whitening_is_refused():
  with pytest.raises(ValueError, match=r"'zca'.*unbiased"):
    ops.whiten(X, MASK, keep_mean=False, whitening="zca")


def test_explained_variance_of_good_constant_and_no_values():
  returns = jnp.array([[1.0, 3.0, 9.0]])
  mask = jnp.array([[True, True, False]])
  explained = lambda v: ops.explained_variance(jnp.array([v]), returns, mask)
  assert explained([1.0, 3.0, jnp.nan]) == 1.0
  assert explained([7.0, 7.0, 7.0]) == 0.0
  # Residuals 0 and 2 have variance 1, as have the returns themselves.
  assert explained([1.0, 1.0, 0.0]) == 0.0
  # Residuals 0.5 and 1.5: variance 1/4.
  assert explained([0.5, 1.5, 0.0]) == 0.75
  constant = ops.explained_variance(returns, jnp.full((1, 3), 2.0), mask)
  assert constant == 0.0


# GAE.


def gae_loop(rewards, values, lengths, gamma, lam):
  advantages = np.zeros(rewards.shape)
  for b, length in enumerate(lengths):
    for t in range(length):
      for k in range(t, length):  # eq. 16 as it stands: a sum over deltas
        after = values[b, k + 1] if k + 1 < length else 0.0
        delta = rewards[b, k] + gamma * after - values[b, k]
        advantages[b, t] += (gamma * lam) ** (k - t) * delta
  return advantages


@pytest.mark.parametrize(
  ("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)]
)
def test_gae_equals_the_sum_of_deltas(gamma, lam):
  rng = np.random.default_rng(1)
  lengths = [5, 3, 0, 1]
  rewards, values = rng.normal(size=(2, 4, 5)).astype(np.float32)
  mask = ragged(lengths, 5)
  advantages, returns = ops.gae(
    jnp.asarray(rewards), jnp.asarray(values), mask, gamma=gamma, lam=lam
  )
  expected = gae_loop(rewards, values, lengths, gamma, lam)
  np.testing.assert_allclose(advantages, expected, **CLOSE)
  expected = np.where(mask, expected + values, 0)
  np.testing.assert_allclose(returns, expected, **CLOSE)


def test_gae_by_hand():
  # gamma 1, lambda 0.5: delta_1 = 1 - 3 = -2, delta_0 = 0 + 3 - 2 = 1,
  # A_0 = 1 + 0.5 * -2 = 0.
  advantages, returns = ops.gae(
    jnp.array([[0.0, 1.0, 9.0]]),
    jnp.array([[2.0, 3.0, 9.0]]),
    jnp.array([[True, True, False]]),
    gamma=1.0,
    lam=0.5,
  )
  np.testing.assert_array_equal(advantages, [[0.0, -2.0, 0.0]])
  np.testing.assert_array_equal(returns, [[2.0, 1.0, 0.0]])


def test_gae_ignores_junk_outside_the_mask():
  mask = ragged([2, 0], 3)
  clean = jnp.where(mask, 1.0, 0.0)
  junk = jnp.where(mask, 1.0, jnp.nan)
  kwargs = dict(gamma=0.9, lam=0.8)
  for got, expected in zip(
    ops.gae(junk, junk, mask, **kwargs), ops.gae(clean, clean, mask, **kwargs)
  ):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_statistics_are_float32_or_better(dtype):
  with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
    x, mask = jnp.ones((2, 3), dtype), jnp.ones((2, 3), bool)
    results = [
      ops.masked_mean(x, mask),
      ops.masked_var(x, mask, unbiased=True),
      ops.explained_variance(x, x, mask),
      ops.kl(x, x, estimator="k3", inner_clip=1.0, outer_clip=1.0),
      *ops.gae(x, x, mask, gamma=1.0, lam=1.0),
      *(
        ops.whiten(x, mask, keep_mean=True, whitening=w) for w in ops.WHITENINGS
      ),
      ops.at_least_float32(x),
    ]
  expected = "float64" if dtype == "float64" else "float32"
  assert {str(x.dtype) for x in results} == {expected}
