# SPDX-License-Identifier: Apache-2.0
"""Rows of data files, and errors that say where: file, line, field.

Read are JSON lines (`.jsonl`, `.jsonl.gz`), and Parquet and Arrow as Hugging
Face's `datasets` writes them. A split is one file or several:

  train.jsonl                            one file
  data/train-00000-of-00002.parquet      a folder from the hub
  train/data-00000-of-00001.arrow        `save_to_disk`
"""

import gzip
import hashlib
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")

Row = dict[str, Any]


def folder(path: str | os.PathLike, *, task: str) -> pathlib.Path:
  """The folder that `data_dir` names.

  Raises:
    FileNotFoundError: there is no such folder.
  """
  found = pathlib.Path(path).expanduser()
  if not found.is_dir():
    raise FileNotFoundError(f"{task}: data_dir={str(found)!r} is not a folder")
  return found


def jsonl(data_dir: pathlib.Path, stem: str, *, task: str) -> pathlib.Path:
  """The file `stem`.jsonl or `stem`.jsonl.gz of a folder.

  Raises:
    FileNotFoundError: neither is there.
  """
  names = (f"{stem}.jsonl", f"{stem}.jsonl.gz")
  for name in names:
    if (data_dir / name).is_file():
      return data_dir / name
  raise FileNotFoundError(
    f"{task}: no {' or '.join(names)} in {str(data_dir)!r}"
  )


def files_of(data_dir: pathlib.Path, split: str) -> list[pathlib.Path]:
  """Files of a split, see the module; sorted, and [] if there are none."""
  for pattern in (f"{split}", f"{split}-*", f"{split}/*"):
    for inside in (data_dir, data_dir / "data"):
      found = sorted(
        path
        for ending in ENDINGS
        for path in inside.glob(f"{pattern}{ending}")
        if path.is_file()
      )
      if found:
        return found
  return []


def digest(raw: Sequence[bytes]) -> str:
  """Hash of the content of files; changes with any byte of any of them."""
  return hashlib.sha256(
    b"".join(hashlib.sha256(x).digest() for x in raw)
  ).hexdigest()


def read(raw: bytes, path: os.PathLike) -> Iterator[tuple[str, Row]]:
  """(where, row) of a file that was read into memory; where = file and line.

  Raises:
    ValueError: the file is broken or has no rows, or a line is no object.
  """
  name = os.fspath(path)
  parse = _table if name.endswith((".parquet", ".arrow")) else _lines
  empty = True
  for where, row in parse(raw, name):
    empty = False
    yield where, row
  if empty:
    raise ValueError(f"{path}: no rows")


def text(row: Row, field: str, where: str) -> str:
  """A field that must be text with something in it.

  Raises:
    ValueError: it is missing or something else; names file, line and field.
  """
  if field not in row:
    raise ValueError(f"{where}: field {field!r} is missing")
  value = row[field]
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{where}: field {field!r} must be text, got {value!r}")
  try:
    value.encode("utf-8")
  except UnicodeEncodeError as e:
    raise ValueError(f"{where}: field {field!r} is not Unicode: {e}") from e
  return value


def number(row: Row, field: str, where: str) -> float:
  """A field that must be a finite number; errors as of `text`."""
  if field not in row:
    raise ValueError(f"{where}: field {field!r} is missing")
  value = row[field]
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not abs(value) < float("inf"):
    raise ValueError(
      f"{where}: field {field!r} must be a number, got {value!r}"
    )
  return float(value)


def _lines(raw: bytes, name: str) -> Iterator[tuple[str, Row]]:
  if name.endswith(".gz"):
    try:
      raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as e:
      raise ValueError(f"{name}: not a whole gzip file: {e}") from e
  for i, line in enumerate(raw.split(b"\n"), start=1):
    if not line.strip():
      continue
    where = f"{name}, line {i}"
    try:
      row = json.loads(line.decode("utf-8"))
    except ValueError as e:  # Of the decoder or of JSON.
      raise ValueError(f"{where}: not JSON: {e}") from e
    if not isinstance(row, dict):
      raise ValueError(f"{where}: not an object with fields")
    yield where, row


def _table(raw: bytes, name: str) -> Iterator[tuple[str, Row]]:
  """Rows of a Parquet file or of an Arrow stream; a "line" is a row."""
  import pyarrow  # on first use: it takes a moment

  try:
    if name.endswith(".arrow"):
      found = pyarrow.ipc.open_stream(io.BytesIO(raw)).read_all()
    else:
      from pyarrow import parquet

      found = parquet.read_table(io.BytesIO(raw))
  except (pyarrow.ArrowException, OSError) as e:
    raise ValueError(f"{name}: cannot be read: {e}") from e
  for i, row in enumerate(found.to_pylist(), start=1):
    yield f"{name}, row {i}", row
