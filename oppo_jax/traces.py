# SPDX-License-Identifier: Apache-2.0
"""Prompt and response lengths: traces of services, and what a run has logged.

NumPy and the standard library only. A trace is a CSV file (it may be gzipped)
with a column `output_tokens`, a request per line; `input_tokens` or
`prompt_tokens` is the prompt's length, `count` says how many such requests
there were. A file of one integer per line holds response lengths.
"""

import csv
import gzip
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

PROMPTS = ("input_tokens", "prompt_tokens")


class Lengths(NamedTuple):
  """Lengths by uid; after the last one the first follows.

  Attributes:
    prompt_len: [N] tokens.
    response_len: [N] tokens.
  """

  prompt_len: np.ndarray
  response_len: np.ndarray

  def of(self, uid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response lengths of uids."""
    at = uid % len(self.response_len)
    return self.prompt_len[at], self.response_len[at]


def _open(path: str):
  opener = gzip.open if str(path).endswith(".gz") else open
  return opener(path, "rt", encoding="utf-8", errors="replace")


def _integer(text: Any, path: str, line: int, *, least: int) -> int:
  try:
    value = int(text)
  except (TypeError, ValueError):
    raise ValueError(f"{path}, line {line}: {text!r} is no integer") from None
  if value < least:
    raise ValueError(f"{path}, line {line}: {value} is not >= {least}")
  return value


def load(path: str, *, where: str, prompt_len: int) -> Lengths:
  """Lengths of a trace in its order; requests without tokens are left out.

  Args:
    path: the file.
    where: "column=value" keeps the lines that say so; "" keeps all.
    prompt_len: of prompts that the file does not tell.

  Raises:
    ValueError: names the file, and the line or the column.
    OSError: the file cannot be read.
  """
  column, _, value = where.partition("=")
  prompts: list[int] = []
  responses: list[int] = []
  counts: list[int] = []
  try:
    with _open(path) as f:
      head = f.readline().strip()
      f.seek(0)
      if head.lstrip("-").isdigit():
        if where:
          raise ValueError(f"--where={where}: {path} has no columns")
        responses = [
          _integer(line, path, i, least=1) for i, line in enumerate(f, start=1)
        ]
      else:
        names = next(csv.reader([head]))
        for name in ("output_tokens", column or "output_tokens"):
          if name not in names:
            raise ValueError(f"{path}: no column {name!r}, only {names}")
        prompt = next((name for name in PROMPTS if name in names), None)
        for line, row in enumerate(csv.DictReader(f), start=2):
          if column and row[column] != value:
            continue
          tokens = _integer(row["output_tokens"], path, line, least=0)
          if not tokens:
            continue
          responses.append(tokens)
          if prompt:
            prompts.append(max(1, _integer(row[prompt], path, line, least=0)))
          if "count" in names:
            counts.append(_integer(row["count"], path, line, least=0))
  except (EOFError, gzip.BadGzipFile) as e:
    raise ValueError(f"{path}: {e}") from e
  if not responses:
    kept = f" with {where}" if where else ""
    raise ValueError(f"{path}: no lengths{kept}")
  response = np.array(responses, np.int64)
  first = np.array(prompts or [prompt_len] * len(response), np.int64)
  if counts:
    first, response = (np.repeat(x, counts) for x in (first, response))
  return Lengths(first, response)


def shuffled(lengths: Lengths, *, seed: int) -> Lengths:
  """The same requests in another order: prompts of a run are drawn, too."""
  order = np.random.default_rng(seed).permutation(len(lengths.response_len))
  return Lengths(lengths.prompt_len[order], lengths.response_len[order])


def limited(
  lengths: Lengths, *, max_prompt_len: int, max_response_len: int, fit: str
) -> Lengths:
  """Prompts of at most P tokens, responses of at most R.

  Args:
    lengths: as they are.
    max_prompt_len: P, longer prompts are cut; 0 = no limit.
    max_response_len: R; 0 = no limit.
    fit: "clip" cuts longer ones off, "scale" multiplies all of them so that
      the longest has R tokens.
  """
  if max_prompt_len:
    prompt = np.minimum(lengths.prompt_len, max_prompt_len)
    lengths = lengths._replace(prompt_len=prompt)
  if not max_response_len:
    return lengths
  response = lengths.response_len
  if fit == "scale":
    response = np.rint(response * (max_response_len / response.max()))
  response = np.clip(response, 1, max_response_len).astype(np.int64)
  return lengths._replace(response_len=response)


def read_rows(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Rows of a JSONL file; a last line without its end was cut short.

  Raises:
    ValueError: names the file and the line.
  """
  lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")[:-1]
  for number, line in enumerate(lines, start=1):
    try:
      yield json.loads(line)
    except json.JSONDecodeError as e:
      raise ValueError(f"{path}, line {number}: not JSON ({e})") from e


def of_run(
  rows: Iterator[dict[str, Any]], forced: np.ndarray | None, *, seed: int
) -> tuple[Lengths, int]:
  """Lengths by uid, from the rows of rollouts.jsonl.

  A run logs all rows of a batch only if `log.rollouts_per_step` says so; the
  lengths of uids that were not logged are drawn from those that were.

  Args:
    rows: of rollouts.jsonl.
    forced: response length by uid, if they were forced.
    seed: of the draws.

  Returns:
    Lengths, and how many uids were logged.

  Raises:
    ValueError: nothing was logged.
  """
  seen = {
    r["uid"]: (len(r["prompt_tokens"]), len(r["response_tokens"])) for r in rows
  }
  if not seen:
    raise ValueError("no rows in rollouts.jsonl: log.rollouts_per_step was 0")
  known = np.array(list(seen.values()), np.int64)
  num = max(max(seen) + 1, 0 if forced is None else len(forced))
  draw = np.random.default_rng(seed).integers(len(known), size=num)
  prompt, response = known[draw].T.copy()
  uids = np.array(list(seen))
  prompt[uids], response[uids] = known.T
  if forced is not None:
    response = forced[np.arange(num) % len(forced)].astype(np.int64)
  return Lengths(prompt, response), len(seen)
