# SPDX-License-Identifier: Apache-2.0
r"""A reward model, learned from pairs of responses.

  python -m oppo_jax.reward_model --config=configs/stack_exchange.py:tiny \
      --config.load.policy=runs/sft/hf --workdir=runs/reward_model

Section `reward_model` of the config. Starts from config.load.reward_model; or
from the trunk of config.load.policy with a new head; or from a random model.
The workdir is that of `supervised_run.py`; its folder hf/ is what
--config.load.reward_model of `train` wants.

The accuracy on held-out pairs stands beside that of two rules that read
nothing: the longer response wins; and the rule about length that most training
pairs follow (the majority).
"""

import functools
import pathlib
from collections.abc import Sequence

import ml_collections
import numpy as np

from oppo_jax import (
  assemble,
  cli,
  encoding,
  stage_command,
  supervised,
  supervised_run,
  texts,
  types,
  warm_start,
)
from oppo_jax.tasks import base as tasks_base


def longer_wins(pairs: Sequence[tasks_base.Pair]) -> float:
  """Share of pairs whose chosen text is the longer one; equal ones are half."""
  gaps = np.array([len(p.chosen) - len(p.rejected) for p in pairs])
  return float(np.mean((gaps > 0) + 0.5 * (gaps == 0))) if len(gaps) else 0.5


def baselines(
  train: Sequence[tasks_base.Pair], test: Sequence[tasks_base.Pair]
) -> dict[str, float]:
  """Accuracy on `test` of rules that read nothing, see the module."""
  longer = longer_wins(test)
  majority = longer if longer_wins(train) >= 0.5 else 1 - longer
  return {"num_pairs": len(test), "longer": longer, "majority": majority}


def apart(
  train: Sequence[tasks_base.Pair], test: Sequence[tasks_base.Pair]
) -> list[tasks_base.Pair]:
  """Training pairs whose prompt is not one of the test pairs'."""
  held_out = {pair.prompt for pair in test}
  return [pair for pair in train if pair.prompt not in held_out]


def judge(
  scores: np.ndarray, items: Sequence[tuple[texts.Text, ...]]
) -> dict[str, float]:
  """What scores [N, 2] of (chosen, rejected) are worth.

  Returns:
    accuracy: share of pairs with the chosen response higher; equal ones half.
    loss: -log sigmoid(gap), mean.
    gap, score, spread: mean gap; mean and standard deviation of all scores.
    length: correlation of a score with the number of response tokens.
  """
  scores = scores.astype(np.float64)
  gap = scores[:, 0] - scores[:, 1]
  num = [[len(t.tokens) - t.prompt_len for t in item] for item in items]
  moving = len(scores) > 1 and scores.std() > 0 and np.std(num) > 0
  return {
    "accuracy": float(np.mean((gap > 0) + 0.5 * (gap == 0))),
    "loss": float(np.mean(np.logaddexp(0, -gap))),
    "gap": float(gap.mean()),
    "score": float(scores.mean()),
    "spread": float(scores.std()),
    "length": float(np.corrcoef(scores.ravel(), np.ravel(num))[0, 1])
    if moving
    else 0.0,
  }


def make_stage(
  config: ml_collections.ConfigDict, s: assemble.Setup
) -> supervised_run.Stage:
  """The task's pairs; held out are those of its test split.

  Raises:
    ValueError: the task has none.
  """
  section, task = config.reward_model, s.parts.task
  if task.pairs is None:
    raise ValueError(f"config.task_name={task.name!r}: has no pairs")
  pairs = {"test": task.pairs("test")}
  pairs["train"] = apart(task.pairs("train"), pairs["test"])
  limits = supervised_run.limits(config, section)
  found = {
    split: encoding.preferences(x, s.parts.tokens, limits)
    for split, x in pairs.items()
  }
  for split in ("train", "test"):
    stage_command.say_found("reward_model", split, found[split], "pairs")
  num_eval = section.num_eval or None
  held_out = found["test"].items[:num_eval]
  kept = lambda split: [pairs[split][i] for i in found[split].rows]
  train, test = kept("train"), kept("test")[:num_eval]

  def evaluate(params: types.Params) -> dict[str, float]:
    if not held_out:
      return {}
    scores = supervised.score_pairs(
      s.parts.reward, params, held_out, rows=section.rows, width=section.width
    )
    return judge(scores, held_out)

  return supervised_run.Stage(
    name="reward_model",
    model=s.parts.reward,
    start=lambda: warm_start.first_reward_model(config, s.parts),
    loss_fn=functools.partial(
      supervised.centered_preference_loss,
      model=s.parts.reward,
      margin_coef=section.margin_coef,
      center_coef=section.center_coef,
    ),
    items=found["train"].items,
    margins=np.array([pair.margin for pair in train], np.float32),
    evaluate=evaluate,
    seed=(config.seed, 2),
    source=config.load.reward_model or config.load.policy,
    baselines=baselines(train, test) if test else {},
  )


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Runs the stage, from the start or from where it was killed."""
  s = assemble.setup(config, workdir, log=cli.say)
  stage = make_stage(config, s)
  summary = supervised_run.run(
    config, stage, s.parts.tokens, workdir, log=cli.say
  )
  if rules := summary["baselines"]:
    cli.say(
      f"reward_model: {summary['after']['accuracy']:.1%} of"
      f" {rules['num_pairs']} held-out pairs right; longer wins:"
      f" {rules['longer']:.1%}, majority of the training pairs:"
      f" {rules['majority']:.1%}"
    )
  cli.say(f"{workdir / 'hf'}: the model, {summary['wall_s']:.0f} s")


if __name__ == "__main__":
  stage_command.run(train, "reward_model")
