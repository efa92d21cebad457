# SPDX-License-Identifier: Apache-2.0
"""What `config.validate` refuses, and that every config of ours passes it."""

import dataclasses
import functools
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from configs import common
from oppo_jax import assemble, config, packing, schema, supervised, texts
from oppo_jax.algos import ppo
from oppo_jax.models import gpt, transformer
from oppo_jax.tasks import stack_exchange

CONFIGS = pathlib.Path(common.__file__).parent


def base():
  """A small config that `validate` accepts; every key there is."""
  c = common.base(arm="oppo")
  c.num_steps = 3
  c.rollout.update(batch_size=8, max_prompt_len=16, max_response_len=48)
  c.overlap.chunk.update(size=8, sizes=(4, 8), period=10)
  c.overlap.delta.update(kind="fixed", init=2, max=4, window=5, step=1)
  c.algo.num_minibatches = 2
  c.warm_start.sft.update(num_steps=10, width=64)
  return c


def changed(**overrides):
  """`base` with dotted keys replaced: changed(**{"rollout.top_p": 0.5})."""
  c = base()
  with c.unlocked(), c.ignore_type():
    c.update_from_flattened_dict(overrides)
  return c


def leaves(c, prefix=""):
  for name, value in c.items():
    if isinstance(value, ConfigDict):
      yield from leaves(value, f"{prefix}{name}.")
    else:
      yield prefix + name


def sections(c, prefix=""):
  yield prefix
  for name, value in c.items():
    if isinstance(value, ConfigDict):
      yield from sections(value, f"{prefix}{name}.")


def at(c, prefix):
  for name in prefix.split(".")[:-1]:
    c = c[name]
  return c


OPEN = ("task.", "reward.rules.")  # whoever reads them checks their keys
CLOSED = sorted(set(sections(base())) - set(OPEN))
KEYS = [key for key in leaves(base()) if not key.startswith(OPEN)]
REQUIRED = ["task", "algo", "warm_start", "model", "overlap.delta", *KEYS]


def test_the_base_config_is_accepted():
  config.validate(base())


def test_the_schema_has_the_keys_of_the_configs_and_no_others():
  known = {k for k, rule in config.SCHEMA.items() if rule != schema.SECTION}
  known |= {f"algo.{k}" for k in ppo.SCHEMA}
  known |= {f"model.{k}" for k in transformer.SCHEMA}
  assert known == set(KEYS)


@pytest.mark.parametrize(
  ("names", "cls"),
  [
    (ppo.SCHEMA, ppo.PPOConfig),
    (config.FIT, supervised.FitConfig),
    (
      {*transformer.SCHEMA, "vocab_size", "head"},
      transformer.Config,
    ),
    ({*gpt.SCHEMA, "vocab_size", "head"}, gpt.Config),
  ],
)
def test_the_schema_has_the_fields_of_the_dataclass_they_go_to(names, cls):
  # What has a default is a checkpoint's to say, never a config's.
  fields = dataclasses.fields(cls)
  no_default = {f.name for f in fields if f.default is dataclasses.MISSING}
  assert set(names) == no_default


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("overlap.max_staleness", -1),
    ("overlap.chunk.kind", "tuned"),
    ("overlap.delta.kind", "robust"),
    ("optim.pack_width", 64),
    ("rollout.top_p", 0.1),
    ("critic.init", "random"),
    ("critic.init", "policy"),
    ("load.reward_model", str(CONFIGS)),
    ("rollout.chat", True),
    ("task.anything", [1, 2]),
    ("warm_start.sft.terse", 1.0),
    ("warm_start.reward_model.rows", 2),
    ("algo.num_minibatches", 8),
    ("algo.denominator", "behavior"),
    ("algo.lam", 0.0),
  ],
)
def test_values_at_the_edge_are_accepted(key, value):
  config.validate(changed(**{key: value}))


