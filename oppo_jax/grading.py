# SPDX-License-Identifier: Apache-2.0
"""Grades responses by the task's rule: in place, or in threads, ahead of need.

  decode   row 3 ends ....... row 1 ends .... batch complete
  threads       grade 3 ------->  grade 1 ------->
  results                                          waits for what is missing

A grade is a function of the example and the text, whenever and wherever it is
computed: threads, and rows that are handed in early, change no result.
"""

from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple

from oppo_jax.tasks import base


class Item(NamedTuple):
  """A response to grade: its identity, its example, its text."""

  uid: int
  example: base.Example
  text: str


class Grader:
  """Grades for one task; what was submitted is kept until it is asked for."""

  def __init__(self, task: base.Task):
    self._task = task
    self._waiting: dict[int, tuple[str, futures.Future]] = {}
    self._pool = None
    if task.workers:
      self._pool = futures.ThreadPoolExecutor(task.workers, "grading")

  @property
  def is_early(self) -> bool:
    """Whether there is something to gain from `submit`."""
    return self._pool is not None

  def submit(self, item: Item) -> None:
    """Has a response graded by a thread; `is_early` only.

    A uid that is submitted again (its row was started anew) is graded again.
    """
    future = self._pool.submit(self._task.grades, item.example, item.text)
    self._waiting[item.uid] = (item.text, future)

  def results(self, items: Sequence[Item]) -> list[dict[str, float]]:
    """What `Task.grades` says of each; waits for threads.

    Raises:
      ValueError: the rule has failed; names the task and the uid.
    """
    if self._pool is None:
      return [self._task.grades(item.example, item.text) for item in items]
    for item in items:
      if self._waiting.get(item.uid, (None, None))[0] != item.text:
        self.submit(item)
    return [self._result(item.uid) for item in items]

  def _result(self, uid: int) -> dict[str, float]:
    _, future = self._waiting.pop(uid)
    try:
      return future.result()
    except Exception as e:  # whatever a rule may raise
      what = " ".join(f"{type(e).__name__}: {e}".split())
      raise ValueError(f"task {self._task.name!r}, uid {uid}: {what}") from e

  def close(self) -> None:
    """Drops what is not begun."""
    if self._pool is not None:
      self._pool.shutdown(wait=False, cancel_futures=True)


def rewards(
  task: base.Task, examples: Sequence[base.Example], texts: Sequence[str]
) -> list[float]:
  """The main reward of each response, by the task's threads if it has any.

  Raises:
    ValueError: see `Grader.results`; a uid is an index here.
  """
  grader = Grader(task)
  try:
    found = grader.results(
      [Item(i, *pair) for i, pair in enumerate(zip(examples, texts))]
    )
  finally:
    grader.close()
  return [grades["rule"] for grades in found]
