# SPDX-License-Identifier: Apache-2.0
"""What the supervised stages learn from: solutions, and pairs (right, wrong).

Of the task's own, where it has some; else the task's worked solutions, spoiled
ones, and what the policy itself says, graded by the task's rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

import ml_collections
import numpy as np

from oppo_jax import (
  encoding,
  flight,
  generation,
  grading,
  keys,
  stream,
  texts,
  tokenizer,
  types,
)
from oppo_jax.models import base as models_base
from oppo_jax.tasks import base as tasks_base

Pair = tuple[texts.Text, texts.Text]

HELD_OUT = 8  # one prompt in this many is kept from the reward model


class Parts(NamedTuple):
  """What the stages work with.

  Attributes:
    task: prompts and the rule that grades.
    tokens: tokenizer.
    prompts: training prompts.
    policy: model with the "lm" head.
    reference: likewise; often the same.
    reward: model with the "scalar" head.
    critic: likewise.
    sampler: `generation.make_fns` at the training temperature.
  """

  task: tasks_base.Task
  tokens: tokenizer.Tokenizer
  prompts: stream.Prompts
  policy: models_base.Model
  reference: models_base.Model
  reward: models_base.Model
  critic: models_base.Model
  sampler: flight.Fns


def limits(
  config: ml_collections.ConfigDict, section: ml_collections.ConfigDict
) -> encoding.Limits:
  """How long a text of this stage may be; longer ones are left out."""
  r = config.rollout
  return encoding.Limits(
    r.max_prompt_len, r.long_prompts, section.width, "skip"
  )


def _text(parts: Parts, i: int, response: Sequence[int]) -> texts.Text:
  return encoding.text(parts.prompts.tokens[i], response)


def solutions(
  config: ml_collections.ConfigDict, parts: Parts
) -> list[tuple[texts.Text]]:
  """The training prompts with their solutions, a share of them terse."""
  examples = parts.task.prompts("train")
  limit = config.rollout.max_response_len
  rng = np.random.default_rng((config.seed, 3))
  is_terse = rng.random(len(parts.prompts.rows)) < config.warm_start.sft.terse
  items = []
  for i, row in enumerate(parts.prompts.rows):
    solution = examples[row].solution
    if is_terse[i]:
      solution = parts.task.terse(examples[row])
    response = [*parts.tokens.encode(solution), parts.tokens.eos_id]
    if solution and len(response) <= limit:
      items.append((_text(parts, i, response),))
  return items


def given_pairs(
  config: ml_collections.ConfigDict, parts: Parts, split: str
) -> list[Pair]:
  """The task's own pairs, of prompts that are in no other split."""
  return encoding.preferences(
    parts.task.pairs(split),
    parts.tokens,
    limits(config, config.warm_start.reward_model),
  ).items


def sampled_pairs(
  config: ml_collections.ConfigDict, parts: Parts, policy: types.Params
) -> list[list[Pair]]:
  """Per prompt, pairs (right, wrong) among the policy's own samples.

  The task's rule tells right from wrong. If all samples of a prompt are wrong,
  its worked solution is the right one; if all are right, it gives no pair.
  """
  section = config.warm_start.reward_model
  examples = parts.task.prompts("train")
  num = min(section.num_prompts, len(parts.prompts.tokens))
  k = section.num_samples
  responses = generation.generate(
    parts.sampler,
    policy,
    [parts.prompts.tokens[i] for i in range(num) for _ in range(k)],
    run_key=keys.named(config.seed, "sample_pairs"),
  )
  asked = [examples[row] for row in parts.prompts.rows[:num]]
  grades = grading.rewards(
    parts.task,
    [example for example in asked for _ in range(k)],
    [parts.tokens.decode(response) for response in responses],
  )
  pairs = []
  for i, example in enumerate(asked):
    sides: dict[bool, dict[tuple[int, ...], None]] = {True: {}, False: {}}
    for j in range(i * k, (i + 1) * k):
      sides[grades[j] >= 1][tuple(responses[j])] = None
    if not sides[True] and example.solution:
      solution = parts.tokens.encode(example.solution)
      sides[True][(*solution, parts.tokens.eos_id)] = None
    pairs.append(
      [
        (_text(parts, i, right), _text(parts, i, wrong))
        for right in sides[True]
        for wrong in sides[False]
      ]
    )
  return pairs


def spoiled_pairs(
  config: ml_collections.ConfigDict, parts: Parts
) -> list[list[Pair]]:
  """Per further prompt, one pair (worked solution, the same with a mistake)."""
  section = config.warm_start.reward_model
  if parts.task.corrupt is None:
    return []
  examples = parts.task.prompts("train")
  rng = np.random.default_rng((config.seed, 1))
  encode = lambda text: [*parts.tokens.encode(text), parts.tokens.eos_id]
  pairs = []
  first = section.num_prompts
  last = min(first + section.num_spoiled, len(parts.prompts.tokens))
  for i in range(first, last):
    example = examples[parts.prompts.rows[i]]
    wrong = parts.task.corrupt(example, rng)
    right_text = _text(parts, i, encode(example.solution))
    pairs.append([(right_text, _text(parts, i, encode(wrong)))])
  return pairs


def made_pairs(
  config: ml_collections.ConfigDict, parts: Parts, policy: types.Params
) -> tuple[list[Pair], list[Pair]]:
  """Pairs for training, sampled and spoiled, and held-out ones, sampled."""
  width = config.warm_start.reward_model.width
  sampled = sampled_pairs(config, parts, policy)
  cut = len(sampled) // HELD_OUT
  fits = lambda pair: all(len(text.tokens) <= width for text in pair)
  flat = lambda groups: [p for group in groups for p in group if fits(p)]
  return (
    flat([*sampled[cut:], *spoiled_pairs(config, parts)]),
    flat(sampled[:cut]),
  )
