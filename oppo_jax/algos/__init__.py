# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name: one file each, one line here."""

from typing import Any

from oppo_jax.algos import base, ppo

# A file has `make` and `SCHEMA` (the keys of config.algo).
ALGOS = {"ppo": ppo}


def make(name: str, *args: Any, **kwargs: Any) -> base.Algorithm:
  """Makes the algorithm called `name`; arguments as of its own `make`."""
  if name not in ALGOS:
    raise ValueError(f"algorithm {name!r}: not in {sorted(ALGOS)}")
  return ALGOS[name].make(*args, **kwargs)
