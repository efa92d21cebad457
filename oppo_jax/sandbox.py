# SPDX-License-Identifier: Apache-2.0
"""Runs a program that nobody has read, with tests, and says what came of it.

The program gets a process, a user and a process tree of its own, no network, an
empty folder, an empty environment, nothing on stdin, and limits (`Limits`). The
tests run in another process and ask it over a pipe, one call at a time: what
they expect is nowhere in its reach, and answers cross as plain data. So there
is no verdict to forge: leaving early, patched builtins, an `__eq__` that says
yes, a search through frames or memory all end as "wrong" or "crash". When the
tests are done, everything that was started is killed (`jail.py`, `trial.py`).

Random numbers of the module `random` and the order of sets are the same in
every run, so the outcome is a function of program and tests, unless the program
asks the clock or the system, or is close to a limit.

What it does not protect against:

- Holes in the kernel. Programs make the system calls that they like; there is
  no filter and no virtual machine.
- Memory as a whole. The limit is one for each process, and `processes` of them
  may use it at once; files and unnamed files in memory come on top, with at
  most 32 * `disk_bytes` for each process. In a container, bound the container.
- Time that it takes from others: until a limit ends it, it may use all cores.
- A program that knows the tests from its prompt and returns what they expect.
- Where namespaces are not granted (`Result.granted` says what was; Docker and
  Colab often grant none): the program can use the network, and read and write
  what its user can. Under root that is a user of its own, else it is the user
  who trains, whose processes it can kill then.
"""

import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

OUTCOMES = ("passed", "wrong", "crash", "timeout", "memory", "output")
GRANTS = ("network", "processes", "files")

_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
_BOOT = (
  "import sys; sys.path.insert(0, sys.argv.pop(1))"
  "; from oppo_jax import trial; del sys.path[0]; trial.main()"
)
_GRACE_S = 10.0  # beyond the wall limit, for starting and clearing up


class Limits(NamedTuple):
  """What a program may use.

  Attributes:
    cpu_s: CPU time of a process.
    wall_s: of all of it, tests included.
    memory_bytes: address space of a process.
    processes: processes and threads at one time, itself included.
    disk_bytes: of a file, and of all files where "files" is granted.
    output_bytes: printed.
  """

  cpu_s: int
  wall_s: float
  memory_bytes: int
  processes: int
  disk_bytes: int
  output_bytes: int


class Result(NamedTuple):
  """What came of it.

  Attributes:
    outcome: one of `OUTCOMES`, of the first test that did not pass: "wrong" = a
      test was not content, "crash" = an exception, a signal, no Python, or the
      process was gone; the rest are limits.
    why: a few words.
    passed: tests that passed.
    granted: of `GRANTS`, what the program was kept from, see `jail.separate`.
    printed: the begin of its output.
    cpu_s: CPU time, where its process ended by itself.
  """

  outcome: str
  why: str
  passed: int
  granted: tuple[str, ...]
  printed: str
  cpu_s: float


def run(
  program: str,
  tests: Sequence[str],
  *,
  names: Sequence[str],
  preamble: str,
  setup: str,
  limits: Limits,
) -> Result:
  """Runs a program, then tests on what it defines.

  Args:
    program: Python source.
    tests: Python statements, each a test: passed if it raises nothing.
    names: what the tests take from the program. In the tests these are
      stand-ins: functions, or classes whose objects stay with the program.
    preamble: statements that the tests rely on; run before `names` are there.
    setup: the same, run after.
    limits: what the program may use, and the tests too.

  Raises:
    RuntimeError: the sandbox itself has failed.
    OSError: the system is not Linux.
  """
  if sys.platform != "linux":
    raise OSError(f"sandbox: programs run on Linux only, not {sys.platform}")
  job = dict(
    program=program,
    tests=list(tests),
    names=list(names),
    preamble=preamble,
    setup=setup,
  )
  with tempfile.TemporaryDirectory(prefix="trial-") as folder:
    spec = json.dumps(limits._asdict() | {"folder": folder})
    with subprocess.Popen(
      [sys.executable, "-S", "-s", "-P", "-c", _BOOT, _ROOT, spec],
      env={"PYTHONHASHSEED": "0"},  # the order of sets is the same every time
      cwd="/",
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    ) as process:
      try:
        out, err = process.communicate(
          json.dumps(job).encode(), timeout=limits.wall_s + _GRACE_S
        )
      except subprocess.TimeoutExpired:  # the machine is far too busy
        return Result("timeout", "wall clock, from outside", 0, (), "", 0.0)
      finally:
        process.kill()
  if process.returncode:
    raise RuntimeError(f"sandbox: {err.decode(errors='replace')[-2000:]}")
  found = json.loads(out)
  found["granted"] = tuple(found["granted"])
  return Result(**found)


@functools.cache
def granted() -> tuple[str, ...]:
  """Of `GRANTS`, what this system lets a program be kept from."""
  limits = Limits(10, 60.0, 1 << 30, 1, 1 << 20, 1 << 20)
  empty = dict(names=(), preamble="", setup="")
  return run("", (), limits=limits, **empty).granted
