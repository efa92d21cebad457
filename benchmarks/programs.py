# SPDX-License-Identifier: Apache-2.0
"""The loop's compiled programs on shapes alone: nothing is allocated.

What `jit_table.make_fns` jits, with the arguments that a run of this config
would give it, as `jax.ShapeDtypeStruct`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from oppo_jax import assemble, types


class Program(NamedTuple):
  """One function of `flight.Fns`, and what it is called with.

  Attributes:
    jitted: the function.
    args: its arrays, as shapes.
    static: its keywords.
    donated: positions in `args` of what it gives back in place.
  """

  jitted: Callable
  args: tuple[Any, ...]
  static: dict[str, Any]
  donated: tuple[int, ...]


def nbytes(tree):
  """Bytes of the arrays of a tree; a key counts as two words."""
  size = lambda x: 8 if _is_key(x) else x.size * x.dtype.itemsize
  return sum(map(size, jax.tree.leaves(tree)))


def _is_key(x):
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def ints(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def shapes(config, *, vocab_size):
  """The engine of a config, and what a run holds: arrays by name, as shapes.

  "slots", "cache", "scorers"; "params", in the dtype of use, by model; "train",
  the state of the update, in float32.
  """
  engine = assemble.build(config, vocab_size=vocab_size, eos_ids=(0,))
  key = jax.eval_shape(lambda: jax.random.key(0))
  init = lambda model: jax.eval_shape(model.init, key)
  slots, cache, scorers = jax.eval_shape(engine.fns.init)
  raw = {k: init(m) for k, m in engine.models._asdict().items()}
  cast = lambda tree: jax.eval_shape(engine.fns.cast, tree)
  train = {k: raw[k] for k in ("policy", "critic")}
  return engine, {
    "slots": slots,
    "cache": cache,
    "scorers": scorers,
    "params": {k: cast(v) for k, v in raw.items()},
    "train": jax.eval_shape(engine.algorithm.init, train),
    "key": key,
  }


def make(config, *, vocab_size, chunk_size):
  """Programs by name.

  Args:
    config: validated; `rollout.decode_loop` as on the device meant.
    vocab_size: V.
    chunk_size: C.
  """
  engine, held = shapes(config, vocab_size=vocab_size)
  fns, params, slots = engine.fns, held["params"], held["slots"]
  tile = [ints(fns.sizes.tile.rows)] * 2
  chunk = (params["policy"], slots, held["cache"], ints(), held["key"])
  static = dict(chunk_size=chunk_size)
  found = {"decode_chunk": Program(fns.decode_chunk, chunk, static, (1, 2))}
  prefill = (params["policy"], held["cache"], slots.tokens, *tile)
  found["prefill"] = Program(fns.prefill, prefill, {}, (1,))
  for name, state in held["scorers"].items():
    args = (params[name], state, slots.tokens, *tile)
    found[f"append {name}"] = Program(fns.append[name], args, {}, (1,))
  if fns.decode_and_append is not None:
    names = list(held["scorers"])
    of = lambda x: dict.fromkeys(names, x)
    scored = ({k: params[k] for k in names}, held["scorers"], slots.tokens)
    args = (*chunk, *scored, of(tile[0]), of(tile[1]))
    fused = Program(fns.decode_and_append, args, static, (1, 2, 6))
    found["decode_and_append"] = fused
  outputs = {k: v.outputs for k, v in held["scorers"].items()}
  _, batch = jax.eval_shape(fns.harvest, slots, outputs, ints())
  algo = config.algo
  lead = (algo.num_epochs, algo.num_minibatches)
  rows = ints(*lead, config.rollout.batch_size // algo.num_minibatches)
  packing = types.Packing(rows, rows, rows, num_micro=ints(*lead))
  update = (held["train"], batch, packing)
  found["update"] = Program(fns.update, update, {}, (0,))
  return found
