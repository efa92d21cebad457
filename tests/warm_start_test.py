# SPDX-License-Identifier: Apache-2.0
"""Where PPO starts from: what stages learn from, and when they are redone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_exact
from ml_collections import ConfigDict

from oppo_jax import (
  generation,
  pretrained,
  stage_data,
  stream,
  supervised,
  tasks,
  texts,
  tokenizer,
  warm_start,
)
from oppo_jax.tasks import base as tasks_base

MAX_RESPONSE_LEN = 30


def config(**overrides):
  """The sections that the stages read."""
  fit = dict(
    num_steps=2,
    rows=4,
    width=48,
    lr=1e-3,
    warmup_steps=0,
    weight_decay=0.0,
    clip_norm=1.0,
  )
  c = ConfigDict(
    dict(
      seed=0,
      task_name="arithmetic",
      task=dict(difficulty=1),
      tokenizer=dict(kind="char"),
      model_name="transformer",
      model=dict(num_layers=2),
      load=dict.fromkeys(pretrained.ROLES, ""),
      critic=dict(init="reward"),
      warm_start=dict(
        sft=dict(terse=0.0, **fit),
        reward_model=dict(num_prompts=16, num_samples=3, num_spoiled=10, **fit),
      ),
      rollout=dict(
        max_prompt_len=16,
        max_response_len=MAX_RESPONSE_LEN,
        long_prompts="refuse",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        batch_size=4,
      ),
      score=dict(logprob_chunk=16),
      optim=dict(policy_lr=1e-3),
    )
  )
  c.update_from_flattened_dict(overrides)
  return c


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
  task = tasks.make(
    "arithmetic",
    difficulty=1,
    max_ops=5,
    num_train=40,
    num_test=4,
    seed=0,
    cache_dir=tmp_path_factory.mktemp("data"),
  )
  tokens = tokenizer.make("char", corpus=task.corpus(100))
  prompts = stream.encode_prompts(
    task.prompts("train"), tokens, max_prompt_len=16, long_prompts="refuse"
  )
  policy, scalar, sampler = tiny.model(), tiny.model("scalar"), None
  return stage_data.Parts(
    task, tokens, prompts, policy, policy, scalar, scalar, sampler
  )


def response_of(parts, text):
  """The response of a training sequence, as text; it must end in an EOS."""
  response = text.tokens[text.prompt_len :]
  assert response[-1] == parts.tokens.eos_id
  return parts.tokens.decode(response)


def row_of(parts, text):
  """The training row of a training sequence, by its prompt."""
  prompt = text.tokens[: text.prompt_len].tolist()
  rows = [p.tolist() for p in parts.prompts.tokens]
  example = parts.task.prompts("train")[rows.index(prompt)]
  assert parts.tokens.decode(prompt[1:]) == example.prompt
  return example


# What the policy learns from.


def fitted(monkeypatch, fit, *args):
  """What `supervised.fit` is given by `fit(*args)`."""
  seen = []

  def record(params, loss, items, config, *, seed, log):
    seen.append((items, config, seed))
    return params

  monkeypatch.setattr(supervised, "fit", record)
  fit(*args, log=lambda line: seen.append(line))
  return seen


def policy_items(monkeypatch, config, parts):
  ((items, *_),) = fitted(monkeypatch, warm_start.fit_policy, config, parts, {})
  return [text for (text,) in items]


def test_the_policy_learns_worked_solutions_that_fit(parts, monkeypatch):
  examples = parts.task.prompts("train")
  texts = policy_items(monkeypatch, config(), parts)
  fitting = [e for e in examples if len(e.solution) + 1 <= MAX_RESPONSE_LEN]
  assert 0 < len(fitting) < len(examples)
  found = [(row_of(parts, t).prompt, response_of(parts, t)) for t in texts]
  assert found == [(e.prompt, e.solution) for e in fitting]


def test_a_share_of_the_demonstrations_is_terse(parts, monkeypatch):
  examples = parts.task.prompts("train")
  for share, low, high in ((1.0, 40, 40), (0.5, 10, 30)):
    c = config(**{"warm_start.sft.terse": share})
    texts = policy_items(monkeypatch, c, parts)
    terse = [
      text
      for text in texts
      if response_of(parts, text) == f"#{row_of(parts, text).answer}"
    ]
    assert low <= len(terse) <= high
  assert len(examples) == 40


def test_without_a_solution_that_fits_there_is_nothing_to_learn(parts):
  c = config(**{"rollout.max_response_len": 3})
  with pytest.raises(ValueError, match="no worked solution of at most 3 token"):
    warm_start.fit_policy(c, parts, {}, log=print)


# What the reward model learns from.


def scripted(monkeypatch, parts, responses_of):
  """Makes `generate` answer prompt i with responses_of(i, example)."""
  examples = parts.task.prompts("train")
  asked = []

  def generate(fns, params, prompts, *, run_key):
    asked.extend(prompts)
    k = config().warm_start.reward_model.num_samples
    texts = [
      text
      for i in range(len(prompts) // k)
      for text in responses_of(i, examples[parts.prompts.rows[i]])
    ]
    eos = parts.tokens.eos_id
    return [np.array([*parts.tokens.encode(t), eos]) for t in texts]

  monkeypatch.setattr(generation, "generate", generate)
  return asked


def test_pairs_are_right_and_wrong_samples_of_one_prompt(parts, monkeypatch):
  right = lambda e: f"#{e.answer}"
  wrong = lambda e: f"#{int(e.answer) + 1}"
  kinds = [
    lambda e: [right(e), wrong(e), "+"],  # 1 x 2
    lambda e: [e.solution, right(e), wrong(e)],  # 2 x 1
    lambda e: [right(e)] * 2 + [wrong(e)],  # equal samples count once
    lambda e: [right(e), e.solution, right(e)],  # nothing wrong: no pair
    lambda e: ["+", "+", wrong(e)],  # nothing right: the worked solution
  ]
  asked = scripted(monkeypatch, parts, lambda i, e: kinds[i % 5](e))
  pairs = stage_data.sampled_pairs(config(), parts, {})
  assert [len(group) for group in pairs[:5]] == [2, 2, 1, 0, 2]
  assert len(pairs) == 16
  assert len(asked) == 16 * 3
  for i, group in enumerate(pairs):
    np.testing.assert_array_equal(asked[3 * i + 2], asked[3 * i])
    np.testing.assert_array_equal(asked[3 * i], parts.prompts.tokens[i])
    for good, bad in group:
      example = row_of(parts, good)
      assert row_of(parts, bad) == example
      assert parts.task.reward(example, response_of(parts, good)) == 1
      assert parts.task.reward(example, response_of(parts, bad)) == 0
  solution = row_of(parts, pairs[4][0][0]).solution
  assert {response_of(parts, good) for good, _ in pairs[4]} == {solution}


def test_spoiled_pairs_are_of_further_prompts(parts):
  pairs = stage_data.spoiled_pairs(config(), parts)
  assert len(pairs) == 10
  for i, ((good, bad),) in enumerate(pairs, start=16):
    for text in (good, bad):
      np.testing.assert_array_equal(
        text.tokens[: text.prompt_len], parts.prompts.tokens[i]
      )
    example = row_of(parts, good)
    assert response_of(parts, good) == example.solution
    assert parts.task.reward(example, response_of(parts, bad)) == 0


def test_no_more_prompts_are_spoiled_than_there_are(parts):
  c = config(**{"warm_start.reward_model.num_spoiled": 999})
  assert len(stage_data.spoiled_pairs(c, parts)) == 40 - 16


def test_a_task_that_cannot_spoil_gives_no_spoiled_pairs(parts):
  task = tasks_base.Task("x", parts.task.prompts, parts.task.reward, None, None)
  assert stage_data.spoiled_pairs(config(), parts._replace(task=task)) == []


def test_held_out_prompts_are_not_learned_from(parts, monkeypatch):
  scripted(monkeypatch, parts, lambda i, e: [f"#{e.answer}", "+", "-"])
  judged = []

  def pair_accuracy(model, params, pairs, fit):
    judged.extend(pairs)
    return 3, 4

  monkeypatch.setattr(warm_start, "pair_accuracy", pair_accuracy)
  first, (items, fit, _), last = fitted(
    monkeypatch, warm_start.fit_reward_model, config(), parts, {}, {}
  )
  # 16 prompts, one in 8 held out, two pairs each; 10 spoiled ones.
  assert len(judged) == 2 * 2
  assert len(items) == 14 * 2 + 10
  assert first == "reward_model: 38 pairs, 4 held out"
  assert last == "reward_model: 75.0% of 4 held-out pairs right"
  assert fit.width == 48
  prompt = lambda pair: pair[0].tokens[: pair[0].prompt_len].tolist()
  held_out = [p.tolist() for p in parts.prompts.tokens[:2]]
  assert [prompt(pair) for pair in judged[::2]] == held_out
  kept = {tuple(parts.prompts.tokens[i]) for i in range(2, 26)}
  assert {tuple(prompt(pair)) for pair in items} == kept


def test_a_tasks_own_pairs_and_demonstrations_come_first(parts, monkeypatch):
  examples = parts.task.prompts("train")
  own = {
    split: [
      tasks_base.Pair(e.prompt, e.answer, "+", 0.0) for e in examples[a:b]
    ]
    for split, a, b in (("train", 0, 6), ("test", 6, 9))
  }
  shown = [e for e in examples[10:] if len(e.solution) < 20][:3]
  task = dataclasses.replace(
    parts.task,
    reward=None,
    terse=None,
    pairs=own.get,
    demonstrations=lambda split: shown,
  )
  own_parts = parts._replace(task=task)
  monkeypatch.setattr(warm_start, "pair_accuracy", lambda *_: (1, 3))
  first, (items, *_), _ = fitted(
    monkeypatch, warm_start.fit_reward_model, config(), own_parts, {}, {}
  )
  assert first == "reward_model: 6 pairs, 3 held out"
  assert [response_of(parts, good) for good, _ in items] == [
    e.answer for e in examples[:6]
  ]
  texts = policy_items(monkeypatch, config(), own_parts)
  assert [response_of(parts, text) for text in texts] == [
    e.solution for e in shown
  ]
  c = config(**{"warm_start.sft.terse": 0.5})
  with pytest.raises(ValueError, match="terse=0.5: must be 0.0"):
    warm_start.fit_policy(c, own_parts, {}, log=print)


def test_pairs_that_do_not_fit_into_a_row_are_left_out(parts, monkeypatch):
  scripted(monkeypatch, parts, lambda i, e: [f"#{e.answer}", "1" * 25, "#"])
  c = config(**{"warm_start.reward_model.width": 24})
  monkeypatch.setattr(warm_start, "pair_accuracy", lambda *_: (1, 1))
  _, (items, *_), _ = fitted(
    monkeypatch, warm_start.fit_reward_model, c, parts, {}, {}
  )
  assert items
  assert all(len(text.tokens) <= 24 for pair in items for text in pair)


def test_without_a_pair_there_is_nothing_to_learn(parts, monkeypatch):
  scripted(monkeypatch, parts, lambda i, e: [f"#{e.answer}"] * 3)
  c = config(**{"warm_start.reward_model.num_spoiled": 0})
  with pytest.raises(ValueError, match="got the same grade"):
    warm_start.fit_reward_model(c, parts, {}, {}, log=print)


class LastToken:
  """A reward model whose score is the last token's id."""

  def forward(self, params, tokens, positions, segments):
    return tokens[..., None]

  def head(self, params, hidden):
    return hidden.astype(jnp.float32)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_pairs_are_judged_one_by_one(rows):
  """Right if the first ends higher; also in the last, incomplete batch."""
  text = lambda last: texts.Text(np.array([1, 2, last], np.int32), 1)
  pairs = [
    (text(a), text(b))
    for a, b in [(9, 3), (3, 9), (5, 5), (8, 7), (2, 1), (1, 2), (6, 4)]
  ]
  fit = supervised.FitConfig(
    num_steps=1,
    rows=rows,
    width=3,
    lr=0.0,
    warmup_steps=0,
    weight_decay=0.0,
    clip_norm=0.0,
  )
  assert warm_start.pair_accuracy(LastToken(), {}, pairs, fit) == (4, 7)


