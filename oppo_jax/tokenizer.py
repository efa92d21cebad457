# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: one small class over Hugging Face tokenizers.

  char   the characters of a corpus, one id each    tiny tasks
  byte   UTF-8 bytes, one id each                   any text, no training
  bpe    byte-level BPE trained on a corpus         any text, shorter rows
  hf     the tokenizer in a folder                  pretrained models

The first three give ids 0, 1, 2 to padding, BOS and EOS, and never read those
out of text: a prompt that spells "<eos>" is just characters. What `save` writes
is a folder that `AutoTokenizer` opens too.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>")
_EXTRAS = "generation_config.json"  # Where Hugging Face lists several EOS ids.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one is there


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Encodes and decodes; knows the ids of the special tokens.

  Attributes:
    hf: the Hugging Face tokenizer.
    vocab_size: one more than the largest id.
    pad_id: may equal an EOS id; masks never come from it.
    bos_id: None where the vocabulary has none.
    eos_ids: ids that end a response; the first is the one written in targets.
    alphabet: characters that a "char" tokenizer knows; None = any text.
    system: of a chat: what precedes the prompt in the tokenizer's template, ""
      = nothing; None = prompts are plain text.
  """

  hf: Any
  vocab_size: int
  pad_id: int
  bos_id: int | None
  eos_ids: tuple[int, ...]
  alphabet: frozenset[str] | None
  system: str | None = None

  @property
  def eos_id(self) -> int:
    return self.eos_ids[0]

  def encode(self, text: str) -> list[int]:
    """Token ids of the text alone; no BOS, no EOS.

    Raises:
      ValueError: a character that a "char" tokenizer does not know.
    """
    if self.alphabet is not None and not self.alphabet.issuperset(text):
      char = next(c for c in text if c not in self.alphabet)
      raise ValueError(
        f"character {char!r} is not in the tokenizer's vocabulary; text:"
        f" {text!r}"
      )
    return self.hf.encode(text, add_special_tokens=False)

  def encode_prompt(self, text: str) -> list[int]:
    """Token ids of a prompt: after a BOS, if there is one; or of a chat.

    A chat is what the template makes of it, word for word: whether a BOS comes
    first, and what opens the answer.
    """
    if self.system is not None:
      return self.encode(self.chat(text))
    bos = [] if self.bos_id is None else [self.bos_id]
    ids = list(self.encode(text))
    return ids if ids[: len(bos)] == bos else bos + ids

  def chat(self, prompt: str, response: str | None = None) -> str:
    """A prompt in the tokenizer's template, open for the answer or answered.

    Raises:
      ValueError: there is no template, or it refuses (a system message).
    """
    messages = [dict(role="user", content=prompt)]
    if self.system:
      messages.insert(0, dict(role="system", content=self.system))
    if response is not None:
      messages.append(dict(role="assistant", content=response))
    try:
      return self.hf.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=response is None
      )
    except Exception as e:  # templates are programs of others
      raise ValueError(f"the tokenizer's chat template: {e}") from e

  def in_chat(self, system: str) -> "Tokenizer":
    """The same, for prompts in its chat template."""
    return dataclasses.replace(self, system=system)

  def decode(self, ids: Sequence[int]) -> str:
    """The text of the ids, without the EOS at the end.

    Nothing else is left out: a padding id in the middle of an answer reads
    "<pad>", an id without a token reads U+FFFD, so that no grader mistakes
    "1<pad>7" for "17".
    """
    ids = [int(i) for i in ids]
    if ids and ids[-1] in self.eos_ids:
      ids = ids[:-1]
    text, known = "", []
    for i in [*ids, self.vocab_size]:
      if i < self.vocab_size:
        known.append(i)
        continue
      text += self.hf.decode(
        known, skip_special_tokens=False, clean_up_tokenization_spaces=False
      )
      text, known = text + "\ufffd", []
    return text[:-1]  # the sentinel's

  def decode_after(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of the ids as it follows that of the prompt.

    Alone, SentencePiece's begin without the space they have there.
    """
    prompt, ids = [int(i) for i in prompt], [int(i) for i in ids]
    head, whole = self.decode(prompt), self.decode([*prompt, *ids])
    return whole[len(head) :] if whole.startswith(head) else self.decode(ids)

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the files that `load` reads."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    self.hf.save_pretrained(folder)
    extras = _read(folder / _EXTRAS) | {"eos_token_id": list(self.eos_ids)}
    (folder / _EXTRAS).write_text(json.dumps(extras) + "\n")


def make(
  kind: str, *, corpus: Iterable[str] = (), vocab_size: int = 0, path: str = ""
) -> Tokenizer:
  """A tokenizer of one of the kinds above.

  Args:
    kind: "char", "byte", "bpe" or "hf".
    corpus: texts to learn from ("char", "bpe"); the same texts give the same
      ids.
    vocab_size: number of ids a "bpe" tokenizer may use, special ones included.
    path: folder of an "hf" tokenizer.

  Raises:
    ValueError: no such kind, or something it needs is missing.
  """
  if kind == "char":
    return _char(corpus)
  if kind == "byte":
    return _byte()
  if kind == "bpe":
    return _bpe(corpus, vocab_size)
  if kind == "hf":
    return load(path)
  raise ValueError(f"tokenizer kind={kind!r}: not one of bpe, byte, char, hf")


