# SPDX-License-Identifier: Apache-2.0
"""Programs, graded by running them: 1.0 if all tests of the row pass.

Rows are of MBPP, HumanEval or OpenCoder (`code_rows.py`). Programs run in the
sandbox (`sandbox.py`), in worker threads while other rows decode.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from oppo_jax import sandbox
from oppo_jax.tasks import base, code_rows, lines, rows

OUTCOMES = (*sandbox.OUTCOMES, "empty")  # empty: no program in the response
RULES = ("tests", *(f"code_{name}" for name in OUTCOMES))
DISK_BYTES, OUTPUT_BYTES = 16 << 20, 1 << 20

_FENCE = re.compile(
  r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL
)


def make(
  *,
  train_path: str,
  test_path: str,
  style: str,
  shown_tests: int,
  cpu_s: int,
  wall_s: float,
  memory_mb: int,
  processes: int,
  isolation: str,
  workers: int,
  cache_dir: str | os.PathLike,
) -> base.Task:
  """The task.

  Args:
    train_path: file of rows (`lines.ENDINGS`) for training. Of MBPP the rows of
      its training split are taken.
    test_path: the same for the test split; "" = the file of `train_path`.
    style: "complete" = as a text that goes on, for base models; "ask" = a
      request that is answered in Markdown, for models that chat.
    shown_tests: tests in the prompt (MBPP, OpenCoder), at most; all of them
      grade. A policy that is shown all can learn to write down their answers.
    cpu_s: seconds of CPU time for a program.
    wall_s: seconds for a program and its tests.
    memory_mb: MiB of address space for a process.
    processes: processes and threads of a program.
    isolation: "required" = refuse to run programs without what namespaces give
      (no network, own processes, no files of the host); "any" = run them as
      well as this system allows.
    workers: threads that grade.
    cache_dir: where the rows' converted form is kept, see `rows.py`.

  Raises:
    ValueError: names the key, or file, line and field.
    FileNotFoundError: names the file.
  """
  for key, value, low in (
    ("shown_tests", shown_tests, 0),
    ("cpu_s", cpu_s, 1),
    ("wall_s", wall_s, 1),
    ("memory_mb", memory_mb, 64),
    ("processes", processes, 1),
    ("workers", workers, 1),
  ):
    if value < low:
      raise ValueError(f"{key}={value}: must be at least {low}")
  for key, value, options in (
    ("style", style, code_rows.STYLES),
    ("isolation", isolation, ("required", "any")),
  ):
    if value not in options:
      raise ValueError(f"{key}={value!r}: not one of {options}")
  paths = {"train": train_path, "test": test_path or train_path}
  for path in paths.values():
    if not pathlib.Path(path).is_file():
      raise FileNotFoundError(f"code: {path!r} is not a file")
  if isolation == "required":
    check_isolation()
  limits = sandbox.Limits(
    cpu_s=cpu_s,
    wall_s=float(wall_s),
    memory_bytes=memory_mb << 20,
    processes=processes,
    disk_bytes=DISK_BYTES,
    output_bytes=OUTPUT_BYTES,
  )

  @functools.cache
  def load() -> dict[str, list[base.Example]]:
    raw = {k: pathlib.Path(path).read_bytes() for k, path in paths.items()}
    found = rows.load(
      "code",
      key=json.dumps([lines.digest(list(raw.values())), style, shown_tests]),
      fields=("prompt", "answer", "solution"),
      make_rows=lambda: code_rows.read_splits(
        raw, paths, style=style, shown_tests=shown_tests
      ),
      data_dir=cache_dir,
    )
    return {k: [base.Example(**row) for row in v] for k, v in found.items()}

  def prompts(split: str) -> Sequence[base.Example]:
    base.check_split(split)
    return load()[split]

  grade_within = functools.partial(grade, limits=limits)
  return base.Task(
    "code",
    prompts,
    reward=lambda example, response: grade_within(example, response)["rule"],
    terse=None,
    corrupt=None,
    grade=grade_within,
    rules=RULES,
    workers=workers,
  )


def check_isolation() -> None:
  """Raises ValueError if programs could reach what they should not."""
  lacking = [x for x in sandbox.GRANTS if x not in sandbox.granted()]
  if lacking:
    raise ValueError(
      f"isolation='required': this system cannot keep programs from its"
      f" {', '.join(lacking)} (see sandbox.py); 'any' runs them all the same"
    )


def grade(
  example: base.Example, response: str, *, limits: sandbox.Limits
) -> dict[str, float]:
  """Runs the response's program: "rule", and `RULES`.

  "tests" is the share of tests that pass, and one of "code_..." is 1.0.
  """
  trial = json.loads(example.answer)
  program = program_of(trial, response)
  outcome, passed = "empty", 0
  if program:
    result = sandbox.run(
      program,
      trial["tests"],
      names=trial["names"],
      preamble=trial["preamble"],
      setup=trial["setup"],
      limits=limits,
    )
    outcome, passed = result.outcome, result.passed
  return {
    "rule": float(outcome == "passed"),
    "tests": passed / len(trial["tests"]),
    **{f"code_{name}": float(name == outcome) for name in OUTCOMES},
  }


def program_of(trial: dict[str, Any], response: str) -> str:
  """The program in a response; "" if there is none.

  Of fenced blocks, the last that defines what is asked for, else the last; an
  open fence reaches to the end. Without a fence, all up to "[DONE]". Where a
  head is to be completed (HumanEval) and the program does not begin anew, it
  follows the head, as far as its lines are indented.
  """
  names, head = trial["names"], trial["head"]
  blocks = _FENCE.findall(response)
  defining = [code for code in blocks if code_rows.defines(code, names)]
  code = (
    defining or blocks or [response.partition(code_rows.BEGIN)[2] or response]
  )[-1]
  code = code.partition(code_rows.DONE.strip())[0].rstrip()
  if not code.strip() or not head:
    return code.strip("\n")
  if code_rows.defines(code, names):
    # What the head has before the function: imports and other functions.
    return head[: code_rows.definition(names[0]).search(head).start()] + code
  body = re.match(r"(?:[ \t]+[^\n]*|[ \t]*(?:\n|\Z))*", code)[0]
  return head + body if body.strip() else ""