# Stages.


@pytest.fixture
def made(monkeypatch):
  """Names of the stages that were made, not loaded; each adds one to params."""
  names = []

  def stage(name):
    def make(config, parts, *args, log):
      names.append(name)
      return jax.tree.map(lambda x: x + 1, args[-1])

    return make

  monkeypatch.setattr(warm_start, "fit_policy", stage("sft"))
  monkeypatch.setattr(warm_start, "fit_reward_model", stage("reward_model"))
  return names


def run(config, parts, workdir):
  return warm_start.run(config, parts, workdir=workdir, log=lambda line: None)


NO_STAGES = {
  "warm_start.sft.num_steps": 0,
  "warm_start.reward_model.num_steps": 0,
}


def test_without_stages_everything_is_drawn(parts, made, tmp_path):
  start = run(config(**NO_STAGES), parts, tmp_path)
  again = run(config(**NO_STAGES), parts, tmp_path)
  other = run(config(seed=1, **NO_STAGES), parts, tmp_path)
  assert made == []
  assert list(tmp_path.iterdir()) == []
  assert_exact(again, start)
  assert_exact(start["critic"], start["reward"])
  embedding = lambda params, name: np.asarray(params[name]["embedding"])
  drawn = [embedding(start, "policy"), embedding(start, "reward")]
  drawn += [embedding(other, "policy"), embedding(other, "reward")]
  for i, a in enumerate(drawn):
    assert not any((a == b).all() for b in drawn[i + 1 :])