BAD = {
  "seed": [-1, 1.5, "0"],
  "num_steps": [-1],
  "task_name": ["", 3],
  "task": [3],
  "tokenizer.kind": ["word"],
  "tokenizer.vocab_size": [-1],
  "tokenizer.path": [None],
  "model.num_layers": [0],
  "model.num_kv_heads": [0, 3],
  "model.head_dim": [7],
  "model.rope_theta": [0.0, 10_000],
  "model.norm_eps": [0.0],
  "model.qk_norm": ["no", 0],
  "model.dtype": ["float16"],
  "model.attention": ["pallas", 64],
  "model.attention_block": [-2],
  "model.remat": [True, "all"],
  "model_name": [""],
  "load.policy": [None, "no/such/folder", __file__],
  "load.reward_model": ["no/such/folder"],
  "load.retokenize": [1, True],
  "critic.init": ["zeros"],
  "warm_start.sft": [1],
  "warm_start.sft.num_steps": [-1, 1.0],
  "warm_start.sft.rows": [0],
  "warm_start.sft.terse": [-0.1, 1.1, 1],
  "warm_start.sft.lr": [-1e-3],
  "warm_start.reward_model.num_steps": [-1],
  "warm_start.reward_model.rows": [1],
  "warm_start.reward_model.num_prompts": [0],
  "warm_start.reward_model.num_samples": [0],
  "warm_start.reward_model.num_spoiled": [-1],
  "rollout.batch_size": [0, True, 8.0],
  "rollout.max_prompt_len": [0],
  "rollout.max_response_len": [0],
  "rollout.temperature": [0.0, -1.0, 1, float("nan"), float("inf")],
  "rollout.top_k": [-1],
  "rollout.top_p": [0.0, 1.1],
  "rollout.long_prompts": ["cut"],
  "rollout.chat": ["template"],
  "rollout.system": [None, "You are kind."],
  "rollout.target_lengths_path": ["no/such/file.txt"],
  "rollout.decode_loop": ["scan"],
  "rollout.decode_rows": [-2],
  "score.tile_rows": [0],
  "score.tile_len": [0],
  "score.logprob_chunk": [0],
  "reward.model_weight": [float("nan")],
  "reward.rules": [1.0],
  "reward.rules.length": [1, "much"],
  "overlap": ["oppo"],
  "overlap.intra": ["resume", True],
  "overlap.inter": ["chunk"],
  "overlap.max_staleness": [0, -2, 1.0],
  "overlap.policy_cache": ["drop"],
  "overlap.chunk.kind": ["auto"],
  "overlap.chunk.size": [0],
  "overlap.chunk.sizes": [(), (0,), (8, 8), [4, 8], (4, "a"), (4.0,)],
  "overlap.chunk.period": [0],
  "overlap.replay_path": ["no/such/decisions.jsonl"],
  "overlap.delta.kind": ["papr"],
  "overlap.delta.init": [-1, 5],
  "overlap.delta.min": [-1],
  "overlap.delta.max": [-1, 9],
  "overlap.delta.window": [0],
  "overlap.delta.step": [0],
  "overlap.delta.dead_band": [-0.5],
  "algo_name": ["", "grpo", 3],
  "algo.num_minibatches": [0, 3, 2.0],
  "algo.clip_eps": [0.0, 1],
  "algo.lam": [1.1],
  "algo.kl_coef": [-0.1],
  "algo.kl_estimator": ["k4"],
  "algo.kl_loss_estimator": ["K1"],
  "algo.whiten_rewards": [1],
  "algo.whitening": ["batch"],
  "algo.score_position": ["first"],
  "algo.num_epochs": [0],
  "algo.denominator": ["old", "start"],
  "optim.policy_lr": [-1e-3, 0],
  "optim.schedule": ["step"],
  "optim.warmup_steps": [-1],
  "optim.clip_norm": [-1.0],
  "optim.b1": [1.0, -0.1],
  "optim.eps": [0.0],
  "optim.pack_width": [-1, 63],
  "optim.micro_rows": [-1],
  "eval.every": [-1],
  "log.tensorboard": ["yes"],
}


