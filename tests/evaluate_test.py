# SPDX-License-Identifier: Apache-2.0
"""Numbers of an evaluation, by hand."""

import functools
import itertools
import types

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny
from compare import assert_close

from oppo_jax import evaluate


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_right, k):
  samples = [True] * num_right + [False] * (6 - num_right)
  subsets = list(itertools.combinations(samples, k))
  expected = np.mean([any(subset) for subset in subsets])
  got = evaluate.pass_at_k(6, num_right, k)
  np.testing.assert_allclose(got, expected, atol=1e-12)


def test_pass_at_k_of_many_samples_is_a_number():
  assert 0.99 < evaluate.pass_at_k(10_000, 100, 1_000) <= 1.0


def test_more_than_were_drawn_cannot_be_asked_for():
  for k in (0, 4):
    with pytest.raises(ValueError, match=f"k={k}: must be in"):
      evaluate.pass_at_k(3, 1, k)


@pytest.mark.parametrize(
  ("texts", "says"),
  [(["x"], "--k=x: must be integers"), (["1", "5"], "--k=5: must be in")],
)
def test_a_bad_k_is_named(texts, says):
  with pytest.raises(ValueError, match=says):
    evaluate.read_ks(texts, 4)


def test_numbers_are_means_over_responses_and_pass_at_k_over_prompts():
  """Two prompts of two samples; the first prompt has one right."""
  said = evaluate.Said(
    examples=[None] * 4,
    prompts=[np.arange(2)] * 4,
    responses=[np.arange(n) for n in (1, 2, 3, 4)],
    texts=[""] * 4,
    has_eos=np.array([True, True, True, False]),
  )
  columns = {"rule": np.array([0.0, 1.0, 0.5, 0.0]), "kl": np.arange(4.0)}
  task = types.SimpleNamespace(reward=lambda example, text: 0.0)
  found = evaluate.numbers_of(task, said, columns, (1, 2), 2)
  assert found == {
    "responses": 4,
    "response_len": 2.5,
    "truncated": 0.25,
    "accuracy": 0.375,
    "kl": 1.5,
    "pass@1": (1 / 2 + 0) / 2,
    "pass@2": (1 + 0) / 2,
  }


def test_rows_are_prompts_and_responses_side_by_side():
  said = evaluate.Said(
    [None] * 2,
    [np.array([1, 2]), np.array([3])],
    [np.array([4]), np.array([5, 6])],
    ["", ""],
    np.array([True, True]),
  )
  tokens, length = evaluate.rows_of(said, row_len=4)
  np.testing.assert_array_equal(tokens, [[1, 2, 4, 0], [3, 5, 6, 0]])
  np.testing.assert_array_equal(length, [3, 3])


# Against a plain forward pass.


@functools.cache
def setup():
  """Two policies and a reward model; what `evaluate` reads of a setup."""
  parts = types.SimpleNamespace(
    policy=tiny.model(), reference=tiny.model(), reward=tiny.model("scalar")
  )
  fns = types.SimpleNamespace(cast=lambda params: params)
  params = {
    "policy": tiny.params(parts.policy, 0),
    "reference": tiny.params(parts.reference, 1),
    "reward_model": tiny.params(parts.reward, 2),
  }
  return types.SimpleNamespace(parts=parts, fns=fns, rescore_fn=None), params


def config(temperature):
  return ml_collections.ConfigDict(
    dict(
      load=dict(reference="a folder", reward_model="another"),
      rollout=dict(
        max_prompt_len=5,
        max_response_len=7,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
      ),
      score=dict(logprob_chunk=16),
    )
  )


def said_of(lengths):
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(0, tiny.VOCAB, n).astype(np.int32)
  rows = [(draw(p), draw(r)) for p, r in lengths]
  texts = [""] * len(rows)
  return evaluate.Said(texts, *zip(*rows), texts, np.ones(len(rows), bool))


def forward(model, params, row):
  """Outputs of the model on one row: [len, out]."""
  positions = jnp.arange(len(row))[None]
  hidden = model.forward(params, row[None], positions, 0 * positions)
  return np.asarray(model.head(params, hidden)[0], np.float64)


def test_the_kl_is_the_log_ratio_of_whole_responses(monkeypatch):
  s, params = setup()
  load = lambda role, folder, model: params[role]
  monkeypatch.setattr(evaluate.pretrained, "load_params", load)
  said = said_of([(5, 7), (2, 3), (4, 1)])
  got = evaluate.kl_of(config(0.5), s, params["policy"], said)
  for i, (prompt, response) in enumerate(zip(said.prompts, said.responses)):
    row, logprobs = np.concatenate([prompt, response]), []
    for name in ("policy", "reference"):
      logits = forward(getattr(s.parts, name), params[name], row) / 0.5
      logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
      at = np.arange(len(prompt), len(row))
      logprobs.append(logits[at - 1, row[at]].sum())
    assert_close(got[i], logprobs[0] - logprobs[1])


def test_a_score_is_read_off_the_last_token(monkeypatch):
  s, params = setup()
  load = lambda role, folder, model: params[role]
  monkeypatch.setattr(evaluate.pretrained, "load_params", load)
  said = said_of([(5, 7), (2, 3), (4, 1)])
  got = evaluate.scores_of(config(1.0), s, said)
  for i, parts in enumerate(zip(said.prompts, said.responses)):
    whole = forward(
      s.parts.reward, params["reward_model"], np.concatenate(parts)
    )
    assert_close(float(got[i]), whole[-1, 0])