def test_a_random_critic_is_nobodys_copy(parts, made, tmp_path):
  c = config(**NO_STAGES, **{"critic.init": "random"})
  start = run(c, parts, tmp_path)
  assert (start["critic"]["out"] != start["reward"]["out"]).any()
  assert (start["critic"]["embedding"] != start["reward"]["embedding"]).any()


def test_a_critic_of_the_policys_trunk_has_a_head_of_its_own(
  parts, made, tmp_path
):
  start = run(config(**{"critic.init": "policy"}), parts, tmp_path)
  trunk = lambda params: {k: v for k, v in params.items() if k != "out"}
  assert_exact(trunk(start["critic"]), trunk(start["policy"]))
  assert (start["critic"]["out"] != start["reward"]["out"]).any()
  assert "out" not in start["policy"]  # tied: nothing was added to it


def test_the_reward_model_starts_from_the_policys_trunk(parts, made, tmp_path):
  c = config(**{"warm_start.reward_model.num_steps": 0})
  start = run(c, parts, tmp_path)
  assert made == ["sft"]
  trunk = lambda params: {k: v for k, v in params.items() if k != "out"}
  assert_exact(trunk(start["reward"]), trunk(start["policy"]))
  drawn = run(config(**NO_STAGES), parts, tmp_path)
  assert_exact(start["reward"]["out"], drawn["reward"]["out"])


