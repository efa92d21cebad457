# SPDX-License-Identifier: Apache-2.0
"""Which functions of the loop are compiled, how often, and what they give up.

The one place where `jax.jit` is written for rollouts and updates. What is
static here decides how often something compiles, what is donated decides how
much memory there is; `tests/retrace_test.py` holds the table to both.
"""

import functools

import jax
import jax.numpy as jnp

from oppo_jax import decode, flight, score, slots
from oppo_jax.algos import base as algos_base
from oppo_jax.flight import Fns, Sizes
from oppo_jax.models import base as models_base

# XLA:GPU runs one program's kernels in order, unless the program is one CUDA
# graph: with loops captured (driver of CUDA 12.3 or later), and branches that
# share no data side by side. What it captures by default, and loops.
ONE_GRAPH = {
  "xla_gpu_enable_command_buffer": (
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"
    "CONDITIONAL,WHILE"
  ),
  "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}


def make_fns(
  *,
  sizes: Sizes,
  sampling: decode.Sampling,
  policy: models_base.Model,
  scorers: dict[str, models_base.Model],
  algorithm: algos_base.Algorithm | None,
  devices: tuple[jax.Device, jax.Device] | None = None,
  dispatch: str = "separate",
) -> Fns:
  """Compiles nothing yet; says what is jitted, static and donated.

  | function     | static     | donated       | compiles                       |
  |--------------|------------|---------------|--------------------------------|
  | init         | -          | -             | 1                              |
  | new_cache    | name       | -             | 1 per cache that goes stale    |
  | admit        | -          | slots         | 1                              |
  | prefill      | -          | cache         | 1                              |
  | decode_chunk | chunk_size | slots, cache  | 1 ("while": C is traced), or   |
  |              |  if "fori" |               | 1 per chunk size ("fori")      |
  | append[name] | -          | scorer state  | 1 per scorer                   |
  | decode_      | chunk_size | slots, cache, | as decode_chunk; only if       |
  |   and_append |  if "fori" | scorer states | dispatch is "fused"            |
  | harvest      | -          | slots         | 1                              |
  | update       | -          | train state   | 1                              |

  Args:
    sizes: static sizes.
    sampling: how tokens are drawn; its distribution is the scorers' too.
    policy: model that decodes.
    scorers: by name: "reward", "reference", "critic", "policy".
    algorithm: gives `update`; None where nothing is trained (evaluation).
    devices: of the policy and of the scorers; None = one for all.
    dispatch: "separate": a chunk and the tiles beside it are programs one after
      the other. "fused": one program, for backends that overlap inside of one.
  """
  if sizes.batch_size % sizes.group_size:
    raise ValueError(
      f"batch_size={sizes.batch_size} is not a multiple of the algorithm's"
      f" group_size={sizes.group_size}: a group would be split"
    )
  rule = dict(
    batch_size=sizes.batch_size,
    group_size=sizes.group_size,
    max_staleness=sizes.max_staleness,
  )
  select = functools.partial(slots.select, **rule)
  tile = dict(tile_len=sizes.tile.length)
  sized = dict(num_slots=sizes.num_slots, row_len=sizes.row_len, **tile)

  def new_cache(name):
    model = policy if name == flight.POLICY_CACHE else scorers[name]
    return score.init_cache(model, **sized)

  def init():
    return (
      slots.init(sizes.num_slots, sizes.row_len),
      new_cache(flight.POLICY_CACHE),
      {name: score.init(model, **sized) for name, model in scorers.items()},
    )

  def harvest(buffer, outputs, version):
    buffer, batch = slots.harvest(
      buffer,
      select(buffer, version),
      outputs,
      batch_size=sizes.batch_size,
      max_response_len=sampling.max_response_len,
      eos_ids=sampling.eos_ids,
    )
    return (slots.restart(buffer) if sizes.restarts else buffer), batch

  decode_chunk = functools.partial(
    decode.decode_chunk,
    policy=policy,
    sampling=sampling,
    is_complete=functools.partial(slots.is_complete, **rule),
    select=select,
    loop=sizes.decode_loop,
    decode_rows=sizes.decode_rows,
  )
  append = lambda model: functools.partial(
    score.prefill_append,
    model=model,
    logprob_chunk=sizes.tile.logprob_chunk,
    temperature=sampling.temperature or 1.0,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    **tile,
  )

  def decode_and_append(
    params, buffer, cache, version, run_key, scorer_params, states, tokens,
    slot, tile, chunk_size,
  ):  # fmt: skip
    """A chunk, and one call of tiles of every scorer: they share no data."""
    states = {
      name: append(model)(
        *(scorer_params[name], states[name], tokens, slot[name], tile[name])
      )
      for name, model in scorers.items()
    }
    chunk = decode_chunk(params, buffer, cache, version, run_key, chunk_size)
    return *chunk, states

  def cast(params):
    """What rollouts compute with: in bfloat16 a copy, one per update."""
    return jax.tree.map(lambda x: jnp.asarray(x, policy.dtype), params)

  is_static = ("chunk_size",) if sizes.decode_loop == "fori" else ()
  is_fused = dispatch == "fused" and bool(scorers)
  on_gpu = jax.default_backend() == "gpu"
  return Fns(
    init=jax.jit(init),
    new_cache=jax.jit(new_cache, static_argnames="name"),
    admit=jax.jit(slots.admit, donate_argnums=0),
    prefill=jax.jit(
      functools.partial(score.prefill, model=policy, **tile), donate_argnums=1
    ),
    decode_chunk=jax.jit(
      decode_chunk, donate_argnums=(1, 2), static_argnames=is_static
    ),
    append={
      name: jax.jit(append(model), donate_argnums=1)
      for name, model in scorers.items()
    },
    decode_and_append=jax.jit(
      decode_and_append,
      donate_argnums=(1, 2, 6),
      static_argnames=is_static,
      compiler_options=ONE_GRAPH if on_gpu else None,
    )
    if is_fused
    else None,
    harvest=jax.jit(harvest, donate_argnums=0),
    update=jax.jit(algorithm.update, donate_argnums=0) if algorithm else None,
    cast=cast,
    sizes=sizes,
    devices=devices,
  )
