# SPDX-License-Identifier: Apache-2.0
"""Parts of `benchmarks.gpu`: each yields one dict per measurement.

Model-FLOPs count matrix products and attention once, forward (backward: twice
more); what is recomputed (remat, logits) does not count.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import bench
from oppo_jax import assemble, flight, jit_table, keys, overlap, packing
from oppo_jax import config as config_lib

# What a program is compiled with. "graph": loops captured in its CUDA graph.
CAPTURED = "xla_gpu_enable_command_buffer"
FORMS = {"plain": {}, "graph": {CAPTURED: jit_table.ONE_GRAPH[CAPTURED]}}


def seconds_of(call, *, rounds, until):
  """Seconds of calls after the first, which may compile; all that fit."""
  jax.block_until_ready(call())
  taken = []
  for _ in range(rounds):
    began = time.perf_counter()
    jax.block_until_ready(call())
    taken.append(time.perf_counter() - began)
    if time.monotonic() > until:
      break
  return taken


def machine(spec, until):
  """Speed of a copy (read and write counted) and of a matrix product."""
  del until
  x = jnp.zeros(spec["copy_bytes"] // 4, jnp.float32)
  n = spec["matmul"]
  a = jnp.ones((n, n), jnp.bfloat16)
  far = time.monotonic() + 5
  copy = seconds_of(
    functools.partial(jax.jit(lambda x: x + 1), x), rounds=8, until=far
  )
  product = jax.jit(lambda a: a @ a)
  dot = seconds_of(functools.partial(product, a), rounds=8, until=far + 5)
  yield {
    "copy_bytes_per_s": 2 * x.nbytes / min(copy),
    "matmul_flop_per_s": 2 * n**3 / min(dot),
  }


def config_of(spec, arm, **changes):
  options = {
    "rollout.decode_loop": "fori" if on_gpu() else "while",
    "overlap.chunk.size": spec["chunk"],
    "score.tile_rows": spec["tile_rows"],
    "score.tile_len": spec["tile_len"],
    # All of a call's logits at once: a loop over slices is not captured.
    "score.logprob_chunk": spec["tile_rows"] * spec["tile_len"],
    "algo.logprob_chunk": spec["logprob_chunk"],
    "algo.num_minibatches": spec["minibatches"],
    "optim.micro_rows": spec["micro_rows"][0],
  }
  return bench.config_of(
    arm,
    model=spec["model"],
    batch_size=spec["batch_size"],
    delta=spec["delta"],
    prompt_len=spec["prompt_len"],
    response_len=spec["response_len"],
    staleness=2,
    **(options | changes),
  )


def vocab_of(spec):
  return bench.VOCAB_SIZES.get(spec["model"], bench.VOCAB_SIZE)


def engine_of(spec, config):
  return assemble.build(config, vocab_size=vocab_of(spec), eos_ids=(0,))


def params_of(engine, model, seed):
  """Random parameters in the dtype of use."""
  init = lambda: engine.fns.cast(model.init(jax.random.key(seed)))
  return jax.jit(init)()


def matrix_sizes(model):
  """Weights of a layer's matrices, of all layers."""
  heads = model["num_heads"] + 2 * model["num_kv_heads"]
  attention = model["width"] * model["head_dim"] * (heads + model["num_heads"])
  mlp = 3 * model["width"] * model["mlp_dim"]
  return model["num_layers"] * (attention + mlp)


def forward_flops(model, tokens, keys_seen, *, vocab_size):
  """Of `tokens` tokens that attend to `keys_seen` keys, all together."""
  over = model["num_layers"] * model["num_heads"] * model["head_dim"]
  head = model["width"] * (vocab_size or 0)
  return 2 * tokens * (matrix_sizes(model) + head) + 4 * over * keys_seen


def on_gpu():
  return jax.default_backend() == "gpu"


def decode(spec, until):
  """Seconds per tick against the bytes that a tick must move."""
  for live in spec["lives"]:
    for attention, form in spec["decode_forms"]:
      if time.monotonic() < until:
        yield _decode(spec, live, attention, form, until)