def test_stages_build_on_each_other(parts, made, tmp_path):
  drawn = run(config(**NO_STAGES), parts, tmp_path)
  start = run(config(), parts, tmp_path)
  assert made == ["sft", "reward_model"]
  one_more = lambda x: jax.tree.map(lambda x: x + 1, x)
  assert_exact(start["policy"], one_more(drawn["policy"]))
  assert_exact(start["reward"]["out"], one_more(drawn["reward"]["out"]))
  assert_exact(
    start["reward"]["embedding"], one_more(start["policy"]["embedding"])
  )
  assert_exact(start["critic"], start["reward"])


def test_the_same_settings_load_what_was_made(parts, made, tmp_path):
  start = run(config(), parts, tmp_path)
  c = config(**{"optim.policy_lr": 0.5, "rollout.batch_size": 64})
  c.critic.init = "random"
  again = run(c, parts, tmp_path)
  assert made == ["sft", "reward_model"]
  for name in ("policy", "reward"):
    assert_exact(again[name], start[name])


@pytest.mark.parametrize(
  ("key", "value", "stages"),
  [
    ("seed", 1, ["sft", "reward_model"]),
    ("task.difficulty", 2, ["sft", "reward_model"]),
    ("tokenizer.kind", "byte", ["sft", "reward_model"]),
    ("model.num_layers", 3, ["sft", "reward_model"]),
    ("rollout.max_response_len", 31, ["sft", "reward_model"]),
    ("warm_start.sft.lr", 2e-3, ["sft", "reward_model"]),
    ("warm_start.sft.terse", 0.5, ["sft", "reward_model"]),
    ("warm_start.reward_model.num_samples", 4, ["reward_model"]),
    ("rollout.temperature", 0.5, ["reward_model"]),
  ],
)
def test_a_stage_is_made_again_when_what_it_depends_on_changes(
  key, value, stages, parts, made, tmp_path
):
  run(config(), parts, tmp_path)
  made.clear()
  run(config(**{key: value}), parts, tmp_path)
  assert made == stages
  made.clear()
  run(config(), parts, tmp_path)  # the first ones are still there
  assert made == []
