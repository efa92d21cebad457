# SPDX-License-Identifier: Apache-2.0
"""A reward model with a tokenizer of its own: it reads text, not token ids.

  batch -> prompts and responses as text -> its ids -> one forward pass

Nothing of this can be streamed: a response is text once it is complete. Every
call has the same shape, so a row's score does not depend on its neighbors.
"""

from collections.abc import Callable, Sequence

import numpy as np

from oppo_jax import hf, one_shot, tokenizer, types
from oppo_jax.models import base

# (parameters, prompts, responses, which ended) -> scores [B]
Rescore = Callable[
  [types.Params, Sequence[str], Sequence[str], Sequence[bool]], np.ndarray
]


def encode(
  tokens: tokenizer.Tokenizer, prompt: str, response: str, *, has_eos: bool
) -> list[int]:
  """A finished text as the reward model reads it: its template, or its EOS.

  Its own template closes an answer; in plain text the EOS does, if the policy
  has said one.
  """
  if tokens.system is not None:
    return tokens.encode(tokens.chat(prompt, response))
  ids = tokens.encode_prompt(prompt + response)
  return [*ids, tokens.eos_id] if has_eos else ids


def make(
  model: base.Model,
  tokens: tokenizer.Tokenizer,
  *,
  width: int,
  chunk: int,
) -> Rescore:
  """Scores of texts.

  Args:
    model: with the "scalar" head.
    tokens: of the reward model, `in_chat` where the policy is.
    width: tokens of a row, which is cut on the left if it has more.
    chunk: see `one_shot.outputs`.
  """

  def rescore(params, prompts, responses, has_eos):
    rows = [
      encode(tokens, prompt, response, has_eos=bool(ended))[-width:]
      for prompt, response, ended in zip(prompts, responses, has_eos)
    ]
    length = np.array([max(len(row), 1) for row in rows], np.int32)
    padded = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
      padded[i, : len(row)] = row
    said = one_shot.outputs(model, params, padded, length, chunk=chunk)
    return said[np.arange(len(rows)), length - 1]

  return rescore


def load(
  folder: str,
  model: base.Model,
  *,
  row_len: int,
  chunk: int,
  system: str | None,
) -> Rescore:
  """`make` for a folder, with room for twice the tokens of the policy's row.

  Args:
    folder: of the reward model, with its tokenizer.
    model: of that folder.
    row_len: L of the policy.
    chunk: see `one_shot.outputs`.
    system: see `tokenizer.Tokenizer`.

  Raises:
    ValueError: there is no tokenizer in the folder, one that the embedding is
      too small for, or no chat template.
    OSError: a file is missing.
  """
  if tokenizer.vocabulary(folder) is None:
    raise ValueError("holds no tokenizer to read text with")
  tokens = tokenizer.load(folder)
  if tokens.vocab_size > model.vocab_size:
    raise ValueError(
      f"its tokenizer has {tokens.vocab_size} ids, its embedding"
      f" {model.vocab_size} rows"
    )
  if system is not None:
    tokens = tokens.in_chat(system)
    tokens.chat("", "")
  longest = hf.longest(folder, model)
  width = min(2 * row_len, longest) if longest else 2 * row_len
  return make(model, tokens, width=width, chunk=chunk)
