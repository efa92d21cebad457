# SPDX-License-Identifier: Apache-2.0
r"""Cost of scoring: tiles against one pass; while rows grow against afterwards.

  python -m benchmarks.score --tiles=16,32,64 --out=score.json

The same rows, the same tokens. "one pass" is one tile as long as a row, all
rows at once: padding is computed too. "afterwards" runs the tiles when all rows
are complete, "as they grow" after every chunk of ticks what is there by then;
both run the same tiles, in calls of the same shape. Cases take turns; medians,
and ratios to "one pass" within the run. cpu_s is CPU time of all threads.
"""

import dataclasses
import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags

from benchmarks import bench
from oppo_jax import assemble, flight, overlap

_WORKLOAD = flags.DEFINE_string("workload", "lognormal", "See bench.py.")
_MODEL = flags.DEFINE_enum("model", "peer", list(bench.MODELS), "Its shape.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "B")
_RESPONSE = flags.DEFINE_integer("response_len", 224, "R, tokens.")
_TILES = flags.DEFINE_list("tiles", ["16", "32", "64"], "score.tile_len.")
_CALL = flags.DEFINE_integer("call", 512, "Tokens per call of tiles.")
_CHUNK = flags.DEFINE_integer("chunk", 16, "Ticks between two looks.")
_SCORERS = flags.DEFINE_list("scorers", ["critic", "reference"], "Of those.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")
PROMPT = 32


class Case:
  """One way to score the same rows."""

  def __init__(self, name, tile_len, tile_rows, lengths, chunk):
    self.name, self.wall, self.cpu = name, [], []
    config = bench.config_of(
      "serial",
      model=_MODEL.value,
      batch_size=_BATCH_SIZE.value,
      delta=0,
      prompt_len=PROMPT,
      response_len=_RESPONSE.value,
      staleness=-1,
      **{"score.tile_len": tile_len, "score.tile_rows": tile_rows},
    )
    engine = assemble.build(config, vocab_size=bench.VOCAB_SIZE, eos_ids=(0,))
    scorers = _SCORERS.value
    self.params = {
      name: jax.jit(getattr(engine.models, name).init)(jax.random.key(0))
      for name in scorers
    }
    self.fns = engine.fns
    self.lengths = PROMPT + lengths
    longest = self.lengths.max()
    looks = np.arange(PROMPT, longest, chunk)[1:] if chunk else []
    self.looks = [np.minimum(self.lengths, n) for n in (*looks, longest)]
    rng = np.random.default_rng(0)
    shape = (self.fns.sizes.num_slots, self.fns.sizes.row_len)
    self.tokens = rng.integers(1, bench.VOCAB_SIZE, shape).astype(np.int32)

  def _all(self, x):
    """Over all slots; the free ones are behind."""
    missing = self.fns.sizes.num_slots - len(x)
    return np.pad(np.asarray(x, np.int32), (0, missing))

  def _start(self):
    state = flight.init(self.fns)
    chosen = {k: state.scorers[k] for k in _SCORERS.value}
    uid = np.full(self.fns.sizes.num_slots, -1, np.int32)
    uid[: len(self.lengths)] = np.arange(len(self.lengths))
    return dataclasses.replace(state, scorers=chosen, uid=uid)

  def measure(self):
    state, tokens = self._start(), jax.device_put(self.tokens)
    jax.block_until_ready((state.scorers, tokens))
    wall, cpu, tiles = time.perf_counter(), time.process_time(), 0
    for length in self.looks:
      now = self._all(length)
      state = dataclasses.replace(
        state, length=now, done=now == self._all(self.lengths)
      )
      is_last = length is self.looks[-1]
      state, ran, _ = overlap.score_rows(
        *(self.fns, state, self.params, tokens),
        dict.fromkeys(state.scorers, state.in_flight),
        flush=is_last,
      )
      tiles += sum(ran.values())
    jax.block_until_ready(state.scorers)
    self.wall.append(time.perf_counter() - wall)
    self.cpu.append(time.process_time() - cpu)
    self.tiles = tiles


def main(argv):
  del argv
  lengths = bench.lengths_of(
    _WORKLOAD.value, limit=_RESPONSE.value, num=_BATCH_SIZE.value
  )
  row_len = PROMPT + _RESPONSE.value
  cases = [Case("one pass", row_len, _BATCH_SIZE.value, lengths, 0)]
  for tile_len in (int(x) for x in _TILES.value):
    tile_rows = max(_CALL.value // tile_len, 1)
    for name, chunk in (("afterwards", 0), ("as they grow", _CHUNK.value)):
      name = f"tiles of {tile_len}, {name}"
      cases.append(Case(name, tile_len, tile_rows, lengths, chunk))
  for _ in range(1 + _ROUNDS.value):
    for case in cases:
      case.measure()
  total = int((PROMPT + lengths).sum())
  result = bench.conditions() | {"tokens": total, "cases": []}
  sys.stdout.write(
    f"{_WORKLOAD.value}: {total} tokens in {len(lengths)} rows, scorers"
    f" {', '.join(_SCORERS.value)}\n"
    f"{'':28s} {'wall s':>8s} {'CPU s':>8s} {'tiles':>6s} to one pass\n"
  )
  first = statistics.median(cases[0].wall[1:])
  for case in cases:
    wall, cpu = case.wall[1:], case.cpu[1:]
    seen = {
      "wall_s": statistics.median(wall),
      "cpu_s": statistics.median(cpu),
      "tiles": case.tiles,
      "to_one_pass": statistics.median(wall) / first,
    }
    sys.stdout.write(
      f"{case.name:28s} {seen['wall_s']:8.3f} {seen['cpu_s']:8.3f}"
      f" {case.tiles:6d} {seen['to_one_pass']:10.2f}x\n"
    )
    raw = {"raw_wall_s": wall, "raw_cpu_s": cpu}
    result["cases"].append({"name": case.name} | seen | raw)
  if _OUT.value:
    bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
