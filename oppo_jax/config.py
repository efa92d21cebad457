# SPDX-License-Identifier: Apache-2.0
"""What a config may hold, and what follows from it.

`SCHEMA` is the one list of keys; models and algorithms bring those of their own
sections, and every plug-in its name. `validate` runs before anything else, and
ends a run with one line that names the key. Derived quantities are functions,
never fields.
"""

import difflib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import ml_collections

from oppo_jax import (
  algos,
  chunking,
  compile_cache,
  delta,
  encoding,
  models,
  stream,
  tasks,
)
from oppo_jax.algos import optim
from oppo_jax.schema import (
  BOOL,
  FILE,
  FOLDER,
  SECTION,
  SIZES,
  STALENESS,
  TEXT,
  Rule,
  choice,
  integer,
  number,
)

FIT = {  # a supervised stage, see `supervised.FitConfig`
  "num_steps": integer(0),  # 0 = the stage is skipped
  "rows": integer(1),
  "width": integer(1),  # tokens
  "lr": number(0.0),
  "warmup_steps": integer(0),
  "weight_decay": number(0.0),
  "clip_norm": number(0.0),  # 0 = off
}

STAGE = FIT | {  # a stage that is a command of its own
  "eval_every": integer(0),  # steps; 0 = ends only
  "save_every": integer(0),  # steps between snapshots; 0 = at the end
  "num_eval": integer(0),  # held-out items; 0 = all
  "long_responses": choice(*encoding.LONG_RESPONSES),
}

SCHEMA: dict[str, Rule] = {
  "seed": integer(0),
  "num_steps": integer(0),
  "compile_cache": choice(*compile_cache.CHOICES),
  "task_name": choice(*tasks.TASKS),
  "task": SECTION,  # the task checks its own
  "tokenizer.kind": choice("char", "byte", "bpe", "hf"),
  "tokenizer.vocab_size": integer(0),  # "bpe" only
  "tokenizer.path": TEXT,
  "model_name": choice(*models.MODELS),
  "model": SECTION,  # `SCHEMA` of the model's file
  "load.policy": FOLDER,
  "load.reference": FOLDER,
  "load.reward_model": FOLDER,
  "load.critic": FOLDER,
  "load.retokenize": BOOL,
  "critic.init": choice("reward", "policy", "random"),
  **{f"warm_start.sft.{key}": rule for key, rule in FIT.items()},
  "warm_start.sft.terse": number(0.0, 1.0),  # share of demonstrations
  **{f"warm_start.reward_model.{key}": rule for key, rule in FIT.items()},
  "warm_start.reward_model.rows": integer(2),  # a pair may take two
  "warm_start.reward_model.num_prompts": integer(1),
  "warm_start.reward_model.num_samples": integer(1),
  "warm_start.reward_model.num_spoiled": integer(0),
  **{f"sft.{key}": rule for key, rule in STAGE.items()},
  **{f"reward_model.{key}": rule for key, rule in STAGE.items()},
  "reward_model.rows": integer(2),  # a pair may take two
  "reward_model.margin_coef": number(0.0),
  "reward_model.center_coef": number(0.0),
  "rollout.batch_size": integer(1),
  "rollout.max_prompt_len": integer(1),
  "rollout.max_response_len": integer(1),
  "rollout.temperature": number(above=0.0),
  "rollout.top_k": integer(0),  # 0 = all
  "rollout.top_p": number(above=0.0, high=1.0),  # 1 = all
  "rollout.long_prompts": choice(*stream.LONG_PROMPTS),
  "rollout.chat": BOOL,
  "rollout.system": TEXT,
  "rollout.target_lengths_path": FILE,
  "rollout.decode_loop": choice("auto", "while", "fori"),
  "rollout.decode_rows": integer(-1),  # -1 = auto, 0 = all slots
  "score.tile_rows": integer(1),
  "score.tile_len": integer(1),
  "score.logprob_chunk": integer(1),
  "reward.model_weight": number(),
  "reward.rule_weight": number(),
  "reward.rules": SECTION,  # a weight for each name, see `rewards.check_rules`
  "overlap.placement": choice("colocated", "disaggregated"),
  "overlap.dispatch": choice("auto", "separate", "fused"),
  "overlap.intra": choice("none", "sequence", "chunk"),
  "overlap.inter": choice("none", "resume", "restart"),
  "overlap.max_staleness": STALENESS,
  "overlap.policy_cache": choice("recompute", "keep"),
  "overlap.critic_cache": choice("recompute", "keep"),
  "overlap.replay_path": FILE,  # decisions.jsonl
  "overlap.chunk.kind": choice(*chunking.RULES),
  "overlap.chunk.size": integer(1),
  "overlap.chunk.sizes": SIZES,
  "overlap.chunk.period": integer(1),
  "overlap.delta.kind": choice(*delta.RULES),
  "overlap.delta.init": integer(0),
  "overlap.delta.min": integer(0),
  "overlap.delta.max": integer(0),
  "overlap.delta.window": integer(1),
  "overlap.delta.step": integer(1),
  "overlap.delta.dead_band": number(0.0),  # standard errors
  "algo_name": choice(*algos.ALGOS),
  "algo": SECTION,  # `SCHEMA` of the algorithm's file
  "optim.policy_lr": number(0.0),
  "optim.critic_lr": number(0.0),
  "optim.schedule": choice(*optim.SCHEDULES),
  "optim.warmup_steps": integer(0),
  "optim.clip_norm": number(0.0),  # 0 = off
  "optim.b1": number(0.0, below=1.0),
  "optim.b2": number(0.0, below=1.0),
  "optim.eps": number(above=0.0),
  "optim.weight_decay": number(0.0),
  "optim.pack_width": integer(0),  # 0 = row_len
  "optim.micro_rows": integer(0),  # 0 = auto
  "eval.num_prompts": integer(0),
  "eval.every": integer(0),
  "log.rollouts_per_step": integer(0),
  "log.params_every": integer(0),
  "log.tensorboard": BOOL,
}

