# SPDX-License-Identifier: Apache-2.0
"""Published model families: what their configs and tensors are called here.

A family is data: a table of tensors, and functions that translate sizes and
choices from its config.json and back. No weights are read here. A new one is a
few lines in a file, and FAMILIES.
"""

from collections.abc import Iterable
from typing import Any

from oppo_jax.families import base, gpt, llama
from oppo_jax.models import gpt as gpt_model
from oppo_jax.models import transformer

FAMILIES: dict[str, base.Family] = llama.FAMILIES | gpt.FAMILIES


def fitting(config: Any) -> str:
  """The first model_type that can state our model's config.

  Raises:
    ValueError: none can.
  """
  kinds = {gpt_model.Config: "gpt", transformer.Config: "transformer"}
  kind = kinds.get(type(config))
  for model_type, family in FAMILIES.items():
    if family.model == kind and family.fits(config):
      return model_type
  raise ValueError(f"no published family is like {config}")


def expand(
  family: base.Family, paths: Iterable[str], *, num_layers: int, is_lm: bool
) -> dict[str, base.Row]:
  """Their full names -> the rows of the tensors that a model has.

  Args:
    family: whose names.
    paths: of the leaves of our tree, such as "layer_0.attention.q.kernel".
    num_layers: N.
    is_lm: the head is an LM head, else it gives one number.
  """
  rows = [
    base.Row(
      family.prefix + row.theirs.format(i=i),
      f"layer_{i}.{row.ours}" if "{i}" in row.theirs else row.ours,
      row.layout,
    )
    for row in family.rows
    for i in range(num_layers if "{i}" in row.theirs else 1)
  ]
  rows.append(
    base.Row(family.head if is_lm else base.SCORE, "out", "transposed")
  )
  known = set(paths)
  return {row.theirs: row for row in rows if row.ours in known}
