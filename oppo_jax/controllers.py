# SPDX-License-Identifier: Apache-2.0
"""The two decisions of a step, delta and chunk size, taken together."""

from typing import Any, NamedTuple

import ml_collections

from oppo_jax import chunking, delta


class Controllers(NamedTuple):
  """State and settings of both rules.

  Attributes:
    delta: what the delta rule remembers.
    chunk: what the chunk rule remembers.
    delta_rule: keywords of `delta.init` and `delta.update`.
    chunk_rule: keywords of `chunking.init` and `chunking.observe`.
  """

  delta: delta.DeltaState
  chunk: chunking.ChunkState
  delta_rule: dict[str, Any]
  chunk_rule: dict[str, Any]

  def decision(self) -> dict[str, int]:
    """Of the coming step: what decisions.jsonl holds, and `replay` reads."""
    return {
      "delta": delta.overcommit(self.delta),
      "chunk_size": chunking.chunk_size(self.chunk),
    }

  def observe(
    self,
    of_delta: delta.StepObservation,
    of_chunk: chunking.ChunkObservation,
  ) -> "Controllers":
    """The controllers of the coming step."""
    return self._replace(
      delta=delta.update(self.delta, of_delta, **self.delta_rule),
      chunk=chunking.observe(self.chunk, of_chunk, **self.chunk_rule),
    )


def make(config: ml_collections.ConfigDict, *, num_steps: int) -> Controllers:
  """From config.overlap; without inter-step overlap delta stays 0.

  Raises:
    ValueError: the log to be replayed is unreadable or too short.
  """
  chunk_rule, delta_rule = config.chunk.to_dict(), config.delta.to_dict()
  if config.inter == "none":
    delta_rule |= dict(kind="fixed", init=0, min=0)
  decisions = []
  if "replay" in (chunk_rule["kind"], delta_rule["kind"]):
    path = config.replay_path
    decisions = chunking.load_decisions(path)
    if len(decisions) < num_steps:
      raise ValueError(
        f"config.overlap.replay_path={path!r}: holds {len(decisions)}"
        f" decisions, num_steps is {num_steps}"
      )
  log_of = lambda rule, key: (
    [d[key] for d in decisions] if rule["kind"] == "replay" else ()
  )
  return Controllers(
    delta.init(**delta_rule, log=log_of(delta_rule, "delta")),
    chunking.init(**chunk_rule, log=log_of(chunk_rule, "chunk_size")),
    delta_rule,
    chunk_rule,
  )
