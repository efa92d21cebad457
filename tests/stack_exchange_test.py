# SPDX-License-Identifier: Apache-2.0
"""Claims about Stack Exchange: what a question becomes, and which pairs."""

import gzip
import json
import pathlib

import pytest

from oppo_jax import tasks
from oppo_jax.tasks import stack_exchange

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "stack_exchange"
needs_data = pytest.mark.skipif(
  not DATA.is_dir(), reason="the Stack Exchange files are not on this machine"
)


def answer(number, votes, selected=False):
  text = f"text {number}"
  return dict(answer_id=number, votes=votes, selected=selected, text=text)


def question(qid, *answers):
  title, text = f"title {qid}", f" question {qid}\n"
  return dict(qid=qid, title=title, question=text, answers=list(answers))


def write(folder, **files):
  """One file per use; what is not said has one question of its own."""
  folder.mkdir(exist_ok=True)
  for name in stack_exchange.FILES:
    own = [question(name, answer(1, 3), answer(2, 0))]
    text = "\n".join(json.dumps(row) for row in files.get(name, own))
    (folder / f"questions_{name}.jsonl").write_text(text + "\n")
  return folder


def make(data_dir, cache_dir):
  return tasks.make("stack_exchange", data_dir=data_dir, cache_dir=cache_dir)


def test_a_prompt_is_title_and_question_and_has_no_rule(tmp_path):
  task = make(write(tmp_path / "data"), tmp_path)
  (example,) = task.prompts("train")
  assert example.prompt == ("Question: title rl\n\nquestion rl\n\nAnswer:")
  assert task.reward is None


@pytest.mark.parametrize(
  ("votes", "is_accepted", "score"),
  [
    (0, False, 0),
    (1, False, 1),
    (2, False, 2),  # log2(3) = 1.58
    (4, False, 2),  # log2(5) = 2.32
    (5, False, 3),  # log2(6) = 2.58
    (7, True, 4),
    (-3, False, -1),
    (-3, True, -1),
  ],
)
def test_votes_become_a_score(votes, is_accepted, score):
  assert stack_exchange.pm_score(votes, is_accepted=is_accepted) == score


def test_pairs_have_the_better_answer_first_and_no_ties(tmp_path):
  """Scores 0, 2, 2, 1: five pairs; the two of 2 make none."""
  answers = [answer(4, 0), answer(1, 3), answer(2, 1, True), answer(3, 1)]
  reward = [question("a", *answers)]
  task = make(write(tmp_path / "data", reward=reward), tmp_path)
  found = [(p.chosen, p.rejected, p.margin) for p in task.pairs("train")]
  assert found == [
    (" text 1", " text 3", 1.0),
    (" text 1", " text 4", 2.0),
    (" text 2", " text 3", 1.0),
    (" text 2", " text 4", 2.0),
    (" text 3", " text 4", 1.0),
  ]


def test_a_question_gives_ten_pairs_at_most():
  answers = [dict(id=i, score=i, text=f"{i}") for i in range(6)]
  row = dict(qid="a", title="t", question="q", answers=answers)
  found = stack_exchange.pairs_of(row)
  assert len(set(found)) == len(found) == 10
  assert stack_exchange.pairs_of(row) == found


def test_demonstrations_are_better_than_another_answer_the_best_first(tmp_path):
  answers = [answer(1, 0), answer(3, 7), answer(4, 1), answer(2, 7)]
  finetune = [question("a", *answers), question("b", answer(5, 1))]
  task = make(write(tmp_path / "data", finetune=finetune), tmp_path)
  shown = [example.solution for example in task.demonstrations("train")]
  assert shown == [" text 2", " text 3", " text 4"]


def test_the_solution_of_a_prompt_is_the_best_answer(tmp_path):
  rl = [question("a", answer(1, 0), answer(3, 7), answer(2, 7))]
  task = make(write(tmp_path / "data", rl=rl), tmp_path)
  assert [e.solution for e in task.prompts("train")] == [" text 2"]


def test_a_question_in_two_files_is_refused(tmp_path):
  same = [question("a", answer(1, 3), answer(2, 0))]
  task = make(write(tmp_path / "data", reward=same, evaluation=same), tmp_path)
  with pytest.raises(ValueError, match="question 'a' is in questions_evaluat"):
    task.prompts("train")


BROKEN = {
  "no title": (dict(qid="a"), "field 'title' is missing"),
  "no answers": (
    dict(qid="a", title="t", question="q", answers=[]),
    "field 'answers' must be a list",
  ),
  "votes in words": (
    question("a", answer(1, "many")),
    "answer 1: field 'votes' must be a number, got 'many'",
  ),
  "an empty answer": (
    question("a", answer(1, 1), answer(2, 1) | {"text": " "}),
    "answer 2: field 'text' must be text, got ' '",
  ),
  "selected by a number": (
    question("a", answer(1, 1, 3)),
    "answer 1: field 'selected' must be true or false, got 3",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_named(name, tmp_path):
  row, message = BROKEN[name]
  good = question("b", answer(1, 3), answer(2, 0))
  task = make(write(tmp_path / "data", rl=[good, row]), tmp_path)
  with pytest.raises(ValueError, match=message) as error:
    task.prompts("train")
  assert "questions_rl.jsonl, line 2" in str(error.value)


def test_an_edited_file_is_read_again(tmp_path):
  data = write(tmp_path / "data")
  assert make(data, tmp_path).prompts("train")[0].prompt.startswith("Question")
  write(data, rl=[question("other", answer(1, 1))])
  assert "title other" in make(data, tmp_path).prompts("train")[0].prompt


def test_a_missing_file_is_named(tmp_path):
  data = write(tmp_path / "data")
  (data / "questions_rl.jsonl").unlink()
  with pytest.raises(FileNotFoundError, match="no questions_rl.jsonl or"):
    make(data, tmp_path)


@needs_data
@pytest.mark.parametrize(
  ("split", "file"), [("train", "reward"), ("test", "evaluation")]
)
def test_the_pairs_are_those_that_were_published(split, file, tmp_path):
  """The same pairs with the same scores as in the files made for this."""
  say = lambda text: " " + text.strip()
  with gzip.open(DATA / f"paired_{file}.jsonl.gz", "rt") as f:
    rows = [json.loads(line) for line in f]
  published = {
    (
      stack_exchange.prompt_of(row),
      say(row["response_j"]),
      say(row["response_k"]),
      float(row["score_j"] - row["score_k"]),
    )
    for row in rows
  }
  found = make(DATA, tmp_path).pairs(split)
  assert len(found) == len(rows) > 400
  assert {
    (p.prompt, p.chosen, p.rejected, p.margin) for p in found
  } == published
