# SPDX-License-Identifier: Apache-2.0
"""Random keys by what they are for: fold_in(key(seed), purpose).

No key is split, carried and returned; a key is a function of its meaning. Under
"rollout", a token's key is fold_in(fold_in(key, uid), position).
"""

import jax

PURPOSES = (
  "rollout",  # sampling of PPO's responses
  "init_policy",
  "init_reward",
  "init_critic",
  "sample_pairs",  # responses that the reward model learns from
  "held_out",  # sampled evaluation
  "generate",  # the command
)


def named(seed: int, purpose: str) -> jax.Array:
  """The key of one of `PURPOSES`."""
  return jax.random.fold_in(jax.random.key(seed), PURPOSES.index(purpose))
