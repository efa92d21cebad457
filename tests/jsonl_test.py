# SPDX-License-Identifier: Apache-2.0
"""Claims about local data: fields, files, splits, rules."""

import gzip
import json
import pathlib

import pyarrow
import pytest
from pyarrow import parquet

from oppo_jax import tasks
from oppo_jax.tasks import base

HH = pathlib.Path(__file__).parents[2] / "shared" / "data" / "hh_rlhf"
KEYS = dict(
  template="{prompt}",
  rule="none",
  test_share=5,
  prompt="ask",
  answer="",
  solution="",
  chosen="",
  rejected="",
  margin="",
)


def make(folder, **keys):
  data_dir, cache_dir = folder / "source", folder / "cache"
  kwargs = dict(data_dir=data_dir, cache_dir=cache_dir) | KEYS | keys
  return tasks.make("jsonl", **kwargs)


def write(folder, train, test=None):
  (folder / "source").mkdir(exist_ok=True)
  for split, rows in (("train", train), ("test", test)):
    if rows is not None:
      lines = [x if isinstance(x, str) else json.dumps(x) for x in rows]
      path = folder / "source" / f"{split}.jsonl"
      path.write_text("\n".join(lines) + "\n")


def test_fields_are_named_in_the_config(tmp_path):
  row = dict(ask="1+1?", reply="2", work="1+1=2", good="two", bad="3", gap=2)
  write(tmp_path, [row], [row | dict(ask="other?")])
  task = make(
    tmp_path,
    template="Q: {prompt}\nA:",
    answer="reply",
    solution="work",
    chosen="good",
    rejected="bad",
    margin="gap",
  )
  example = base.Example("Q: 1+1?\nA:", answer="2", solution="1+1=2")
  assert task.prompts("train") == [example]
  assert task.demonstrations("train") == [example]
  assert task.terse(example) == "2"
  pair = base.Pair("Q: 1+1?\nA:", chosen="two", rejected="3", margin=2.0)
  assert task.pairs("train") == [pair]


def test_the_chosen_response_is_a_demonstration(tmp_path):
  row = dict(ask="1+1?", good="two", bad="3")
  write(tmp_path, [row], [row | dict(ask="other?")])
  task = make(tmp_path, chosen="good", rejected="bad")
  assert task.demonstrations("train")[0].solution == "two"
  assert task.terse is None


def test_several_pairs_of_a_prompt_are_one_prompt(tmp_path):
  rows = [dict(ask="1+1?", good=text, bad="3") for text in ("two", "2")]
  write(tmp_path, rows, [dict(ask="other?", good="a", bad="b")])
  task = make(tmp_path, chosen="good", rejected="bad")
  assert len(task.prompts("train")) == 1
  assert len(task.pairs("train")) == len(task.demonstrations("train")) == 2


@pytest.mark.parametrize(
  ("rule", "right", "wrong"),
  [
    ("exact", " 1,002\n", "1002"),
    ("number", "so it is 1002.", "1002 + 1"),
  ],
)
def test_a_rule_grades(rule, right, wrong, tmp_path):
  row = dict(ask="how many?", reply="1,002")
  write(tmp_path, [row], [dict(ask="other?", reply="1")])
  task = make(tmp_path, answer="reply", rule=rule)
  (example,) = task.prompts("train")
  assert task.reward(example, right) == 1.0
  assert task.reward(example, wrong) == 0.0


def test_without_a_prompt_field_it_is_what_dialogues_share(tmp_path):
  start = "Human: Why?\n\nAssistant:"
  row = dict(good=f"{start} Because.", bad=f"{start} Be quiet.")
  other = dict(good="Human: Who? I.", bad="Human: Who? You.")
  write(tmp_path, [row], [other])
  task = make(tmp_path, prompt="", chosen="good", rejected="bad")
  pair = base.Pair(start, " Because.", " Be quiet.", 0.0)
  assert task.pairs("train") == [pair]


def test_without_a_test_split_prompts_are_split(tmp_path):
  rows = [dict(ask=f"{i % 40}?", reply="x") for i in range(80)]
  write(tmp_path, rows)
  task = make(tmp_path, answer="reply")
  train, test = ({e.prompt for e in task.prompts(s)} for s in base.SPLITS)
  assert train | test == {row["ask"] for row in rows}
  assert not train & test
  assert 3 <= len(test) <= 14  # 8 expected


def test_a_training_row_with_a_test_prompt_is_left_out(tmp_path):
  rows = [dict(ask=text, reply="x") for text in ("a", "b", "c")]
  write(tmp_path, rows, rows[1:2])
  task = make(tmp_path, answer="reply")
  assert [e.prompt for e in task.prompts("train")] == ["a", "c"]
  assert [e.prompt for e in task.prompts("test")] == ["b"]


def gzipped(rows, path):
  text = "\n".join(json.dumps(row) for row in rows)
  path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(text.encode()))


