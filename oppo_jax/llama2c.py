# SPDX-License-Identifier: Apache-2.0
"""Models in the layout of llama2.c: one file of weights, one of tokens.

  weights   7 int32: dim, hidden, layers, heads, kv_heads, vocab, seq_len
            float32: each kind of tensor for all layers, [out, in]
            float32: two tables of rotary angles, not read
  tokens    int32: longest; then per token float32 score, int32 length, bytes

A negative vocab says that an LM head follows; else it is the embedding. Rotary
embeddings turn neighbors (2i, 2i + 1) there, and (i, i + half) here: the rows
of the query and key projections are put in another order.
"""

import json
import os
import pathlib
import re
import struct
from typing import Any

import numpy as np

from oppo_jax import types

HEADER = struct.Struct("<7i")
UNK, BOS, EOS = 0, 1, 2
_FIELDS = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "seq_len")


def _halves(x: np.ndarray, heads: int) -> np.ndarray:
  """[layers, heads * dim, D]: rows 0 1 2 3 .. of a head become 0 2 .. 1 3 .."""
  layers, size, width = x.shape
  x = x.reshape(layers, heads, size // heads // 2, 2, width)
  return x.swapaxes(2, 3).reshape(layers, size, width)


def read(path: pathlib.Path) -> tuple[dict[str, Any], types.Params]:
  """Keywords of the "transformer", and its parameters (NumPy, float32).

  Raises:
    ValueError: the file is of another kind, or of another size than its header
      says.
  """
  data = path.read_bytes()
  if len(data) < HEADER.size:
    raise ValueError(f"{path}: too short for a llama2.c file")
  dim, hidden, num, heads, kv_heads, vocab, length = HEADER.unpack_from(data)
  is_tied, vocab = vocab > 0, abs(vocab)
  sizes = dict(zip(_FIELDS, (dim, hidden, num, heads, kv_heads, vocab, length)))
  if min(sizes.values()) < 1 or dim % heads or heads % kv_heads or num > 1000:
    raise ValueError(f"{path}: no llama2.c header of version 0: {sizes}")
  head_dim = dim // heads
  kv = kv_heads * head_dim
  shapes = {
    "embedding": (vocab, dim),
    "attention_norm": (num, dim),
    "q": (num, dim, dim),
    "k": (num, kv, dim),
    "v": (num, kv, dim),
    "o": (num, dim, dim),
    "mlp_norm": (num, dim),
    "gate": (num, hidden, dim),
    "down": (num, dim, hidden),
    "up": (num, hidden, dim),
    "norm": (dim,),
    "angles": (2, length, head_dim // 2),
    "out": (0 if is_tied else vocab, dim),
  }
  counts = [int(np.prod(shape)) for shape in shapes.values()]
  expected = HEADER.size + 4 * sum(counts)
  if len(data) != expected:
    raise ValueError(
      f"{path}: has {len(data)} bytes, its header asks for {expected}"
    )
  flat = np.frombuffer(data, "<f4", offset=HEADER.size)
  parts = np.split(flat, np.cumsum(counts)[:-1])
  x = {k: p.reshape(s) for (k, s), p in zip(shapes.items(), parts)}
  x["q"], x["k"] = _halves(x["q"], heads), _halves(x["k"], kv_heads)

  def layer(i: int) -> types.Params:
    dense = lambda name: {"kernel": x[name][i].T}
    return {
      "attention_norm": {"scale": x["attention_norm"][i]},
      "attention": {name: dense(name) for name in "qkvo"},
      "mlp_norm": {"scale": x["mlp_norm"][i]},
      **{name: dense(name) for name in ("gate", "up", "down")},
    }

  params = {
    "embedding": x["embedding"],
    "norm": {"scale": x["norm"]},
    **{f"layer_{i}": layer(i) for i in range(num)},
    **({} if is_tied else {"out": x["out"].T}),
  }
  kwargs = dict(
    vocab_size=vocab,
    num_layers=num,
    width=dim,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    mlp_dim=hidden,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=is_tied,
  )
  return kwargs, params


def read_tokens(
  path: pathlib.Path, vocab_size: int
) -> list[tuple[bytes, float]]:
  """Pieces and their scores, in the order of their ids.

  Raises:
    ValueError: the file does not hold exactly `vocab_size` tokens.
  """
  data, at, found = path.read_bytes(), 4, []
  try:
    while at < len(data):
      score, size = struct.unpack_from("<fi", data, at)
      piece = data[at + 8 : at + 8 + size]
      if size < 0 or len(piece) != size:
        raise ValueError
      found.append((piece, score))
      at += 8 + size
  except (struct.error, ValueError):
    raise ValueError(f"{path}: damaged at byte {at}") from None
  if len(found) != vocab_size:
    raise ValueError(
      f"{path}: has {len(found)} tokens, the model's embedding {vocab_size}"
    )
  return found


def save_tokenizer(
  path: pathlib.Path, folder: pathlib.Path, *, vocab_size: int
) -> None:
  """Writes the tokens as a Hugging Face tokenizer.

  SentencePiece joins the neighbors whose joint piece has the best score, so a
  merge ranks as high as what it makes. BOS ends a text as EOS does: models of
  llama2.c are trained on stories laid end to end, with a BOS before each.

  Args:
    path: the file of tokens.
    folder: is there.
    vocab_size: V, tokens there must be.
  """
  # Without torch, transformers says so on import.
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  import tokenizers
  import transformers

  special = {UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
  vocab: dict[str, int] = {}
  scores: dict[str, float] = {}
  for i, (raw, score) in enumerate(read_tokens(path, vocab_size)):
    piece = raw.decode().replace(" ", "\u2581")
    vocab[special.get(i, piece)] = i
    if i not in special and not re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
      scores[piece] = score
  merges = [
    (-score, vocab[piece[:i]], vocab[piece[i:]], (piece[:i], piece[i:]))
    for piece, score in scores.items()
    for i in range(1, len(piece))
    if piece[:i] in scores and piece[i:] in scores
  ]
  t = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab=vocab,
      merges=[pair for *_, pair in sorted(merges)],
      unk_token=special[UNK],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  t.normalizer = tokenizers.normalizers.Sequence(
    [
      tokenizers.normalizers.Prepend("\u2581"),
      tokenizers.normalizers.Replace(" ", "\u2581"),
    ]
  )
  t.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace("\u2581", " "),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
      tokenizers.decoders.Strip(" ", 1, 0),
    ]
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=t,
    unk_token=special[UNK],
    bos_token=special[BOS],
    eos_token=special[EOS],
    clean_up_tokenization_spaces=False,
  ).save_pretrained(folder)
  ends = json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, BOS]})
  (folder / "generation_config.json").write_text(ends + "\n")
