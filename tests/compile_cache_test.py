# SPDX-License-Identifier: Apache-2.0
"""Where compiled programs are kept, and when they are not."""

import pathlib

import jax
import pytest

from oppo_jax import compile_cache


@pytest.fixture(autouse=True)
def as_before():
  """JAX's settings are put back."""
  names = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def test_the_user_folder_is_shared_by_runs(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  folders = [
    compile_cache.folder_of("user", pathlib.Path(run)) for run in ("a", "b")
  ]
  assert folders == [tmp_path / "oppo_jax" / "compiled"] * 2
  monkeypatch.delenv("XDG_CACHE_HOME")
  monkeypatch.setenv("HOME", str(tmp_path))
  found = compile_cache.folder_of("user", pathlib.Path("a"))
  assert found == tmp_path / ".cache" / "oppo_jax" / "compiled"


def test_the_workdir_has_its_own(tmp_path):
  assert compile_cache.enable("workdir", tmp_path) == str(tmp_path / "compiled")
  assert (tmp_path / "compiled").is_dir()
  assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")


def test_off_keeps_nothing(tmp_path):
  assert compile_cache.enable("off", tmp_path) == ""
  assert list(tmp_path.iterdir()) == []
  assert not jax.config.jax_compilation_cache_dir


def test_a_folder_given_to_jax_is_left_alone(tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
  assert compile_cache.enable("workdir", tmp_path) == str(tmp_path / "mine")
  assert not (tmp_path / "compiled").exists()


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path):
  file = tmp_path / "file"
  file.write_text("")
  assert compile_cache.enable("workdir", file) == ""
  assert not jax.config.jax_compilation_cache_dir
