# SPDX-License-Identifier: Apache-2.0
"""Peak host memory and seconds of loading a Hugging Face folder.

  python -m benchmarks.load_checkpoint --folder=/tmp/llama --layers=8 \
      --stored=bfloat16 --dtype=float32

Writes a random Llama of 7B shape (width 4096, MLP 11008, 32000 tokens) with
`layers` layers to `folder` if nothing is there, and loads it in a process of
its own. The page cache is warm after writing; `--folder` of real weights is
loaded as it is.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

GIB = 2**30
SHAPE = dict(
  model_type="llama",
  architectures=["LlamaForCausalLM"],
  vocab_size=32000,
  hidden_size=4096,
  intermediate_size=11008,
  num_attention_heads=32,
  num_key_value_heads=32,
  rms_norm_eps=1e-5,
  rope_theta=10000.0,
  tie_word_embeddings=False,
)


def write(folder, *, layers, stored, max_bytes):
  """A folder of random weights, one file at a time."""
  import ml_dtypes
  import numpy as np

  from oppo_jax import shards

  folder.mkdir(parents=True)
  config = SHAPE | dict(num_hidden_layers=layers, dtype=stored)
  (folder / "config.json").write_text(json.dumps(config))
  d, h, v = (SHAPE[f"{k}_size"] for k in ("hidden", "intermediate", "vocab"))
  shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
  for i in range(layers):
    at = f"model.layers.{i}"
    shapes |= {f"{at}.self_attn.{x}_proj.weight": (d, d) for x in "qkvo"}
    shapes |= {
      f"{at}.mlp.gate_proj.weight": (h, d),
      f"{at}.mlp.up_proj.weight": (h, d),
      f"{at}.mlp.down_proj.weight": (d, h),
      f"{at}.input_layernorm.weight": (d,),
      f"{at}.post_attention_layernorm.weight": (d,),
    }
  shapes["lm_head.weight"] = (v, d)
  dtype = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
  rng = np.random.default_rng(0)
  row = (0.02 * rng.standard_normal(11008)).astype(dtype)
  make = lambda shape: lambda: np.broadcast_to(row[: shape[-1]], shape)
  size = lambda shape: int(np.prod(shape)) * dtype.itemsize
  shards.write(
    folder,
    {name: (size(shape), make(shape)) for name, shape in shapes.items()},
    max_bytes=max_bytes,
  )


def load(folder, *, dtype):
  """What it took, of this process."""
  import jax

  from oppo_jax import hf, shards

  model = hf.make_model(folder, head=hf.head(folder), **hf.PLAIN)
  peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  jax.numpy.zeros(()).block_until_ready()
  before, start = peak(), time.perf_counter()
  params = hf.load_params(folder, model, dtype=dtype)
  jax.block_until_ready(params)
  seconds = time.perf_counter() - start
  leaves = jax.tree.leaves(params)
  target = sum(x.nbytes for x in leaves)
  found = shards.find(folder).values()
  return {
    "parameters": sum(x.size for x in leaves),
    "files": len({tensor.path for tensor in found}),
    "target_gib": target / GIB,
    "before_gib": before / GIB,
    "peak_gib": peak() / GIB,
    "bound_gib": (1.3 * target + GIB) / GIB,
    "seconds": seconds,
  }


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--layers", type=int, default=4)
  parser.add_argument("--stored", default="bfloat16")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--max_bytes", type=int, default=1_000_000_000)
  parser.add_argument("--is_child", action="store_true")
  args = parser.parse_args()
  if args.is_child:
    print(json.dumps(load(args.folder, dtype=args.dtype), indent=2))
    return
  if not args.folder.exists():
    write(
      args.folder,
      layers=args.layers,
      stored=args.stored,
      max_bytes=args.max_bytes,
    )
  command = [sys.executable, "-m", "benchmarks.load_checkpoint", "--is_child"]
  command += [f"--folder={args.folder}", f"--dtype={args.dtype}"]
  subprocess.run(command, check=True)


if __name__ == "__main__":
  main()
