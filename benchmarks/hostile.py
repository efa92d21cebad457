# SPDX-License-Identifier: Apache-2.0
"""Programs that mean harm, and what must become of each in the sandbox.

A program is to define `f` with f(2) == 4, and none of these computes it: each
returns 4 only if what it tried has worked. So "passed" means harm done, but for
the last group, which is right and must stay so beside what it tries.
"""

from typing import NamedTuple

TESTS = ("assert f(2) == 4", "assert f(3) == 6")


class Program(NamedTuple):
  """A program, and the outcomes that are as they should be.

  Attributes:
    source: the program.
    expected: outcomes of `sandbox.OUTCOMES`.
    needs: what the system must grant (`sandbox.GRANTS`) for this to hold; it
      is not run without, as it may do harm then.
  """

  source: str
  expected: str
  needs: str = ""


PROGRAMS = {
  # Time.
  "infinite loop": Program("while True: pass", "timeout"),
  "loop that ignores SIGXCPU": Program(
    """
import signal
for n in range(1, 65):
  try: signal.signal(n, signal.SIG_IGN)
  except (OSError, ValueError): pass
while True: pass
""",
    "timeout",
  ),
  "sleeps for ever": Program("import time\ntime.sleep(1e6)", "timeout"),
  # Processes.
  "fork bomb": Program(
    """
import os
while True:
  try: os.fork()
  except OSError: pass
""",
    "timeout",
  ),
  "forks until it is refused": Program(
    """
import os, time
count = 1
for _ in range(500):
  try: pid = os.fork()
  except OSError: break
  if not pid: time.sleep(1e6)
  count += 1
if count > 64:
  def f(x): return 2 * x
else: raise RuntimeError(f"{count} processes")
""",
    "crash",
  ),
  "ten thousand threads": Program(
    """
import threading, time
for _ in range(10_000):
  threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
def f(x): return 2 * x
""",
    "crash",
  ),
  "kills everybody it may": Program(
    """
import os, signal
for pid in (os.getppid(), 1, 0, -1):
  try: os.kill(pid, signal.SIGKILL)
  except OSError: pass
def f(x): return 5
""",
    "crash wrong",
    "processes",
  ),
  # Memory and room.
  "allocates 10 GiB": Program("x = bytearray(10 << 30)", "memory"),
  "allocates bit by bit": Program(
    "x = []\nwhile True: x.append(bytearray(1 << 20))", "memory"
  ),
  "unpacks a zip bomb": Program(
    """
import zlib
small = zlib.compress(bytes(1 << 24), 9)
while True: small = zlib.compress(zlib.decompress(small) * 64, 0)
""",
    "memory",
  ),
  "writes a file of 10 GiB": Program(
    """
with open("big", "wb") as f:
  for _ in range(10 << 10): f.write(bytes(1 << 20))
def f(x): return 2 * x
""",
    "crash",
  ),
  "fills the disk with files": Program(
    """
for i in range(1_000):
  with open(f"part{i}", "wb") as file: file.write(bytes(1 << 20))
def f(x): return 2 * x
""",
    "crash",
    "files",
  ),
  "fills memory with files that have no name": Program(
    """
import os
size = 0
for _ in range(500):
  size += os.write(os.memfd_create("x"), bytes(1 << 26))
  if size > 1 << 30: break
def f(x): return 2 * x
""",
    "crash",
  ),
  # Words.
  "prints gigabytes": Program("while True: print('x' * (1 << 20))", "output"),
  "child prints gigabytes": Program(
    """
import os, time
if not os.fork():
  while True: os.write(2, b"x" * (1 << 16))
time.sleep(1e6)
""",
    "output",
  ),
  "answers with 50 MB": Program("def f(x): return 'x' * 50_000_000", "output"),
  "answers with itself inside": Program(
    "def f(x):\n  y = []\n  y.append(y)\n  return y", "crash"
  ),
  # Files and secrets.
  "writes outside": Program(
    """
import os
done = []
places = ["/", "/etc", "/root", "/home", "/usr", "/var/tmp", "/dev/shm"]
places += [os.path.dirname(os.__file__), ".."]
for place in places:
  path = os.path.join(place, "oppo_jax_was_here")
  try:
    open(path, "w").close()
    done.append(path)
    os.remove(path)
  except OSError: pass
def f(x): return 2 * x if done else 5
""",
    "wrong",
    "files",
  ),
  "writes outside by a symlink": Program(
    """
import os
done = []
for i, place in enumerate(["/", "/etc", "/var/tmp", "/dev/shm"]):
  os.symlink(place, f"link{i}")
  try:
    open(f"link{i}/oppo_jax_was_here", "w").close()
    done.append(place)
    os.remove(f"link{i}/oppo_jax_was_here")
  except OSError: pass
def f(x): return 2 * x if done else 5
""",
    "wrong",
    "files",
  ),
  "reads the host's files": Program(
    """
import os
seen = []
for path in ("/etc/passwd", "/etc/hostname", "/proc/1/cmdline", "/var"):
  seen += [path] if os.path.exists(path) else []
def f(x): return 2 * x if seen else 5
""",
    "wrong",
    "files",
  ),
  "reads the environment": Program(
    """
import os
seen = {k for k in os.environ if k not in ("HOME", "LC_CTYPE")}
for pid in os.listdir("/proc") if os.path.exists("/proc") else []:
  try: seen.add(open(f"/proc/{pid}/environ").read())
  except OSError: pass
def f(x): return 2 * x if seen else 5
""",
    "wrong",
    "files",
  ),
  "looks for the tests": Program(
    """
import gc, sys
def f(x):
  words = ["as" + "sert", "verd" + "ict"]
  frame, found = sys._getframe(), []
  while frame:
    found += [v for v in frame.f_locals.values()]
    frame = frame.f_back
  found += gc.get_objects() + sys.argv
  for y in found:
    if isinstance(y, (str, list, dict)) and "f(2) " + "== 4" in str(y)[:10_000]:
      return 2 * x
  return 5
""",
    "wrong",
  ),
  "deletes all files": Program(
    """
import os, shutil
shutil.rmtree("/", ignore_errors=True)
def f(x): return 5
""",
    "wrong timeout",
    "files",
  ),
  # The network.
  "opens connections": Program(
    """
import socket
done = []
for place in (("1.1.1.1", 53), ("8.8.8.8", 53), ("127.0.0.1", 22)):
  try: done.append(socket.create_connection(place, timeout=1))
  except ConnectionRefusedError: done.append(place)
  except OSError: pass
def f(x): return 2 * x if done else 5
""",
    "wrong",
    "network",
  ),
  # The verdict.
  "os._exit(0) at once": Program("import os\nos._exit(0)", "crash"),
  "os._exit(0) in a test": Program("import os\ndef f(x): os._exit(0)", "crash"),
  "sys.exit(0)": Program("import sys\nsys.exit(0)", "crash"),
  "os._exit(0) at the end": Program(
    """
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): return 5
""",
    "wrong",
  ),
  "equal to everything": Program(
    """
class Yes(int):
  def __eq__(self, other): return True
  __hash__ = int.__hash__
class Any:
  def __eq__(self, other): return True
def f(x): return Yes(5) if x == 2 else Any()
""",
    "wrong",
  ),
  "patches the builtins": Program(
    """
import builtins, json, os, struct, sys
class Never(BaseException): pass
builtins.AssertionError = Never
builtins.exec = builtins.compile = lambda *a, **k: None
builtins.isinstance = lambda *a: True
json.loads = json.dumps = lambda *a, **k: '["is", 4]'
def f(x): return 5
""",
    "wrong crash",
  ),
  "writes a verdict to all files": Program(
    """
import json, os, struct
raw = json.dumps(["passed", ""]).encode()
raw = struct.pack("I", len(raw)) + raw
for fd in range(3, 256):
  try: os.write(fd, raw * 3)
  except OSError: pass
def f(x): return 5
""",
    "crash wrong",
  ),
  "closes all files": Program(
    "import os\nos.closerange(0, 256)\ndef f(x): return 4", "crash timeout"
  ),
  "patches the tests from outside": Program(
    """
import ctypes, os
libc, done = ctypes.CDLL(None), []
for pid in range(1, 50):  # PTRACE_ATTACH
  if pid != os.getpid() and not libc.ptrace(16, pid, 0, 0): done.append(pid)
def f(x): return 2 * x if done else 5
""",
    "wrong",
  ),
  "wants its rights back": Program(
    """
import ctypes, os
libc, done = ctypes.CDLL(None, use_errno=True), []
try: os.setuid(0); done.append("root")
except OSError: pass
if not libc.unshare(0x10020000):  # a user namespace of its own, with mounts
  for path in (b"/", b"/usr"):
    if not libc.mount(None, path, None, 32 | 4096, None): done.append(path)
def f(x): return 2 * x if done and os.access("/usr", os.W_OK) else 5
""",
    "wrong",
    "files",
  ),
  # Crashes.
  "endless recursion": Program("def f(x): return f(x)", "crash"),
  "endless recursion, no limit": Program(
    """
import sys
sys.setrecursionlimit(1 << 30)
def f(x): return [f(x)][0] + sorted([1], key=f)[0]
""",
    "crash memory timeout",
  ),
  "abort": Program("import os\nos.abort()", "crash"),
  "reads what nobody types": Program("x = input()", "crash"),
  "no Python": Program("def f(x) return 4", "crash"),
  # Right answers beside it: the harm must not come to pass.
  "leaves a sleeping child": Program(
    """
import os, time
if not os.fork():
  os.setsid()
  if not os.fork():
    time.sleep(1e6)
  os._exit(0)
def f(x): return 2 * x
""",
    "passed",
  ),
  "leaves a child that ends the tests again": Program(
    """
import os
os.fork()
def f(x): return 2 * x
""",
    "passed",
  ),
}
