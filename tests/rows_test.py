# SPDX-License-Identifier: Apache-2.0
"""What the data sets on disk promise: whole, current, in order."""

import errno
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from oppo_jax.tasks import rows

ROWS = {
  "train": [{"text": f"row {i} \u2212\u00e9\n"} for i in range(500)],
  "test": [{"text": ""}, {"text": "b"}],
}


def load(data_dir, found=ROWS, key="k"):
  return rows.load(
    "x",
    key=key,
    fields=["text"],
    make_rows=lambda: found,
    data_dir=data_dir,
  )


def refuse():
  raise AssertionError("built again")


class Hooked(list):
  """Rows that call a function while they are being written."""

  def __init__(self, found, hook):
    super().__init__(found)
    self.hook = hook

  def __iter__(self):
    self.hook()
    return super().__iter__()


def test_rows_come_back_whole_and_in_order(tmp_path):
  assert load(tmp_path) == ROWS  # 500 > 400: Parquet would lose rows.


def test_a_second_load_does_not_build(tmp_path):
  load(tmp_path)
  found = rows.load(
    "x", key="k", fields=["text"], make_rows=refuse, data_dir=tmp_path
  )
  assert found == ROWS


def test_another_key_is_another_data_set(tmp_path):
  load(tmp_path)
  other = {"train": [{"text": "new"}]}
  assert load(tmp_path, other, key="k2") == other
  assert load(tmp_path) == ROWS


def test_an_error_while_building_leaves_nothing_that_counts(tmp_path):
  def fail():
    raise ZeroDivisionError

  with pytest.raises(ZeroDivisionError):
    load(tmp_path, {"train": Hooked(ROWS["train"], fail)})
  assert load(tmp_path) == ROWS


def test_the_loser_of_a_race_reads_the_winners_copy(tmp_path):
  def win():
    load(tmp_path)

  # The outer build is under way when the inner one finishes.
  found = load(tmp_path, {k: Hooked(v, win) for k, v in ROWS.items()})
  assert found == ROWS


def test_a_race_lost_at_the_very_end_reads_the_winners_copy(
  tmp_path, monkeypatch
):
  load(tmp_path / "won")
  (winner,) = (tmp_path / "won").glob("x-*/rows/1.0.0")
  rename = os.rename
  late = []

  def rename_too_late(source, target):
    if "incomplete" in str(source) and "lost" in str(target):
      shutil.copytree(winner, target)
      late.append(target)
    rename(source, target)  # ENOTEMPTY, not FileExistsError.

  monkeypatch.setattr(os, "rename", rename_too_late)
  assert load(tmp_path / "lost") == ROWS
  assert any(str(target).endswith("1.0.0") for target in late)


def test_an_error_of_the_disk_is_not_taken_for_a_race(tmp_path):
  def fail():
    raise OSError(errno.ENOSPC, "disk full")

  with pytest.raises(OSError, match="disk full"):
    load(tmp_path, {"train": Hooked(ROWS["train"], fail)})


def test_leftovers_of_a_killed_build_do_no_harm(tmp_path):
  load(tmp_path)
  (folder,) = tmp_path.glob("x-*/rows")
  (folder / "1.0.0").rename(folder / "incomplete.ABCDEF_1.0.0")
  for part in (folder / "incomplete.ABCDEF_1.0.0").glob("*train*"):
    part.write_bytes(b"half")
  assert load(tmp_path) == ROWS


def test_damage_is_named_with_its_folder(tmp_path):
  load(tmp_path)
  (part,) = tmp_path.glob("x-*/rows/1.0.0/*train*")
  whole = part.read_bytes()
  part.write_bytes(whole[:70000])
  with pytest.raises(ValueError, match="1.0.0 is damaged, delete the folder"):
    load(tmp_path)
  part.write_bytes(whole)
  (part.parent / "dataset_info.json").unlink()
  with pytest.raises(ValueError, match="1.0.0 is damaged, delete the folder"):
    load(tmp_path)


def test_two_processes_build_at_once(tmp_path):
  # Both wait until both have found nothing on disk.
  code = """
import pathlib, sys, time
from oppo_jax.tasks import rows
folder, me, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
def make_rows():
  (folder / me).touch()
  end = time.time() + 60
  while not (folder / other).exists() and time.time() < end:
    time.sleep(0.01)
  return {"train": [{"text": str(i)} for i in range(2000)]}
found = rows.load(
  "x", key="k", fields=["text"], make_rows=make_rows, data_dir=folder
)
assert [r["text"] for r in found["train"]] == [str(i) for i in range(2000)]
assert (folder / other).exists()
"""
  root = pathlib.Path(__file__).parents[1]
  children = [
    subprocess.Popen(
      [sys.executable, "-c", code, str(tmp_path), *names],
      cwd=root,
      stderr=subprocess.PIPE,
      text=True,
    )
    for names in (("a", "b"), ("b", "a"))
  ]
  for child in children:
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
