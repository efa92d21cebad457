# SPDX-License-Identifier: Apache-2.0
"""GSM8K word problems: real rows, graded by their final number.

Cobbe et al. 2021, arXiv 2110.14168; https://github.com/openai/grade-school-math.
`data_dir` holds `train.jsonl` and `test.jsonl`, or the same with `.gz`, with
the fields `question` and `answer` (steps, last line `#### number`).
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from fractions import Fraction

from oppo_jax.tasks import base, lines, rows

PROMPT = "Question: {question}\nAnswer:"
SOLUTION = " {steps}"
FIELDS = ("question", "answer")

_CALCULATOR = re.compile(r"<<[^<>]*>>")  # 48/2 = <<48/2=24>>24
_FINAL = re.compile(r"(?:####|^[ \t]*A:)(.*)$", re.MULTILINE)
_NUMBER = re.compile(
  r"(?P<minus>(?<![0-9A-Za-z)])[-\u2212])?"  # not the minus of 16-13
  r"(?:[$\u20ac\u00a3](?P<inner>[-\u2212])?)?"
  r"(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
  r"|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
  r"(?:/(?P<denominator>[0-9]+))?"
)
_MAX_DIGITS = 100  # Beyond, a response is babble, and Python refuses at 4300.


def make(*, data_dir: str | os.PathLike, cache_dir: str | os.PathLike):
  """The task.

  Args:
    data_dir: folder of the JSONL files, only read.
    cache_dir: where their converted form is kept, see `rows.py`; an edited file
      is converted again.

  Raises:
    FileNotFoundError: the folder or a file is not there.
  """
  source = lines.folder(data_dir, task="gsm8k")
  paths = {k: lines.jsonl(source, k, task="gsm8k") for k in base.SPLITS}

  @functools.cache
  def load():
    raw = {split: path.read_bytes() for split, path in paths.items()}
    hashes = {k: hashlib.sha256(v).hexdigest() for k, v in raw.items()}
    found = rows.load(
      "gsm8k",
      key=json.dumps(hashes),
      fields=FIELDS,
      make_rows=lambda: {k: read_rows(v, paths[k]) for k, v in raw.items()},
      data_dir=cache_dir,
    )
    return {k: [example(**row) for row in v] for k, v in found.items()}

  def prompts(split: str) -> Sequence[base.Example]:
    base.check_split(split)
    return load()[split]

  return base.Task("gsm8k", prompts, reward, terse, corrupt=None)


def example(question: str, answer: str) -> base.Example:
  """The prompt, final number and worked solution of one row."""
  return base.Example(
    prompt=PROMPT.format(question=question.strip()),
    answer=_final_field(answer),
    solution=SOLUTION.format(steps=_CALCULATOR.sub("", answer).strip()),
  )


def reward(example: base.Example, response: str) -> float:
  """1.0 if the response's final number is the answer, as numbers."""
  said = final_number(response)
  return float(said is not None and said == final_number(example.answer))


def terse(example: base.Example) -> str:
  """The last line of a solution alone."""
  return f" #### {example.answer}"


def final_number(text: str) -> Fraction | None:
  """The number a text ends on.

  The first number after the last `####`, or after the last `A:` that begins a
  line, whichever comes later; without either, the last number of the text.
  Commas, currency signs, a percent sign, a trailing period are ignored; 18 =
  18.00 = 36/2. None if there is no such number.
  """
  marks = _FINAL.findall(text)
  numbers = list(_NUMBER.finditer(marks[-1] if marks else text))
  if not numbers:
    return None
  match = numbers[0] if marks else numbers[-1]
  number = match["number"].replace(",", "")
  denominator = match["denominator"] or "1"
  if len(number) + len(denominator) > _MAX_DIGITS or not int(denominator):
    return None
  sign = -1 if match["minus"] or match["inner"] else 1
  return sign * Fraction(number) / int(denominator)


def read_rows(raw: bytes, path: os.PathLike) -> list[dict[str, str]]:
  """Parses a JSONL file, gzipped or not, already read into memory.

  Raises:
    ValueError: a broken file or row, naming the file, line and field.
  """
  found = []
  for where, row in lines.read(raw, path):
    found.append({field: lines.text(row, field, where) for field in FIELDS})
    if final_number(_final_field(row["answer"])) is None:
      raise ValueError(f"{where}: field 'answer' does not end on '#### number'")
  return found


def _final_field(answer: str) -> str:
  """What stands after `####`, without commas; "" if nothing does."""
  return answer.rpartition("####")[2].strip().replace(",", "")