def _decode(spec, live, attention, form, until):
  model, size = bench.MODELS[spec["model"]], spec["chunk"]
  rest = spec["prompt_len"] + spec["response_len"] - live
  changed = dict(prompt_len=live, response_len=rest, delta=0)
  changes = spec["attention"][attention]
  config = config_of(spec | changed, "serial", **changes)
  engine = engine_of(spec, config)
  fns, num = engine.fns, config.rollout.batch_size
  params = params_of(engine, engine.models.policy, 0)
  prompt = flight.Prompt(np.ones(live, np.int32), rest)
  state = flight.admit(
    fns,
    flight.init(fns),
    num_in_flight=num,
    prompt_of=lambda uid: prompt,
    version=0,
  )
  state = overlap.prefill_policy(fns, state, params)
  held = [state.slots, state.cache]
  is_static = config.rollout.decode_loop == "fori"
  call = jax.jit(
    fns.decode_chunk.__wrapped__,
    donate_argnums=(1, 2),
    static_argnames=("chunk_size",) if is_static else (),
    compiler_options=FORMS[form] if on_gpu() else {},
  )

  def chunk():
    run_key = keys.named(0, "rollout")
    held[0], held[1], report = call(
      *(params, *held, np.int32(0), run_key), chunk_size=size
    )
    return report.tick

  taken = seconds_of(chunk, rounds=min(4, rest // size - 2), until=until)
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  pair = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_dim"]
  middle = live + size * (1 + len(taken) / 2)
  key_bytes = pair * jnp.dtype(config.model.dtype).itemsize * num * middle
  return {
    "live": live,
    "attention": attention,
    "form": form,
    "rows": num,
    "s_per_tick": statistics.median(taken) / size,
    "bytes": weights + key_bytes,
    "raw": taken,
  }


def score(spec, until):
  """Seconds of one call of tiles, and its model-FLOPs."""
  for attention, form in spec["score_forms"]:
    for name in ("critic", "reference"):
      if time.monotonic() < until:
        yield from _score(spec, name, attention, form, until)


def _score(spec, name, attention, form, until):
  model = bench.MODELS[spec["model"]]
  rows, length = spec["tile_rows"], spec["tile_len"]
  changes = spec["attention"][attention]
  config = config_of(spec | dict(delta=0), "serial", **changes)
  engine = engine_of(spec, config)
  scorer = getattr(engine.models, name)
  params = params_of(engine, scorer, 1)
  slots, _, scorers = jax.eval_shape(engine.fns.init)
  zeros = lambda x: jnp.zeros(x.shape, x.dtype)
  held = [jax.jit(lambda: jax.tree.map(zeros, scorers[name]))()]
  tokens = jnp.ones(slots.tokens.shape, jnp.int32)
  slot = np.arange(rows, dtype=np.int32) % spec["batch_size"]
  call = jax.jit(
    engine.fns.append[name].__wrapped__,
    donate_argnums=1,
    compiler_options=FORMS[form] if on_gpu() else {},
  )
  last = tokens.shape[1] // length - 1
  for tile in sorted({0, last // 4, last // 2}):
    at = np.full(rows, tile, np.int32)

    def append():
      held[0] = call(params, held[0], tokens, slot, at)  # noqa: B023
      return held[0].outputs

    taken = seconds_of(append, rounds=6, until=until)
    seen = rows * length * (tile * length + (length + 1) / 2)
    head = vocab_of(spec) if scorer.is_lm else 0
    yield {
      "scorer": name,
      "attention": attention,
      "form": form,
      "tokens": rows * length,
      "first_column": tile * length,
      "s": statistics.median(taken),
      "model_flops": forward_flops(model, rows * length, seen, vocab_size=head),
      "raw": taken,
    }


def batch_of(engine, lengths, prompt_len):
  """A batch with these response lengths, and nothing else real."""
  fns = engine.fns
  slots, _, scorers = jax.eval_shape(fns.init)
  outputs = {k: v.outputs for k, v in scorers.items()}
  like = jax.eval_shape(
    fns.harvest, slots, outputs, jax.ShapeDtypeStruct((), jnp.int32)
  )[1]
  batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
  columns = np.arange(batch.mask.shape[1])
  return batch.replace(
    uid=np.arange(len(lengths), dtype=np.int32),
    sequences=np.ones_like(batch.sequences),
    prompt_len=np.full(len(lengths), prompt_len, np.int32),
    response_len=np.asarray(lengths, np.int32),
    responses=np.ones_like(batch.responses),
    mask=columns < np.asarray(lengths)[:, None],
  )


def update(spec, until):
  """Seconds of an update on one batch of real lengths, and its model-FLOPs."""
  for micro_rows in spec["micro_rows"]:
    for attention in spec["update_forms"]:
      if time.monotonic() < until:
        yield _update(spec, micro_rows, attention, until)


def _update(spec, micro_rows, attention, until):
  model = bench.MODELS[spec["model"]]
  lengths = bench.lengths_of(
    spec["lengths"], limit=spec["response_len"], num=spec["batch_size"]
  )
  total = lengths + spec["prompt_len"]
  changes = spec["attention"][attention] | {"optim.micro_rows": micro_rows}
  config = config_of(spec, "serial", **changes)
  engine, width = engine_of(spec, config), config_lib.row_len(config)
  made = engine.models._asdict()
  draw = lambda name, i: made[name].init(jax.random.key(i))
  init = lambda: engine.algorithm.init(
    {"policy": draw("policy", 0), "critic": draw("critic", 1)}
  )
  held = [jax.jit(init)()]
  batch = batch_of(engine, lengths, spec["prompt_len"])
  plan = packing.plan(
    total,
    order_seed=(0, 0),
    num_epochs=config.algo.num_epochs,
    num_minibatches=config.algo.num_minibatches,
    width=width,
    micro_rows=micro_rows,
  )

  def once():
    held[0], seen = engine.fns.update(held[0], batch, plan)
    return seen["loss/policy_avg"]

  taken = seconds_of(once, rounds=3, until=until)
  tokens, seen = int(total.sum()), int((total * (total + 1) // 2).sum())
  flops = [
    forward_flops(model, tokens, seen, vocab_size=head)
    for head in (vocab_of(spec), 0)
  ]
  computed = int(plan.num_micro.sum()) * micro_rows * width
  return {
    "micro_rows": micro_rows,
    "attention": attention,
    "tokens": tokens,
    "tokens_computed": computed,
    "s": statistics.median(taken),
    "model_flops": 3 * config.algo.num_epochs * sum(flops),
    "raw": taken,
  }


def arms(spec, until):
  """PPO steps, by arm, dispatch and attention, on real lengths."""
  num = spec["batch_size"] * (spec["steps"] + 2) + spec["delta"]
  lengths = bench.lengths_of(
    spec["lengths"], limit=spec["response_len"], num=num
  )
  for arm, dispatch, attention in spec["arms"]:
    if time.monotonic() < until:
      yield _arm(spec, arm, dispatch, attention, lengths, until)


def _arm(spec, arm, dispatch, attention, lengths, until):
  changes = spec["attention"][attention] | {"overlap.dispatch": dispatch}
  config = config_of(spec, arm, **changes)
  one, rows = bench.Arm(config, lengths, vocab_size=vocab_of(spec)), []
  for index in range(1 + spec["steps"]):
    row = one.step()
    if index:  # the first compiles and fills the slots
      rows.append(row)
    if rows and time.monotonic() > until:
      break
  mean = lambda key: statistics.mean(r[key] for r in rows)
  found = {
    "arm": arm,
    "dispatch": dispatch,
    "attention": attention,
    "s": mean("wall_s"),
    "tokens": mean("tokens/trained"),
    "ticks": mean("overlap/ticks"),
    "raw": rows,
  }
  if arm in ("serial", "intra") and time.monotonic() < until:
    one.longest = spec["profiled_len"]
    found["busy"] = one.busy()
  return found


PARTS = {f.__name__: f for f in (machine, decode, score, update, arms)}


def peak_bytes():
  stats = jax.local_devices()[0].memory_stats() or {}
  return stats.get("peak_bytes_in_use")
