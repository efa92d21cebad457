# SPDX-License-Identifier: Apache-2.0
r"""Time of a decode tick, against the bytes it must move.

  python -m benchmarks.decode --rows=16,64 --lives=32,256 --chunks=1,16,64
  python -m benchmarks.decode --rows=8 --lives=32 --chunks=4 --vocab_size=151936

One tick is one token for every row. Rows hold `live` tokens when the clock
starts. The floor is (weights + keys and values of the live prefix) / the
bandwidth that a copy reaches on this device in this run. `sampling` is the
share of drawing tokens from logits, timed by itself. Programs take turns.
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import bench
from oppo_jax import assemble, decode, flight, keys, metrics, overlap

_ROWS = flags.DEFINE_list("rows", ["16", "64"], "Rows decoded at once.")
_LIVES = flags.DEFINE_list("lives", ["32", "256"], "Tokens in each row.")
_CHUNKS = flags.DEFINE_list("chunks", ["1", "16", "64"], "Ticks per call.")
_BLOCKS = flags.DEFINE_list("blocks", ["64"], "model.attention_block; 0 = off.")
_MODEL = flags.DEFINE_enum("model", "peer", list(bench.MODELS), "Its shape.")
_VOCAB = flags.DEFINE_integer("vocab_size", bench.VOCAB_SIZE, "V")
_FEW = flags.DEFINE_list("decode_rows", ["-1"], "rollout.decode_rows.")
_CAPACITY = flags.DEFINE_integer("capacity", 576, "Columns of a row.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")


def bandwidth():
  """Bytes per second of a large copy, read and write counted."""
  x = jnp.zeros(64 * 2**20, jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  jax.block_until_ready(copy(x))
  times = []
  for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready(copy(x))
    times.append(time.perf_counter() - start)
  return 2 * x.nbytes / min(times)


class Case:
  """One (rows, live, chunk, block, decode_rows), ready to be timed."""

  def __init__(self, rows, live, chunk, block, few):
    self.key = {"rows": rows, "live": live, "chunk": chunk, "block": block}
    self.key["decode_rows"] = few
    response = _CAPACITY.value - live
    config = bench.config_of(
      "serial",
      model=_MODEL.value,
      batch_size=rows,
      delta=0,
      prompt_len=live,
      response_len=response,
      staleness=-1,
      **{"model.attention_block": block, "rollout.decode_rows": few},
    )
    engine = assemble.build(config, vocab_size=_VOCAB.value, eos_ids=(0,))
    self.fns, self.chunk = engine.fns, chunk
    self.params = engine.models.policy.init(jax.random.key(0))
    self.config = config
    tokens = np.ones(live, np.int32)
    self.prompt_of = lambda uid: flight.Prompt(tokens, response)
    kv = 2 * config.model.num_layers * config.model.num_kv_heads
    self.bytes = sum(x.nbytes for x in jax.tree.leaves(self.params))
    self.bytes += 4 * kv * config.model.head_dim * rows * (live + chunk / 2)
    self.seconds, self.sampling = [], []
    draw = functools.partial(decode.sample, sampling=engine.sampling)
    self._draw = jax.jit(draw)

  def measure_sampling(self):
    """Seconds that drawing a token for every row takes."""
    rows = self.key["rows"]
    none = np.zeros(rows, bool)
    ids = np.arange(rows, dtype=np.int32)
    logits = jnp.zeros((rows, _VOCAB.value), jnp.float32)
    args = (logits, ids, ids, none, none, keys.named(0, "rollout"))
    for _ in range(2):  # the first may compile
      start = time.perf_counter()
      jax.block_until_ready(self._draw(*args))
      seconds = time.perf_counter() - start
    self.sampling.append(seconds)

  def measure(self):
    """Seconds per tick of one chunk, from rows that hold `live` tokens."""
    fns = self.fns
    state = flight.admit(
      fns,
      flight.init(fns),
      num_in_flight=self.key["rows"],
      prompt_of=self.prompt_of,
      version=0,
    )
    state = overlap.prefill_policy(fns, state, self.params)
    run_key = keys.named(0, "rollout")
    slots, cache = state.slots, state.cache
    for _ in range(2):  # the first may compile
      jax.block_until_ready((slots, cache))
      start = time.perf_counter()
      slots, cache, report = fns.decode_chunk(
        self.params,
        *(slots, cache, np.int32(0), run_key),
        chunk_size=self.chunk,
      )
      metrics.fetch(report.tick)
      seconds = time.perf_counter() - start
    self.seconds.append(seconds / self.chunk)


def main(argv):
  del argv
  numbers = lambda flag: [int(x) for x in flag.value]
  cases = [
    Case(rows, live, chunk, block, few)
    for rows in numbers(_ROWS)
    for live in numbers(_LIVES)
    for chunk in numbers(_CHUNKS)
    for block in numbers(_BLOCKS)
    for few in numbers(_FEW)
    if live + 2 * chunk < _CAPACITY.value
  ]
  speed = bandwidth()
  for index in range(1 + _ROUNDS.value):
    for case in cases:
      case.measure()
      case.measure_sampling()
      if index == 0:
        case.seconds.clear(), case.sampling.clear()
  result = bench.conditions() | {"bandwidth": speed, "cases": []}
  say = lambda line: sys.stdout.write(line + "\n")
  say(f"copy {speed / 1e9:.1f} GB/s")
  say("rows  live chunk block  few  ms/tick   floor  tokens/s  sampling")
  for case in cases:
    tick = statistics.median(case.seconds)
    floor = case.bytes / speed
    sampling = statistics.median(case.sampling)
    k = case.key
    say(
      f"{k['rows']:4d} {k['live']:5d} {k['chunk']:5d} {k['block']:5d}"
      f" {k['decode_rows']:4d}"
      f" {tick * 1e3:8.2f} {floor * 1e3:7.2f} {k['rows'] / tick:9.0f}"
      f" {sampling / tick:8.1%}"
    )
    row = {"s_per_tick": tick, "floor_s": floor, "raw": case.seconds}
    row |= {"sampling_s": sampling, "raw_sampling": case.sampling}
    result["cases"].append(k | row)
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
