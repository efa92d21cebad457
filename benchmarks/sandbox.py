# SPDX-License-Identifier: Apache-2.0
r"""What the sandbox does with hostile programs, and with right ones.

  python -m benchmarks.sandbox
  python -m benchmarks.sandbox --references=mbpp.jsonl.gz,humaneval.jsonl.gz

The first prints a row for every program of `hostile.py`; the exit code is 1 if
one of them got what it should not, or left a process behind. It needs the
standard library alone, so that another user's Python can run it. The second
runs the reference program of every row of the files.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
import time

from benchmarks import hostile
from oppo_jax import sandbox

LIMITS = sandbox.Limits(
  cpu_s=2,
  wall_s=4.0,
  memory_bytes=256 << 20,
  processes=8,
  disk_bytes=16 << 20,
  output_bytes=1 << 20,
)
ROOMY = LIMITS._replace(
  cpu_s=20, wall_s=60.0, memory_bytes=1 << 30, processes=16
)


def left_behind(mark: str) -> list[int]:
  """Processes with `mark` in their command line, but for this one."""
  found = []
  for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
      try:
        line = pathlib.Path(f"/proc/{name}/cmdline").read_bytes()
      except OSError:
        continue
      if mark.encode() in line:
        found.append(int(name))
  return found


@contextlib.contextmanager
def marked_folder():
  """A folder for trials; all of their processes have it in their command line.

  Yields a function that says what is left: processes and files.
  """
  before = tempfile.tempdir
  with tempfile.TemporaryDirectory(prefix="attack-") as folder:
    os.chmod(folder, 0o711)
    tempfile.tempdir = folder
    try:
      yield lambda: [*left_behind(folder), *os.listdir(folder)]
    finally:
      tempfile.tempdir = before


def attack(name: str) -> sandbox.Result:
  """Runs a hostile program."""
  return sandbox.run(
    hostile.PROGRAMS[name].source,
    hostile.TESTS,
    names=("f",),
    preamble="",
    setup="",
    limits=LIMITS,
  )


def may_run(name: str) -> bool:
  """Whether the system grants what the program needs to be harmless."""
  needs = hostile.PROGRAMS[name].needs.split()
  return set(needs) <= set(sandbox.granted())


def is_as_expected(name: str, result: sandbox.Result) -> bool:
  """The outcome is right, or the system grants too little for that."""
  program = hostile.PROGRAMS[name]
  if not set(program.needs.split()) <= set(result.granted):
    return True
  return result.outcome in program.expected.split()


def table() -> bool:
  """Prints what became of every hostile program; true if all is well."""
  is_well, granted = True, sandbox.granted()
  print(f"{'program':42s} {'outcome':9s} {'s':>5s}  why")
  for name in hostile.PROGRAMS:
    if not may_run(name):
      print(f"{name:42s} not run, needs {hostile.PROGRAMS[name].needs}")
      continue
    with marked_folder() as left_of:
      began = time.perf_counter()
      result = attack(name)
      seconds, left = time.perf_counter() - began, left_of()
    is_good = is_as_expected(name, result) and not left
    is_well &= is_good
    why = " ".join(result.why.split())[:60]
    note = "" if is_good else f"  NOT AS IT SHOULD BE, left: {left}"
    print(f"{name:42s} {result.outcome:9s} {seconds:5.2f}  {why}{note}")
  lacking = [x for x in sandbox.GRANTS if x not in granted]
  who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
  print(
    f"\nrun by {who}; apart from the host: {', '.join(granted) or 'nothing'}"
  )
  if lacking:
    print(f"NOT granted by this system: {', '.join(lacking)}")
  print("all as they should be" if is_well else "NOT all as they should be")
  return is_well


def references(paths: list[str], *, style: str, workers: int) -> bool:
  """Runs the reference program of every row; true if all pass."""
  from oppo_jax.tasks import base, code, code_rows, lines

  is_well = True
  grade = functools.partial(code.grade, limits=ROOMY)
  for path in map(pathlib.Path, paths):
    found = list(lines.read(path.read_bytes(), path))
    examples = [
      base.Example(**code_rows.to_row(row, where, style=style, shown_tests=1))
      for where, row in found
    ]
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      got = list(pool.map(grade, examples, (e.solution for e in examples)))
    seconds = time.perf_counter() - began
    right = sum(numbers["rule"] == 1.0 for numbers in got)
    print(f"{path.name}: {right} of {len(got)} pass, {seconds:.0f} s")
    for (where, _), numbers in zip(found, got):
      if numbers["rule"] != 1.0:
        is_well = False
        print(f"  {where}: {[k for k, v in numbers.items() if v]}")
  return is_well


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--references", default="")
  parser.add_argument("--style", default="complete")
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument(
    "--json", default="", help="names; prints results as JSON"
  )
  args = parser.parse_args()
  if args.references:
    paths = args.references.split(",")
    how = dict(style=args.style, workers=args.workers)
    sys.exit(not references(paths, **how))
  if args.json:
    with marked_folder() as left_of:
      found = {name: attack(name) for name in args.json.split(",")}
      print(json.dumps({"results": found, "left": left_of()}))
    return
  sys.exit(not table())


if __name__ == "__main__":
  main()