ARMS = {  # name -> (intra, inter)
  "serial": ("none", "none"),
  "sequence": ("sequence", "none"),
  "intra": ("chunk", "none"),
  "inter": ("none", "resume"),
  "restart": ("none", "restart"),
  "oppo": ("chunk", "resume"),
}


def _schema(config: ml_collections.ConfigDict) -> dict[str, Rule]:
  """`SCHEMA`, with the sections of the model and algorithm that are named."""
  schema = dict(SCHEMA)
  for section, plugins in (("model", models.MODELS), ("algo", algos.ALGOS)):
    plugin = plugins.get(str(config.get(f"{section}_name")))
    keys = plugin.SCHEMA if plugin else {}
    schema |= {f"{section}.{key}": rule for key, rule in keys.items()}
  reward = config.get("reward")
  rules = reward.get("rules") if _is_section(reward) else None
  for name in rules if _is_section(rules) else ():
    schema[f"reward.rules.{name}"] = number()
  return schema


def _is_section(x: Any) -> bool:
  return isinstance(x, Mapping | ml_collections.ConfigDict)


def _tree(schema: Mapping[str, Rule]) -> dict[str, Any]:
  """All keys by sections: section -> {key: rule or section}."""
  tree: dict[str, Any] = {}
  for key, rule in schema.items():
    *sections, last = key.split(".")
    node = tree
    for section in sections:
      node = node.setdefault(section, {})
    node[last] = {} if rule is SECTION else rule
  return tree


def _check_keys(config: Any, tree: dict[str, Any], prefix: str) -> None:
  """Walks config and keys side by side; no keys: whoever reads it checks it."""
  for name in config if tree else ():
    if name not in tree:
      close = difflib.get_close_matches(name, tree, n=1)
      hint = f"; did you mean {close[0]!r}?" if close else ""
      raise ValueError(f"config.{prefix}{name}: unknown key{hint}")
  for name, rule in tree.items():
    key = prefix + name
    if name not in config:
      raise ValueError(f"config.{key}: missing")
    value = config[name]
    if isinstance(rule, Rule):
      if not rule.is_valid(value):
        raise ValueError(f"config.{key}={value!r}: must be {rule.expected}")
    elif not _is_section(value):
      raise ValueError(f"config.{key}={value!r}: must be a section")
    else:
      _check_keys(value, rule, f"{key}.")


