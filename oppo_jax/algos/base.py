# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is to the rest of the package."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from oppo_jax import types

SCORERS = ("critic", "reference", "reward", "policy")
Metrics = dict[str, jax.Array]  # float32 scalars


class Algorithm(NamedTuple):
  """Three pure functions, and the two hooks that reshape the pipeline.

  Attributes:
    scorers: of `SCORERS`, what is streamed over the rows in flight. "policy"
      fills `Batch.start_logprobs`, the others the fields of their names.
    group_size: responses to one prompt that must be harvested together.
    init: `init(params)` -> `TrainState`. Parameters are float32 masters.
    update: `update(state, batch, packing)` -> state, metrics. Not jitted; all
      shapes are static; `state` may be donated.
    gradients: of the same arguments: those of the first minibatch, before
      clipping, as a tree like `state.params`. What `update` does first; proofs
      look at it.
  """

  scorers: frozenset[str]
  group_size: int
  init: Callable[[types.Params], types.TrainState]
  update: Callable[
    [types.TrainState, types.Batch, types.Packing],
    tuple[types.TrainState, Metrics],
  ]
  gradients: Callable[
    [types.TrainState, types.Batch, types.Packing], types.Params
  ]