@pytest.mark.parametrize(
  ("key", "value"), [(key, value) for key in BAD for value in BAD[key]]
)
def test_a_bad_value_is_refused_by_key_value_and_range(key, value):
  c = base()
  *prefix, name = key.split(".")
  section = at(c, ".".join([*prefix, ""]))
  with c.unlocked(), c.ignore_type():
    del section[name]
    section[name] = value
  with pytest.raises(ValueError) as e:
    config.validate(c)
  message = str(e.value)
  assert message.startswith(f"config.{key}={value!r}: must be "), message
  assert "\n" not in message
  assert not message.endswith("must be ")


@pytest.mark.parametrize("prefix", CLOSED)
def test_an_unknown_key_is_refused_at_every_level(prefix):
  c = base()
  with c.unlocked():
    at(c, prefix)["no_such_key"] = 1
  with pytest.raises(ValueError) as e:
    config.validate(c)
  assert str(e.value) == f"config.{prefix}no_such_key: unknown key"


def test_an_unknown_key_is_answered_with_the_one_that_was_meant():
  with pytest.raises(ValueError, match=r"did you mean 'temperature'\?"):
    config.validate(changed(**{"rollout.temprature": 1.0}))


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key):
  c = base()
  *prefix, name = key.split(".")
  with c.unlocked():
    del at(c, ".".join([*prefix, ""]))[name]
  with pytest.raises(ValueError) as e:
    config.validate(c)
  assert str(e.value).startswith(f"config.{key}")
  assert str(e.value).endswith("missing")


FLASH = {"model.attention": "flash", "model.dtype": "bfloat16"}


@pytest.mark.parametrize(
  ("broken", "changes", "mended"),
  [
    (
      "overlap.delta.max",  # 9 rows could starve, a batch holds 8
      {"overlap.delta.max": 9},
      {"overlap.max_staleness": -1},
    ),
    (
      "overlap.delta.init",
      {"overlap.delta.min": 3},
      {"overlap.delta.init": 3},
    ),
    (
      "overlap.delta.max",
      {"overlap.delta.min": 5},
      {"overlap.delta.min": 2},
    ),
    (
      "overlap.delta.window",
      {"overlap.delta.kind": "robust", "overlap.delta.window": 1},
      {"overlap.delta.window": 2},
    ),
    (
      "overlap.chunk.period",
      {"overlap.chunk.kind": "tuned", "overlap.chunk.period": 2},
      {"overlap.chunk.period": 3},
    ),
    (
      "overlap.replay_path",
      {"overlap.chunk.kind": "replay"},
      {"overlap.replay_path": __file__},
    ),
    (
      "overlap.replay_path",
      {"overlap.delta.kind": "replay"},
      {"overlap.replay_path": __file__},
    ),
    (
      "algo.num_minibatches",
      {"rollout.batch_size": 9},
      {"algo.num_minibatches": 3},
    ),
    (
      "optim.pack_width",
      {"optim.pack_width": 60},
      {"rollout.max_response_len": 44},
    ),
    (
      "warm_start.sft.width",
      {"rollout.max_response_len": 49},
      {"warm_start.sft.num_steps": 0},
    ),
    (
      "model.dtype",
      {"model.attention": "flash"},
      {"model.dtype": "bfloat16"},
    ),
    (
      "model.attention_block",
      FLASH | {"model.attention_block": 48},
      {"model.attention_block": 64},
    ),
    (
      "model.attention_block",
      FLASH | {"model.attention_block": 8},
      {"model.attention_block": -1},
    ),
    (
      "reward.model_weight",  # of a head that was drawn
      {"load.policy": str(CONFIGS)},
      {"load.reward_model": str(CONFIGS)},
    ),
    (
      "reward.model_weight",
      {"load.policy": str(CONFIGS)},
      {"reward.model_weight": 0.0},
    ),
    (
      "load.retokenize",
      {"load.retokenize": True, "critic.init": "policy"},
      {"load.reward_model": str(CONFIGS)},
    ),
    (
      "critic.init",
      {"load.retokenize": True, "load.reward_model": str(CONFIGS)},
      {"critic.init": "policy"},
    ),
    (
      "warm_start.reward_model.num_steps",
      {
        "load.retokenize": True,
        "load.reward_model": str(CONFIGS),
        "critic.init": "policy",
        "warm_start.reward_model.num_steps": 1,
      },
      {"warm_start.reward_model.num_steps": 0},
    ),
    (
      "rollout.long_prompts",
      {"rollout.chat": True, "rollout.long_prompts": "truncate_left"},
      {"rollout.long_prompts": "skip"},
    ),
    (
      "algo.denominator",
      {"model.dtype": "bfloat16", "algo.denominator": "behavior"},
      {"algo.denominator": "auto"},
    ),
    (
      "algo.denominator",
      {"algo.denominator": "start"},
      {"overlap.inter": "none"},
    ),
    (
      "algo.denominator",
      {"algo.denominator": "start"},
      {"algo.denominator": "decoupled"},
    ),
  ],
)
def test_values_that_do_not_go_together_are_refused(broken, changes, mended):
  with pytest.raises(ValueError, match=rf"^config\.{broken}="):
    config.validate(changed(**changes))
  config.validate(changed(**{**changes, **mended}))


