# SPDX-License-Identifier: Apache-2.0
"""The system calls that Python has no function for; each raises OSError."""

import ctypes
import os
import struct

# unshare(2)
NEW_FILES, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
# mount(2); the first four are those of statvfs(3) too
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
REMOUNT, BIND, RECURSIVE, PRIVATE = 1 << 5, 1 << 12, 1 << 14, 1 << 18
# prctl(2)
DEATH_SIGNAL, DUMPABLE, SUBREAPER, NO_NEW_RIGHTS = 1, 4, 36, 38

_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPABILITIES_V3 = 0x20080522


def _libc():
  return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
  if result:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
  """Namespaces of its own for this process (`NEW_PIDS`: for its children)."""
  _check(_libc().unshare(flags), "unshare")


def prctl(option: int, value: int) -> None:
  """Sets one property of this process."""
  _check(_libc().prctl(option, value, 0, 0, 0), f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
  """mount(2); "" is a null pointer."""
  raw = (x.encode() or None for x in (source, target, kind))
  result = _libc().mount(*raw, ctypes.c_ulong(flags), data.encode() or None)
  _check(result, f"mount {target}")


def kept_flags(path: str) -> int:
  """Flags of the mount that a path is on, to be said again in a remount.

  A user namespace may not drop them.
  """
  flags = os.statvfs(path).f_flag
  same = NO_SUID | NO_DEVICES | NO_EXEC | 1024 | 2048  # and no (dir) atime
  relative_atime = 1 << 21 if flags & 4096 else 0
  return flags & same | relative_atime


def enter_root(root: str) -> None:
  """Makes a mounted folder the root, and lets go of the former one."""
  number = _PIVOT_ROOT.get(os.uname().machine)
  if number is None:
    raise OSError(f"pivot_root: not known on {os.uname().machine}")
  os.chdir(root)
  _check(_libc().syscall(number, b".", b"."), "pivot_root")
  _check(_libc().umount2(b".", _DETACH), "umount")
  os.chdir("/")


def drop_capabilities() -> None:
  """All of them, for good."""
  header = struct.pack("Ii", _CAPABILITIES_V3, 0)
  _check(_libc().capset(header, bytes(24)), "capset")
