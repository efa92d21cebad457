# SPDX-License-Identifier: Apache-2.0
"""Claims about GSM8K: reading, formatting, grading."""

import gzip
import json
import pathlib
from fractions import Fraction

import pytest

from oppo_jax import tasks
from oppo_jax.tasks import base, gsm8k

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
needs_data = pytest.mark.skipif(
  not DATA.is_dir(), reason="the GSM8K files are not on this machine"
)

GOOD = {"question": " How many? ", "answer": "1+1=<<1+1=2>>2\n#### 1,002"}


def write(folder, train=None, test=None):
  for split, lines in (("train", train), ("test", test)):
    lines = [json.dumps(GOOD)] if lines is None else lines
    (folder / f"{split}.jsonl").write_bytes(
      b"".join(x if isinstance(x, bytes) else x.encode() + b"\n" for x in lines)
    )


def make(folder):
  return tasks.make(
    "gsm8k", data_dir=folder / "source", cache_dir=folder / "cache"
  )


@pytest.fixture
def folder(tmp_path):
  (tmp_path / "source").mkdir()
  return tmp_path


def test_a_row_becomes_prompt_answer_and_plain_solution(folder):
  write(folder / "source")
  (example,) = make(folder).prompts("train")
  assert example == base.Example(
    prompt="Question: How many?\nAnswer:",
    answer="1002",
    solution=" 1+1=2\n#### 1,002",
  )
  assert make(folder).reward(example, example.solution) == 1.0


def test_braces_in_a_question_are_text():
  question = "{answer} {0} {"
  assert question in gsm8k.example(question, "#### 1").prompt


def test_gzip_and_plain_files_give_the_same_rows(folder):
  write(folder / "source")
  plain = make(folder).prompts("test")
  for split in base.SPLITS:
    path = folder / "source" / f"{split}.jsonl"
    with gzip.open(f"{path}.gz", "wb") as f:
      f.write(path.read_bytes())
    path.unlink()
  assert make(folder).prompts("test") == plain


def test_an_edited_file_is_read_again(folder):
  write(folder / "source")
  before = make(folder).prompts("train")
  edited = json.dumps(GOOD | {"question": "How few?"})
  write(folder / "source", train=["", json.dumps(GOOD), edited])
  after = make(folder).prompts("train")
  assert [e.prompt for e in after] == [
    before[0].prompt,
    "Question: How few?\nAnswer:",
  ]


