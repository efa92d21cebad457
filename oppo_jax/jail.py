# SPDX-License-Identifier: Apache-2.0
"""Shuts a process in, by what Linux offers: namespaces, another user, limits.

Knows nothing of programs or tests; `trial.py` decides who is shut in. All of it
runs in a small process of its own, never in the trainer: forking a process that
has threads, or moving it into a namespace, is not safe.

  L   leaves the network, the file tree and the IPC of the host   `separate`
  └ S     gives its children process numbers of their own         `start`
    └ init    number 1 in there: the kernel kills the rest with it
      └ main    user without rights, limits, then what it is for
"""

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from oppo_jax import linux

_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin")
_DEVICES = ("null", "zero", "urandom")


class Child(NamedTuple):
  """A process that was started in here.

  Attributes:
    pid: of its outermost part; killing it kills all of it.
    status: pipe on which `Status` comes when the innermost part has ended.
  """

  pid: int
  status: int


class Status(NamedTuple):
  """How a child ended: wait status, CPU seconds, peak memory in bytes."""

  code: int
  cpu_s: float
  peak_bytes: int


_STATUS = struct.Struct("idq")


def guard() -> None:
  """Nobody may look into this process; it dies with its parent."""
  linux.prctl(linux.DUMPABLE, 0)
  linux.prctl(linux.DEATH_SIGNAL, signal.SIGKILL)


def separate(folder: str, *, prefix: str, disk_bytes: int) -> tuple[str, ...]:
  """Moves this process out of what it shares with the host.

  Args:
    folder: empty folder of this trial; the new file tree is made in it.
    prefix: Python's installation, to be seen from inside.
    disk_bytes: room for files in "/tmp", the only place to write.

  Returns:
    What was granted, of "network" (there is none), "processes" (others cannot
    be seen or signalled, and all of its own die together), "files" (those of
    the host cannot be seen, but for Python and /usr).
  """
  with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
    f.write("1000")  # the first to go if the machine runs out of memory
  uid, gid = os.geteuid(), os.getegid()
  flags = linux.NEW_FILES | linux.NEW_NETWORK | linux.NEW_IPC | linux.NEW_NAMES
  try:
    linux.unshare(flags | (linux.NEW_USERS if uid else 0))
  except OSError:
    return ()
  if uid:
    for name, text in (
      ("setgroups", "deny"),
      ("uid_map", f"{uid} {uid} 1"),
      ("gid_map", f"{gid} {gid} 1"),
    ):
      with open(f"/proc/self/{name}", "w") as f:
        f.write(text)
  try:
    _make_root(folder, prefix=prefix, disk_bytes=disk_bytes)
  except OSError:
    return ("network", "processes")
  return ("network", "processes", "files")


def _show(path: str, root: str) -> None:
  """The host's file or folder at `path`, read-only, at the same place."""
  target = root + path
  if os.path.islink(path):  # /lib -> usr/lib
    os.symlink(os.readlink(path), target)
    return
  if os.path.isdir(path):
    os.makedirs(target, exist_ok=True)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT, 0o644))
  linux.mount(path, target, "", linux.BIND | linux.RECURSIVE, "")
  if os.path.isdir(path):
    safe = linux.READ_ONLY | linux.NO_SUID | linux.NO_DEVICES
    flags = linux.BIND | linux.REMOUNT | safe | linux.kept_flags(path)
    linux.mount("", target, "", flags, "")


def _make_root(root: str, *, prefix: str, disk_bytes: int) -> None:
  """A file tree of Python, /usr and an empty /tmp, and nothing else."""
  linux.mount("", "/", "", linux.PRIVATE | linux.RECURSIVE, "")
  safe = linux.NO_SUID | linux.NO_DEVICES
  linux.mount("tmpfs", root, "tmpfs", safe, "size=1m,mode=755")
  os.mkdir(f"{root}/tmp")
  room = f"size={disk_bytes},nr_inodes=4096,mode=1777"
  linux.mount("tmpfs", f"{root}/tmp", "tmpfs", safe, room)
  seen = [path for path in _SYSTEM if os.path.lexists(path)]
  real = os.path.realpath(prefix)
  if not any(f"{real}/".startswith(f"{path}/") for path in seen):
    seen.append(real)
  for path in (*seen, *(f"/dev/{name}" for name in _DEVICES)):
    _show(path, root)
  if not os.path.lexists(root + prefix):
    os.makedirs(os.path.dirname(root + prefix), exist_ok=True)
    os.symlink(real, root + prefix)
  linux.mount(
    "", root, "", linux.BIND | linux.REMOUNT | linux.READ_ONLY | safe, ""
  )
  linux.enter_root(root)


def check_readable(path: str) -> None:
  """Raises OSError if another user than root could not read a file."""
  while path != (path := os.path.dirname(path)):
    if not os.stat(path).st_mode & 0o001:
      raise OSError(f"Python lies in {path}, which other users cannot enter")


def adopt_orphans() -> None:
  """What a descendant leaves behind becomes a child of this process."""
  linux.prctl(linux.SUBREAPER, 1)