def _conflicts(c: ml_collections.ConfigDict) -> Iterator[tuple[bool, str, str]]:
  """Rules over several keys: (is broken, key, what it must be)."""
  yield from models.MODELS[c.model_name].conflicts(c.model)
  batch_size, sizes = c.rollout.batch_size, c.overlap.chunk.sizes
  delta, chunk = c.overlap.delta, c.overlap.chunk  # not the modules
  bounds = f"[{delta.min}, {delta.max}]"
  is_inside = delta.min <= delta.init <= delta.max
  yield delta.max < delta.min, "overlap.delta.max", f">= min={delta.min}"
  yield not is_inside, "overlap.delta.init", f"in [min, max] = {bounds}"
  yield (
    c.overlap.max_staleness > 0 and delta.max > batch_size,
    "overlap.delta.max",
    f"<= rollout.batch_size={batch_size} while max_staleness is bounded: one "
    "batch must be able to hold every row that may not be deferred again",
  )
  too_short = delta.kind == "robust" and delta.window < 2
  yield too_short, "overlap.delta.window", ">= 2 for kind='robust'"
  too_short = chunk.kind == "tuned" and chunk.period <= len(sizes)
  yield too_short, "overlap.chunk.period", f"> {len(sizes)}, the trials"
  no_log = "replay" in (chunk.kind, delta.kind) and not c.overlap.replay_path
  yield no_log, "overlap.replay_path", "a file for kind='replay'"
  yield from _load_conflicts(c)
  too_narrow = 0 < c.optim.pack_width < row_len(c)
  yield too_narrow, "optim.pack_width", f"0 or >= {row_len(c)}, the longest row"
  apart = c.overlap.placement != "colocated" and c.overlap.dispatch == "fused"
  yield apart, "overlap.dispatch", "'auto' or 'separate' on two devices"
  sft = c.warm_start.sft
  too_narrow = sft.num_steps > 0 and sft.width < row_len(c)
  yield too_narrow, "warm_start.sft.width", f">= {row_len(c)}, the longest row"
  yield (
    batch_size % c.algo.num_minibatches != 0,
    "algo.num_minibatches",
    f"a divisor of rollout.batch_size={batch_size}",
  )
  denominator = c.algo.get("denominator")
  is_exact = c.model.dtype == "float32"
  yield (
    denominator == "behavior" and not is_exact,
    "algo.denominator",
    "'auto' or another one in bfloat16, where a decode step and a forward pass"
    " differ by up to 0.03 nats: ratios to 'behavior' would not start at 1",
  )
  yield (
    denominator == "start" and c.overlap.inter != "none",
    "algo.denominator",
    "'auto' or another one while rows are deferred (overlap.inter="
    f"{c.overlap.inter!r}): 'start' alone does not know what policy sampled a"
    " token",
  )


def _load_conflicts(
  c: ml_collections.ConfigDict,
) -> Iterator[tuple[bool, str, str]]:
  """Rules about folders and chats, as `_conflicts`."""
  load, r = c.load, c.rollout
  has_reward = load.reward_model or c.warm_start.reward_model.num_steps
  yield (
    bool(load.policy and not has_reward and c.reward.model_weight),
    "reward.model_weight",
    "0.0 without a reward model: load.reward_model names none, and"
    " warm_start.reward_model.num_steps is 0",
  )
  yield (
    load.retokenize and not load.reward_model,
    "load.retokenize",
    "False where load.reward_model names no folder",
  )
  yield (
    load.retokenize and c.warm_start.reward_model.num_steps > 0,
    "warm_start.reward_model.num_steps",
    "0 with load.retokenize: what reads other ids is not trained further",
  )
  yield (
    load.retokenize and not load.critic and c.critic.init == "reward",
    "critic.init",
    "'policy' or 'random' with load.retokenize: the critic reads the policy's"
    " ids",
  )
  yield (
    r.chat and r.long_prompts == "truncate_left",
    "rollout.long_prompts",
    "'refuse' or 'skip' with rollout.chat: the template's head would go",
  )
  no_chat = bool(r.system) and not r.chat
  yield no_chat, "rollout.system", "'' without rollout.chat"


