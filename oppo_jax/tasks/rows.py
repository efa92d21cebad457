# SPDX-License-Identifier: Apache-2.0
"""Rows of text kept as a TFDS data set (array_record, no TensorFlow).

  data_dir/<name>-<hash of what decides the content>/rows/1.0.0/

A changed hash is another folder, so nothing stale is ever read. TFDS renames
the finished folder into place: what is there is whole, and a killed build
leaves an `incomplete.*` folder beside it that nobody reads.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Row = Mapping[str, str]


def load(
  name: str,
  *,
  key: str,
  fields: Sequence[str],
  make_rows: Callable[[], Mapping[str, Sequence[Row]]],
  data_dir: str | os.PathLike,
) -> dict[str, list[dict[str, str]]]:
  """Reads the data set, building it first if it is not there.

  Any number of processes may do this at once.

  Args:
    name: letters, digits, `-` and `_`.
    key: everything that decides the content; only its hash is kept.
    fields: text fields of a row.
    make_rows: split -> rows; called only to build. An error in it leaves
      nothing on disk.
    data_dir: root folder of the data sets; made if missing.

  Returns:
    split -> rows, in the order of `make_rows`.
  """
  what = json.dumps([name, key, list(fields)])
  digest = hashlib.sha256(what.encode("utf-8")).hexdigest()[:16]
  make = functools.partial(
    _builder_class(),
    fields=tuple(fields),
    data_dir=os.path.join(os.path.expanduser(data_dir), f"{name}-{digest}"),
  )
  builder = make()
  if not os.path.exists(builder.data_dir):
    builder.rows = make_rows()
    try:
      builder.download_and_prepare()
    except OSError:
      # FileExistsError or ENOTEMPTY, by how close the race was: another process
      # was faster, and its copy is whole.
      if not os.path.exists(builder.data_dir):
        raise
    builder = make()
  try:
    if not builder.info.splits:
      raise RuntimeError("dataset_info.json is missing")
    return {
      split: _read(builder.as_data_source(split=split), fields)
      for split in builder.info.splits
    }
  except RuntimeError as e:  # What ArrayRecord raises.
    message = f"{builder.data_dir} is damaged, delete the folder: {e}"
    raise ValueError(message) from e


def _read(source, fields: Sequence[str]) -> list[dict[str, str]]:
  """All rows in the order of their index; TFDS stores them shuffled."""
  found = source.__getitems__(list(range(len(source))))
  found.sort(key=lambda row: row["index"])
  if [int(row["index"]) for row in found] != list(range(len(source))):
    raise RuntimeError("rows are missing")
  return [{f: row[f].decode("utf-8") for f in fields} for row in found]


@functools.cache
def _builder_class():
  """The TFDS builder, made on first use: importing TFDS is slow."""
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()

  class Rows(tfds.core.GeneratorBasedBuilder):
    """Rows of text fields and an index."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, fields, data_dir):
      self.fields = fields
      self.rows = {}
      super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self):
      features = {f: tfds.features.Text() for f in self.fields}
      features["index"] = tfds.features.Scalar(np.int64)
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {split: self._generate_examples(split) for split in self.rows}

    def _generate_examples(self, split):
      for i, row in enumerate(self.rows[split]):
        yield i, {"index": i} | {f: row[f] for f in self.fields}

    def _log_download_bytes(self):
      """TFDS would print that it is downloading; it is not."""

    _log_download_done = _log_download_bytes

  return Rows
