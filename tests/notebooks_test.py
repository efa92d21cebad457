# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from the first cell to the last, and hold no outputs."""

import pathlib
import warnings

import pytest

nbformat = pytest.importorskip("nbformat", reason="oppo-jax[notebook]")
nbclient = pytest.importorskip("nbclient", reason="oppo-jax[notebook]")
pytest.importorskip("ipykernel", reason="oppo-jax[notebook]")

ROOT = pathlib.Path(__file__).parents[1]
TRACES = pathlib.Path(__file__).parents[2] / "shared/data/length_traces"
NAMES = ("delta_and_lengths", "gradient_equality", "oppo_walkthrough")
QUIET = {
  "CI": "1",  # what a notebook looks at to run for a short time only
  "JAX_PLATFORMS": "cpu",
  "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm, without ipywidgets
}
TIMEOUT_S = 300  # a cell, on a busy machine; all of them take a minute or two


def read(name):
  return nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(name, monkeypatch, environment):
  """Runs it as a reader would, without a screen; returns what was shown."""
  for key, value in (QUIET | environment).items():
    monkeypatch.setenv(key, str(value))
  notebook = read(name)
  client = nbclient.NotebookClient(
    notebook,
    timeout=TIMEOUT_S,
    kernel_name="python3",
    resources={"metadata": {"path": str(ROOT)}},
  )
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the messaging between the processes
    client.execute()  # raises what a cell raises
  return [output for cell in code(notebook) for output in cell.outputs]


def check_shown(outputs, *, least_pictures):
  pictures = [o for o in outputs if "image/png" in o.get("data", {})]
  assert len(pictures) >= least_pictures
  said = [o.text for o in outputs if o.get("name") == "stderr"]
  assert not said, said


def test_every_notebook_is_tested():
  assert sorted(p.stem for p in (ROOT / "colab").glob("*.ipynb")) == [*NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_clean_and_begins_with_the_set_up(name):
  notebook = read(name)
  nbformat.validate(notebook)
  assert notebook.cells[0].cell_type == "markdown"
  assert notebook.cells[0].source.startswith("# ")
  assert code(notebook)[0].source == code(read(NAMES[0]))[0].source
  set_up = code(notebook)[0].source
  for part in ("google.colab", "REPO =", "nvidia-smi", "[cuda12]"):
    assert part in set_up
  for cell in code(notebook):
    assert not cell.outputs
    assert cell.execution_count is None


def test_oppo_walkthrough_runs(monkeypatch):
  outputs = execute("oppo_walkthrough", monkeypatch, {})
  check_shown(outputs, least_pictures=5)


def test_gradient_equality_runs(monkeypatch):
  outputs = execute("gradient_equality", monkeypatch, {})
  check_shown(outputs, least_pictures=3)


@pytest.mark.parametrize("is_real", [False, True], ids=["drawn", "real"])
def test_delta_and_lengths_runs(is_real, monkeypatch, tmp_path):
  if is_real and not TRACES.is_dir():
    pytest.skip("the traces are not part of this repository")
  folder = TRACES if is_real else tmp_path
  outputs = execute("delta_and_lengths", monkeypatch, {"OPPO_TRACES": folder})
  check_shown(outputs, least_pictures=5)
