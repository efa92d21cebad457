# SPDX-License-Identifier: Apache-2.0
"""Rules of this repository that a program can check."""

import ast
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import oppo_jax

PACKAGE = pathlib.Path(oppo_jax.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON = sorted(
  path
  for folder in ("oppo_jax", "configs", "tests", "benchmarks")
  for path in (ROOT / folder).rglob("*.py")
)
name_of = lambda path: str(path.relative_to(ROOT))


def where(pattern, paths=MODULES):
  """Files with a line that matches, but for comments and docstrings."""
  found = set()
  for path in paths:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # docstrings quote freely
      if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        node.value = ast.Constant(None)
    if re.search(pattern, ast.unparse(tree)):
      found.add(name_of(path))
  return found


@pytest.mark.parametrize(
  ("module", "args"),
  [
    ("ruff", ["check", "."]),
    ("ruff", ["format", "--check", "."]),
  ],
)
def test_ruff_has_nothing_to_say(module, args):
  if importlib.util.find_spec(module) is None:
    pytest.skip(f"{module} is not installed: oppo-jax[lint]")
  command = [sys.executable, "-m", module, *args]
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stdout + done.stderr


def test_modules_import_from_lower_layers_only():
  beside = pathlib.Path(sys.executable).parent / "lint-imports"
  program = str(beside) if beside.exists() else shutil.which("lint-imports")
  if program is None:
    pytest.skip("import-linter is not installed: oppo-jax[lint]")
  done = subprocess.run(
    [program, "--no-cache"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "1 kept, 0 broken" in done.stdout


def test_every_file_names_its_license():
  empty = {name_of(path) for path in PYTHON if not path.read_text()}
  assert empty <= {"configs/__init__.py"}
  line = "# SPDX-License-Identifier: Apache-2.0\n"
  without = {n for n in PYTHON if not n.read_text().startswith(line)}
  assert {name_of(path) for path in without} == empty


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_says_what_it_is_for(path):
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert docstring
  assert docstring.splitlines()[0].endswith((".", ":"))


def test_jit_is_written_in_few_places():
  """The loop's `make_fns`, the supervised stages before it, the proofs."""
  assert where(r"\bjax\.jit\b") == {
    "oppo_jax/jit_table.py",
    "oppo_jax/supervised.py",
    "oppo_jax/warm_start.py",
    "oppo_jax/short_runs.py",
    "oppo_jax/one_shot.py",
  }
  assert not where(r"\b(nn|nnx|flax)\.jit\b|import jit|\bpmap\b")


def test_the_host_waits_in_one_place():
  """`metrics.fetch`; `slots.check` is for debugging."""
  waits = r"\bdevice_get\b|\bblock_until_ready\b"
  assert where(waits) == {"oppo_jax/metrics.py", "oppo_jax/slots.py"}
  check = re.search(
    r"\ndef check\(.*?(?=\n(def|class) |\Z)",
    (PACKAGE / "slots.py").read_text(),
    re.DOTALL,
  )
  assert "device_get" in check[0]
  assert (PACKAGE / "slots.py").read_text().count("device_get") == 1


@pytest.mark.parametrize("module", ["delta", "chunking"])
def test_controllers_are_plain_python(module):
  tree = ast.parse((PACKAGE / f"{module}.py").read_text())
  imported = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      imported |= {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
      imported.add((node.module or "").partition(".")[0])
  assert imported <= set(sys.stdlib_module_names)


def test_no_file_names_a_place_on_somebodys_machine():
  listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
  if not (ROOT / ".git").exists() or shutil.which("git") is None:
    pytest.skip("not a git checkout")
  done = subprocess.run(
    [*listed, "-z"], cwd=ROOT, capture_output=True, text=True, check=True
  )
  paths = [ROOT / name for name in done.stdout.split("\0") if name]
  assert ROOT / "pyproject.toml" in paths
  homes = "|".join(("work", "root", "home", "Users", "tmp/venv"))
  place = re.compile(rf"(?<![\w.\-/:])/({homes})/\w")
  found = {
    f"{name_of(path)}: {match[0]}"
    for path in paths
    if path.is_file()
    for match in place.finditer(path.read_text(errors="replace"))
  }
  assert not found
