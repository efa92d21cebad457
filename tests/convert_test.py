# SPDX-License-Identifier: Apache-2.0
"""What is converted says the same: llama2.c files, runs, Hugging Face."""

import hashlib
import json
import pathlib
import struct

import jax
import numpy as np
import pytest
import tiny
from compare import assert_exact

from oppo_jax import (
  checkpoint,
  convert,
  decode,
  generation,
  hf,
  llama2c,
  score,
  shards,
  tokenizer,
)

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "stories260k"
FIXTURES = pathlib.Path(__file__).parent / "fixtures"
# The greedy sample printed in doc/stories260K.md of llama2.c: 565 characters.
SAMPLE_LEN = 565
SAMPLE_START = "Once upon a time, there was a little girl named Lily. She loved"
SAMPLE_SHA256 = (
  "30b2ffb07967932a88bfdf5e23b517a6f4cfcf7231db9e537360d3c12a4e4d10"
)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
  """The pretrained model, converted."""
  if not DATA.is_dir():
    pytest.skip(f"no {DATA}")
  out = tmp_path_factory.mktemp("stories") / "hf"
  convert.convert(DATA, out)
  return out


def test_a_pretrained_model_tells_the_published_story(stories):
  """Greedy, from BOS, by the loop's `decode_chunk`."""
  model = hf.make_model(stories, head="lm", **hf.PLAIN)
  params = hf.load_params(stories, model, dtype="float32")
  tokens = tokenizer.load(stories)
  assert tokens.eos_ids == (llama2c.EOS, llama2c.BOS)
  fns = generation.make_fns(
    model,
    sampling=decode.Sampling(
      temperature=0.0,
      top_k=0,
      top_p=1.0,
      eos_ids=tokens.eos_ids,
      max_response_len=256,
    ),
    num_slots=2,
    max_prompt_len=8,
    tile=score.Tile(rows=2, length=8, logprob_chunk=16),
    decode_loop="while",
    decode_rows=0,
  )
  bos = np.array([tokens.bos_id], np.int32)
  opening = [tokens.bos_id, *tokens.encode("Once upon a time")]
  said = generation.generate(
    fns,
    params,
    [bos, np.array(opening, np.int32)],
    run_key=jax.random.key(0),
  )
  text = tokens.decode(said[0])
  assert text.startswith(SAMPLE_START)
  sample = text[:SAMPLE_LEN]
  assert hashlib.sha256(sample.encode()).hexdigest() == SAMPLE_SHA256
  # The same story with its beginning given as a prompt.
  together = tokens.decode([*opening[1:], *said[1].tolist()])
  assert together[:SAMPLE_LEN] == sample


def test_a_response_keeps_the_space_that_it_begins_with(stories):
  tokens = tokenizer.load(stories)
  whole = tokens.encode("Tim and Ben")
  head = tokens.encode("Tim")
  assert whole[: len(head)] == head
  assert tokens.decode(whole[len(head) :]) == "and Ben"
  prompt = [tokens.bos_id, *head]
  assert tokens.decode_after(prompt, whole[len(head) :]) == " and Ben"
  assert tokens.decode_after(prompt, [*whole[len(head) :], 2]) == " and Ben"


def joined(text, pieces):
  """Token ids as llama2.c finds them: join the best pair, again and again."""
  ids = {piece: i for i, (piece, _) in enumerate(pieces)}
  found = []
  for char in " " + text:
    raw = char.encode()
    found += [ids[raw]] if raw in ids else [byte + 3 for byte in raw]
  while True:
    best = None
    for i in range(len(found) - 1):
      piece = pieces[found[i]][0] + pieces[found[i + 1]][0]
      score = pieces[ids[piece]][1] if piece in ids else None
      if score is not None and (best is None or score > best[0]):
        best = (score, i, ids[piece])
    if best is None:
      return found
    found[best[1] : best[1] + 2] = [best[2]]


def test_text_becomes_the_tokens_that_llama2c_finds(stories):
  pieces = llama2c.read_tokens(DATA / "tok512.bin", 512)
  tokens = tokenizer.load(stories)
  for text in (
    "Once upon a time, there was a little girl named Lily.",
    'She said, "I can\'t  find it!"\nThe end',
    " two  spaces, caf\u00e9 \u20ac5 \U0001f986",
    "a",
  ):
    assert tokens.encode(text) == joined(text, pieces)
    assert tokens.decode(tokens.encode(text)) == text


