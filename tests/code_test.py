# SPDX-License-Identifier: Apache-2.0
"""Claims about programming problems: reading, finding the program, grading."""

import gzip
import json
import pathlib
import re
import sys

import pytest

from oppo_jax import sandbox, tasks
from oppo_jax.tasks import base, code, code_rows, lines

pytestmark = pytest.mark.skipif(
  sys.platform != "linux", reason="the sandbox runs on Linux"
)
DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
FILES = [DATA / name / f"{name}.jsonl.gz" for name in ("mbpp", "humaneval")]
needs_data = pytest.mark.skipif(
  not all(path.is_file() for path in FILES),
  reason="the files of MBPP and HumanEval are not on this machine",
)
LIMITS = sandbox.Limits(20, 60.0, 512 << 20, 8, 1 << 20, 1 << 20)

MBPP = {
  "task_id": 601,
  "text": "Write a function to double a number.",
  "code": "import math\r\ndef double(x):\r\n  return 2 * x",
  "test_setup_code": "",
  "test_list": ["assert double(2) == 4", "assert double(-1) == -2"],
}
HUMANEVAL = {
  "task_id": "HumanEval/0",
  "prompt": "import math\n\n\ndef double(x):\n    '''Twice x.'''\n",
  "entry_point": "double",
  "canonical_solution": "    y = 2 * x\n\n    return y\n",
  "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}
OPENCODER = {
  "instruction": "Double a number.",
  "code": "def double(x):\n  return 2 * x",
  "entry_point": "double",
  "testcase": "['assert double(2) == 4']",
}


def example(row=MBPP, style="complete", shown_tests=1):
  row = code_rows.to_row(row, "here", style=style, shown_tests=shown_tests)
  return base.Example(**row)


def grade(x, response):
  return code.grade(x, response, limits=LIMITS)


def make(folder, train=(MBPP,), test=None, **kwargs):
  kwargs = (
    dict(
      train_path=str(folder / "train.jsonl"),
      test_path="" if test is None else str(folder / "test.jsonl"),
      style="complete",
      shown_tests=1,
      cpu_s=20,
      wall_s=60.0,
      memory_mb=512,
      processes=8,
      isolation="any",
      workers=2,
      cache_dir=folder / "cache",
    )
    | kwargs
  )
  for name, rows in (("train", train), ("test", test)):
    if rows is not None:
      text = "".join(json.dumps(row) + "\n" for row in rows)
      (folder / f"{name}.jsonl").write_text(text)
  return tasks.make("code", **kwargs)


# Rows.


def test_a_row_of_mbpp_shows_as_many_tests_as_it_may():
  x = example()
  assert x.prompt == (
    "You are an expert Python programmer, and here is your task: Write a"
    " function to double a number. Your code should pass this test:\n\n"
    "assert double(2) == 4\n[BEGIN]\n"
  )
  assert x.solution == "import math\ndef double(x):\n  return 2 * x\n[DONE]"
  assert "double(-1)" in example(shown_tests=3).prompt
  assert "assert" not in example(shown_tests=0).prompt
  trial = json.loads(x.answer)
  assert trial["names"] == ["double"]
  assert trial["preamble"] == ""  # the tests do not use math
  assert trial["tests"] == MBPP["test_list"]


def test_in_a_chat_the_solution_is_fenced():
  x = example(style="ask")
  assert "[BEGIN]" not in x.prompt
  assert (
    x.solution == "```python\nimport math\ndef double(x):\n  return 2 * x\n```"
  )
  x = example(HUMANEVAL, style="ask")
  assert f"```python\n{HUMANEVAL['prompt']}```" in x.prompt
  assert x.solution.startswith("```python\nimport math\n\n\ndef double")


@pytest.mark.parametrize("row", [MBPP, HUMANEVAL, OPENCODER])
@pytest.mark.parametrize("style", code_rows.STYLES)
def test_every_kind_of_row_is_passed_by_its_own_program(row, style):
  x = example(row, style)
  assert grade(x, x.solution)["rule"] == 1.0
  wrong = x.solution.replace("2 * x", "3 * x")
  got = grade(x, wrong)
  assert got["rule"] == 0.0
  assert got["code_wrong"] == 1.0


BROKEN = {
  "no tests": (MBPP | {"test_list": []}, "field 'test_list' must be a list"),
  "a number as test": (MBPP | {"test_list": [3]}, "3 is not a test"),
  "no code": ({"test_list": ["assert f()"]}, "field 'code' is missing"),
  "no Python": (MBPP | {"code": "def f(:"}, "code or tests are not Python"),
  "not a list": (OPENCODER | {"testcase": "[1"}, "'testcase' is not a list"),
  "other name": (HUMANEVAL | {"entry_point": "g"}, "does not define 'g'"),
  "unknown kind": ({"question": "?"}, "'test_list', 'test' or 'testcase'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_named(name, tmp_path):
  row, message = BROKEN[name]
  row = row | {"split": "test"}
  with pytest.raises(ValueError, match=r"test\.jsonl, line 2: .*" + message):
    make(tmp_path, test=[HUMANEVAL, row]).prompts("test")


def test_splits_are_the_published_ones_and_do_not_meet(tmp_path):
  number = lambda i, n: MBPP | {"task_id": i, "text": f"Task {n}."}
  train = [number(601, 1), number(974, 2), number(510, 3), number(511, 4)]
  task = make(tmp_path, train)
  which = lambda split: [
    re.search("Task (.)", e.prompt)[1] for e in task.prompts(split)
  ]
  assert which("train") == ["1", "2"]
  assert which("test") == ["3"]
  with pytest.raises(ValueError, match="no rows for the test split"):
    make(tmp_path, train[:2]).prompts("test")
  with pytest.raises(ValueError, match=r"test.jsonl: 1 prompts are in .*train"):
    make(tmp_path, [HUMANEVAL], [HUMANEVAL]).prompts("test")


def test_a_bad_key_is_named(tmp_path):
  for key, value in (
    ("style", "chat"),
    ("isolation", "some"),
    ("workers", 0),
    ("wall_s", 0.0),
  ):
    with pytest.raises(ValueError, match=f"^{key}={value!r}: "):
      make(tmp_path, **{key: value})
  with pytest.raises(FileNotFoundError, match="code: 'nowhere' is not a file"):
    make(tmp_path, train_path="nowhere")


def test_programs_do_not_run_where_they_cannot_be_kept_apart(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(sandbox, "granted", lambda: ("processes",))
  with pytest.raises(ValueError, match="programs from its network, files"):
    make(tmp_path, isolation="required")
  make(tmp_path, isolation="any")


# Programs.

DEFINES = "def double(x):\n  return 2 * x"


@pytest.mark.parametrize(
  ("response", "program"),
  [
    (DEFINES, DEFINES),
    (f"[BEGIN]\n{DEFINES}\n[DONE]\nand so on", DEFINES),
    (f"Sure:\n```python\n{DEFINES}\n```\nDone.", DEFINES),
    (f"```\n{DEFINES}", DEFINES),  # cut at the length limit
    (f"```\n{DEFINES}\n```\nUse:\n```\ndouble(2)\n```", DEFINES),
    (f"```\nx = 1\n```\n```python\n{DEFINES}\n```", DEFINES),
    ("```python\nx = 1\n```\n```\ny = 2\n```", "y = 2"),
    (f"  ```python\n{DEFINES}\n  ```", DEFINES),
    ("", ""),
    ("\n \n", ""),
    ("```python\n```", ""),
  ],
)
def test_the_program_of_a_response(response, program):
  trial = json.loads(example().answer)
  assert code.program_of(trial, response) == program


@pytest.mark.parametrize(
  ("response", "program"),
  [
    ("    return 2 * x\n", "{head}    return 2 * x"),
    ("    return 2 * x\n\n\nprint(double(2))", "{head}    return 2 * x\n\n\n"),
    ("```python\n    return 2 * x\n```", "{head}    return 2 * x"),
    (f"```python\n{DEFINES}\n```", "import math\n\n\n" + DEFINES),
    ("return 2 * x", ""),  # not in the function
    ("", ""),
  ],
)
def test_a_program_completes_a_head_or_begins_anew(response, program):
  trial = json.loads(example(HUMANEVAL).answer)
  expected = program.format(head=HUMANEVAL["prompt"])
  assert code.program_of(trial, response) == expected


def test_what_a_response_gets():
  x = example()
  half = grade(x, "def double(x): return 4")
  assert (half["rule"], half["tests"]) == (0.0, 0.5)
  assert half["code_wrong"] == 1.0
  assert grade(x, "def double(x): return y")["code_crash"] == 1.0
  assert grade(x, "def double(x: return 4")["code_crash"] == 1.0
  empty = grade(x, "")
  assert (empty["tests"], empty["code_empty"]) == (0.0, 1.0)
  for got in (half, empty):
    assert set(got) == {"rule", *code.RULES}
    assert sum(got[f"code_{name}"] for name in code.OUTCOMES) == 1.0


# Real rows.


@needs_data
def test_reference_programs_pass():
  """One in 16 here; `benchmarks.sandbox --references` runs all of them."""
  for path, count in zip(FILES, (724, 82)):
    found = list(lines.read(path.read_bytes(), path))
    assert len(found) == count
    odd = [
      row for _, row in found if row["task_id"] in (126, 533, 596, 601, 927)
    ]
    for row in [row for _, row in found[::16]] + odd:
      if row["task_id"] != 123:  # takes 5 s
        x = example(row)
        assert grade(x, x.solution)["rule"] == 1.0, row["task_id"]


@needs_data
def test_the_real_rows_are_all_there(tmp_path):
  mbpp, humaneval = map(str, FILES)
  task = make(tmp_path, None, train_path=mbpp)
  assert [len(task.prompts(s)) for s in base.SPLITS] == [374, 250]
  task = make(tmp_path, None, train_path=mbpp, test_path=humaneval)
  assert [len(task.prompts(s)) for s in base.SPLITS] == [374, 82]
  with gzip.open(FILES[1], "rt") as f:
    first = json.loads(f.readline())
  assert task.prompts("test")[0].prompt == first["prompt"]