def validate(config: ml_collections.ConfigDict) -> None:
  """Checks keys, types, ranges, and what the values say together.

  Raises:
    ValueError: one line that names the key, its value, and what is allowed.
  """
  _check_keys(config, _tree(_schema(config)), "")
  for is_broken, key, expected in _conflicts(config):
    if is_broken:
      value = config
      for name in key.split("."):
        value = value[name]
      raise ValueError(f"config.{key}={value!r}: must be {expected}")


def num_slots(config: ml_collections.ConfigDict) -> int:
  """S: room for B + max delta rows, a multiple of 8; the same in all arms.

  Where all slots are decoded in one call, another number of them moves
  log-probs in the last bit, so arms that are to be compared bit for bit share
  it.
  """
  return -(-(config.rollout.batch_size + config.overlap.delta.max) // 8) * 8


def algo(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """`config.algo` as the algorithm takes it, with no "auto" left in it.

  denominator="auto" is what the dtype allows: in float32 the log-prob stored at
  sampling is that of a forward pass to some 1e-6 nats ("behavior"), in bfloat16
  it is not ("decoupled").
  """
  chosen = config.algo.to_dict()
  if chosen.get("denominator") == "auto":
    is_exact = config.model.dtype == "float32"
    chosen["denominator"] = "behavior" if is_exact else "decoupled"
  return chosen


def has_reward_model(config: ml_collections.ConfigDict) -> bool:
  """Whether its score is worth something, or counts all the same."""
  is_made = config.load.reward_model or config.warm_start.reward_model.num_steps
  return bool(is_made or config.reward.model_weight)


def row_len(config: ml_collections.ConfigDict) -> int:
  """L = P + R: columns of a row."""
  return config.rollout.max_prompt_len + config.rollout.max_response_len


def pack_width(config: ml_collections.ConfigDict) -> int:
  """W: tokens of a packed row of the update."""
  return config.optim.pack_width or row_len(config)


def arm_overrides(arm: str) -> dict[str, str]:
  """The two choices that make an arm, for `update_from_flattened_dict`."""
  if arm not in ARMS:
    raise ValueError(f"arm={arm!r}: must be one of {tuple(ARMS)}")
  intra, inter = ARMS[arm]
  return {"overlap.intra": intra, "overlap.inter": inter}


def arm_name(intra: str, inter: str) -> str:
  """The arm these two choices make; "intra+inter" if it has no name."""
  names = {choices: arm for arm, choices in ARMS.items()}
  return names.get((intra, inter), f"{intra}+{inter}")


def parse_arg(arg: str | None, **defaults: Any) -> SimpleNamespace:
  """Reads what follows the colon of `--config=configs/x.py:oppo,delta=2`.

  Args:
    arg: comma-separated `key=value` pairs; one bare word is the value of the
      key `word`. None or "" = all defaults.
    **defaults: the keys that are known. A value is read as the type of its
      default: bool ("true", "false"), int, float or str.

  Raises:
    ValueError: unknown key or unreadable value; names it.

  Example:
    parse_arg("oppo,delta=2", word="serial", delta=0, x=0.5)
    -> word "oppo", delta 2, x 0.5
  """
  values = dict(defaults)
  for part in arg.split(",") if arg else ():
    key, is_pair, text = part.partition("=")
    if not is_pair:
      key, text = "word", part
    if key not in defaults:
      what = repr(key) if is_pair else f"word {part!r}"
      raise ValueError(
        f"config argument {arg!r}: unknown {what}, not in {sorted(defaults)}"
      )
    kind = type(defaults[key])
    bools = {"true": True, "false": False}
    try:
      values[key] = bools[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
      raise ValueError(
        f"config argument {arg!r}: {key}={text!r} is not of type "
        f"{kind.__name__}"
      ) from None
  return SimpleNamespace(**values)
