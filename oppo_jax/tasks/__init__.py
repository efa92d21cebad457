# SPDX-License-Identifier: Apache-2.0
"""Tasks by name. A new one is one file and one line here."""

from oppo_jax.tasks import (
  arithmetic,
  base,
  code,
  gsm8k,
  jsonl,
  stack_exchange,
  stories,
)

TASKS = {
  "arithmetic": arithmetic.make,
  "code": code.make,
  "gsm8k": gsm8k.make,
  "jsonl": jsonl.make,
  "stack_exchange": stack_exchange.make,
  "stories": stories.make,
}


def make(name: str, **kwargs) -> base.Task:
  """The task called `name`.

  Raises:
    ValueError: no such task, a missing key, or one that it does not know.
  """
  if name not in TASKS:
    raise ValueError(f"task_name={name!r}: not one of {sorted(TASKS)}")
  try:
    return TASKS[name](**kwargs)
  except TypeError as e:
    raise ValueError(f"task {name!r}: {e}") from e
