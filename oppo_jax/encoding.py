# SPDX-License-Identifier: Apache-2.0
"""Demonstrations and preference pairs of a task, as token ids.

A text is a prompt as the policy is given it, then a response and an EOS. One
that is too long is left out, or its response is cut: then it has no EOS, as a
response that PPO cuts at its limit has none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oppo_jax import stream, tokenizer
from oppo_jax.tasks import base
from oppo_jax.texts import Text

LONG_RESPONSES = ("skip", "truncate")


class Encoded(NamedTuple):
  """What a supervised stage learns from.

  Attributes:
    items: one text each, or the two of a pair.
    rows: where each came from in what was given.
    num_long: left out, or cut, as too long.
    num_tied: pairs left out, as both sides read the same.
  """

  items: list[tuple[Text, ...]]
  rows: np.ndarray
  num_long: int
  num_tied: int


class Limits(NamedTuple):
  """What fits.

  Attributes:
    max_prompt_len: tokens.
    long_prompts: see `stream.encode_prompts`.
    max_len: tokens of prompt and response.
    long_responses: "skip" or "truncate".
  """

  max_prompt_len: int
  long_prompts: str
  max_len: int
  long_responses: str


def text(prompt: np.ndarray, response: Sequence[int]) -> Text:
  """A training text; `response` ends in its EOS, if it has one."""
  response = np.asarray(response, np.int32)
  return Text(np.concatenate([prompt, response]), len(prompt))


def demonstrations(
  examples: Sequence[base.Example],
  tokens: tokenizer.Tokenizer,
  limits: Limits,
) -> Encoded:
  """Prompts with their solutions; examples without one are left out."""
  rows = [i for i, example in enumerate(examples) if example.solution]
  return _encode(
    [examples[i] for i in rows],
    lambda example: (example.solution,),
    np.asarray(rows, np.int64),
    tokens,
    limits,
  )


def preferences(
  pairs: Sequence[base.Pair], tokens: tokenizer.Tokenizer, limits: Limits
) -> Encoded:
  """(chosen, rejected) to the same prompt; pairs without a difference are left
  out, also where cutting leaves none."""
  return _encode(
    pairs,
    lambda pair: (pair.chosen, pair.rejected),
    np.arange(len(pairs)),
    tokens,
    limits,
  )


def _encode(asked, responses_of, rows, tokens, limits) -> Encoded:
  """Texts of rows that have a prompt, and one or more responses to it."""
  items, kept, num_tied = [], [], 0
  if not len(asked):
    return Encoded([], rows, 0, 0)
  prompts = stream.encode_prompts(
    asked,
    tokens,
    max_prompt_len=limits.max_prompt_len,
    long_prompts=limits.long_prompts,
  )
  num_long = len(asked) - len(prompts.rows)
  for prompt, row in zip(prompts.tokens, prompts.rows):
    room = limits.max_len - len(prompt)
    said = [
      [*tokens.encode(response), tokens.eos_id]
      for response in responses_of(asked[row])
    ]
    if max(map(len, said)) > room:
      num_long += 1
      if limits.long_responses == "skip" or room < 1:
        continue
      said = [response[:room] for response in said]
    if len(said) > 1 and said[0] == said[1]:
      num_tied += 1
      continue
    items.append(tuple(text(prompt, response) for response in said))
    kept.append(rows[row])
  return Encoded(items, np.asarray(kept, np.int64), num_long, num_tied)
