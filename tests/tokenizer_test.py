# SPDX-License-Identifier: Apache-2.0
"""Claims about tokenizers: lossless, deterministic, kept with the run."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from oppo_jax import tasks, tokenizer
from oppo_jax.tasks import arithmetic, gsm8k

SUMS = [
  e.prompt + e.solution
  for e in (
    arithmetic.problem(seed=0, split="train", index=i, difficulty=5, max_ops=12)
    for i in range(300)
  )
]
NASTY = [
  "",
  " ",
  "\n\n \t\r\n",
  "<pad><bos><eos>",
  "Janet\u2019s ducks \u2212 \u00bd \u20ac5\u00a0\u200b\u2028",
  "e\u0301 \u00e9 \ufb01",  # No normalisation.
  "\U0001f986 \x00 \x7f",
  "  two  spaces , before . marks !",
]
KINDS = {
  "char": dict(corpus=[*SUMS, *NASTY]),
  "byte": {},
  "bpe": dict(corpus=SUMS, vocab_size=300),
}
DATA = pathlib.Path(__file__).parents[2] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
  return request.param


@pytest.fixture(scope="module")
def tok(kind):
  return tokenizer.make(kind, **KINDS[kind])


def test_text_survives(tok):
  for text in SUMS + NASTY:
    assert tok.decode(tok.encode(text)) == text


def test_special_tokens_are_never_read_out_of_text(tok):
  special = {tok.pad_id, tok.bos_id, tok.eos_id}
  assert len(special) == 3
  for text in SUMS + NASTY:
    assert not special & set(tok.encode(text))


def test_only_the_last_eos_is_left_out_of_text(tok):
  text = tok.encode("1+2")
  assert tok.decode(np.asarray([*text, tok.eos_id], np.int32)) == "1+2"
  # A padding id or a second EOS inside an answer is not glossed over.
  assert tok.decode([*text, tok.pad_id, *text]) == "1+2<pad>1+2"
  assert tok.decode([*text, tok.eos_id, tok.eos_id]) == "1+2<eos>"


def test_an_id_without_a_token_is_visible_in_text(tok):
  text = tok.encode("1+2")
  assert tok.decode([*text, tok.vocab_size + 3, *text]) == "1+2\ufffd1+2"
  assert tok.decode([]) == ""


def test_ids_are_below_vocab_size(tok):
  assert max(i for text in SUMS for i in tok.encode(text)) < tok.vocab_size
  assert tok.eos_ids == (tok.eos_id,)


def test_a_saved_tokenizer_is_the_same(kind, tok, tmp_path):
  tok.save(tmp_path / "tok")
  loaded = tokenizer.load(tmp_path / "tok")
  by_kind = tokenizer.make("hf", path=str(tmp_path / "tok"))
  for other in (loaded, by_kind):
    for name in ("vocab_size", "pad_id", "bos_id", "eos_ids", "alphabet"):
      assert getattr(other, name) == getattr(tok, name), name
    for text in SUMS + NASTY:
      assert other.encode(text) == tok.encode(text)
      assert other.decode(tok.encode(text)) == text


def test_the_same_corpus_gives_the_same_ids(kind, tok, tmp_path):
  """Also in another process, where Python hashes strings differently."""
  corpus = tmp_path / "corpus.json"
  corpus.write_text(json.dumps(KINDS[kind]))
  code = """
