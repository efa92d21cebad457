# SPDX-License-Identifier: Apache-2.0
"""Samples responses to a list of prompts, and grades them with the task's rule.

Uses the same loop as training, without scorers: half of the slots are harvested
at a time while the other half goes on, so long rows hold nobody up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from oppo_jax import (
  decode,
  flight,
  grading,
  jit_table,
  metrics,
  overlap,
  score,
  tokenizer,
  types,
)
from oppo_jax.models import base as models_base
from oppo_jax.tasks import base as tasks_base

CHUNK_SIZE = 32  # ticks; changes no result


class Accuracy(NamedTuple):
  """What an evaluation found.

  Attributes:
    accuracy: mean rule-based reward, in [0, 1].
    mean_len: tokens per response.
    truncated: share of responses cut at the length limit.
  """

  accuracy: float
  mean_len: float
  truncated: float


def make_fns(
  policy: models_base.Model,
  *,
  sampling: decode.Sampling,
  num_slots: int,
  max_prompt_len: int,
  tile: score.Tile,
  decode_loop: str,
  decode_rows: int,
) -> flight.Fns:
  """The loop's functions for generation alone."""
  return jit_table.make_fns(
    sizes=flight.Sizes(
      num_slots=num_slots,
      batch_size=num_slots // 2,
      group_size=1,
      max_prompt_len=max_prompt_len,
      row_len=max_prompt_len + sampling.max_response_len,
      max_staleness=-1,
      tile=tile,
      decode_loop=decode_loop,
      decode_rows=decode_rows,
      restarts=False,
      keep_policy_cache=True,
      keep_critic_cache=True,
      speculates=False,
    ),
    sampling=sampling,
    policy=policy,
    scorers={},
    algorithm=None,
  )


def generate(
  fns: flight.Fns,
  params: types.Params,
  prompts: Sequence[np.ndarray],
  *,
  run_key: jax.Array,
) -> list[np.ndarray]:
  """Responses (token ids, EOS included), in the order of the prompts.

  The response to prompt i is drawn with uid i: it depends on nothing but
  (run_key, i, params).

  Args:
    fns: of `make_fns`.
    params: policy parameters.
    prompts: token ids.
    run_key: key of the sampling.
  """
  # Rows that fill up the last harvest end with their first token.
  filler = flight.Prompt(np.asarray(prompts[0]), 1)
  prompt_of = lambda uid: (
    flight.Prompt(np.asarray(prompts[uid]), 0) if uid < len(prompts) else filler
  )
  params = {"policy": fns.cast(params)}
  state = flight.init(fns)
  responses: dict[int, np.ndarray] = {}
  while len(responses) < len(prompts):
    state = flight.admit(
      fns,
      state,
      num_in_flight=fns.sizes.num_slots,
      prompt_of=prompt_of,
      version=0,
    )
    state, batch, _ = overlap.rollout(
      fns,
      state,
      params,
      version=0,
      run_key=run_key,
      chunk_size=CHUNK_SIZE,
      intra="none",
      timers=metrics.Timers(),
    )
    seen = metrics.fetch(
      {"uid": batch.uid, "text": batch.responses, "n": batch.response_len}
    )
    for uid, text, n in zip(seen["uid"], seen["text"], seen["n"]):
      if uid < len(prompts):
        responses[int(uid)] = text[:n]
  return [responses[i] for i in range(len(prompts))]


def grade(
  task: tasks_base.Task,
  examples: Sequence[tasks_base.Example],
  responses: Sequence[np.ndarray],
  *,
  tokens: tokenizer.Tokenizer,
  max_response_len: int,
) -> Accuracy:
  """Mean rule-based reward of the responses, with length statistics."""
  texts = [tokens.decode(r.tolist()) for r in responses]
  rewards = grading.rewards(task, examples, texts)
  lengths = np.array([len(r) for r in responses])
  ended = np.array([r[-1] in tokens.eos_ids for r in responses])
  return Accuracy(
    accuracy=float(np.mean(rewards)),
    mean_len=float(lengths.mean()),
    truncated=float(np.mean((lengths == max_response_len) & ~ended)),
  )
