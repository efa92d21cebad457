# SPDX-License-Identifier: Apache-2.0
"""What becomes of programs in the sandbox, and of what they try."""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from benchmarks import hostile
from benchmarks import sandbox as attacks
from oppo_jax import sandbox

pytestmark = pytest.mark.skipif(
  sys.platform != "linux", reason="the sandbox runs on Linux"
)
ROOT = pathlib.Path(__file__).parents[1]
LIMITS = attacks.LIMITS._replace(cpu_s=10, wall_s=30.0)
needs = lambda grant: pytest.mark.skipif(
  sys.platform == "linux" and grant not in sandbox.granted(),
  reason=f"this system does not grant {grant!r} to a sandbox",
)


def run(program, *tests, names=("f",), preamble="", setup="", limits=LIMITS):
  return sandbox.run(
    program,
    tests,
    names=names,
    preamble=preamble,
    setup=setup,
    limits=limits,
  )


# Harm.


@pytest.fixture(scope="module")
def attacked():
  """Every hostile program at once, and what all of them have left behind."""
  with attacks.marked_folder() as left_of:
    names = [name for name in hostile.PROGRAMS if attacks.may_run(name)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      results = dict(zip(names, pool.map(attacks.attack, names)))
    return results, left_of()


@pytest.mark.parametrize("name", hostile.PROGRAMS)
def test_a_hostile_program_gets_what_it_should(attacked, name):
  if name not in attacked[0]:
    pytest.skip(f"this system does not grant {hostile.PROGRAMS[name].needs}")
  result = attacked[0][name]
  assert attacks.is_as_expected(name, result), result


def test_nothing_is_left_behind(attacked):
  assert attacked[1] == []


QUICK = [
  "forks until it is refused",
  "ten thousand threads",
  "allocates 10 GiB",
  "writes a file of 10 GiB",
  "prints gigabytes",
  "writes outside",
  "reads the host's files",
  "opens connections",
  "os._exit(0) at once",
  "looks for the tests",
  "patches the tests from outside",
  "leaves a sleeping child",
]


def attack_from_outside(code, **kwargs):
  """The same in a process of another Python: the system's, if it will do."""
  python = "/usr/bin/python3"
  probe = "import sys; sys.exit(sys.version_info < (3, 11))"
  if not os.path.exists(python) or subprocess.call([python, "-c", probe]):
    pytest.skip("no Python for all users")
  if not os.stat(ROOT).st_mode & 0o001:
    pytest.skip("other users cannot read this checkout")
  code += "from benchmarks import sandbox\nsandbox.main()"
  done = subprocess.run(
    [python, "-c", code, f"--json={','.join(QUICK)}"],
    cwd=ROOT,
    env={"PYTHONDONTWRITEBYTECODE": "1"},
    capture_output=True,
    check=False,
    **kwargs,
  )
  assert done.returncode == 0, done.stderr.decode()
  found = json.loads(done.stdout)
  results = {k: sandbox.Result(*v) for k, v in found["results"].items()}
  return results, found["left"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_same_holds_for_a_user_without_rights():
  results, left = attack_from_outside("", user=65534, group=65534)
  assert left == []
  for name in QUICK:
    assert attacks.is_as_expected(name, results[name]), (name, results[name])


def test_without_namespaces_limits_hold_and_the_result_says_so():
  patched = (
    "from oppo_jax import sandbox\n"
    "sandbox._BOOT = sandbox._BOOT.replace('trial.main()',"
    "'trial.jail.separate = lambda *a, **k: (); trial.main()')\n"
  )
  results, left = attack_from_outside(patched)
  assert left == []
  for name in QUICK:
    assert not results[name].granted
    assert attacks.is_as_expected(name, results[name]), (name, results[name])
  assert results["reads the host's files"].outcome == "passed"  # it did


@needs("network")
def test_the_host_cannot_be_reached():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    program = (
      "import socket\n"
      f"def f(x): return bool(socket.create_connection(('127.0.0.1', {port})))"
    )
    assert run(program, "assert f(2)").outcome == "crash"
    socket.create_connection(("127.0.0.1", port)).close()  # it was there


@needs("files")
def test_a_file_of_the_host_stays_as_it_is(tmp_path):
  path = tmp_path / "kept"
  path.write_text("mine")
  path.chmod(0o666)
  program = f"open({str(path)!r}, 'w').write('yours')\ndef f(x): return 4"
  result = run(program, "assert f(2) == 4")
  assert (result.outcome, result.why[:17]) == ("crash", "FileNotFoundError")
  assert path.read_text() == "mine"


def test_the_environment_is_empty(monkeypatch):
  monkeypatch.setenv("OPPO_JAX_SECRET", "x")
  program = "import os\nx = dict(os.environ)\ndef f(): return x"
  test = "y = f()\nassert list(y) == ['HOME']"
  assert run(program, test).outcome == "passed"


@needs("files")
def test_what_it_may_it_can():
  program = """
import os, tempfile, threading
def f():
  with tempfile.NamedTemporaryFile("w+", dir=".") as file:
    file.write("x")
  found = []
  threads = [threading.Thread(target=found.append, args=(i,)) for i in range(4)]
  for t in threads: t.start()
  for t in threads: t.join()
  return sorted(found), os.listdir("."), os.listdir("/")
"""
  test = (
    "a, b, c = f()\nassert a == [0, 1, 2, 3] and b == [] and 'home' not in c"
  )
  assert run(program, test).outcome == "passed"


# Tests and stand-ins.


def test_outcomes_are_told_apart_and_passed_tests_counted():
  program = """
def f(x):
  if x == 0: raise ValueError("zero")
  return 2 * x
"""
  right, wrong, crash = "assert f(2) == 4", "assert f(2) == 5", "assert f(0)"
  got = run(program, right, wrong, crash, right)
  assert (got.outcome, got.passed) == ("wrong", 2)
  got = run(program, right, crash, wrong)
  assert (got.outcome, got.passed, got.why) == ("crash", 1, "ValueError: zero")
  assert run(program, right, right)[:3] == ("passed", "", 2)


def test_an_answer_of_the_wrong_kind_is_a_wrong_answer():
  got = run("def f(x): return None", "assert abs(f(2) - 4) < 1e-6")
  assert got.outcome == "wrong"
  assert "TypeError" in got.why


def test_what_is_not_defined_is_a_crash():
  got = run("g = 4", "assert f(2) == 4")
  assert (got.outcome, got.why) == (
    "crash",
    "NameError: name 'f' is not defined",
  )


def test_tests_may_expect_an_exception():
  test = "try: f(2)\nexcept KeyError: pass\nelse: assert False"
  assert run("def f(x): return {}[x]", test).outcome == "passed"
  assert run("def f(x): return 1 / 0", test).outcome == "crash"


def test_objects_stay_with_the_program():
  program = """
class Node:
  def __init__(self, x): self.x, self.next = x, None
  def __eq__(self, other): return True
  def __len__(self): return 7
  def __getitem__(self, i): return i
def f(node):
  while node:
    yield node.x
    node = node.next
"""
  setup = "a = Node(1)\na.next = Node(2)"
  tests = (
    "assert list(f(a)) == [1, 2]",
    "assert a.next.x == 2",
    "assert len(a) == 7 and a['k'] == 'k'",
    "assert a != 1 and not a == Node(1)",
  )
  got = run(program, *tests, names=("f", "Node"), setup=setup)
  assert got[:3] == ("passed", "", 4), got


def test_a_preamble_is_there_but_the_program_has_its_names():
  preamble = "def f(x): return 4\ndef g(x): return x + 1"
  assert run("def f(x): return 3", "assert g(f(2)) == 4", preamble=preamble)[
    :3
  ] == ("passed", "", 1)


def test_sets_and_random_numbers_are_the_same_in_every_run():
  program = """
import random
def f(): return [*{"a", "b", "c", "d", "e", "f"}], random.random()
"""
  got = [run(program, "print(f())\nassert f() == 0").outcome for _ in range(2)]
  assert got == ["wrong"] * 2
  shown = "print(f(), flush=True)"
  first = run(program + shown, "f()").printed
  assert first
  assert run(program + shown, "f()").printed == first


def test_a_stopped_program_keeps_the_tests_that_it_passed():
  program = "import os\ndef f(x): return 4 if x == 2 else os._exit(0)"
  got = run(program, "assert f(2) == 4", "assert f(3) == 6", "assert f(2) == 4")
  assert (got.outcome, got.passed) == ("crash", 1)


def test_a_sandbox_that_fails_says_so(monkeypatch):
  monkeypatch.setattr(sandbox, "_BOOT", "raise SystemExit('no way')")
  with pytest.raises(RuntimeError, match="sandbox: no way"):
    run("", "")
  monkeypatch.setattr(sys, "platform", "darwin")
  with pytest.raises(OSError, match="Linux only, not darwin"):
    run("", "")
