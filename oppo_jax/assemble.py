# SPDX-License-Identifier: Apache-2.0
"""From a config to the things that run: task, tokenizer, models, functions.

Reads data, draws no parameters, compiles nothing.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections

from oppo_jax import (
  algos,
  auto,
  decode,
  flight,
  generation,
  grading,
  hf,
  jit_table,
  models,
  pretrained,
  rescore,
  rewards,
  score,
  stage_data,
  stream,
  tasks,
  tokenizer,
)
from oppo_jax import config as config_lib
from oppo_jax.algos import base as algos_base
from oppo_jax.models import base as models_base
from oppo_jax.tasks import base as tasks_base


class Setup(NamedTuple):
  """What a config turns into.

  Attributes:
    parts: task, tokenizer, prompts, models.
    examples: training rows, `parts.prompts.rows` points into them.
    algorithm: of `algos`.
    fns: the loop's jitted functions.
    greedy: functions of the held-out evaluation.
    prompt_of: the prompt of a uid, as the loop wants it.
    row_of: training row of a uid.
    max_response_len: R.
    grader: of the task; has threads if the task wants some.
    rescore_fn: of a reward model that reads text; None = it is streamed.
  """

  parts: stage_data.Parts
  examples: Sequence[tasks_base.Example]
  algorithm: algos_base.Algorithm
  fns: flight.Fns
  greedy: flight.Fns
  prompt_of: Callable[[int], flight.Prompt]
  row_of: Callable[[int], int]
  max_response_len: int
  grader: grading.Grader
  rescore_fn: rescore.Rescore | None = None


def make_tokenizer(
  config: ml_collections.ConfigDict, task: tasks_base.Task
) -> tokenizer.Tokenizer:
  """The tokenizer of the config, trained on the task's text if need be.

  A policy from a folder brings its own, unless a path names another.

  Raises:
    ValueError: names the part of the config.
  """
  kind, path, key = (
    config.tokenizer.kind,
    config.tokenizer.path,
    "tokenizer.path",
  )
  if config.load.policy:
    key = key if path else "load.policy"
    kind, path = "hf", path or config.load.policy
  if kind == "hf":
    try:
      tokens = tokenizer.load(path)
      if config.rollout.chat:
        tokens = tokens.in_chat(config.rollout.system)
        tokens.chat("")  # so that a missing template is noticed here
      return tokens
    except Exception as e:  # files of others, so anything may be raised
      raise ValueError(f"config.{key}={path!r}: {e}") from e
  if config.rollout.chat:
    raise ValueError(
      f"config.rollout.chat=True: tokenizer.kind={kind!r} has no chat template"
    )
  return tokenizer.make(
    kind,
    corpus=task.corpus(5_000),
    vocab_size=config.tokenizer.vocab_size,
  )


def make_rescore(
  config: ml_collections.ConfigDict, model: models_base.Model
) -> rescore.Rescore | None:
  """For a reward model that reads text; None where it reads token ids.

  Raises:
    ValueError: its folder has no tokenizer, or none that fits.
  """
  folder = config.load.reward_model
  if not config.load.retokenize:
    return None
  try:
    return rescore.load(
      folder,
      model,
      row_len=config_lib.row_len(config),
      chunk=config.score.logprob_chunk,
      system=config.rollout.system if config.rollout.chat else None,
    )
  except (ValueError, OSError) as e:
    raise ValueError(f"config.load.reward_model={folder!r}: {e}") from e


class Engine(NamedTuple):
  """What a config turns into without its data.

  Attributes:
    models: policy, reference, reward model, critic.
    algorithm: of `algos`.
    sampling: how the policy draws.
    fns: the loop's jitted functions.
    generation: keywords of `generation.make_fns`, for evaluations.
  """

  models: pretrained.Models
  algorithm: algos_base.Algorithm
  sampling: decode.Sampling
  fns: flight.Fns
  generation: dict[str, Any]


def devices_of(placement: str) -> tuple[jax.Device, jax.Device] | None:
  """Where the policy and where the scorers run; None = one device for all.

  Raises:
    ValueError: there is no second device.
  """
  if placement == "colocated":
    return None
  found = jax.devices()
  if len(found) < 2:
    raise ValueError(
      f"config.overlap.placement={placement!r}: needs two devices, jax sees"
      f" {found}"
    )
  return found[0], found[1]


def micro_rows(config: ml_collections.ConfigDict) -> int:
  """Packed rows per micro-batch."""
  return auto.micro_rows(
    config.optim.micro_rows,
    jax.default_backend(),
    width=config_lib.pack_width(config),
    mlp_dim=config.model.get("mlp_dim"),
    minibatch_rows=config.rollout.batch_size // config.algo.num_minibatches,
  )


def build(
  config: ml_collections.ConfigDict,
  *,
  vocab_size: int,
  eos_ids: tuple[int, ...],
) -> Engine:
  """Models and functions; `vocab_size` is of a policy without a folder."""
  chosen = config.model.to_dict()
  backend = jax.default_backend()
  # A model of one's own need not have these choices.
  kind = auto.attention(chosen.get("attention", "auto"), backend)
  if "attention" in chosen:
    chosen["attention"] = kind
  if "attention_block" in chosen:
    chosen["attention_block"] = auto.attention_block(
      chosen["attention_block"], backend, kind=kind
    )
  sized = dict(vocab_size=vocab_size, **chosen)
  found = pretrained.make_models(
    config.load,
    critic_init=config.critic.init,
    # A model of one's own need not have them all; then no folder holds one.
    choices={k: chosen[k] for k in hf.CHOICES if k in chosen},
    fresh=lambda head: models.make(config.model_name, head=head, **sized),
  )
  r, o = config.rollout, config.overlap
  sampling = decode.Sampling(
    temperature=r.temperature,
    top_k=r.top_k,
    top_p=r.top_p,
    eos_ids=eos_ids,
    max_response_len=r.max_response_len,
  )
  tile = score.Tile(
    config.score.tile_rows, config.score.tile_len, config.score.logprob_chunk
  )
  decode_loop = auto.decode_loop(r.decode_loop, backend)
  decode_rows = auto.decode_rows(r.decode_rows, backend)
  dispatch = auto.dispatch(o.dispatch, backend)
  row_len = config_lib.row_len(config)
  optim = config.optim.to_dict()
  del optim["pack_width"], optim["micro_rows"]
  algorithm = algos.make(
    config.algo_name,
    config_lib.algo(config),
    optim,
    policy=found.policy,
    critic=found.critic,
    temperature=r.temperature,
    top_k=r.top_k,
    top_p=r.top_p,
    num_updates=config.num_steps,
    bin_width=config_lib.pack_width(config),
    micro_rows=micro_rows(config),
  )
  if config.load.retokenize or not config_lib.has_reward_model(config):
    # What reads text scores a complete batch; what was drawn at random and
    # weighs nothing need not.
    algorithm = algorithm._replace(scorers=algorithm.scorers - {"reward"})
  order = ("reward", "reference", "critic", "policy")
  scorers = {name: getattr(found, name) for name in order}
  fns = jit_table.make_fns(
    sizes=flight.Sizes(
      num_slots=config_lib.num_slots(config),
      batch_size=r.batch_size,
      group_size=algorithm.group_size,
      max_prompt_len=r.max_prompt_len,
      row_len=row_len,
      max_staleness=o.max_staleness,
      tile=tile,
      decode_loop=decode_loop,
      decode_rows=decode_rows,
      restarts=o.inter == "restart",
      keep_policy_cache=o.policy_cache == "keep",
      keep_critic_cache=o.critic_cache == "keep",
      speculates=auto.speculates(o.placement, dispatch),
    ),
    sampling=sampling,
    policy=found.policy,
    scorers={k: v for k, v in scorers.items() if k in algorithm.scorers},
    algorithm=algorithm,
    devices=devices_of(o.placement),
    dispatch=dispatch,
  )
  generating = dict(
    num_slots=64,
    max_prompt_len=r.max_prompt_len,
    tile=tile,
    decode_loop=decode_loop,
    decode_rows=decode_rows,
  )
  return Engine(found, algorithm, sampling, fns, generating)


def setup(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  *,
  log: Callable[[str], None],
) -> Setup:
  """Builds everything but parameters.

  Args:
    config: validated.
    workdir: gets the data set and the tokenizer.
    log: takes one line of text.

  Raises:
    ValueError: what the config names is not there, or does not fit; says what.
  """
  try:
    task = tasks.make(
      config.task_name, cache_dir=workdir / "data", **config.task.to_dict()
    )
  except (ValueError, FileNotFoundError) as e:
    raise ValueError(f"config.task: {e}") from e
  if task.reward is None and config.reward.rule_weight:
    raise ValueError(
      f"config.reward.rule_weight={config.reward.rule_weight!r}: must be 0.0,"
      f" task {task.name!r} has no rule"
    )
  rewards.check_rules(config.reward.rules.to_dict(), task.rules)
  tokens = make_tokenizer(config, task)
  tokens.save(workdir / "tokenizer")
  examples = task.prompts("train")
  prompts = stream.encode_prompts(
    examples,
    tokens,
    max_prompt_len=config.rollout.max_prompt_len,
    long_prompts=config.rollout.long_prompts,
  )
  if prompts.num_long:
    did = {"skip": "left out", "truncate_left": "cut on the left"}
    log(
      f"{prompts.num_long} of {len(examples)} prompts are longer than"
      f" {config.rollout.max_prompt_len} tokens:"
      f" {did[config.rollout.long_prompts]}"
    )
  # Rounded up, for the matrix units; the extra ids are never sampled from text.
  vocab_size = -(-tokens.vocab_size // 8) * 8
  engine = build(config, vocab_size=vocab_size, eos_ids=tokens.eos_ids)
  pretrained.check(
    config.load,
    engine.models,
    tokens,
    row_len=config_lib.row_len(config),
    tile_len=config.score.tile_len,
  )
  sampling, r = engine.sampling, config.rollout
  generator = lambda sampling: generation.make_fns(
    engine.models.policy, sampling=sampling, **engine.generation
  )

  uids = stream.Stream(
    len(prompts.tokens), config.seed, group_size=engine.algorithm.group_size
  )
  target_lengths = None
  if r.target_lengths_path:
    target_lengths = stream.load_target_lengths(
      r.target_lengths_path, max_response_len=r.max_response_len
    )
    log(
      "FORCED LENGTHS: every response ends where"
      f" {r.target_lengths_path} says ({len(target_lengths)} lengths, then from"
      " the start). This is a benchmark, not training."
    )

  def prompt_of(uid: int) -> flight.Prompt:
    forced = 0
    if target_lengths is not None:
      forced = int(target_lengths[uid % len(target_lengths)])
    return flight.Prompt(prompts.tokens[uids.index(uid)], forced)

  parts = stage_data.Parts(
    task, tokens, prompts, *engine.models, sampler=generator(sampling)
  )
  return Setup(
    parts=parts,
    examples=examples,
    algorithm=engine.algorithm,
    fns=engine.fns,
    greedy=generator(sampling._replace(temperature=0.0)),
    prompt_of=prompt_of,
    row_of=lambda uid: int(prompts.rows[uids.index(uid)]),
    max_response_len=r.max_response_len,
    grader=grading.Grader(task),
    rescore_fn=make_rescore(config, engine.models.reward),
  )
