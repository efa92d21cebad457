# SPDX-License-Identifier: Apache-2.0
"""The process that `sandbox.run` starts: starts two more, and keeps the clock.

this      reads the job, says what came out
├ tests     in a jail: ask the program, send a line for each test
└ program   in a jail of its own: answers
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time

from oppo_jax import exam, jail, wire


def main() -> None:
  """Reads limits from the arguments and the job from stdin; prints the end."""
  began, limits = time.monotonic(), json.loads(sys.argv[1])
  is_root = os.geteuid() == 0
  uids = [jail.free_uid(i) if is_root else os.geteuid() for i in range(2)]
  null, folder = os.open(os.devnull, os.O_RDWR), limits["folder"]
  granted = jail.separate(
    folder, prefix=sys.base_prefix, disk_bytes=limits["disk_bytes"]
  )
  # Tasks that are counted with those of the program: of the jails, or of all
  # that this user runs.
  spare = 1 if is_root else 6 if granted else 6 + jail.count_tasks(uids[0])
  jail.guard()
  jail.adopt_orphans()
  if "files" in granted:
    folder = "/tmp"
  elif is_root:
    jail.check_readable(os.__file__)
    os.chown(folder, uids[0], uids[0])

  asked, requests = os.pipe()
  answers, answered = os.pipe()
  job, job_in = os.pipe()
  verdict, verdict_in = os.pipe()
  printed, printed_in = os.pipe()
  shared = {
    resource.RLIMIT_CPU: limits["cpu_s"],
    resource.RLIMIT_AS: limits["memory_bytes"],
    resource.RLIMIT_NOFILE: 32,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MSGQUEUE: 0,
  }
  confined = dict(own_processes="processes" in granted)
  program = jail.start(
    lambda: exam.serve(asked, answered),
    uid=uids[0],
    limits=shared
    | {
      resource.RLIMIT_NPROC: limits["processes"] + spare,
      resource.RLIMIT_FSIZE: limits["disk_bytes"],
    },
    folder=folder,
    stdio=(null, printed_in, printed_in),
    keep=(asked, answered),
    **confined,
  )
  tests = jail.start(
    lambda: exam.judge(wire.receive(job), requests, answers, verdict_in),
    uid=uids[1],
    limits=shared
    | {resource.RLIMIT_NPROC: 1 + spare, resource.RLIMIT_FSIZE: 0},
    folder="/",
    stdio=(null, null, null),
    keep=(job, requests, answers, verdict_in),
    **confined,
  )
  for fd in (asked, requests, answers, answered, job, verdict_in, printed_in):
    os.close(fd)
  given = json.loads(sys.stdin.buffer.read())
  with contextlib.suppress(wire.Closed):
    wire.send(job_in, given)
  os.close(job_in)
  watch = _Watch(verdict, printed, program, limits["output_bytes"])
  watch.until(began + limits["wall_s"])
  jail.end((program, tests), **confined)
  watch.drain()
  found = _outcome(watch, len(given["tests"]), limits["cpu_s"], tests)
  json.dump(found | {"granted": granted, "printed": watch.head}, sys.stdout)


class _Watch:
  """What L has seen so far.

  Attributes:
    said: lines of T.
    head: begin of what P printed.
    status: how P ended, if it did.
    timed_out: the clock ran out first.
    flooded: P printed more than it may.
  """

  def __init__(self, verdict: int, printed: int, program, output_bytes: int):
    self._verdict, self._printed, self._program = verdict, printed, program
    self._left, self._raw = output_bytes, b""
    self._open = {verdict, printed, program.status}
    self.said, self.head, self.status = [], "", None
    self.timed_out = self.flooded = False

  def until(self, deadline: float) -> None:
    """Watches until T is done, P prints too much, or the clock runs out."""
    while self._verdict in self._open and not self.flooded:
      if not self._look(deadline - time.monotonic()):
        self.timed_out = True
        return
    # T has lost P: what became of it is on its way.
    if self.said and self.said[-1][0] == "gone":
      patience = time.monotonic() + 2
      while self._program.status in self._open and not self.flooded:
        if not self._look(patience - time.monotonic()):
          return

  def drain(self) -> None:
    """Reads what is left in the pipes of those who have ended."""
    while self._open:
      self._look(None)

  def _look(self, seconds: float | None) -> bool:
    wait = None if seconds is None else max(seconds, 0)
    ready, _, _ = select.select(list(self._open), [], [], wait)
    for fd in ready:
      if fd == self._program.status:
        self.status = jail.read_status(fd)
        self._open.discard(fd)
        continue
      part = os.read(fd, 1 << 16)
      if not part:
        self._open.discard(fd)
      elif fd == self._printed:
        self._left -= len(part)
        self.flooded |= self._left < 0
        self.head += part[: exam.DETAIL - len(self.head)].decode("latin-1")
      else:
        self._raw += part
        self._split()
    return bool(ready)

  def _split(self) -> None:
    while len(self._raw) >= wire.LENGTH.size:
      (size,) = wire.LENGTH.unpack_from(self._raw)
      line = self._raw[wire.LENGTH.size :][:size]
      if len(line) < size:
        return
      self.said.append(json.loads(line))
      self._raw = self._raw[wire.LENGTH.size + size :]


def _outcome(watch: _Watch, num_tests: int, cpu_s: int, tests) -> dict:
  """What all that was seen comes to."""
  passed = sum(outcome == "passed" for outcome, _ in watch.said)
  failed = [line for line in watch.said if line[0] != "passed"]
  if watch.flooded:
    outcome, why = "output", "printed too much"
  elif watch.timed_out:
    outcome, why = "timeout", "wall clock"
  elif failed and failed[0][0] != "gone":
    outcome, why = failed[0]
  elif failed:
    outcome, why = _fate(watch.status, cpu_s)
  elif passed < num_tests:
    outcome, why = _fate(jail.read_status(tests.status), cpu_s)
    why = f"the tests: {why}"
  else:
    outcome, why = "passed", ""
  cpu = watch.status.cpu_s if watch.status else 0.0
  return {"outcome": outcome, "why": why, "passed": passed, "cpu_s": cpu}


def _fate(status: jail.Status | None, cpu_s: int) -> tuple[str, str]:
  """Outcome and explanation of a process that ended too early."""
  if status is None:
    return "crash", "it hung up"
  number = os.waitstatus_to_exitcode(status.code)
  if number >= 0:
    return "crash", f"it left with exit code {number}"
  if number == -signal.SIGXCPU or status.cpu_s >= cpu_s:
    return "timeout", "CPU time"
  return "crash", f"killed by signal {-number}"
