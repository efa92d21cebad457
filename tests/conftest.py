# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: the backend, and how properties are searched."""

import os

# Bits are compared on one backend; another one must be asked for by name.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis

# Derandomized: a test that passes today passes tomorrow.
hypothesis.settings.register_profile(
  "tests", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("tests")
