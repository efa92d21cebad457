# SPDX-License-Identifier: Apache-2.0
"""Rows of text kept as a TFDS data set (array_record, no TensorFlow).

  data_dir/rows/<name>-<hash of what decides the content>/1.0.0/

A changed hash is another folder, so nothing stale is ever read. TFDS renames
the finished folder into place: what is there is whole, and a killed build
leaves an `incomplete.*` folder beside it that nobody reads.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence

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
    name=f"{name}-{digest}",
    fields=tuple(fields),
    data_dir=os.path.expanduser(os.fspath(data_dir)),
  )
  builder = make()
  if not builder.is_prepared():
    builder.rows = make_rows()
    try:
      builder.download_and_prepare()
    except FileExistsError:  # Another process was faster; its copy is whole.
      if not make().is_prepared():
        raise
    builder = make()
  return {
    split: _read(builder.as_data_source(split=split), fields)
    for split in builder.info.splits
  }


def _read(source, fields: Sequence[str]) -> list[dict[str, str]]:
  """All rows in the order of their index; TFDS stores them shuffled."""
  found = source.__getitems__(list(range(len(source))))
  found.sort(key=lambda row: row["index"])
  if [int(row["index"]) for row in found] != list(range(len(source))):
    raise ValueError(f"{source}: rows are missing; delete the folder")
  return [{f: row[f].decode("utf-8") for f in fields} for row in found]


@functools.cache
def _builder_class():
  """The TFDS builder, made on first use: importing TFDS is slow."""
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()

  class Rows(tfds.core.GeneratorBasedBuilder):
    """Rows of text fields and an index."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, name, fields, data_dir):
      self.fields = fields
      self.rows = {}
      super().__init__(
        config=tfds.core.BuilderConfig(name=name),
        data_dir=data_dir,
        file_format="array_record",
      )

    def _info(self):
      features = {f: tfds.features.Text() for f in self.fields}
      features["index"] = tfds.features.Scalar("int64")
      return tfds.core.DatasetInfo(
        builder=self, features=tfds.features.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {split: self._generate_examples(split) for split in self.rows}

    def _generate_examples(self, split):
      for i, row in enumerate(self.rows[split]):
        yield i, {"index": i} | {f: row[f] for f in self.fields}

  return Rows
