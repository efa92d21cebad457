# SPDX-License-Identifier: Apache-2.0
"""Questions of Stack Exchange; what people voted for is the only grade.

Pairs follow the rule of the data set stack-exchange-paired, which scores
answers as Askell et al. 2021, arXiv 2112.00861 do:

  pm_score = round(log2(1 + votes)), half up;  +1 if accepted;  -1 if votes < 0

Every two answers of a question with unequal pm_score make a pair, at most 10 a
question. `data_dir` holds one file for each use, and no question is in two:

  questions_finetune   demonstrations: answers that are better than another
                       one to the same question
  questions_reward     training pairs
  questions_rl         training prompts, answered by the policy
  questions_evaluation prompts, pairs and demonstrations of the test split

They are .jsonl or .jsonl.gz. A row has the text fields `qid`, `title`,
`question`, and `answers`, a list of objects with `answer_id` (dates them:
smaller = earlier), `votes`, `selected` and `text`.
"""

import functools
import itertools
import json
import math
import os
import random
from collections.abc import Sequence
from typing import Any

from oppo_jax.tasks import base, lines, rows

PROMPT = "Question: {title}\n\n{question}\n\nAnswer:"
ANSWER = " {text}"
FILES = ("finetune", "reward", "rl", "evaluation")
MAX_PAIRS = 10  # per question

_USES = {  # use -> file of each split
  "prompts": {"train": "rl", "test": "evaluation"},
  "pairs": {"train": "reward", "test": "evaluation"},
  "demonstrations": {"train": "finetune", "test": "evaluation"},
}


def make(*, data_dir: str | os.PathLike, cache_dir: str | os.PathLike):
  """The task.

  Args:
    data_dir: folder of the files, only read.
    cache_dir: where their converted form is kept, see `rows.py`; an edited file
      is converted again.

  Raises:
    FileNotFoundError: the folder or a file is not there.
  """
  source = lines.folder(data_dir, task="stack_exchange")
  paths = {
    name: lines.jsonl(source, f"questions_{name}", task="stack_exchange")
    for name in FILES
  }

  @functools.cache
  def load() -> dict[str, list[dict[str, Any]]]:
    raw = {name: path.read_bytes() for name, path in paths.items()}

    def make_rows():
      found = {name: read_rows(x, paths[name]) for name, x in raw.items()}
      check_apart(found)
      return {
        name: [{"row": json.dumps(row)} for row in questions]
        for name, questions in found.items()
      }

    found = rows.load(
      "stack_exchange",
      key=lines.digest(list(raw.values())),
      fields=("row",),
      make_rows=make_rows,
      data_dir=cache_dir,
    )
    return {k: [json.loads(x["row"]) for x in v] for k, v in found.items()}

  def questions(use: str, split: str) -> list[dict[str, Any]]:
    base.check_split(split)
    return load()[_USES[use][split]]

  def prompts(split: str) -> Sequence[base.Example]:
    return [examples_of(row)[0] for row in questions("prompts", split)]

  def demonstrations(split: str) -> Sequence[base.Example]:
    found = []
    for row in questions("demonstrations", split):
      worst = min(a["score"] for a in row["answers"])
      shown = zip(ranked(row), examples_of(row))
      found += [example for a, example in shown if a["score"] > worst]
    return found

  def pairs(split: str) -> Sequence[base.Pair]:
    found = [pairs_of(row) for row in questions("pairs", split)]
    return list(itertools.chain.from_iterable(found))

  return base.Task(
    "stack_exchange",
    functools.cache(prompts),
    reward=None,
    terse=None,
    corrupt=None,
    pairs=functools.cache(pairs),
    demonstrations=functools.cache(demonstrations),
  )


def pm_score(votes: int, *, is_accepted: bool) -> int:
  """What people thought of an answer, on a logarithmic scale."""
  if votes < 0:
    return -1
  return math.floor(math.log2(1 + votes) + 0.5) + is_accepted


def prompt_of(row: dict[str, Any]) -> str:
  """How a question is asked."""
  return PROMPT.format(
    title=row["title"].strip(), question=row["question"].strip()
  )


def ranked(row: dict[str, Any]) -> list[dict[str, Any]]:
  """Answers to a question, the best first; of equal ones, the earliest."""
  return sorted(row["answers"], key=lambda a: (-a["score"], a["id"]))


def examples_of(row: dict[str, Any]) -> list[base.Example]:
  """A question with each of its answers, in the order of `ranked`."""
  prompt, say = prompt_of(row), lambda a: ANSWER.format(text=a["text"].strip())
  return [base.Example(prompt, "", say(a)) for a in ranked(row)]


def pairs_of(row: dict[str, Any]) -> list[base.Pair]:
  """Preferences among the answers to one question; the margin is that of
  `pm_score`."""
  answers = sorted(row["answers"], key=lambda a: a["id"])
  unequal = [
    (a, b) if a["score"] > b["score"] else (b, a)
    for a, b in itertools.combinations(answers, 2)
    if a["score"] != b["score"]
  ]
  if len(unequal) > MAX_PAIRS:
    # The seed is that of the data's publication, so the pairs are its pairs.
    draw = random.Random(f"42:{row['qid']}")
    unequal = draw.sample(unequal, MAX_PAIRS)
  prompt, say = prompt_of(row), lambda a: ANSWER.format(text=a["text"].strip())
  return [
    base.Pair(prompt, say(a), say(b), float(a["score"] - b["score"]))
    for a, b in unequal
  ]


def read_rows(raw: bytes, path: os.PathLike) -> list[dict[str, Any]]:
  """Questions of a file, checked; answers get their `score`.

  Raises:
    ValueError: a broken file or row, naming the file, line and field.
  """
  found = []
  for where, row in lines.read(raw, path):
    question = {k: lines.text(row, k, where) for k in ("qid", "title")}
    question["question"] = lines.text(row, "question", where)
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers:
      raise ValueError(f"{where}: field 'answers' must be a list, not empty")
    question["answers"] = [
      _answer(a, f"{where}, answer {i}") for i, a in enumerate(answers, start=1)
    ]
    found.append(question)
  return found


def _answer(answer: Any, where: str) -> dict[str, Any]:
  if not isinstance(answer, dict):
    raise ValueError(f"{where}: not an object with fields")
  is_accepted = answer.get("selected", False)
  if not isinstance(is_accepted, bool):
    raise ValueError(
      f"{where}: field 'selected' must be true or false, got {is_accepted!r}"
    )
  votes = int(lines.number(answer, "votes", where))
  return {
    "id": int(lines.number(answer, "answer_id", where)),
    "score": pm_score(votes, is_accepted=is_accepted),
    "text": lines.text(answer, "text", where),
  }


def check_apart(found: dict[str, list[dict[str, Any]]]) -> None:
  """Raises ValueError if a question is in two files."""
  seen: dict[str, str] = {}
  for name, questions in found.items():
    for row in questions:
      asked = prompt_of(row)
      if seen.setdefault(asked, name) != name:
        raise ValueError(
          f"stack_exchange: question {row['qid']!r} is in questions_{name} and"
          f" in questions_{seen[asked]}"
        )
