# SPDX-License-Identifier: Apache-2.0
"""Largest differences to torch, family by family; and greedy text beside it.

  python -m benchmarks.parity
  python -m benchmarks.parity --folder=runs/stories/hf --prompts=50

Needs torch. Without a folder: random checkpoints of all families, saved by
transformers in several files and read here, in float32; rows of 20, 3, 13 and 7
tokens, caches with columns to spare that hold garbage. With one: continuations
of the model in it by the loop and by `transformers.generate`, token by token.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
import torch
import transformers

from oppo_jax import decode, generation, hf, score, tasks, tokenizer

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import three_ways
from fixtures import make

LENGTHS = (20, 3, 13, 7)
WAYS = ("whole", "tiles", "decode", "scores")


def compare(name, *, is_lm, seed):
  """Largest absolute differences of one random checkpoint, by how computed."""
  family, options = make.CHECKPOINTS[name]
  theirs = make.make_model(family, options, is_lm=is_lm, seed=seed)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary) / ("x" if is_lm else "x_reward")
    theirs.save_pretrained(folder, max_shard_size="8KB")
    said = make.reference(theirs, is_lm=is_lm, seed=seed + 1, lengths=LENGTHS)
    model = three_ways.model_of(folder, block=8)
    params = hf.load_params(folder, model, dtype="float32")
  rows = model, params, said["tokens"], said["length"]
  if not is_lm:
    apart = np.abs(three_ways.say_scores(*rows) - said["scores"])
    return {"scores": apart.max()}, np.ptp(said["scores"])
  is_real = np.arange(max(LENGTHS)) < said["length"][:, None]
  found = {}
  for way in WAYS[:3]:
    apart = np.abs(getattr(three_ways, f"say_{way}")(*rows) - said["logits"])
    found[way] = apart[is_real].max()
  return found, np.ptp(said["logits"][is_real])


def what_of(name):
  """What is special about a checkpoint, in a few words."""
  family, options = make.CHECKPOINTS[name]
  heads = options.get("num_attention_heads", options.get("n_head"))
  kv_heads = options.get("num_key_value_heads", heads)
  rope = options.get("rope_parameters", {}).get("rope_type", "default")
  words = [family, f"{heads} heads"]
  words += [f"{kv_heads} of keys"] * (kv_heads != heads)
  words += [f"rope {rope}"] * (rope != "default")
  words += ["window"] * ("sliding_window" in options)
  words += ["tied"] * bool(options.get("tie_word_embeddings"))
  return ", ".join(words)


def table():
  print("largest |difference| to torch, float32")
  head = "".join(f" {way:>8s}" for way in WAYS)
  print(f"{'checkpoint':22s}{head}   range   what")
  for i, name in enumerate(make.CHECKPOINTS):
    found, spread = compare(name, is_lm=True, seed=200 + 2 * i)
    if name in make.REWARD_MODELS:
      found |= compare(name, is_lm=False, seed=300 + 2 * i)[0]
    cells = [f"{found[way]:8.1e}" if way in found else 8 * " " for way in WAYS]
    print(f"{name:22s} {' '.join(cells)} {spread:7.1f}   {what_of(name)}")


def beside(folder, *, num_prompts, max_len):
  """Both continue the same prompts greedily; says how many are the same."""
  tokens = tokenizer.load(folder)
  examples = tasks.make("stories", num_test=num_prompts, seed=0, cache_dir="")
  texts = [e.prompt for e in examples.prompts("test")]
  prompts = [np.array(tokens.encode_prompt(text), np.int32) for text in texts]
  model = hf.make_model(folder, head="lm", **hf.PLAIN)
  fns = generation.make_fns(
    model,
    sampling=decode.Sampling(0.0, 0, 1.0, tokens.eos_ids, max_len),
    num_slots=16,
    max_prompt_len=max(map(len, prompts)),
    tile=score.Tile(rows=8, length=32, logprob_chunk=512),
    decode_loop="while",
    decode_rows=0,
  )
  params = hf.load_params(folder, model, dtype="float32")
  ours = generation.generate(fns, params, prompts, run_key=jax.random.key(0))
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  ids = transformers.AutoTokenizer.from_pretrained(folder)
  same, num_tokens = 0, 0
  for text, prompt, mine in zip(texts, prompts, ours):
    bos = [] if tokens.bos_id is None else [tokens.bos_id]
    assert bos + ids.encode(text, add_special_tokens=False) == prompt.tolist()
    fed = torch.tensor(prompt[None]).long()
    with torch.no_grad():  # ends as generation_config.json says
      out = theirs.generate(
        fed,
        attention_mask=torch.ones_like(fed),
        do_sample=False,
        max_new_tokens=max_len,
        pad_token_id=tokens.pad_id,
      )
    row = out[0, len(prompt) :].tolist()
    same += row == mine.tolist()
    num_tokens += len(row)
  found = {"prompts": len(texts), "same": same, "tokens": num_tokens}
  print(json.dumps(found | {"different texts": len({*map(str, ours)})}))


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--folder", type=pathlib.Path)
  parser.add_argument("--prompts", type=int, default=50)
  parser.add_argument("--max_len", type=int, default=96)
  args = parser.parse_args()
  torch.set_num_threads(1)
  transformers.utils.logging.disable_progress_bar()
  if args.folder is None:
    table()
  else:
    beside(args.folder, num_prompts=args.prompts, max_len=args.max_len)


if __name__ == "__main__":
  main()
