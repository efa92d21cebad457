# SPDX-License-Identifier: Apache-2.0
r"""Supervised fine-tuning on the task's solutions.

  python -m oppo_jax.sft --config=configs/stack_exchange.py:tiny \
      --workdir=runs/sft

Section `sft` of the config. Starts from config.load.policy, or from a random
model. The workdir is that of `supervised_run.py`; its folder hf/ is what
--config.load.policy of the next command wants.
"""

import functools
import math
import pathlib

import ml_collections
import numpy as np

from oppo_jax import (
  assemble,
  cli,
  encoding,
  stage_command,
  supervised,
  supervised_run,
  types,
  warm_start,
)


def make_stage(
  config: ml_collections.ConfigDict, s: assemble.Setup
) -> supervised_run.Stage:
  """Solutions of the task's demonstrations; held out are those of its test
  split.

  Raises:
    ValueError: there are none.
  """
  section, task = config.sft, s.parts.task
  examples_of = task.demonstrations or task.prompts
  limits = supervised_run.limits(config, section)
  found = {
    split: encoding.demonstrations(examples_of(split), s.parts.tokens, limits)
    for split in ("train", "test")
  }
  for split, x in found.items():
    stage_command.say_found("sft", split, x, "demonstrations")
  held_out = found["test"].items[: section.num_eval or None]

  def evaluate(params: types.Params) -> dict[str, float]:
    if not held_out:
      return {}
    loss = supervised.mean_nll(
      s.parts.policy,
      params,
      held_out,
      rows=section.rows,
      width=section.width,
      logprob_chunk=config.score.logprob_chunk,
    )
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

  return supervised_run.Stage(
    name="sft",
    model=s.parts.policy,
    start=lambda: warm_start.first_policy(config, s.parts),
    loss_fn=functools.partial(
      supervised.language_model_loss,
      model=s.parts.policy,
      logprob_chunk=config.score.logprob_chunk,
    ),
    items=found["train"].items,
    margins=np.zeros(len(found["train"].items), np.float32),
    evaluate=evaluate,
    seed=(config.seed, 0),
    source=config.load.policy,
    baselines={},
  )


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Runs the stage, from the start or from where it was killed."""
  s = assemble.setup(config, workdir, log=cli.say)
  stage = make_stage(config, s)
  summary = supervised_run.run(
    config, stage, s.parts.tokens, workdir, log=cli.say
  )
  if summary["after"]:
    cli.say(
      "sft: held-out loss"
      f" {summary['before']['loss']:.4f} -> {summary['after']['loss']:.4f} nats"
      f" per token, perplexity {summary['before']['perplexity']:.2f} ->"
      f" {summary['after']['perplexity']:.2f}"
    )
  cli.say(f"{workdir / 'hf'}: the model, {summary['wall_s']:.0f} s")


if __name__ == "__main__":
  stage_command.run(train, "sft")
