# SPDX-License-Identifier: Apache-2.0
"""Any local data as a task: which field holds what is said in the config.

`data_dir` holds the splits as JSON lines, Parquet or Arrow, under the names
that `lines.py` lists. A field that is named must be in every row; "" says that
the data has no such field:

  prompt             what is asked. "" = the words that chosen and rejected
                     have in common at their start: they are whole dialogues
  answer             what a response must arrive at
  solution           a worked response; "" = chosen, or else the answer
  chosen, rejected   two responses, the first preferred
  margin             how much better it is

A training row whose prompt is in the test split too is left out.
"""

import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from oppo_jax.tasks import base, gsm8k, lines, rows

FIELDS = ("prompt", "answer", "solution", "chosen", "rejected", "margin")


def exact(example: base.Example, response: str) -> float:
  """1.0 if the response is the answer, but for white space around it."""
  return float(response.strip() == example.answer.strip())


RULES = {"none": None, "exact": exact, "number": gsm8k.reward}


def make(
  *,
  data_dir: str | os.PathLike,
  template: str,
  rule: str,
  test_share: int,
  cache_dir: str | os.PathLike,
  **fields: str,
):
  """The task.

  Args:
    data_dir: folder of the files, only read.
    template: how a prompt is put to the policy; `{prompt}` is the field.
    rule: "exact" (the response is the answer), "number" (its final number is
      that of the answer, see `gsm8k.final_number`) or "none".
    test_share: where there is no test split, one prompt in this many is taken
      for it.
    cache_dir: where their converted form is kept, see `rows.py`; an edited file
      is converted again.
    **fields: names of the data's fields, for all of `FIELDS`; "" = none.

  Raises:
    FileNotFoundError: the folder or the training split is not there.
    ValueError: a bad key; names it.
  """
  _check(fields, template, rule, test_share)
  source = lines.folder(data_dir, task="jsonl")
  paths = {split: lines.files_of(source, split) for split in base.SPLITS}
  if not paths["train"]:
    raise FileNotFoundError(
      f"jsonl: no train.jsonl, train.jsonl.gz, train-*.parquet or"
      f" train/*.arrow in {str(source)!r}"
    )
  decides = [fields, template, rule, test_share]

  @functools.cache
  def load() -> dict[str, list[dict[str, Any]]]:
    raw = {k: [p.read_bytes() for p in v] for k, v in paths.items()}
    digests = {k: lines.digest(v) for k, v in raw.items()}

    def make_rows():
      found = {
        name: [
          row
          for x, path in zip(raw[name], paths[name])
          for row in read_rows(x, path, fields=fields, template=template)
        ]
        for name in base.SPLITS
      }
      if not found["test"]:
        found = split_by_prompt(found["train"], test_share=test_share)
      asked = {row["prompt"] for row in found["test"]}
      found["train"] = [r for r in found["train"] if r["prompt"] not in asked]
      for name, items in found.items():
        if not items:
          raise ValueError(f"{source}: no rows for the {name} split")
      return {
        k: [{"row": json.dumps(row)} for row in v] for k, v in found.items()
      }

    found = rows.load(
      "jsonl",
      key=json.dumps([digests, decides]),
      fields=("row",),
      make_rows=make_rows,
      data_dir=cache_dir,
    )
    return {k: [json.loads(x["row"]) for x in v] for k, v in found.items()}

  def prompts(split: str) -> Sequence[base.Example]:
    base.check_split(split)
    found: dict[tuple[str, str], base.Example] = {}
    for row in load()[split]:  # several pairs may be of one prompt
      found.setdefault((row["prompt"], row["answer"]), _example(row))
    return list(found.values())

  def demonstrations(split: str) -> Sequence[base.Example]:
    base.check_split(split)
    return [_example(row) for row in load()[split]]

  def pairs(split: str) -> Sequence[base.Pair]:
    base.check_split(split)
    return [
      base.Pair(row["prompt"], row["chosen"], row["rejected"], row["margin"])
      for row in load()[split]
    ]

  return base.Task(
    "jsonl",
    functools.cache(prompts),
    reward=RULES[rule],
    terse=_answer if fields["answer"] else None,
    corrupt=None,
    pairs=functools.cache(pairs) if fields["chosen"] else None,
    demonstrations=functools.cache(demonstrations)
    if fields["chosen"]
    else None,
  )


