# SPDX-License-Identifier: Apache-2.0
"""Runs that start from Hugging Face folders, and folders that do not fit."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from configs import common
from oppo_jax import (
  assemble,
  checkpoint,
  convert,
  hf,
  metrics,
  models,
  one_shot,
  pretrained,
  rescore,
  tasks,
  tokenizer,
  train,
  warm_start,
)
from oppo_jax import config as config_lib

pytestmark = pytest.mark.usefixtures("compiled_once")

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}"
  "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
HASHES = ("batches_sha256", "params_sha256")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  task = tasks.make(
    "arithmetic",
    difficulty=1,
    max_ops=3,
    num_train=200,
    num_test=8,
    seed=0,
    cache_dir=tmp_path_factory.mktemp("data"),
  )
  return task.corpus(200)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, corpus):
  """Models of several families and sizes, and two tokenizers."""
  tokens = tokenizer.make("char", corpus=corpus)
  chat = tokenizer.make("byte")
  chat.hf.chat_template = TEMPLATE
  chat.hf.split_special_tokens = False  # as of most checkpoints
  small = dict(width=16, num_heads=2, mlp_dim=24)
  gpt2 = dict(num_positions=64, rotary_dim=0, parallel_residual=False)
  made = {
    "policy": (tiny.model(), tokens),
    "reference": (tiny.gpt(), tokens),
    "reward": (tiny.gpt("scalar", **small), tokens),
    "critic": (tiny.model("scalar", num_layers=1), tokens),
    "short": (tiny.gpt("scalar", **gpt2 | dict(num_positions=32)), tokens),
    "small_vocab": (tiny.model("scalar", vocab_size=8), None),
    "other": (tiny.model("scalar", vocab_size=264, qkv_bias=True), chat),
    "chat": (tiny.model(vocab_size=264), chat),
  }
  root = tmp_path_factory.mktemp("folders")
  for i, (name, (model, its)) in enumerate(made.items()):
    params = tiny.params(model, i)
    hf.save(root / name, model, params, dtype="float32", tokens=its)
  return root


def config(folders, arm="oppo", **overrides):
  """Two updates of a tiny policy, graded by the rule and a reward model."""
  c = common.base(arm=arm)
  c.num_steps = 2
  c.task.update(max_ops=3, num_train=40, num_test=8)
  c.rollout.update(batch_size=8, max_prompt_len=16, max_response_len=24)
  c.overlap.delta.update(kind="fixed", init=4, max=8)
  c.overlap.chunk.size = 5
  c.score.update(tile_rows=4, tile_len=8)
  c.reward.update(model_weight=0.5, rule_weight=1.0)
  c.optim.policy_lr = 1e-3
  c.eval.num_prompts = 0
  c.load.policy = str(folders / "policy")
  c.load.reward_model = str(folders / "reward")
  for key, value in overrides.items():
    if key.startswith("load.") and isinstance(value, str):
      value = value and str(folders / value)
    c.update_from_flattened_dict({key: value})
  return c


def finish(c, workdir):
  """Runs a config to its end: its hashes, and rows of metrics."""
  config_lib.validate(c)
  train.train(c, workdir)
  summary = json.loads((workdir / "summary.json").read_text())
  rows = metrics.read_jsonl(workdir / "metrics.jsonl")
  return [summary[name] for name in HASHES], rows


def start(c, workdir):
  """Models and parameters that a run starts from."""
  config_lib.validate(c)
  s = assemble.setup(c, workdir, log=lambda line: None)
  return s, warm_start.run(c, s.parts, workdir=workdir, log=lambda line: None)


def stored(folder):
  model = hf.make_model(folder, head=hf.head(folder), **hf.PLAIN)
  return model, hf.load_params(folder, model, dtype="float32")


ALL = {"load.reference": "reference", "load.critic": "critic"}


def test_every_model_is_that_of_its_folder(folders, tmp_path):
  c = config(folders, **ALL, **{"model.attention_block": 0})  # as PLAIN
  s, params = start(c, tmp_path)
  for role in pretrained.ROLES:
    name = pretrained.ROLES[role]
    model, expected = stored(c.load[role])
    assert getattr(s.parts, name) == model
    assert_exact(params[name], expected)
  saved = (folders / "policy" / "tokenizer.json").read_text()
  assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == saved


def test_how_a_model_is_run_is_the_configs_to_say(folders, tmp_path):
  c = config(folders, **{"model.dtype": "bfloat16", "model.remat": "layer"})
  s, _ = start(c, tmp_path)
  for model in (s.parts.policy, s.parts.reference, s.parts.reward):
    assert (model.dtype, model.config.remat) == ("bfloat16", "layer")


@pytest.mark.parametrize("init", ["reward", "policy", "random"])
def test_a_critic_without_a_folder_starts_as_asked(init, folders, tmp_path):
  s, params = start(config(folders, **{"critic.init": init}), tmp_path)
  like = s.parts.reward if init == "reward" else s.parts.policy
  same = lambda name: jax.tree.map(
    lambda a, b: bool((a == b).all()),
    pretrained.trunk(params["critic"]),
    pretrained.trunk(params[name]),
  )
  assert s.parts.critic.config.width == like.config.width
  assert not s.parts.critic.is_lm
  if init == "random":
    assert not same("policy")["embedding"]
    return
  assert all(jax.tree.leaves(same(init)))
  if init == "reward":
    assert_exact(params["critic"], params["reward"])


def test_a_critic_from_a_language_model_has_its_trunk_and_a_new_head(
  folders, tmp_path
):
  c = config(folders, **{"load.critic": "reference"})
  s, params = start(c, tmp_path)
  _, expected = stored(folders / "reference")
  assert_exact(pretrained.trunk(params["critic"]), pretrained.trunk(expected))
  assert params["critic"]["out"].shape == (32, 1)
  assert not s.parts.critic.is_lm


def test_other_scorers_of_any_size_change_no_bit_by_streaming(
  folders, tmp_path
):
  """Four families at once, in whole runs; and the export of one."""
  runs = {}
  for intra in ("none", "chunk"):
    c = config(folders, **ALL, **{"overlap.intra": intra})
    runs[intra] = finish(c, tmp_path / intra)
  assert runs["none"][0] == runs["chunk"][0]
  rows = runs["chunk"][1]
  assert rows[0]["objective/kl"] != 0  # the reference is another model
  assert rows[0]["overlap/deferred"] > 0
  # What was trained is written as it was trained, and with the source's names.
  folder = tmp_path / "chunk" / "hf"
  model, params = stored(folder)
  path = tmp_path / "chunk" / "params" / "policy.safetensors"
  assert_exact(params, checkpoint.load_params(path, params))
  _, before = stored(folders / "policy")
  assert (params["embedding"] != before["embedding"]).any()
  loaded = tokenizer.load(folder)
  assert loaded.encode("1+2=") == tokenizer.load(folders / "policy").encode(
    "1+2="
  )
  said = json.loads((folder / "generation_config.json").read_text())
  assert said["eos_token_id"] == list(loaded.eos_ids)
  # `convert` finds the folders again by itself.
  convert.convert(tmp_path / "chunk", tmp_path / "again")
  assert_exact(stored(tmp_path / "again")[1], params)
  convert.convert(
    tmp_path / "chunk", tmp_path / "critic", file="params/critic.safetensors"
  )
  assert stored(tmp_path / "critic")[0].config.num_layers == 1


def test_a_run_goes_on_from_the_folder_of_another(folders, tmp_path):
  """A stage on top of a loaded policy; the reference is a copy of what is."""
  c = config(folders)
  c.num_steps = 1
  c.warm_start.sft.update(num_steps=1, rows=2, width=48)
  _, rows = finish(c, tmp_path / "first")
  assert rows[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
  assert len(list((tmp_path / "first" / "stages").iterdir())) == 1
  c = config(tmp_path / "first", **{"load.policy": "hf"})
  c.load.reward_model = str(folders / "reward")
  _, params = start(c, tmp_path / "second")
  trained = checkpoint.load_params(
    tmp_path / "first" / "params" / "policy.safetensors", params["policy"]
  )
  assert_exact(params["policy"], trained)


def test_a_stage_is_made_again_for_another_folder(folders, tmp_path):
  c = config(folders)
  c.warm_start.sft.update(num_steps=1, rows=2, width=48)
  copy = tmp_path / "copy"
  shutil.copytree(folders / "policy", copy)
  _, params = start(c, tmp_path / "run")
  c.load.policy = str(copy)
  _, again = start(c, tmp_path / "run")
  assert_exact(again["policy"], params["policy"])
  names = sorted(p.name for p in (tmp_path / "run" / "stages").iterdir())
  assert len(names) == 2


REFUSED = [
  (
    {"load.reward_model": "reference"},
    "reward_model",
    "is not a reward model: tensor 'score.weight' is missing",
  ),
  ({"load.policy": "critic"}, "policy", "is a reward model"),
  ({"load.reference": "reward"}, "reference", "is a reward model"),
  (
    {"load.reward_model": "other"},
    "reward_model",
    "has another tokenizer than the policy, which says '#' by id 3: here that"
    " is '!'",
  ),
  ({"load.reward_model": "other"}, "reward_model", "load.retokenize=True"),
  ({"load.critic": "other"}, "critic", "has another tokenizer"),
  (
    {"load.reward_model": "small_vocab"},
    "reward_model",
    "its embedding has 8 rows, the policy's tokenizer 18 ids",
  ),
  (
    {"load.reward_model": "short"},
    "reward_model",
    "rows of max_prompt_len + max_response_len = 40 tokens are longer than the"
    " 32 that the model is for",
  ),
  ({"load.critic": ""}, "policy", "no such file"),  # see the test
]


@pytest.mark.parametrize(("overrides", "role", "says"), REFUSED)
def test_a_folder_that_does_not_fit_is_named_in_one_line(
  overrides, role, says, folders, tmp_path
):
  c = config(folders, **overrides)
  if "no such file" in says:
    shutil.copytree(folders / "policy", tmp_path / "broken")
    (tmp_path / "broken" / "config.json").unlink()
    c.load.policy = str(tmp_path / "broken")
  config_lib.validate(c)
  with pytest.raises(ValueError) as e:
    assemble.setup(c, tmp_path / "run", log=lambda line: None)
  message = str(e.value)
  assert message.startswith(f"config.load.{role}={c.load[role]!r}: "), message
  assert says in message
  assert "\n" not in message


def test_weights_that_are_missing_are_named_before_anything_runs(
  folders, tmp_path
):
  shutil.copytree(folders / "reward", tmp_path / "broken")
  (tmp_path / "broken" / "model.safetensors").unlink()
  c = config(folders)
  c.load.reward_model = str(tmp_path / "broken")
  with pytest.raises(ValueError, match=r"load\.reward_model.*no model\.safet"):
    assemble.setup(c, tmp_path / "run", log=lambda line: None)


def test_a_chat_needs_a_template(folders, tmp_path):
  c = config(folders, **{"rollout.chat": True})
  with pytest.raises(ValueError, match=r"load\.policy=.*chat template"):
    assemble.setup(c, tmp_path / "run", log=lambda line: None)
  c.load.policy = ""
  with pytest.raises(ValueError, match=r"rollout\.chat=True: .*'char'"):
    assemble.setup(c, tmp_path / "run", log=lambda line: None)


def test_prompts_of_a_chat_are_wrapped_and_responses_are_not(folders, tmp_path):
  c = config(folders, **{"load.policy": "chat", "load.reward_model": "other"})
  c.rollout.update(chat=True, system="sum", max_prompt_len=20)
  s, _ = start(c, tmp_path)
  tokens, prompt = s.parts.tokens, s.examples[0].prompt
  bos, eos, text = tokens.bos_id, tokens.eos_id, tokens.encode
  ids = s.parts.prompts.tokens[0].tolist()
  assert ids == [bos, *text("sum"), eos, *text(prompt), eos, *text("=")]
  read = rescore.encode(tokens, "1+2=", "3", has_eos=False)
  assert read == [bos, *text("sum"), eos, *text("1+2="), eos, *text("3"), eos]


# A reward model that reads text.


def test_a_text_scores_as_its_own_tokens_do(folders):
  model, params = stored(folders / "other")
  tokens = tokenizer.load(folders / "other")
  read = rescore.make(model, tokens, width=20, chunk=16)
  prompts, responses = ["1+2=", "7-3=", "4="], ["3", "\ufffd;#4", "1" * 30]
  got = read(params, prompts, responses, [True, False, False])
  rows = [
    [tokens.bos_id, *tokens.encode("1+2=3"), tokens.eos_id],
    [tokens.bos_id, *tokens.encode("7-3=\ufffd;#4")],
    tokens.encode("1" * 20),  # cut on the left
  ]
  for row, said in zip(rows, got):
    alone = one_shot.outputs(
      model, params, np.array([row]), np.array([len(row)]), chunk=16
    )
    assert_close(said, alone[0, len(row) - 1])
  # No neighbor, and no place in the batch, changes a bit.
  one = read(params, prompts[1:2], responses[1:2], [False])
  assert_exact(one, got[1:2])


def test_another_tokenizer_is_read_by_text_in_every_arm(folders, tmp_path):
  overrides = {
    "load.reward_model": "other",
    "load.retokenize": True,
    "critic.init": "policy",
  }
  runs = {}
  for intra in ("none", "chunk"):
    c = config(folders, **overrides, **{"overlap.intra": intra})
    c.log.rollouts_per_step = c.rollout.batch_size
    runs[intra] = finish(c, tmp_path / intra)
  assert runs["none"][0] == runs["chunk"][0]
  # The first batch, scored again from the text that was logged.
  _, rows = runs["chunk"]
  logged = metrics.read_jsonl(tmp_path / "chunk" / "rollouts.jsonl")[:8]
  model, params = stored(folders / "other")
  tokens = tokenizer.load(folders / "other")
  read = rescore.make(model, tokens, width=80, chunk=512)
  scores = read(
    params,
    [row["prompt"] for row in logged],
    [row["response"] for row in logged],
    [row["has_eos"] for row in logged],
  )
  assert np.ptp(scores) > 0.05
  assert rows[0]["reward/model"] == pytest.approx(scores.mean(), abs=1e-5)


def test_a_reward_model_without_a_tokenizer_cannot_read(folders, tmp_path):
  c = config(folders, **{"critic.init": "policy", "load.retokenize": True})
  c.load.reward_model = str(FIXTURES / "llama_reward")
  with pytest.raises(ValueError, match=r"llama_reward.*holds no tokenizer"):
    assemble.setup(c, tmp_path, log=lambda line: None)


def test_a_random_reward_model_of_no_weight_is_not_run(folders, tmp_path):
  weightless = {"load.reward_model": "", "reward.model_weight": 0.0}
  s, params = start(config(folders, **weightless), tmp_path)
  assert "reward" not in s.fns.append
  reward, policy = params["reward"], params["policy"]
  assert_exact(pretrained.trunk(reward), pretrained.trunk(policy))
  assert reward["out"].shape == (32, 1)
  s, _ = start(config(folders, **{"reward.model_weight": 0.0}), tmp_path)
  assert "reward" in s.fns.append  # one from a folder is watched


def test_models_of_a_config_alone_are_alike():
  c = common.base()
  fresh = lambda head: models.make(
    "transformer", head=head, vocab_size=16, **c.model.to_dict()
  )
  found = pretrained.make_models(
    c.load, critic_init="reward", choices={}, fresh=fresh
  )
  assert found == (fresh("lm"), fresh("lm"), fresh("scalar"), fresh("scalar"))