@pytest.mark.parametrize(
  ("batch_size", "delta_max", "expected"),
  [(8, 0, 8), (8, 1, 16), (8, 8, 16), (112, 28, 144), (1, 0, 8)],
)
def test_slots_hold_batch_and_delta_in_whole_eights(
  batch_size, delta_max, expected
):
  c = changed(
    **{"rollout.batch_size": batch_size, "overlap.delta.max": delta_max}
  )
  assert config.num_slots(c) == expected


def test_all_arms_have_valid_choices_and_the_same_slots():
  slots, choices = set(), set()
  for arm in ("serial", "sequence", "intra", "inter", "restart", "oppo"):
    c = changed(**config.arm_overrides(arm))
    config.validate(c)
    slots.add(config.num_slots(c))
    choices.add((c.overlap.intra, c.overlap.inter))
  assert slots == {16}
  assert len(choices) == 6
  assert config.arm_overrides("oppo") == {
    "overlap.intra": "chunk",
    "overlap.inter": "resume",
  }


def test_an_arm_is_named_by_its_choices():
  for arm in config.ARMS:
    assert config.arm_name(*config.arm_overrides(arm).values()) == arm
  assert config.arm_name("sequence", "restart") == "sequence+restart"


def test_an_unknown_arm_is_named():
  with pytest.raises(ValueError, match=r"arm='opppo'.*'oppo'"):
    config.arm_overrides("opppo")


def test_a_row_holds_prompt_and_response():
  assert config.row_len(base()) == 16 + 48


DEFAULTS = dict(word="serial", delta=0, lr=0.5, fast=False, name="x")


@pytest.mark.parametrize(
  ("arg", "expected"),
  [
    (None, {}),
    ("", {}),
    ("oppo", dict(word="oppo")),
    ("oppo,delta=2", dict(word="oppo", delta=2)),
    ("delta=-3,lr=1e-3", dict(delta=-3, lr=1e-3)),
    ("fast=true,name=a=b", dict(fast=True, name="a=b")),
    ("fast=False,lr=2", dict(lr=2.0)),
  ],
)
def test_config_arguments_are_read_as_the_type_of_their_default(arg, expected):
  got = vars(config.parse_arg(arg, **DEFAULTS))
  assert got == {**DEFAULTS, **expected}
  assert [type(got[k]) for k in got] == [type(DEFAULTS[k]) for k in got]


@pytest.mark.parametrize(
  ("arg", "complaint"),
  [
    ("detla=2", "unknown 'detla'"),
    ("delta=2.5", "delta='2.5' is not of type int"),
    ("lr=fast", "lr='fast' is not of type float"),
    ("fast=maybe", "fast='maybe' is not of type bool"),
  ],
)
def test_a_bad_config_argument_is_named(arg, complaint):
  with pytest.raises(ValueError) as e:
    config.parse_arg(arg, **DEFAULTS)
  assert complaint in str(e.value)


def test_a_bare_word_is_refused_where_none_is_expected():
  with pytest.raises(ValueError, match="unknown word 'oppo'"):
    config.parse_arg("oppo", delta=2)


