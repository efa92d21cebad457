# SPDX-License-Identifier: Apache-2.0
"""What a backward pass keeps of a layer, and what it computes again.

`model.remat` is one of:

  none       keeps every activation
  layer      keeps what enters a layer (Chen et al. 2016, arXiv 1604.06174)
  attention  keeps two more of the same size: what attention gives, before its
             output projection, and the residual stream after it; then the
             MLP's half is recomputed without attention's
"""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

CHOICES = ("none", "layer", "attention")


def wrap(block: type[nn.Module], choice: str) -> type[nn.Module]:
  """The layer's module, recomputed in the backward pass as `choice` says."""
  match choice:
    case "none":
      return block
    case "layer":
      return nn.remat(block)
    case "attention":
      policy = jax.checkpoint_policies.save_only_these_names("attention")
      return nn.remat(block, policy=policy)
    case _:
      raise ValueError(f"remat={choice!r}: not in {CHOICES}")


def keep(x: jax.Array) -> jax.Array:
  """Marks what `attention` keeps; x itself."""
  return checkpoint_name(x, "attention")
