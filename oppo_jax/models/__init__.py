# SPDX-License-Identifier: Apache-2.0
"""Models by name. A new one is one file and one line here."""

from oppo_jax.models import base, gpt, transformer

# A file has `make`, `SCHEMA` (the keys of config.model) and `conflicts`.
MODELS = {"transformer": transformer, "gpt": gpt}


def make(name: str, **kwargs) -> base.Model:
  """The model called `name`.

  Raises:
    ValueError: no such model, or a key that it does not know.
  """
  if name not in MODELS:
    raise ValueError(f"model_name={name!r}: not one of {sorted(MODELS)}")
  try:
    return MODELS[name].make(**kwargs)
  except TypeError as e:
    raise ValueError(f"model: {e}") from e