def free_uid(offset: int) -> int:
  """A user id that nobody has, by this process's number; for root.

  RLIMIT_NPROC counts by user and spares root: an own id is what bounds a fork
  bomb, and keeps two trials that run at once apart.

  Args:
    offset: 0 or 1, one per child of this process.
  """
  with open("/proc/self/uid_map") as f:
    ranges = [[int(x) for x in line.split()] for line in f]
  start, _, size = max(ranges, key=lambda r: r[2])
  if size < 1 << 15:
    return os.geteuid()  # none to spare: root of a small user namespace
  return start + size - 3 - (2 * os.getpid() + offset) % (size // 2)


def start(
  main: Callable[[], None],
  *,
  uid: int,
  limits: dict[int, int],
  folder: str,
  stdio: tuple[int, int, int],
  keep: Iterable[int],
  own_processes: bool,
) -> Child:
  """Forks a process that is shut in, and calls `main` there.

  Args:
    main: what it is for; the process ends when it returns.
    uid: user id to take, if this process is root's.
    limits: resource limits (`resource.RLIMIT_*`), soft = hard.
    folder: working folder and HOME.
    stdio: what becomes of standard input, output and error.
    keep: further open files that it may use; all others are closed.
    own_processes: `separate` has granted "processes".
  """
  status, status_in = os.pipe()
  pid = os.fork()
  if pid:
    os.close(status_in)
    return Child(pid, status)
  try:
    guard()
    os.setsid()
    if own_processes:
      linux.unshare(linux.NEW_PIDS)
      _follow(os.fork())
      guard()
      os.setsid()
    _give_up_rights(uid)
    guard()  # a change of user undoes it
    inner = os.fork()
    if inner:
      _watch(inner, status_in)
    _close_all_but({*stdio, *keep})
    for number, fd in enumerate(stdio):
      os.dup2(fd, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ["HOME"] = folder
    for what, limit in limits.items():
      if what == resource.RLIMIT_CPU:
        resource.setrlimit(what, (limit, limit + 1))  # SIGXCPU, then SIGKILL
      else:
        resource.setrlimit(what, (limit, limit))
    main()
  except BaseException:
    sys.excepthook(*sys.exc_info())
    os._exit(1)
  os._exit(0)


def _follow(pid: int) -> None:
  """In the parent: waits for the child and ends. In the child: returns."""
  if pid:
    os.closerange(0, 64)
    os.waitpid(pid, 0)
    os._exit(0)


def _watch(pid: int, status: int) -> None:
  """Reaps everybody; when `pid` ends, says how, and ends too."""
  _close_all_but({status})
  while True:
    found, code, used = os.wait4(-1, 0)
    if found == pid:
      cpu_s, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
      os.write(status, _STATUS.pack(code, cpu_s, peak))
      os._exit(0)


def read_status(fd: int) -> Status | None:
  """What `Child.status` says; None if the child was killed from outside."""
  raw = os.read(fd, _STATUS.size)
  return Status(*_STATUS.unpack(raw)) if len(raw) == _STATUS.size else None


def _close_all_but(keep: set[int]) -> None:
  low = 0
  for fd in sorted(keep):
    os.closerange(low, fd)
    low = fd + 1
  os.closerange(low, max(low, 256))


def _give_up_rights(uid: int) -> None:
  """Another user, no capabilities, and no way to get either back."""
  if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  linux.prctl(linux.NO_NEW_RIGHTS, 1)
  linux.drop_capabilities()


def count_tasks(uid: int) -> int:
  """Threads of a user, as RLIMIT_NPROC counts them."""
  count = 0
  for name in os.listdir("/proc"):
    with contextlib.suppress(OSError, ValueError):
      if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
        count += len(os.listdir(f"/proc/{name}/task"))
  return count


def end(children: Iterable[Child], *, own_processes: bool) -> None:
  """Kills the children and all that they have started, and waits for it."""
  for child in children:
    with contextlib.suppress(ProcessLookupError):
      os.kill(child.pid, signal.SIGKILL)
  if not own_processes:
    # Stopped first: what is stopped cannot fork away from the kill.
    stopped = set()
    while found := _descendants(os.getpid()) - stopped:
      _signal(found, signal.SIGSTOP)
      stopped |= found
    _signal(stopped, signal.SIGKILL)
  with contextlib.suppress(ChildProcessError):
    while True:
      os.wait()


def _signal(pids: Iterable[int], number: int) -> None:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)


def _descendants(root: int) -> set[int]:
  """All living processes that descend from `root`."""
  parents = {}
  for name in os.listdir("/proc"):
    with contextlib.suppress(OSError, ValueError):
      with open(f"/proc/{int(name)}/stat", "rb") as f:
        state, parent = f.read().rpartition(b")")[2].split()[:2]
      if state != b"Z":
        parents[int(name)] = int(parent)
  found, grown = set(), {root}
  while grown:
    grown = {p for p, parent in parents.items() if parent in grown} - found
    found |= grown
  return found
