# SPDX-License-Identifier: Apache-2.0
"""Rows of programming problems: prompt, tests, reference program.

Three kinds, told apart by their fields:

  MBPP (Austin et al. 2021, arXiv 2108.07732)       test_list, text, code
  HumanEval (Chen et al. 2021, arXiv 2107.03374)    test, prompt, entry_point
  OpenCoder's instructions (arXiv 2411.04905)       testcase, instruction, code
"""

import ast
import json
import pathlib
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from oppo_jax.tasks import lines

STYLES = ("complete", "ask")

# MBPP's prompt is that of its paper.
MBPP = (
  "You are an expert Python programmer, and here is your task: {text}"
  " Your code should pass {these}:\n\n{tests}\n"
)
BEGIN, DONE = "[BEGIN]\n", "\n[DONE]"
HUMANEVAL = "Complete this Python function:\n\n```python\n{prompt}```\n"
FENCED = "```python\n{code}\n```"

_RANGES = {"test": (11, 510), "train": (601, 974)}  # of MBPP's task_id


def read_splits(
  raw: dict[str, bytes],
  paths: dict[str, str],
  *,
  style: str,
  shown_tests: int,
) -> dict[str, list[dict[str, str]]]:
  """Rows of both splits.

  Raises:
    ValueError: a broken row; a split without rows; a prompt in both splits.
  """
  found = {}
  for split, content in raw.items():
    kept = [
      to_row(row, where, style=style, shown_tests=shown_tests)
      for where, row in lines.read(content, pathlib.Path(paths[split]))
      if _is_of(row, split)
    ]
    if not kept:
      raise ValueError(f"{paths[split]}: no rows for the {split} split")
    found[split] = kept
  both = {x["prompt"] for x in found["train"]}
  both &= {x["prompt"] for x in found["test"]}
  if both:
    raise ValueError(
      f"{paths['test']}: {len(both)} prompts are in {paths['train']} too, e.g."
      f" {min(both)[:80]!r}"
    )
  return found


def _is_of(row: dict[str, Any], split: str) -> bool:
  """Whether a row belongs to a split; files without splits are of both."""
  if "split" in row:
    return row["split"] == split
  if "test_list" in row and isinstance(row.get("task_id"), int):
    low, high = _RANGES[split]
    return low <= row["task_id"] <= high
  return True


def to_row(
  row: dict[str, Any], where: str, *, style: str, shown_tests: int
) -> dict[str, str]:
  """Prompt, trial (as JSON, in `answer`) and solution of a row of any kind."""
  text = lambda field: lines.text(row, field, where).replace("\r\n", "\n")
  if "test_list" in row or "testcase" in row:
    is_mbpp = "test_list" in row
    tests = list(_tests(row, "test_list" if is_mbpp else "testcase", where))
    code, setup = text("code").strip(), ""
    if is_mbpp:
      setup = str(row.get("test_setup_code") or "").replace("\r\n", "\n")
    names, preamble = _used(code, [*tests, setup], where)
    shown = tests[:shown_tests]
    prompt = text("text" if is_mbpp else "instruction").strip() + "\n"
    if is_mbpp:
      these = "this test" if len(shown) == 1 else "these tests"
      prompt = MBPP.format(
        text=prompt.strip(), these=these, tests="\n".join(shown)
      )
    elif shown:
      prompt += "\n" + "\n".join(shown) + "\n"
    if is_mbpp and not shown:
      prompt = prompt.partition(" Your code should")[0] + "\n"
    trial = dict(names=names, preamble=preamble, setup=setup, head="")
    trial["tests"] = tests
    if style == "complete":
      prompt, solution = prompt + BEGIN, code + DONE
    else:
      solution = FENCED.format(code=code)
  elif "test" in row:
    head, name = text("prompt"), text("entry_point")
    code = text("canonical_solution")
    if not defines(head, [name]):
      raise ValueError(f"{where}: field 'prompt' does not define {name!r}")
    trial = dict(names=[name], preamble=head, setup="", head=head)
    trial["tests"] = [f"{text('test')}\ncheck({name})"]
    prompt, solution = head, code
    if style == "ask":
      prompt = HUMANEVAL.format(prompt=head)
      solution = FENCED.format(code=(head + code).strip())
  else:
    raise ValueError(
      f"{where}: field 'test_list', 'test' or 'testcase' missing"
    )
  return dict(prompt=prompt, answer=json.dumps(trial), solution=solution)


def _tests(row: dict[str, Any], field: str, where: str) -> Iterator[str]:
  """The tests of a row: a list of texts, or one text that reads as such."""
  found = row[field]
  if isinstance(found, str):
    try:
      found = ast.literal_eval(found)
    except (ValueError, SyntaxError) as e:
      raise ValueError(f"{where}: field {field!r} is not a list: {e}") from e
  if not isinstance(found, list) or not found:
    raise ValueError(f"{where}: field {field!r} must be a list of tests")
  for test in found:
    if not isinstance(test, str) or not test.strip():
      raise ValueError(f"{where}: field {field!r}: {test!r} is not a test")
    yield test.strip()


def _used(code: str, tests: Sequence[str], where: str) -> tuple[list[str], str]:
  """What the tests use of the reference program: names, and its imports."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # old escapes: the rows' own business
      parsed = [ast.parse(test) for test in tests]
      defined = ast.parse(code).body
  except SyntaxError as e:
    raise ValueError(f"{where}: code or tests are not Python: {e}") from e
  nodes = [node for tree in parsed for node in ast.walk(tree)]
  used = {node.id for node in nodes if isinstance(node, ast.Name)}
  names, imports = [], []
  for node in defined:
    if isinstance(node, ast.Import | ast.ImportFrom):
      bound = {(a.asname or a.name).partition(".")[0] for a in node.names}
      imports += [ast.unparse(node)] if bound & used else []
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
      names += [node.name] if node.name in used else []
    elif isinstance(node, ast.Assign):
      names += [t.id for t in node.targets if getattr(t, "id", 0) in used]
  return list(dict.fromkeys(names)), "\n".join(imports)


def definition(name: str) -> re.Pattern:
  """Matches where a function, class or variable is defined, at the margin."""
  return re.compile(
    rf"^(?:(?:async )?def|class) {re.escape(name)}\b|^{re.escape(name)} *=",
    re.MULTILINE,
  )


def defines(code: str, names: Sequence[str]) -> bool:
  """Whether one of the names is defined."""
  return any(definition(name).search(code) for name in names)
