# SPDX-License-Identifier: Apache-2.0
"""Where PPO starts from: policy, reward model and critic, stage by stage.

  random --SFT on worked solutions--> policy --+--> reference (a frozen copy)
  or a folder                                  |
      the task's pairs, or its own samples, graded: pairs (right, wrong)
                                               |
  policy trunk + new head --Bradley-Terry--> reward model --> critic

Every model may come from a folder instead (`pretrained.py`). Each stage is kept
in the workdir under a name that holds a hash of everything it depends on, so a
second run with the same settings goes straight to PPO.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from oppo_jax import (
  checkpoint,
  encoding,
  hf,
  keys,
  pretrained,
  stage_data,
  supervised,
  types,
)
from oppo_jax.models import base as models_base

Log = Callable[[str], None]


def run(
  config: ml_collections.ConfigDict,
  parts: stage_data.Parts,
  *,
  workdir: pathlib.Path,
  log: Log,
) -> dict[str, types.Params]:
  """Parameters of "policy", "reward" and "critic", float32; and of "reference"
  where it is not the policy.

  Args:
    config: validated.
    parts: what to work with.
    workdir: stages are cached in its folder `stages`.
    log: takes one line of text.
  """
  init = lambda model, what: model.init(keys.named(config.seed, what))
  section = config.warm_start
  # What a stage depends on; a later stage adds to it.
  depends_on = {
    k: config[k]
    for k in ("seed", "task_name", "task", "tokenizer", "model_name", "model")
  }
  limits = ("max_prompt_len", "max_response_len", "long_prompts")
  depends_on |= {k: config.rollout[k] for k in limits}
  cached = functools.partial(_cached, workdir=workdir, log=log)

  given = pretrained.folders(config.load)
  loaded = {
    role: pretrained.load_params(
      role, folder, getattr(parts, pretrained.ROLES[role])
    )
    for role, folder in given.items()
  }
  if given:
    depends_on["load"] = {k: hf.fingerprint(v) for k, v in given.items()}
  policy = loaded.get("policy") or init(parts.policy, "init_policy")
  if section.sft.num_steps:
    depends_on["sft"] = section.sft
    start = policy
    policy = cached(
      "sft",
      depends_on,
      start,
      lambda: fit_policy(config, parts, start, log=log),
    )
  scalar = loaded.get("reward_model")
  if scalar is None and "policy" in given:
    scalar = {**policy, "out": _new_head(config, parts.reward, "init_reward")}
  elif scalar is None:
    scalar = init(parts.reward, "init_reward")
    if section.sft.num_steps:
      # The reward model starts from the policy's trunk, with its own head.
      scalar = {**policy, "out": scalar["out"]}
  reward = scalar
  if section.reward_model.num_steps:
    depends_on["reward_model"] = section.reward_model
    sampling = ("temperature", "top_k", "top_p")
    depends_on |= {k: config.rollout[k] for k in sampling}
    reward = cached(
      "reward_model",
      depends_on,
      scalar,
      lambda: fit_reward_model(config, parts, policy, scalar, log=log),
    )
  params = {"policy": policy, "reward": reward}
  if "reference" in given:
    params["reference"] = loaded["reference"]
  start = {"reward": reward, "policy": pretrained.trunk(policy), "random": None}
  critic = loaded.get("critic") or start[config.critic.init]
  if critic is None:
    critic = init(parts.critic, "init_critic")
  if "out" not in critic:
    critic["out"] = _new_head(config, parts.critic, "init_critic")
  return params | {"critic": critic}


def first_policy(
  config: ml_collections.ConfigDict, parts: stage_data.Parts
) -> types.Params:
  """The policy before any stage: of its folder, or drawn; float32."""
  if folder := config.load.policy:
    return pretrained.load_params("policy", folder, parts.policy)
  return parts.policy.init(keys.named(config.seed, "init_policy"))


def first_reward_model(
  config: ml_collections.ConfigDict, parts: stage_data.Parts
) -> types.Params:
  """The reward model before any stage, float32: of its folder; or the trunk of
  the policy's folder with a new head; or drawn."""
  if folder := config.load.reward_model:
    return pretrained.load_params("reward_model", folder, parts.reward)
  if config.load.policy:
    trunk = pretrained.trunk(first_policy(config, parts))
    return trunk | {"out": _new_head(config, parts.reward, "init_reward")}
  return parts.reward.init(keys.named(config.seed, "init_reward"))


