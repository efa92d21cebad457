# SPDX-License-Identifier: Apache-2.0
"""The two tolerances of the tests: EXACT and CLOSE, nothing between."""

import jax
import numpy as np

ATOL = 1e-5


def _leaves(tree):
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(p): np.asarray(x) for p, x in paths}


def _compare(a, b, same):
  a, b = _leaves(a), _leaves(b)
  assert a.keys() == b.keys()
  for path in a:
    assert a[path].dtype == b[path].dtype, path
    same(a[path], b[path], path)


def assert_exact(a, b):
  """Two pytrees hold the same bits, leaf by leaf (NaN equals NaN)."""
  _compare(a, b, lambda x, y, path: np.testing.assert_array_equal(x, y, path))


def assert_close(a, b, *, atol=ATOL):
  """Two pytrees agree to `atol`, leaf by leaf; integers must be equal."""

  def close(x, y, path):
    if np.issubdtype(x.dtype, np.inexact):
      np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=path)
    else:
      np.testing.assert_array_equal(x, y, path)

  _compare(a, b, close)
