# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the newest one, whole, in its own types."""

import jax
import numpy as np
import pytest
from compare import assert_exact

from oppo_jax import snapshots


def state(seed):
  rng = np.random.default_rng(seed)
  return (
    {"a": jax.numpy.asarray(rng.normal(size=(3, 2)), "float32")},
    [jax.numpy.asarray(seed, "int32"), jax.random.key(seed)],
  )


def test_the_newest_snapshot_comes_back_bit_by_bit(tmp_path):
  kept = snapshots.Snapshots(tmp_path / "kept")
  assert kept.latest(state(0)) is None
  for step in (2, 5):
    kept.save(step, state(step), {"position": 10 * step})
  kept.close()
  again = snapshots.Snapshots(tmp_path / "kept")
  step, found, numbers = again.latest(jax.eval_shape(lambda: state(0)))
  assert (step, numbers) == (5, {"position": 50})
  as_data = lambda x: jax.random.key_data(x) if x.dtype.name[:3] == "key" else x
  assert_exact(jax.tree.map(as_data, found), jax.tree.map(as_data, state(5)))
  assert not (tmp_path / "kept" / "2").exists()
  again.close()


def test_what_was_saved_may_be_donated(tmp_path):
  kept = snapshots.Snapshots(tmp_path / "kept")
  x = jax.numpy.arange(1000.0)
  bump = jax.jit(lambda x: x + 1, donate_argnums=0)
  for step in range(1, 4):
    kept.save(step, {"x": x}, {})
    x = bump(x)
  kept.close()
  found = snapshots.Snapshots(tmp_path / "kept").latest({"x": x})
  np.testing.assert_array_equal(found.state["x"], np.arange(1000.0) + 2)


def test_a_snapshot_of_something_else_is_refused(tmp_path):
  kept = snapshots.Snapshots(tmp_path / "kept")
  kept.save(1, {"x": jax.numpy.zeros(3)}, {})
  for like in ({"x": jax.numpy.zeros(4)}, {"y": jax.numpy.zeros(3)}):
    with pytest.raises(ValueError, match=str(tmp_path / "kept" / "1")):
      kept.latest(like)
  kept.close()