def load(folder: str | os.PathLike) -> Tokenizer:
  """Opens a folder written by `save`, or any Hugging Face tokenizer.

  Raises:
    FileNotFoundError: no such folder; nothing is looked up on a network.
    ValueError: it has no EOS.
  """
  if not os.path.isdir(os.path.expanduser(folder)):
    raise FileNotFoundError(f"tokenizer: path={str(folder)!r} is not a folder")
  folder = pathlib.Path(folder).expanduser()
  hf = _open(folder)
  eos_ids = [] if hf.eos_token_id is None else [hf.eos_token_id]
  for file in (_EXTRAS, "config.json"):
    listed = _read(folder / file).get("eos_token_id")
    if listed is not None:
      eos_ids += listed if isinstance(listed, list) else [listed]
      break
  if not eos_ids:
    raise ValueError(f"tokenizer: {str(folder)!r} has no EOS token")
  return _wrap(hf, eos_ids)


def vocabulary(folder: str | os.PathLike) -> dict[str, int] | None:
  """Tokens and their ids in a folder; None if there is no tokenizer in it."""
  folder = pathlib.Path(folder).expanduser()
  if not any((folder / file).is_file() for file in _FILES):
    return None
  return _open(folder).get_vocab()


def _read(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.is_file() else {}


def _open(folder: pathlib.Path):
  """The tokenizer of transformers in a folder."""
  _, transformers = _libraries()
  auto = transformers.AutoTokenizer
  # What tokenizer.json says holds. Beside a config.json of model_type "qwen2"
  # AutoTokenizer replaces it by the rules of that family.
  kind = _read(folder / "tokenizer_config.json").get("tokenizer_class")
  if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
    auto = transformers.PreTrainedTokenizerFast
  return auto.from_pretrained(folder, local_files_only=True)


def _char(corpus: Iterable[str]) -> Tokenizer:
  tokenizers, _ = _libraries()
  chars = sorted(set().union(*corpus))
  if not chars:
    raise ValueError("tokenizer kind='char': the corpus is empty")
  vocab = {t: i for i, t in enumerate((*SPECIAL, *chars))}
  tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab))
  tok.pre_tokenizer = tokenizers.pre_tokenizers.Split(
    tokenizers.Regex(r"[\s\S]"), behavior="isolated"
  )
  tok.decoder = tokenizers.decoders.Fuse()
  return _finish(tok)


def _byte() -> Tokenizer:
  tokenizers, _ = _libraries()
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {t: i for i, t in enumerate((*SPECIAL, *alphabet))}
  tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges=[]))
  tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  tok.decoder = tokenizers.decoders.ByteLevel()
  return _finish(tok)


def _bpe(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
  tokenizers, _ = _libraries()
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  smallest = len(SPECIAL) + len(alphabet)
  if vocab_size < smallest:
    raise ValueError(
      f"tokenizer kind='bpe': vocab_size={vocab_size} < {smallest} (all bytes"
      " and the special tokens)"
    )
  tok = tokenizers.Tokenizer(tokenizers.models.BPE())
  tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tok.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    show_progress=False,
    special_tokens=list(SPECIAL),
    initial_alphabet=alphabet,
  )
  tok.train_from_iterator(corpus, trainer)
  return _finish(tok)


def _finish(tok) -> Tokenizer:
  """Wraps one of our own: special tokens are never found in text."""
  _, transformers = _libraries()
  pad, bos, eos = SPECIAL
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tok,
    pad_token=pad,
    bos_token=bos,
    eos_token=eos,
    split_special_tokens=True,
    clean_up_tokenization_spaces=False,
  )
  return _wrap(hf, [hf.eos_token_id])


def _wrap(hf, eos_ids: Sequence[int]) -> Tokenizer:
  tokenizers, _ = _libraries()
  vocab = hf.get_vocab()
  model = getattr(getattr(hf, "backend_tokenizer", None), "model", None)
  # A "char" one has nothing to write for an unknown character.
  is_word_level = isinstance(model, tokenizers.models.WordLevel)
  is_char = is_word_level and model.unk_token not in vocab
  return Tokenizer(
    hf=hf,
    vocab_size=max(vocab.values()) + 1,
    pad_id=eos_ids[0] if hf.pad_token_id is None else hf.pad_token_id,
    bos_id=hf.bos_token_id,
    eos_ids=tuple(dict.fromkeys(int(i) for i in eos_ids)),
    alphabet=frozenset(t for t in vocab if len(t) == 1) if is_char else None,
  )


def _libraries():
  """Imported on first use: they take half a second."""
  # Without torch, transformers says so on import; nothing here needs it.
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  # A fork after a parallel encode would warn; texts here are short.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  import tokenizers
  import transformers

  return tokenizers, transformers
