# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: the backend, and how properties are searched."""

import os

# Bits are compared on one backend; another one must be asked for by name.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Derandomized: a test that passes today passes tomorrow.
hypothesis.settings.register_profile(
  "tests", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
  """Programs that one run of the module compiled are read back by the next."""
  options = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: getattr(jax.config, name) for name in options}
  for settings in (options, before):
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
    if settings is options:
      yield


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
  """Commands that tests start keep nothing in the user's cache folder."""
  os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