BROKEN = {
  "cut short": (json.dumps(GOOD)[:20], "line 2: not JSON"),
  "not UTF-8": (b'{"question": "\xff"}\n', "line 2: not JSON"),
  "a list": ("[1, 2]", "line 2: not an object"),
  "no answer": ('{"question": "q"}', "line 2: field 'answer' is missing"),
  "no question": ('{"answer": "#### 1"}', "line 2: field 'question' is miss"),
  "a number": (
    json.dumps(GOOD | {"answer": 3}),
    "line 2: field 'answer' must be text, got 3",
  ),
  "empty": (
    json.dumps(GOOD | {"question": " "}),
    "line 2: field 'question' must be text",
  ),
  "lone surrogate": (
    json.dumps(GOOD | {"question": "\ud800"}),
    "line 2: field 'question' is not Unicode",
  ),
  "no number": (
    json.dumps(GOOD | {"answer": "two\n#### two"}),
    "line 2: field 'answer' does not end on",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_named_and_nothing_is_written(folder, name):
  line, message = BROKEN[name]
  write(folder / "source", test=[json.dumps(GOOD), line])
  with pytest.raises(ValueError, match=message) as error:
    make(folder).prompts("train")
  assert str(folder / "source" / "test.jsonl") in str(error.value)
  assert not list(folder.glob("cache/**/*.array_record*"))
  assert not list(folder.glob("cache/**/incomplete*"))


def test_a_broken_file_is_named(folder):
  write(folder / "source")
  (folder / "source" / "test.jsonl").write_bytes(b"\n")
  with pytest.raises(ValueError, match="test.jsonl: no rows"):
    make(folder).prompts("train")
  (folder / "source" / "test.jsonl").unlink()
  with pytest.raises(FileNotFoundError, match="no test.jsonl or test.jsonl.gz"):
    make(folder)
  packed = folder / "source" / "test.jsonl.gz"
  whole = gzip.compress(json.dumps(GOOD).encode() * 100)
  for raw in (b"plain", whole[:-20], whole[:20] + b"\0" * 9 + whole[29:]):
    packed.write_bytes(raw)
    with pytest.raises(ValueError, match="test.jsonl.gz: not a whole gzip"):
      make(folder).prompts("train")
  with pytest.raises(FileNotFoundError, match="nowhere"):
    tasks.make("gsm8k", data_dir=folder / "nowhere", cache_dir=folder)


def test_a_bad_key_is_named(folder):
  with pytest.raises(ValueError, match="catche_dir"):
    tasks.make("gsm8k", data_dir=folder, catche_dir=folder)


@pytest.mark.parametrize(
  ("text", "number"),
  [
    ("#### 18", 18),
    ("4 + 5\n#### 18\n", 18),
    ("####18", 18),
    ("#### -3", -3),
    ("#### $1,234.50", Fraction(2469, 2)),
    ("#### -$5", -5),
    ("#### $-5", -5),
    ("#### 25%", 25),
    ("#### 18.", 18),
    ("#### 18.00", 18),
    ("#### .5", Fraction(1, 2)),
    ("#### 1/2", Fraction(1, 2)),
    ("#### 1/0", None),
    ("#### 18 days of 7", 18),  # The first number after the mark,
    ("#### 18\n#### 19", 19),  # of the last mark,
    ("A: 4\nQuestion: 5?\n#### 6", 6),  # of either kind.
    ("18\n#### none", None),
    ("so 3.\nA: 18\nin 2 days", 18),
    ("so 3.\nA: 1,800", 1800),
    ("VISA: 4 and then 5", 5),  # Not a mark inside a line.
    ("She has 16-13", 13),  # Without a mark the last number;
    ("It is \u22125 degrees", -5),  # a typographic minus counts.
    ("She pays 5 or $1,800.", 1800),
    ("in 1,2 and 3,45", 45),  # Not thousands.
    ("no number", None),
    ("", None),
    ("9" * 5000, None),
    ("#### 1/" + "9" * 5000, None),
  ],
)
def test_the_final_number_of_a_text(text, number):
  assert gsm8k.final_number(text) == number


def test_only_the_right_number_is_rewarded():
  example = gsm8k.example("q", "#### 1,080")
  assert gsm8k.reward(example, "#### 1080.0") == 1.0
  assert gsm8k.reward(example, "It costs $1,080.") == 1.0
  assert gsm8k.reward(example, "#### 1081") == 0.0
  assert gsm8k.reward(example, "1080\n#### 3") == 0.0
  assert gsm8k.reward(example, "#### -1080") == 0.0
  assert gsm8k.reward(example, "") == 0.0


@needs_data
def test_the_real_rows_are_all_there_and_grade_themselves(tmp_path):
  task = tasks.make("gsm8k", data_dir=DATA, cache_dir=tmp_path)
  for split, count in (("train", 7006), ("test", 660)):
    examples = task.prompts(split)
    with gzip.open(DATA / f"{split}.jsonl.gz", "rt", encoding="utf-8") as f:
      source = [json.loads(line) for line in f]
    assert len(examples) == len(source) == count
    for example, row in zip(examples, source, strict=True):
      assert row["question"].strip() in example.prompt
      assert row["answer"].endswith(f"#### {example.solution.split()[-1]}")
      assert "<<" not in example.solution
      assert ">>" not in example.solution
      assert task.reward(example, example.solution) == 1.0
      wrong = f"{example.solution}\n#### {int(example.answer) + 1}"
      assert task.reward(example, wrong) == 0.0


@needs_data
def test_the_grader_agrees_with_every_published_label():
  agreed = count = 0
  path = DATA / "model_solutions.jsonl.gz"
  with gzip.open(path, "rt", encoding="utf-8") as f:
    for line in f:
      row = json.loads(line)
      truth = str(gsm8k.final_number(row["ground_truth"]))
      example = base.Example("", truth, "")
      for solution in row.values():
        if isinstance(solution, dict):
          reward = gsm8k.reward(example, solution["solution"])
          agreed += bool(reward) == solution["is_correct"]
          count += 1
  assert agreed == count == 2640
