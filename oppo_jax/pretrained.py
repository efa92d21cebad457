# SPDX-License-Identifier: Apache-2.0
"""The four models of a run, and those of them that come from folders.

  policy      decodes, is trained     Llama, Qwen2, GPT-2, ...
  reference   frozen                  the policy's own, or any language model
  reward      frozen                  *ForSequenceClassification
  critic      trained                 like the reward model or like the policy

Each may be of another family and size, but all read the same token ids. What
does not fit ends a run before any weight is read.
"""

from collections.abc import Callable
from typing import NamedTuple

from oppo_jax.models import base as models_base

MakeModel = Callable[[str], models_base.Model]  # of a head: "lm", "scalar"


class Models(NamedTuple):
  """What a run computes with.

  Attributes:
    policy: with the "lm" head.
    reference: likewise.
    reward: with the "scalar" head.
    critic: likewise.
  """

  policy: models_base.Model
  reference: models_base.Model
  reward: models_base.Model
  critic: models_base.Model


def alike(make: MakeModel) -> Models:
  """Four models of one size, two of them with the other head."""
  policy, scalar = make("lm"), make("scalar")
  return Models(policy, policy, scalar, scalar)