def as_parquet(rows, path):
  table = pyarrow.Table.from_pylist(rows)
  parquet.write_table(table, path.with_suffix(".parquet"))


def as_arrow(rows, path):
  table = pyarrow.Table.from_pylist(rows)
  with pyarrow.OSFile(str(path.with_suffix(".arrow")), "wb") as f:
    with pyarrow.ipc.new_stream(f, table.schema) as writer:
      writer.write_table(table)


LAYOUTS = {
  "gzip": (gzipped, "{split}"),
  "shards of the hub": (as_parquet, "data/{split}-0000{i}-of-00002"),
  "save_to_disk": (as_arrow, "{split}/data-0000{i}-of-00002"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_of_other_kinds_give_the_same_rows(name, tmp_path):
  rows = [dict(ask=f"{i}?", reply=f"é{i}") for i in range(6)]
  halves = {"train": rows[:4], "test": rows[4:]}
  write(tmp_path, *halves.values())
  expected = make(tmp_path, answer="reply").prompts("train")
  save, pattern = LAYOUTS[name]
  other = tmp_path / "other"
  for split, part in halves.items():
    half = len(part) // 2 if "{i}" in pattern else len(part)
    for i, shard in enumerate((part[:half], part[half:])):
      path = other / "source" / pattern.format(split=split, i=i)
      path.parent.mkdir(parents=True, exist_ok=True)
      if shard:
        save(shard, path)
  assert make(other, answer="reply").prompts("train") == expected


def test_an_edited_file_is_read_again(tmp_path):
  for text in ("a", "b"):
    write(tmp_path, [dict(ask=text)], [dict(ask="other")])
    assert make(tmp_path).prompts("train")[0].prompt == text


BROKEN = {
  "cut short": ('{"ask": ', "line 2: not JSON"),
  "no prompt": (dict(reply="x"), "line 2: field 'ask' is missing"),
  "a number": (
    dict(ask="a", reply=3),
    "line 2: field 'reply' must be text, got 3",
  ),
  "no margin": (
    dict(ask="a", reply="b", gap="much"),
    "line 2: field 'gap' must be a number, got 'much'",
  ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_is_named(name, tmp_path):
  row, message = BROKEN[name]
  write(tmp_path, [dict(ask="a", reply="b", gap=1), row])
  task = make(tmp_path, answer="reply", margin="gap")
  with pytest.raises(ValueError, match=message) as error:
    task.prompts("train")
  assert str(tmp_path / "source" / "train.jsonl") in str(error.value)


def test_dialogues_with_nothing_in_common_are_named(tmp_path):
  write(tmp_path, [dict(good="a b", bad="c d")])
  task = make(tmp_path, prompt="", chosen="good", rejected="bad")
  with pytest.raises(ValueError, match="line 1: field 'good': has no start"):
    task.prompts("train")


def test_a_broken_table_is_named(tmp_path):
  (tmp_path / "source").mkdir()
  (tmp_path / "source" / "train.parquet").write_bytes(b"PAR1 no")
  with pytest.raises(ValueError, match=r"train.parquet: cannot be read"):
    make(tmp_path).prompts("train")


@pytest.mark.parametrize(
  ("keys", "says"),
  [
    (dict(rule="magic"), "rule='magic': not one of"),
    (dict(rule="exact"), "rule='exact': needs a field for the answer"),
    (dict(chosen="good"), "chosen, rejected: name both fields or none"),
    (dict(prompt=""), "prompt='': must be a field"),
    (dict(template="Q:"), "template='Q:': has no {prompt}"),
    (dict(test_share=1), "test_share=1: must be at least 2"),
    (dict(prompts="ask"), "prompts: unknown key"),
  ],
)
def test_keys_that_do_not_fit_are_named(keys, says, tmp_path):
  write(tmp_path, [dict(ask="a")])
  with pytest.raises(ValueError, match=says):
    make(tmp_path, **keys)


def test_a_missing_split_is_named(tmp_path):
  (tmp_path / "source").mkdir()
  with pytest.raises(FileNotFoundError, match=r"no train.jsonl"):
    make(tmp_path)


@pytest.mark.skipif(
  not HH.is_dir(), reason="the HH-RLHF files are not on this machine"
)
def test_dialogues_people_had_split_into_prompt_and_responses(tmp_path):
  (tmp_path / "source").mkdir()
  raw = (HH / "harmless_base_test.jsonl.gz").read_bytes()
  (tmp_path / "source" / "train.jsonl.gz").write_bytes(raw)
  task = make(tmp_path, prompt="", chosen="chosen", rejected="rejected")
  pairs = [*task.pairs("train"), *task.pairs("test")]
  assert len(pairs) > 1000
  ends = [p.prompt.endswith("Assistant:") for p in pairs]
  assert sum(ends) > 0.5 * len(pairs)