def write_llama2c(path, *, vocab, heads=2, kv_heads=1, cut=0):
  """A file of random weights in the layout of llama2.c; dim 8, 2 layers."""
  dim, hidden, num, length = 8, 12, 2, 4
  half, kv = dim // heads // 2, kv_heads * dim // heads
  per_layer = dim + 2 * dim * dim + 2 * kv * dim + dim + 3 * hidden * dim
  size = abs(vocab) * dim + num * per_layer + dim + 2 * length * half
  size += abs(vocab) * dim if vocab < 0 else 0
  rng = np.random.default_rng(0)
  data = llama2c.HEADER.pack(dim, hidden, num, heads, kv_heads, vocab, length)
  data += rng.normal(size=size).astype("<f4").tobytes()
  path.write_bytes(data[: len(data) - cut])


def test_a_head_of_its_own_is_what_the_file_ends_on(tmp_path):
  path = tmp_path / "model.bin"
  write_llama2c(path, vocab=-5)
  kwargs, params = llama2c.read(path)
  assert (kwargs["vocab_size"], kwargs["tie_embeddings"]) == (5, False)
  last = np.frombuffer(path.read_bytes()[-5 * 8 * 4 :], "<f4")
  assert_exact(params["out"], last.reshape(5, 8).T)
  write_llama2c(path, vocab=5)
  kwargs, params = llama2c.read(path)
  assert kwargs["tie_embeddings"]
  assert "out" not in params


@pytest.mark.parametrize(
  ("make", "says"),
  [
    (lambda p: write_llama2c(p, vocab=5, cut=4), "its header asks for"),
    (lambda p: p.write_bytes(b"ak42" + bytes(300)), "no llama2.c header"),
    (lambda p: p.write_bytes(b"ak42"), "too short"),
  ],
)
def test_a_file_that_is_not_llama2c_is_refused(make, says, tmp_path):
  path = tmp_path / "model.bin"
  make(path)
  with pytest.raises(ValueError) as e:
    llama2c.read(path)
  assert str(e.value).startswith(f"{path}: ")
  assert says in str(e.value)


def test_tokens_that_do_not_fit_are_refused(tmp_path):
  write_llama2c(tmp_path / "model.bin", vocab=5)
  path = tmp_path / "tok5.bin"
  token = lambda text: struct.pack("<fi", -1.0, len(text)) + text
  path.write_bytes(struct.pack("<i", 1) + 4 * token(b"a"))
  with pytest.raises(ValueError, match="has 4 tokens, the model's embedding 5"):
    convert.convert(tmp_path, tmp_path / "out")
  path.write_bytes(path.read_bytes() + token(b"abc")[:-1])
  with pytest.raises(ValueError, match="tok5.bin: damaged at byte"):
    convert.convert(tmp_path, tmp_path / "out")
  assert not (tmp_path / "out").exists()


def test_a_run_that_started_from_a_folder_keeps_its_config(tmp_path):
  base = FIXTURES / "qwen2_yarn"
  model = hf.make_model(base, head="lm", **hf.PLAIN)
  params = tiny.params(model, 1)
  run = tmp_path / "run"
  (run / "params").mkdir(parents=True)
  checkpoint.save_params(run / "params" / "policy.safetensors", params)
  (run / "config.json").write_text('{"model_name": "transformer"}')
  tokens = tokenizer.make("char", corpus=["abc"])
  tokens.save(run / "tokenizer")
  convert.convert(run, tmp_path / "out", base=base)
  assert_exact(hf.load_params(tmp_path / "out", model, dtype=None), params)
  read = lambda folder: json.loads((folder / "config.json").read_text())
  assert read(tmp_path / "out") == read(base) | {"dtype": "float32"}


def test_a_hugging_face_folder_changes_its_type_alone(tmp_path):
  source = FIXTURES / "gpt_neox_reward"  # stored in bfloat16
  as_is, wide = tmp_path / "as_is", tmp_path / "wide"
  convert.convert(source, as_is)
  convert.convert(source, wide, dtype="float32")
  before, same, after = (shards.find(x) for x in (source, as_is, wide))
  assert before.keys() == after.keys() == same.keys()
  for name in before:
    x = shards.view(before[name])
    assert_exact(shards.view(same[name]), x)
    assert_exact(shards.view(after[name]), x.astype(np.float32))


@pytest.mark.parametrize(
  ("source", "says"),
  [
    ("nowhere", "nowhere: is not a folder"),
    ("empty", "empty: neither a config.json, nor one *.bin"),
    ("run", "policy.safetensors: no such file"),
  ],
)
def test_a_source_of_no_kind_is_named(source, says, tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.json").write_text('{"model_name": "x"}')
  with pytest.raises((ValueError, OSError)) as e:
    convert.convert(tmp_path / source, tmp_path / "out")
  assert says in str(e.value)


def test_nothing_is_written_over(tmp_path):
  with pytest.raises(ValueError, match="is there already"):
    convert.convert(FIXTURES / "llama", tmp_path)
  assert not list(tmp_path.iterdir())