import json, sys
from oppo_jax import tokenizer
kwargs = json.load(open(sys.argv[2]))
tokenizer.make(sys.argv[1], **kwargs).save(sys.argv[3])
"""
  root = pathlib.Path(__file__).parents[1]
  args = [sys.executable, "-c", code, kind, corpus, tmp_path / "other"]
  subprocess.run(args, check=True, cwd=root, timeout=120)
  tok.save(tmp_path / "mine")
  for name in ("tokenizer.json", "tokenizer_config.json"):
    mine, other = (tmp_path / d / name for d in ("mine", "other"))
    assert mine.read_bytes() == other.read_bytes()


def test_char_ids_do_not_depend_on_the_order_of_the_corpus():
  one = tokenizer.make("char", corpus=SUMS)
  two = tokenizer.make("char", corpus=SUMS[::-1])
  assert one.encode(SUMS[0]) == two.encode(SUMS[0])
  assert one.vocab_size == 3 + len(set("".join(SUMS)))
  assert len(one.encode(SUMS[0])) == len(SUMS[0])


def test_an_unknown_character_is_named_with_its_text(tmp_path):
  tok = tokenizer.make("char", corpus=["12+="])
  tok.save(tmp_path)
  for t in (tok, tokenizer.load(tmp_path)):
    with pytest.raises(ValueError, match="'x'.*'1[+]x=2'"):
      t.encode("1+x=2")


def test_bpe_merges_what_is_frequent_but_never_digits():
  tok = tokenizer.make("bpe", corpus=["aaa 1234 " * 50], vocab_size=300)
  assert len(tok.encode("aaa")) < 3
  assert len(tok.encode("1234")) == 4


def test_several_eos_are_read_and_kept(tmp_path):
  tok = tokenizer.make("byte")
  tok.save(tmp_path / "a")
  extras = tmp_path / "a" / "generation_config.json"
  extras.write_text('{"eos_token_id": [2, 1]}')
  loaded = tokenizer.load(tmp_path / "a")
  assert loaded.eos_ids == (2, 1)
  loaded.save(tmp_path / "b")
  assert tokenizer.load(tmp_path / "b").eos_ids == (2, 1)
  extras.write_text('{"eos_token_id": 7}')
  assert tokenizer.load(tmp_path / "a").eos_ids == (2, 7)


def test_eos_ids_are_in_the_config_where_nothing_else_lists_them(tmp_path):
  tokenizer.make("byte").save(tmp_path)
  (tmp_path / "config.json").write_text('{"eos_token_id": [9, 2]}')
  assert tokenizer.load(tmp_path).eos_ids == (2,)
  (tmp_path / "generation_config.json").unlink()
  assert tokenizer.load(tmp_path).eos_ids == (2, 9)


def test_how_to_generate_is_kept_when_a_tokenizer_is_saved_beside_it(tmp_path):
  path = tmp_path / "generation_config.json"
  path.write_text('{"temperature": 0.6, "eos_token_id": 7}')
  tokenizer.make("byte").save(tmp_path)
  assert json.loads(path.read_text()) == {
    "temperature": 0.6,
    "eos_token_id": [2],
  }


def test_a_bos_that_is_there_is_not_doubled():
  tok = tokenizer.make("byte")
  assert tok.encode_prompt("a") == [1, *tok.encode("a")]
  tok.hf.split_special_tokens = False  # as of most checkpoints
  assert tok.encode_prompt("<bos>a") == [1, *tok.encode("a")]


TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
  "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant: "
  "{% endif %}"
)


def test_a_chat_is_what_the_template_says_and_no_more(tmp_path):
  """As transformers tokenizes it: one BOS, special tokens by their ids."""
  tok = tokenizer.make("byte")
  tok.hf.chat_template = TEMPLATE
  tok.hf.split_special_tokens = False
  tok.save(tmp_path)
  tok = tokenizer.load(tmp_path)
  messages = [
    dict(role="system", content="Be kind."),
    dict(role="user", content="Hi <eos>"),
  ]
  theirs = tok.hf.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=False
  )
  assert tok.in_chat("Be kind.").encode_prompt("Hi <eos>") == theirs
  assert theirs.count(tok.bos_id) == 1
  plain = tok.in_chat("")
  assert plain.chat("Hi") == "<bos>user: Hi<eos>assistant: "
  assert plain.chat("Hi", "Ho") == "<bos>user: Hi<eos>assistant: Ho<eos>"
  assert tok.encode_prompt("Hi") == [1, *tok.encode("Hi")]


def test_a_chat_without_a_template_is_refused():
  with pytest.raises(ValueError, match="the tokenizer's chat template: "):
    tokenizer.make("byte").in_chat("").encode_prompt("Hi")


def test_a_folder_without_a_tokenizer_has_no_vocabulary(tmp_path):
  assert tokenizer.vocabulary(tmp_path) is None
  tok = tokenizer.make("char", corpus=["ab"])
  tok.save(tmp_path)
  assert tokenizer.vocabulary(tmp_path) == tok.hf.get_vocab()
  assert tokenizer.vocabulary(tmp_path)["b"] == 4


def test_missing_special_tokens_of_a_folder(tmp_path):
  """No padding: EOS stands in. No BOS: None. No EOS: refused."""
  tokenizer.make("byte").save(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  config = json.loads(path.read_text())
  del config["pad_token"], config["bos_token"]
  path.write_text(json.dumps(config))
  tok = tokenizer.load(tmp_path)
  assert (tok.pad_id, tok.bos_id, tok.eos_ids) == (2, None, (2,))
  del config["eos_token"]
  path.write_text(json.dumps(config))
  (tmp_path / "generation_config.json").unlink()
  with pytest.raises(ValueError, match="has no EOS"):
    tokenizer.load(tmp_path)


@pytest.mark.parametrize(
  ("kind", "kwargs", "message"),
  [
    ("word", {}, "kind='word'.*bpe, byte, char, hf"),
    ("char", {}, "corpus is empty"),
    ("bpe", dict(corpus=["a"], vocab_size=258), "vocab_size=258 < 259"),
  ],
)
def test_a_bad_choice_is_named(kind, kwargs, message):
  with pytest.raises(ValueError, match=message):
    tokenizer.make(kind, **kwargs)


@pytest.mark.parametrize("path", ["", "no/such/folder"])
def test_a_missing_folder_is_not_looked_up_elsewhere(path):
  with pytest.raises(FileNotFoundError, match="is not a folder"):
    tokenizer.make("hf", path=path)


@pytest.mark.skipif(
  not DATA.is_dir(), reason="the GSM8K files are not on this machine"
)
def test_gsm8k_survives_and_keeps_its_grade(kind, tmp_path):
  task = tasks.make("gsm8k", data_dir=DATA, cache_dir=tmp_path)
  examples = [*task.prompts("test"), *task.prompts("train")[::10]]
  texts = [e.prompt + e.solution for e in examples]
  tok = tokenizer.make(kind, corpus=texts, vocab_size=384)
  for example, text in zip(examples, texts, strict=True):
    assert tok.decode(tok.encode(text)) == text
    response = tok.decode(tok.encode(example.solution) + [tok.eos_id])
    assert gsm8k.reward(example, response) == 1.0