@pytest.mark.parametrize(
  ("dtype", "denominator", "expected"),
  [
    ("float32", "auto", "behavior"),
    ("bfloat16", "auto", "decoupled"),
    ("float32", "decoupled", "decoupled"),
    ("bfloat16", "tis", "tis"),
  ],
)
def test_the_denominator_follows_the_dtype_unless_it_is_named(
  dtype, denominator, expected
):
  c = changed(**{"model.dtype": dtype, "algo.denominator": denominator})
  config.validate(c)
  assert config.algo(c) == c.algo.to_dict() | dict(denominator=expected)


# Every config file, in every shape it has.

VARIANTS = {
  "ablation": [*config.ARMS, *(f"preset={p}" for p in ppo.PRESETS)],
  "quickstart": [*config.ARMS, *(f"preset={p}" for p in ppo.PRESETS)],
  "gsm8k": [
    f"{size},{choice}"
    for size in ("tiny", "small", "7b")
    for choice in (
      *(f"arm={arm}" for arm in config.ARMS),
      *(f"preset={preset}" for preset in ppo.PRESETS),
    )
  ],
  "opencoder": ["tiny", *common.SIZES, "tiny,arm=serial,preset=trl"],
  "stack_exchange": ["tiny", *common.SIZES, "tiny,arm=serial,preset=trl"],
  "jsonl": ["small", *common.SIZES, "small,arm=serial,preset=trl"],
}
FILES = sorted(p.stem for p in CONFIGS.glob("*.py"))
FILES = [name for name in FILES if name not in ("__init__", "common")]


def load(name, arg=None):
  return importlib.import_module(f"configs.{name}").get_config(arg)


@pytest.mark.parametrize(
  ("name", "arg"),
  [(name, arg) for name in FILES for arg in (None, *VARIANTS.get(name, ()))],
)
def test_every_config_is_valid(name, arg):
  c = load(name, arg)
  config.validate(c)
  chosen = dict(part.partition("=")[::2] for part in (arg or "").split(","))
  arm = chosen.get("arm") or next(iter(chosen))
  arm = arm if arm in config.ARMS else "oppo"
  assert config.arm_name(c.overlap.intra, c.overlap.inter) == arm
  preset = ppo.PRESETS[chosen.get("preset", "openrlhf")]
  assert c.algo.kl_coef == preset["kl_coef"]


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_refuses_what_it_does_not_know(name):
  for arg in ("no_such_word", "preset=no_such_preset", "no_such_key=1"):
    with pytest.raises(ValueError, match="no_such"):
      load(name, arg)


def arithmetic_rows(c, tmp_path):
  c.task.update(num_train=50, num_test=10)


def gsm8k_rows(c, tmp_path):
  for split in ("train", "test"):
    rows = [
      dict(question=f"What is {i} + {i}?", answer=f"Two {i}.\n#### {2 * i}")
      for i in range(40)
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / f"{split}.jsonl").write_text("".join(lines))
  c.task.data_dir = str(tmp_path)


def jsonl_rows(c, tmp_path):
  rows = [dict(prompt=f"What is {i}?") for i in range(40)]
  lines = [json.dumps(row) + "\n" for row in rows]
  (tmp_path / "train.jsonl").write_text("".join(lines))
  c.task.data_dir = str(tmp_path)


def stack_exchange_rows(c, tmp_path):
  for name in stack_exchange.FILES:
    answers = [
      dict(answer_id=i, votes=i, selected=False, text=f"It is {i}.")
      for i in range(3)
    ]
    row = dict(qid=name, title=name, question="What is it?", answers=answers)
    path = tmp_path / f"questions_{name}.jsonl"
    path.write_text(json.dumps(row) + "\n")
  c.task.data_dir = str(tmp_path)


def code_rows(c, tmp_path):
  rows = [
    dict(
      split=("train", "test")[i % 2],
      text=f"Write a function to add {i}.",
      code=f"def add(x):\n  return x + {i}",
      test_list=[f"assert add(1) == {i + 1}"],
    )
    for i in range(40)
  ]
  lines = [json.dumps(row) + "\n" for row in rows]
  (tmp_path / "mbpp.jsonl").write_text("".join(lines))
  c.task.train_path = str(tmp_path / "mbpp.jsonl")
  c.task.isolation = "any"


