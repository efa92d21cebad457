# SPDX-License-Identifier: Apache-2.0
"""Parameters on disk: what goes in comes out, or the error names what is wrong.

And stages: a folder is there as a whole or not at all.
"""

import re

import jax
import jax.numpy as jnp
import pytest
import tiny
from compare import assert_exact
from safetensors import numpy as safetensors

from oppo_jax import checkpoint


def tree():
  return {
    "layer_0": {"q": {"kernel": jnp.arange(6.0).reshape(2, 3)}},
    "scale": jnp.asarray([1.0, -0.0, jnp.inf]),
    "half": jnp.asarray([1.5, 2.5], jnp.bfloat16),
  }


def test_what_is_saved_comes_back_bit_by_bit(tmp_path):
  path = tmp_path / "params.safetensors"
  for params in (tree(), tiny.params(tiny.model(), 0)):
    checkpoint.save_params(path, params)
    loaded = checkpoint.load_params(path, params)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert_exact(loaded, params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded))


def test_tensors_are_named_by_their_path(tmp_path):
  path = tmp_path / "params.safetensors"
  checkpoint.save_params(path, tree())
  names = set(safetensors.load_file(path))
  assert names == {"layer_0.q.kernel", "scale", "half"}


def test_a_transposed_array_is_saved_as_it_reads(tmp_path):
  """safetensors writes the memory of an array, whatever its strides."""
  path = tmp_path / "params.safetensors"
  params = {"x": jax.device_get(tree()["layer_0"]["q"]["kernel"]).T}
  checkpoint.save_params(path, params)
  assert_exact(checkpoint.load_params(path, params), params)


def test_shapes_alone_are_enough_to_load(tmp_path):
  path = tmp_path / "params.safetensors"
  model = tiny.model()
  params = model.init(jax.random.key(0))
  checkpoint.save_params(path, params)
  like = jax.eval_shape(model.init, jax.random.key(0))
  assert_exact(checkpoint.load_params(path, like), params)


def without(params, name):
  return {k: v for k, v in params.items() if k != name}


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (lambda p: without(p, "scale"), "'scale' is missing"),
    (lambda p: p | {"bias": jnp.zeros(1)}, "'bias' is unexpected"),
    (
      lambda p: p | {"scale": jnp.zeros(4)},
      "'scale' is float32[4], expected float32[3]",
    ),
    (
      lambda p: p | {"half": jnp.zeros(2)},
      "'half' is float32[2], expected bfloat16[2]",
    ),
  ],
)
def test_what_does_not_match_is_named(change, says, tmp_path):
  path = tmp_path / "params.safetensors"
  checkpoint.save_params(path, change(tree()))
  with pytest.raises(ValueError, match=re.escape(f"{path}: tensor {says}")):
    checkpoint.load_params(path, tree())


def test_a_damaged_file_is_named(tmp_path):
  path = tmp_path / "params.safetensors"
  checkpoint.save_params(path, tree())
  path.write_bytes(path.read_bytes()[:-5])
  with pytest.raises(ValueError, match=re.escape(str(path))):
    checkpoint.load_params(path, tree())


# Stages.


def test_a_stage_appears_under_its_name_when_it_is_whole(tmp_path):
  folder = tmp_path / "stages" / "sft"
  with checkpoint.stage(folder) as temporary:
    (temporary / "file").write_text("new")
    assert not folder.exists()
    assert temporary.parent == folder.parent  # so that the rename is atomic
  assert (folder / "file").read_text() == "new"
  assert list(folder.parent.iterdir()) == [folder]


def fail_halfway(folder):
  with checkpoint.stage(folder) as temporary:
    (temporary / "file").write_text("half")
    raise KeyboardInterrupt


def test_a_failed_stage_leaves_nothing_behind(tmp_path):
  folder = tmp_path / "stages" / "sft"
  with pytest.raises(KeyboardInterrupt):
    fail_halfway(folder)
  assert list(folder.parent.iterdir()) == []


def test_a_failed_stage_leaves_the_one_before_alone(tmp_path):
  folder = tmp_path / "sft"
  folder.mkdir()
  (folder / "file").write_text("old")
  with pytest.raises(KeyboardInterrupt):
    fail_halfway(folder)
  assert (folder / "file").read_text() == "old"
  assert list(tmp_path.iterdir()) == [folder]


def test_a_stage_made_again_replaces_all_of_the_one_before(tmp_path):
  folder = tmp_path / "sft"
  folder.mkdir()
  (folder / "stale").write_text("old")
  with checkpoint.stage(folder) as temporary:
    assert list(temporary.iterdir()) == []
    (temporary / "file").write_text("new")
  assert [p.name for p in folder.iterdir()] == ["file"]