def _new_head(
  config: ml_collections.ConfigDict, model: models_base.Model, what: str
) -> jax.Array:
  """The head alone of what `init` draws: under jit nothing else is."""
  draw = jax.jit(lambda key: model.init(key)["out"])
  return draw(keys.named(config.seed, what))


def _cached(
  name: str,
  depends_on: dict[str, Any],
  like: types.Params,
  make: Callable[[], types.Params],
  *,
  workdir: pathlib.Path,
  log: Log,
) -> types.Params:
  """Loads the stage if it was made with these settings, else makes it."""
  text = ml_collections.ConfigDict(depends_on).to_json_best_effort()
  text = json.dumps(json.loads(text), sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:12]
  folder = workdir / "stages" / f"{name}-{digest}"
  path = folder / "params.safetensors"
  if path.exists():
    log(f"{name}: cached in {folder}")
    return checkpoint.load_params(path, like)
  params = make()
  with checkpoint.stage(folder) as temporary:
    checkpoint.save_params(temporary / path.name, params)
  return params


def _printer(log: Log, stage: str) -> Callable[[int, dict[str, float]], None]:
  def write(step: int, seen: dict[str, float]) -> None:
    numbers = "  ".join(f"{k} {v:.4f}" for k, v in seen.items())
    log(f"{stage} step {step:5d}  {numbers}")

  return write


def fit_policy(
  config: ml_collections.ConfigDict,
  parts: stage_data.Parts,
  params: types.Params,
  *,
  log: Log,
) -> types.Params:
  """Supervised learning on the task's worked solutions.

  Raises:
    ValueError: the task has none.
  """
  section, task = config.warm_start.sft, parts.task
  if section.terse and task.terse is None:
    raise ValueError(
      f"config.warm_start.sft.terse={section.terse!r}: must be 0.0, task"
      f" {task.name!r} has no terse responses"
    )
  if task.demonstrations is None:
    items = stage_data.solutions(config, parts)
  else:
    items = encoding.demonstrations(
      task.demonstrations("train"),
      parts.tokens,
      stage_data.limits(config, section),
    ).items
  if not items:
    raise ValueError(
      f"warm_start.sft: task {parts.task.name!r} has no worked solution of at"
      f" most {config.rollout.max_response_len} tokens"
    )
  loss = functools.partial(
    supervised.language_model_loss,
    model=parts.policy,
    logprob_chunk=config.score.logprob_chunk,
  )
  return supervised.fit(
    params,
    loss,
    items,
    supervised.fit_config(section),
    seed=(config.seed, 0),
    log=_printer(log, "sft"),
  )


def fit_reward_model(
  config: ml_collections.ConfigDict,
  parts: stage_data.Parts,
  policy: types.Params,
  params: types.Params,
  *,
  log: Log,
) -> types.Params:
  """Bradley-Terry on pairs; says how held-out ones fare.

  The pairs are the task's own, where it has some; else they are made of the
  policy's samples.

  Raises:
    ValueError: there is no pair to learn from.
  """
  section = config.warm_start.reward_model
  if parts.task.pairs is not None:
    items, held_out = (
      stage_data.given_pairs(config, parts, split)
      for split in ("train", "test")
    )
    nothing = f"no pair of at most width={section.width} tokens a side"
  else:
    items, held_out = stage_data.made_pairs(config, parts, policy)
    nothing = "all samples of every prompt got the same grade"
  if not items:
    raise ValueError(f"warm_start.reward_model: {nothing}")
  log(f"reward_model: {len(items)} pairs, {len(held_out)} held out")
  fit = supervised.fit_config(section)
  reward = supervised.fit(
    params,
    functools.partial(supervised.preference_loss, model=parts.reward),
    items,
    fit,
    seed=(config.seed, 2),
    log=_printer(log, "reward_model"),
  )
  if held_out:
    right, seen = pair_accuracy(parts.reward, reward, held_out, fit)
    log(f"reward_model: {right / seen:.1%} of {seen} held-out pairs right")
  return reward


def pair_accuracy(
  model: models_base.Model,
  params: types.Params,
  pairs: Sequence[stage_data.Pair],
  fit: supervised.FitConfig,
) -> tuple[int, int]:
  """How many pairs the reward model orders rightly, and how many it saw."""
  scores = supervised.score_pairs(
    model, params, pairs, rows=fit.rows, width=fit.width
  )
  return int((scores[:, 0] > scores[:, 1]).sum()), len(scores)