ROWS = {
  "arithmetic": arithmetic_rows,
  "code": code_rows,
  "gsm8k": gsm8k_rows,
  "jsonl": jsonl_rows,
  "stack_exchange": stack_exchange_rows,
  # Without a folder, a token is a character.
  "stories": lambda c, tmp_path: c.rollout.update(max_prompt_len=128),
}
TRACED = [
  *((name, None, {}) for name in FILES),
  ("gsm8k", "tiny", {}),
  ("ablation", "restart,preset=trl", {}),
  ("ablation", "preset=verl", {"model.dtype": "bfloat16"}),
  ("ablation", "oppo", {"rollout.decode_loop": "fori"}),
]


@pytest.mark.parametrize(("name", "arg", "overrides"), TRACED)
def test_every_config_traces(name, arg, overrides, tmp_path):
  """Shapes and dtypes of everything that is jitted fit together."""
  c = load(name, arg)
  c.update_from_flattened_dict(overrides)
  config.validate(c)
  ROWS[c.task_name](c, tmp_path)
  s = assemble.setup(c, tmp_path, log=lambda line: None)
  fns, sizes = s.fns, s.fns.sizes
  shape = jax.eval_shape

  buffer, cache, scorers = shape(fns.init)
  num, row_len = buffer.tokens.shape
  assert (num, row_len) == (config.num_slots(c), config.row_len(c))
  ints = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
  version, run_key = ints(), shape(lambda: jax.random.key(0))
  prompts = ints(num, c.rollout.max_prompt_len)
  row = ints(num)
  assert shape(fns.admit, buffer, row, prompts, row, row, version) == buffer

  policy = shape(s.parts.policy.init, run_key)
  reward = shape(s.parts.reward.init, run_key)
  critic = shape(s.parts.critic.init, run_key)
  in_use = dict(
    policy=shape(fns.cast, policy),
    reference=shape(fns.cast, policy),
    reward=shape(fns.cast, reward),
    critic=shape(fns.cast, critic),
  )
  tile = ints(sizes.tile.rows)
  tiles = (buffer.tokens, tile, tile)
  assert shape(fns.prefill, in_use["policy"], cache, *tiles) == cache
  decode = functools.partial(fns.decode_chunk, chunk_size=c.overlap.chunk.size)
  rolled = shape(decode, in_use["policy"], buffer, cache, version, run_key)
  assert rolled[:2] == (buffer, cache)
  assert set(fns.append) == s.algorithm.scorers
  for scorer, append in fns.append.items():
    after = shape(append, in_use[scorer], scorers[scorer], *tiles)
    assert after == scorers[scorer], scorer
  outputs = {k: v.outputs for k, v in scorers.items()}
  after, batch = shape(fns.harvest, buffer, outputs, version)
  assert after == buffer
  r = c.rollout
  assert batch.responses.shape == (r.batch_size, r.max_response_len)

  state = shape(s.algorithm.init, dict(policy=policy, critic=critic))
  plan = packing.plan(
    np.full(r.batch_size, row_len),
    order_seed=(0, 0),
    num_epochs=c.algo.num_epochs,
    num_minibatches=c.algo.num_minibatches,
    width=c.optim.pack_width or row_len,
    micro_rows=assemble.micro_rows(c),
  )
  after, seen = shape(fns.update, state, batch, plan)
  assert after == state
  assert {x.dtype for x in seen.values()} == {jnp.dtype("float32")}

  learn = functools.partial(
    supervised.language_model_loss,
    model=s.parts.policy,
    logprob_chunk=c.score.logprob_chunk,
  )
  prefer = functools.partial(supervised.preference_loss, model=s.parts.reward)
  for stage, loss, params, num_texts in (
    (c.warm_start.sft, learn, policy, 1),
    (c.warm_start.reward_model, prefer, reward, 2),
  ):
    text = texts.Text(np.ones(9, np.int32), 4)
    packed = texts.pack(
      iter([(text,) * num_texts]),
      rows=stage.rows,
      width=stage.width,
      num_items=1,
    )
    value, _ = shape(loss, params, packed)
    assert value.shape == ()
