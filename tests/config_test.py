# SPDX-License-Identifier: Apache-2.0
"""What `config.validate` refuses, and how it says so."""

import pytest
from ml_collections import ConfigDict

from oppo_jax import chunking, config, delta, stream
from oppo_jax.algos import optim


def base():
  """A config that `validate` accepts."""
  return ConfigDict(
    dict(
      seed=0,
      num_steps=3,
      task_name="arithmetic",
      task=dict(max_ops=3),
      tokenizer=dict(kind="char", vocab_size=0, path=""),
      model_name="transformer",
      model=dict(
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        qkv_bias=False,
        qk_norm=False,
        tie_embeddings=True,
        dtype="float32",
        attention_block=0,
        remat=False,
      ),
      critic=dict(init="reward"),
      warm_start=dict(
        sft=dict(num_steps=10, lr=1e-3), reward_model=dict(num_steps=10)
      ),
      rollout=dict(
        batch_size=8,
        max_prompt_len=16,
        max_response_len=48,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        long_prompts="refuse",
        target_lengths_path="",
        decode_loop="auto",
      ),
      score=dict(tile_rows=4, tile_len=16, logprob_chunk=64),
      reward=dict(model_weight=1.0, rule_weight=0.0),
      overlap=dict(
        intra="chunk",
        inter="resume",
        max_staleness=2,
        policy_cache="recompute",
        critic_cache="recompute",
        chunk=dict(
          kind="fixed", size=8, sizes=(4, 8), period=10, replay_path=""
        ),
        delta=dict(
          kind="fixed",
          init=2,
          min=0,
          max=4,
          window=5,
          step=1,
          dead_band=2.0,
        ),
      ),
      algo_name="ppo",
      algo=dict(num_minibatches=2, clip_eps=0.2),
      optim=dict(
        policy_lr=1e-3,
        critic_lr=1e-3,
        schedule="constant",
        warmup_steps=0,
        clip_norm=1.0,
        b1=0.9,
        b2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        pack_width=0,
        micro_rows=4,
      ),
      eval=dict(num_prompts=8, every=0),
      log=dict(rollouts_per_step=1, tensorboard=False),
    )
  )


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


OPEN = {"task.", "algo.", "warm_start.sft.", "warm_start.reward_model."}
CLOSED = sorted(set(sections(base())) - OPEN)
REQUIRED = sorted(
  {"task", "algo", "warm_start.reward_model", "model", "overlap.delta"}
  | {k for k in leaves(base()) if k in config.SCHEMA}
)


def test_the_base_config_is_accepted():
  config.validate(base())


def test_every_key_of_the_schema_is_in_the_base_config():
  c = base()
  for key in config.SCHEMA:
    *prefix, name = key.split(".")
    assert name in at(c, ".".join([*prefix, ""])), key


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("overlap.max_staleness", -1),
    ("overlap.chunk.kind", "tuned"),
    ("overlap.delta.kind", "robust"),
    ("optim.pack_width", 64),
    ("rollout.top_p", 0.1),
    ("critic.init", "random"),
    ("task.anything", [1, 2]),
    ("warm_start.sft.anything", "x"),
    ("algo.num_minibatches", 8),
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
  "model.attention_block": [-1],
  "model.remat": [1],
  "model_name": [""],
  "critic.init": ["zeros"],
  "warm_start.sft": [1],
  "warm_start.sft.num_steps": [-1, 1.0],
  "warm_start.reward_model.num_steps": [-1],
  "rollout.batch_size": [0, True, 8.0],
  "rollout.max_prompt_len": [0],
  "rollout.max_response_len": [0],
  "rollout.temperature": [0.0, -1.0, 1, float("nan"), float("inf")],
  "rollout.top_k": [-1],
  "rollout.top_p": [0.0, 1.1],
  "rollout.long_prompts": ["cut"],
  "rollout.target_lengths_path": ["no/such/file.txt"],
  "rollout.decode_loop": ["scan"],
  "score.tile_rows": [0],
  "score.tile_len": [0],
  "score.logprob_chunk": [0],
  "reward.model_weight": [float("nan")],
  "overlap": ["oppo"],
  "overlap.intra": ["resume", True],
  "overlap.inter": ["chunk"],
  "overlap.max_staleness": [0, -2, 1.0],
  "overlap.policy_cache": ["drop"],
  "overlap.chunk.kind": ["auto"],
  "overlap.chunk.size": [0],
  "overlap.chunk.sizes": [(), (0,), (8, 8), [4, 8], (4, "a"), (4.0,)],
  "overlap.chunk.period": [0],
  "overlap.chunk.replay_path": ["no/such/decisions.jsonl"],
  "overlap.delta.kind": ["papr"],
  "overlap.delta.init": [-1, 5],
  "overlap.delta.min": [-1],
  "overlap.delta.max": [-1, 9],
  "overlap.delta.window": [0],
  "overlap.delta.step": [0],
  "overlap.delta.dead_band": [-0.5],
  "algo_name": [""],
  "algo.num_minibatches": [0, 3, 2.0],
  "optim.policy_lr": [-1e-3, 0],
  "optim.schedule": ["step"],
  "optim.warmup_steps": [-1],
  "optim.clip_norm": [-1.0],
  "optim.b1": [1.0, -0.1],
  "optim.eps": [0.0],
  "optim.pack_width": [-1, 63],
  "optim.micro_rows": [0],
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
      "overlap.chunk.replay_path",
      {"overlap.chunk.kind": "replay"},
      {"overlap.chunk.replay_path": __file__},
    ),
    (
      "overlap.chunk.replay_path",
      {"overlap.delta.kind": "replay"},
      {"overlap.chunk.replay_path": __file__},
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
  ],
)
def test_values_that_do_not_go_together_are_refused(broken, changes, mended):
  with pytest.raises(ValueError, match=rf"^config\.{broken}="):
    config.validate(changed(**changes))
  config.validate(changed(**{**changes, **mended}))


def test_the_schema_offers_what_the_modules_have():
  """`config` imports none of them; this keeps the two lists equal."""
  for key, names in (
    ("overlap.delta.kind", delta.RULES),
    ("overlap.chunk.kind", chunking.RULES),
    ("optim.schedule", optim.SCHEDULES),
    ("rollout.long_prompts", stream.LONG_PROMPTS),
  ):
    assert config.SCHEMA[key].expected == f"one of {tuple(names)}"


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
