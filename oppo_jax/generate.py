# SPDX-License-Identifier: Apache-2.0
r"""Continues prompts with the model of a Hugging Face folder, by the loop.

  python -m oppo_jax.generate --model=stories260k --max_len=256
  python -m oppo_jax.generate --model=llama --prompts=questions.txt --chat \
      --temperature=0.7

Greedy if not told otherwise. Prompts are the lines of a file, or one --prompt;
without either the model begins after its BOS.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from oppo_jax import (
  auto,
  cli,
  decode,
  generation,
  hf,
  keys,
  score,
  tokenizer,
)

TILE = score.Tile(rows=8, length=32, logprob_chunk=512)


def responses(
  folder: str,
  prompts: Sequence[str],
  *,
  max_len: int,
  temperature: float,
  chat: bool,
  system: str,
  dtype: str,
  seed: int,
) -> list[str]:
  """What the model of a folder answers.

  Args:
    folder: a language model with its tokenizer.
    prompts: texts.
    max_len: tokens of a response at most.
    temperature: 0 = greedy.
    chat: prompts go into the tokenizer's template.
    system: message before them there.
    dtype: "float32" or "bfloat16".
    seed: of the draws, which are others for every prompt.

  Raises:
    ValueError: the folder does not hold what is needed; says what.
    FileNotFoundError: likewise.
  """
  tokens = tokenizer.load(folder)
  tokens = tokens.in_chat(system) if chat else tokens
  rows = [np.array(tokens.encode_prompt(text), np.int32) for text in prompts]
  if not all(map(len, rows)):
    raise ValueError("a prompt is empty, and the tokenizer has no BOS")
  longest = max(map(len, rows))
  changes = dict(dtype=dtype, attention_block=64)
  model = hf.make_model(folder, head="lm", **hf.PLAIN | changes)
  limit = hf.longest(folder, model)
  if limit is not None and longest + max_len > limit:
    raise ValueError(
      f"{folder}: a prompt of {longest} tokens and --max_len={max_len} are more"
      f" than the {limit} that the model is for"
    )
  params = hf.load_params(folder, model, dtype="float32")
  backend = jax.default_backend()
  fns = generation.make_fns(
    model,
    sampling=decode.Sampling(
      temperature=temperature,
      top_k=0,
      top_p=1.0,
      eos_ids=tokens.eos_ids,
      max_response_len=max_len,
    ),
    num_slots=min(64, 2 * -(-len(rows) // 2)),
    max_prompt_len=longest,
    tile=TILE,
    decode_loop=auto.decode_loop("auto", backend),
    decode_rows=auto.decode_rows(-1, backend),
  )
  found = generation.generate(
    fns, params, rows, run_key=keys.named(seed, "generate")
  )
  return [tokens.decode_after(*pair) for pair in zip(rows, found)]


def read_prompts(values: Any) -> list[str]:
  """Those of --prompts or --prompt.

  Raises:
    ValueError: both are given, or the file is empty.
    OSError: it cannot be read.
  """
  if not values.prompts:
    return [values.prompt]
  if values.prompt:
    raise ValueError("--prompt and --prompts: only one of them")
  lines = pathlib.Path(values.prompts).expanduser().read_text().splitlines()
  if not lines:
    raise ValueError(f"--prompts={values.prompts}: no lines")
  return lines


def main(values: flags.FlagValues) -> None:
  prompts = read_prompts(values)
  names = ("max_len", "temperature", "chat", "system", "dtype", "seed")
  if values.system and not values.chat:
    raise ValueError("--system: only with --chat")
  found = responses(
    values.model, prompts, **{name: values[name].value for name in names}
  )
  for prompt, text in zip(prompts, found):
    if values.json:
      cli.say(json.dumps({"prompt": prompt, "response": text}))
    else:
      cli.say(text if values.chat else prompt + text)


def define_flags() -> None:
  flags.DEFINE_string("model", None, "Hugging Face folder.")
  flags.DEFINE_string("prompt", "", "Text to continue.")
  flags.DEFINE_string("prompts", "", "File with one prompt per line.")
  flags.DEFINE_integer("max_len", 256, "Tokens of a response.", lower_bound=1)
  flags.DEFINE_float("temperature", 0.0, "0 = greedy.", lower_bound=0.0)
  flags.DEFINE_bool("chat", False, "Prompts go into the chat template.")
  flags.DEFINE_string("system", "", "System message of the chat.")
  flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Computes in.")
  flags.DEFINE_integer("seed", 0, "Of the draws.", lower_bound=0)
  flags.DEFINE_bool("json", False, "One JSON object per prompt.")


if __name__ == "__main__":
  cli.run(main, define_flags, required=["model"])