def _check(
  fields: dict[str, str], template: str, rule: str, test_share: int
) -> None:
  """Raises ValueError if the keys do not fit together."""
  for name in fields:
    if name not in FIELDS:
      raise ValueError(f"{name}: unknown key, not one of {FIELDS}")
  for name in FIELDS:
    if not isinstance(fields.get(name), str):
      raise ValueError(f"{name}: must be the name of a field, or ''")
  if bool(fields["chosen"]) != bool(fields["rejected"]):
    raise ValueError("chosen, rejected: name both fields or none")
  if not fields["prompt"] and not fields["chosen"]:
    raise ValueError("prompt='': must be a field, as there is no chosen")
  if rule not in RULES:
    raise ValueError(f"rule={rule!r}: not one of {tuple(RULES)}")
  if RULES[rule] and not fields["answer"]:
    raise ValueError(f"rule={rule!r}: needs a field for the answer")
  if "{prompt}" not in template:
    raise ValueError(f"template={template!r}: has no {{prompt}}")
  if test_share < 2:
    raise ValueError(f"test_share={test_share}: must be at least 2")


def _example(row: dict[str, Any]) -> base.Example:
  return base.Example(row["prompt"], row["answer"], row["solution"])


def _answer(example: base.Example) -> str:
  """The answer alone."""
  return example.answer


def split_by_prompt(
  found: Sequence[dict[str, Any]], *, test_share: int
) -> dict[str, list[dict[str, Any]]]:
  """Rows by split: a hash of the prompt decides, so none is in both."""
  halves: dict[str, list[dict[str, Any]]] = {k: [] for k in base.SPLITS}
  for row in found:
    digest = hashlib.sha256(row["prompt"].encode("utf-8")).digest()
    is_test = int.from_bytes(digest[:8], "big") % test_share == 0
    halves["test" if is_test else "train"].append(row)
  return halves


def common_start(a: str, b: str) -> str:
  """The longest common start of two texts that ends where a word does."""
  cut = len(os.path.commonprefix([a, b]))
  ends = lambda text: cut == len(text) or text[cut].isspace()
  while cut and not (ends(a) and ends(b)):
    cut -= 1
  return a[:cut].rstrip()


def read_rows(
  raw: bytes, path: os.PathLike, *, fields: dict[str, str], template: str
) -> list[dict[str, Any]]:
  """Rows of a file under our names; what the data has not is "" or 0.

  Raises:
    ValueError: a broken file or row, naming the file, line and field.
  """
  texts = [name for name in FIELDS if name != "margin"]
  found = []
  for where, row in lines.read(raw, path):
    ours: dict[str, Any] = {
      name: lines.text(row, fields[name], where) if fields[name] else ""
      for name in texts
    }
    ours["margin"] = 0.0
    if fields["margin"]:
      ours["margin"] = lines.number(row, fields["margin"], where)
    if not fields["prompt"]:
      ours["prompt"] = common_start(ours["chosen"], ours["rejected"])
      if not ours["prompt"]:
        raise ValueError(
          f"{where}: field {fields['chosen']!r}: has no start in common with"
          f" {fields['rejected']!r}"
        )
      for side in ("chosen", "rejected"):
        ours[side] = ours[side].removeprefix(ours["prompt"])
    ours["solution"] = ours["solution"] or ours["chosen"] or ours["answer"]
    ours["prompt"] = template.replace("{prompt}", ours["prompt"])
    found.append(ours)
  return found
