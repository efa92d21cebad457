# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: the same numbers as torch, the same bits on disk.

The folders of `fixtures/` hold small random checkpoints and what transformers
says of them; `fixtures/make.py` made both.
"""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from compare import assert_close, assert_exact
from safetensors import numpy as safetensors
from three_ways import (
  model_of,
  say_decode,
  say_scores,
  say_tiles,
  say_whole,
)

from oppo_jax import families, hf, shards, tokenizer

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
ALL = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
LANGUAGE = [name for name in ALL if not name.endswith("_reward")]
REWARD = [name for name in ALL if name.endswith("_reward")]


def opened(name, *, block=0):
  """Model, float32 parameters and reference of a fixture."""
  folder = FIXTURES / name
  model = model_of(folder, block=block)
  params = hf.load_params(folder, model, dtype="float32")
  said = safetensors.load_file(folder / "reference.safetensors")
  return model, params, said


@pytest.mark.parametrize(
  ("say", "block"),
  [
    (say_whole, 0),
    (say_tiles, 0),
    (say_decode, 8),
  ],
)
@pytest.mark.parametrize("name", LANGUAGE)
def test_logits_are_those_of_torch(name, say, block):
  model, params, reference = opened(name, block=block)
  tokens, length = reference["tokens"], reference["length"]
  want = reference["logits"]
  assert want.std() > 0.3  # not a comparison of small numbers
  got = say(model, params, tokens, length)
  for row, n in enumerate(length):
    assert_close(got[row, :n], want[row, :n])


@pytest.mark.parametrize("name", REWARD)
def test_scores_at_the_last_token_are_those_of_torch(name):
  model, params, reference = opened(name)
  tokens, length = reference["tokens"], reference["length"]
  got = say_scores(model, params, tokens, length)
  assert np.ptp(reference["scores"]) > 0.2
  assert_close(got, reference["scores"])


def test_fixtures_are_of_all_families_and_hide_nothing():
  kinds, heads = set(), set()
  for name in ALL:
    raw = json.loads((FIXTURES / name / "config.json").read_text())
    kinds.add(raw["model_type"])
    heads.add((raw["model_type"], name in REWARD))
    for key, x in safetensors.load_file(
      FIXTURES / name / "model.safetensors"
    ).items():
      x = x.astype(np.float32)
      assert (x != 0).all(), key
      assert (x != 1).mean() > 0.8, key  # bfloat16 is coarse there
      assert x.std() > 0.1, key
  assert kinds == set(families.FAMILIES)
  assert len(heads) == 2 * len(kinds)


def bits(folder):
  """All tensors of a folder, byte for byte."""
  return {
    name: (tensor.dtype, tensor.shape, shards.view(tensor).tobytes())
    for name, tensor in shards.find(folder).items()
  }


@pytest.mark.parametrize("max_bytes", [hf.MAX_BYTES, 3000])
@pytest.mark.parametrize("name", ALL)
def test_a_round_trip_is_bitwise(name, max_bytes, tmp_path):
  source = FIXTURES / name
  raw = json.loads((source / "config.json").read_text())
  model = model_of(source)
  for dtype in (None, "float32"):
    params = hf.load_params(source, model, dtype=dtype)
    hf.save(
      tmp_path / "out",
      model,
      params,
      dtype=raw["dtype"],
      source=source,
      max_bytes=max_bytes,
    )
    num_files = len(list((tmp_path / "out").glob("*.safetensors")))
    assert (num_files > 3) == (max_bytes == 3000)
    assert bits(tmp_path / "out") == bits(source)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw


@pytest.mark.parametrize("name", ALL)
def test_a_folder_made_without_a_source_holds_the_same_model(name, tmp_path):
  model = model_of(FIXTURES / name)
  params = hf.load_params(FIXTURES / name, model, dtype="float32")
  out = tmp_path / name
  hf.save(out, model, params, dtype="float32")
  assert model_of(out) == model
  assert_exact(hf.load_params(out, model, dtype="float32"), params)


def test_a_path_names_the_leaf_it_holds():
  model, params, _ = opened("llama")
  theirs = {
    name: shards.view(tensor)
    for name, tensor in shards.find(FIXTURES / "llama").items()
  }
  at = "model.layers.1"
  layer = params["layer_1"]
  assert_exact(
    layer["attention"]["k"]["kernel"],
    theirs[f"{at}.self_attn.k_proj.weight"].T,
  )
  assert_exact(layer["down"]["kernel"], theirs[f"{at}.mlp.down_proj.weight"].T)
  assert_exact(params["out"], theirs["lm_head.weight"].T)
  assert jax.tree.structure(params) == jax.tree.structure(
    model.init(jax.random.key(0))
  )


def test_parameters_are_cast_and_placed_as_asked():
  folder = FIXTURES / "llama"  # stored in float32
  model = model_of(folder)
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  where = jax.NamedSharding(mesh, jax.P("x"))
  asked = {}

  def sharding(path, shape):
    asked[path] = shape
    return where if path == "out" else None

  params = hf.load_params(folder, model, dtype="bfloat16", sharding=sharding)
  exact = hf.load_params(folder, model, dtype=None)
  assert_exact(params, jax.tree.map(lambda x: x.astype("bfloat16"), exact))
  assert params["out"].sharding == where
  assert params["embedding"].sharding != where
  assert asked["out"] == (16, 45)
  assert asked["layer_0.gate.kernel"] == (16, 24)


def copied(name, tmp_path, **changes):
  """A copy of a fixture with other entries in its config.json."""
  folder = tmp_path / name
  shutil.copytree(FIXTURES / name, folder)
  path = folder / "config.json"
  raw = json.loads(path.read_text()) | changes
  raw = {k: v for k, v in raw.items() if v is not ...}
  path.write_text(json.dumps(raw))
  return folder


def rewrite(folder, change):
  """Lets `change` edit the dict of tensors of a folder."""
  path = folder / "model.safetensors"
  tensors = safetensors.load_file(path)
  change(tensors)
  safetensors.save_file(tensors, path)


def refused(folder, model=None):
  """What loading ends with."""
  with pytest.raises((ValueError, FileNotFoundError)) as e:
    hf.load_params(folder, model or model_of(folder), dtype="float32")
  return str(e.value)


def test_parameters_do_not_follow_the_file(tmp_path):
  folder = copied("llama", tmp_path)
  params = hf.load_params(folder, model_of(folder), dtype=None)
  path = folder / "model.safetensors"
  with path.open("r+b") as file:
    file.write(b"\x7f" * path.stat().st_size)
  assert_exact(
    params,
    hf.load_params(
      FIXTURES / "llama", model_of(FIXTURES / "llama"), dtype=None
    ),
  )


@pytest.mark.parametrize(
  ("name", "old"),
  [
    ("llama", dict(rope_parameters=..., rope_theta=50.0)),
    (
      "llama_linear",
      dict(
        rope_parameters=...,
        rope_theta=50.0,
        rope_scaling={"type": "linear", "factor": 4.0},
      ),
    ),
    (
      "llama_llama3",
      dict(
        rope_parameters=...,
        rope_theta=50.0,
        rope_scaling={
          "rope_type": "llama3",
          "factor": 8.0,
          "original_max_position_embeddings": 16,
          "low_freq_factor": 1.0,
          "high_freq_factor": 4.0,
        },
      ),
    ),
    (
      "gpt_neox_sequential",
      dict(rope_parameters=..., rotary_pct=0.5, rotary_emb_base=100.0),
    ),
    ("gpt2", dict(n_ctx=32, tie_word_embeddings=..., dtype=...)),
  ],
)
def test_a_config_of_transformers_4_reads_the_same(name, old, tmp_path):
  folder = copied(name, tmp_path, **old)
  assert hf.load_config(folder) == hf.load_config(FIXTURES / name)


def test_a_bare_trunk_with_buffers_is_read(tmp_path):
  """The first GPT-2 files: no prefix, and causal masks among the tensors."""
  folder = copied("gpt2", tmp_path)

  def strip(tensors):
    for name in list(tensors):
      tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    for i in range(2):
      tensors[f"h.{i}.attn.bias"] = np.ones((1, 1, 32, 32), np.float32)
      tensors[f"h.{i}.attn.masked_bias"] = np.float32([-1e4])

  rewrite(folder, strip)
  model = model_of(folder)
  params = hf.load_params(folder, model, dtype="float32")
  assert_exact(params, opened("gpt2")[1])
  # And written with the names it came with.
  hf.save(tmp_path / "out", model, params, dtype="bfloat16", source=folder)
  assert "wte.weight" in shards.find(tmp_path / "out")


def test_a_copy_of_a_tied_embedding_is_read_and_another_one_refused(tmp_path):
  folder = copied("qwen2", tmp_path)
  embedding = "model.embed_tokens.weight"

  def copy(tensors):
    tensors["lm_head.weight"] = tensors[embedding].copy()

  def change(tensors):
    tensors["lm_head.weight"][3, 1] += 1

  rewrite(folder, copy)
  assert_exact(
    hf.load_params(folder, model_of(folder), dtype="float32"),
    opened("qwen2")[1],
  )
  rewrite(folder, change)
  said = refused(folder)
  assert "says that embeddings are tied" in said
  assert "'lm_head.weight'" in said


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (
      lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
      "missing: 'model.layers.1.mlp.up_proj.weight'",
    ),
    (
      lambda t: t.update(
        {"model.layers.2.mlp.up_proj.weight": t["lm_head.weight"].copy()}
      ),
      "unexpected: 'model.layers.2.mlp.up_proj.weight'",
    ),
    (
      lambda t: t.update(
        {"model.layers.0.self_attn.q_proj.bias": np.zeros(16, np.float32)}
      ),
      "unexpected: 'model.layers.0.self_attn.q_proj.bias'",
    ),
    (
      lambda t: t.update({"lm_head.weight": np.zeros((48, 16), np.float32)}),
      "tensor 'lm_head.weight' is [48, 16], expected [45, 16]",
    ),
    (
      lambda t: t.update({"lm_head.weight": np.zeros((45, 16), np.int8)}),
      "tensor 'lm_head.weight' is I8, which is not read",
    ),
    (
      lambda t: t.update({"score.weight": np.zeros((1, 16), np.float32)}),
      "is a reward model (tensor 'score.weight'), not a language model",
    ),
    (
      lambda t: t.clear(),
      "missing: 'lm_head.weight', 'model.embed_tokens.weight',",
    ),
  ],
)
def test_tensors_that_are_not_as_expected_are_named(change, says, tmp_path):
  folder = copied("llama", tmp_path)
  rewrite(folder, change)
  said = refused(folder)
  assert says in said
  assert str(folder) in said


def test_a_reward_model_of_several_labels_is_refused(tmp_path):
  folder = copied("llama_reward", tmp_path)

  def two(tensors):
    tensors["score.weight"] = np.zeros((2, 16), np.float32)

  rewrite(folder, two)
  assert "[2, 16], expected [1, 16]: only one label" in refused(folder)


def test_a_language_model_is_no_reward_model():
  folder = FIXTURES / "qwen3"
  model = hf.make_model(folder, head="scalar", **hf.PLAIN)
  said = refused(folder, model)
  assert said == (
    f"{folder}: is not a reward model: tensor 'score.weight' is missing"
  )


def test_another_model_is_refused_before_anything_is_read():
  said = refused(FIXTURES / "llama", model_of(FIXTURES / "mistral"))
  assert "config.json: head_dim is 4, the model's is 6" in said
  said = refused(FIXTURES / "llama", model_of(FIXTURES / "gpt2"))
  assert "another kind of model" in said


@pytest.mark.parametrize(
  ("name", "changes", "says"),
  [
    (
      "llama",
      dict(model_type="mamba"),
      "model_type='mamba': not one of ['gpt2'",
    ),
    ("llama", dict(model_type=...), "model_type=None: not one of"),
    ("llama", dict(hidden_act="relu"), "hidden_act='relu': only 'silu'"),
    (
      "llama",
      dict(
        rope_parameters={
          "rope_type": "dynamic",
          "rope_theta": 50.0,
          "factor": 2.0,
        }
      ),
      "rope_type='dynamic': only 'default' or 'linear'",
    ),
    (
      "gpt_neox",
      dict(
        rope_parameters={
          "rope_type": "linear",
          "rope_theta": 50.0,
          "factor": 2.0,
          "partial_rotary_factor": 0.25,
        }
      ),
      "rope_type='linear': only 'default'",
    ),
    ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=False"),
    ("gpt2", dict(activation_function="relu"), "activation_function='relu'"),
  ],
)
def test_options_that_are_not_known_are_named(name, changes, says, tmp_path):
  folder = copied(name, tmp_path, **changes)
  with pytest.raises(ValueError) as e:
    hf.load_config(folder)
  assert str(e.value).startswith(f"{folder / 'config.json'}: ")
  assert says in str(e.value)


def test_files_that_are_not_there_or_damaged_are_named(tmp_path):
  folder = copied("llama", tmp_path)
  model = model_of(folder)
  path = folder / "model.safetensors"
  whole = path.read_bytes()
  path.write_bytes(whole[:-100])
  assert refused(folder, model).startswith(f"{path}: ")
  path.unlink()
  (folder / "pytorch_model.bin").write_bytes(b"")
  assert f"{folder}: no model.safetensors" in refused(folder, model)
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match="config.json: not JSON"):
    hf.load_config(folder)
  (folder / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match="config.json: no such file"):
    hf.load_config(folder)


def test_an_index_that_is_wrong_is_named(tmp_path):
  model, params, _ = opened("llama")
  folder = tmp_path / "llama"
  save = lambda: hf.save(folder, model, params, dtype="float32", max_bytes=9000)
  save()
  (second,) = folder.glob("model-00002-*.safetensors")
  index = folder / shards.INDEX
  second.unlink()
  assert f"{index}: names {second.name}, which is not there" in refused(folder)
  save()
  raw = json.loads(index.read_text())
  raw["weight_map"]["lm_head.weight"] = raw["weight_map"]["model.norm.weight"]
  last = sorted(folder.glob("*.safetensors"))[-1].name
  raw["weight_map"]["model.embed_tokens.weight"] = last
  index.write_text(json.dumps(raw))
  said = refused(folder)
  assert said == (
    f"{index}: tensor 'model.embed_tokens.weight' is not in {last}"
  )
  index.write_text("[]")
  assert f"{index}: no index of tensors" in refused(folder)


def test_no_file_is_larger_than_asked_but_for_a_larger_tensor(tmp_path):
  model, params, _ = opened("llama")
  hf.save(tmp_path / "out", model, params, dtype="float32", max_bytes=2000)
  files = list((tmp_path / "out").glob("*.safetensors"))
  sizes = {
    path: [x.nbytes for x in safetensors.load_file(path).values()]
    for path in files
  }
  assert sum(sum(s) for s in sizes.values()) == 4 * sum(
    x.size for x in jax.tree.leaves(params)
  )
  for size in sizes.values():
    assert sum(size) <= 2000 or len(size) == 1
  assert len(files) < sum(len(s) for s in sizes.values())


def test_rows_longer_than_a_window_or_a_table_are_refused():
  for name, longest in (("mistral", 24), ("gpt2", 32)):
    model = model_of(FIXTURES / name)
    model.init_cache(1, longest)
    with pytest.raises(ValueError, match=f"{longest + 1} columns is too long"):
      model.init_cache(1, longest + 1)
  model_of(FIXTURES / "llama").init_cache(1, 100)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_an_export_has_the_tokenizer_and_its_ids(name, tmp_path):
  model, params, _ = opened(name)
  tokens = tokenizer.make("char", corpus=["abc "])
  out = tmp_path / "out"
  hf.save(out, model, params, dtype="bfloat16", tokens=tokens)
  raw = json.loads((out / "config.json").read_text())
  assert raw["eos_token_id"] == [tokens.eos_id]
  assert raw["pad_token_id"] == tokens.pad_id
  assert raw["dtype"] == "bfloat16"
  again = tokenizer.load(out)
  for text in ("cab", " c  b "):
    assert again.encode(text) == tokens.encode(text)
  # An export of what started from this folder takes its files along.
  hf.save(tmp_path / "next", model, params, dtype="float32", source=out)
  assert tokenizer.load(tmp_path / "next").encode("cab") == again.encode("cab")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
  model, params, _ = opened("llama")
  tokens = tokenizer.make("byte")
  with pytest.raises(ValueError, match="has 259 ids, the model's embedding 45"):
    hf.save(tmp_path / "out", model, params, dtype="float32", tokens=tokens)
  assert not (tmp_path / "out").exists()


def test_a_model_like_no_family_is_not_exported(tmp_path):
  model, params, _ = opened("qwen2")  # biases on q, k, v
  config = model.config.__class__(**{**vars(model.config), "mlp_bias": True})
  model = type(model)(config)
  with pytest.raises(ValueError, match="no published family is like"):
    hf.save(tmp_path / "out", model, params, dtype="float32")
