# SPDX-License-Identifier: Apache-2.0
"""The table in `jit_table.make_fns`: what compiles, how often, what is donated;
and where the host waits.
"""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from oppo_jax import flight, jit_table, metrics, overlap, slots

CHUNK_SIZES = (3, 1, 64, 7, 3)
DELTAS = (3, 0, 4, 1, 2)


@pytest.fixture(scope="module")
def setup():
  """Of functions that nobody else calls.

  jit shares its cache between all wrappers of one function, so the library
  function that is jitted as it is gets a wrapper of its own.
  """
  with pytest.MonkeyPatch.context() as patched:
    admit = slots.admit
    patched.setattr(slots, "admit", lambda *args: admit(*args))
    return tiny.setup.__wrapped__(make_model=tiny.light)


def train(s, intra):
  return tiny.train(
    s,
    num_steps=len(DELTAS),
    chunk_size=CHUNK_SIZES.__getitem__,
    delta=DELTAS.__getitem__,
    intra=intra,
  )


def compilations(fns):
  named = {f"append {k}": f for k, f in fns.append.items()}
  named |= {k: f for k, f in fns._asdict().items() if hasattr(f, "_cache_size")}
  return {k: f._cache_size() for k, f in named.items()}


ONCE = {
  "init": 1,
  "admit": 1,
  "prefill": 1,
  "decode_chunk": 1,
  "append critic": 1,
  "append reference": 1,
  "append reward": 1,
  "harvest": 1,
  "update": 1,
  "new_cache": 2,  # of what an update makes stale: policy and critic
}


def test_everything_compiles_once(setup):
  for intra in ("none", "sequence", "chunk"):
    run = train(setup, intra)
    assert [r.deferred for r in run.rollouts] == list(DELTAS)
  assert compilations(setup.fns) == ONCE


def test_a_fixed_trip_loop_compiles_once_per_chunk_size():
  for loop, times in (("while", 1), ("fori", 4)):
    s = tiny.light_loop.__wrapped__(decode_loop=loop)
    tiny.roll(
      s, deltas=DELTAS, prompt_of=tiny.prompt_of, chunk_sizes=CHUNK_SIZES
    )
    assert s.fns.decode_chunk._cache_size() == times


def watched(s, log):
  """`s`, with a note of every call: what was donated, and what must live."""

  def watch(name, f, donated):
    def call(*args, **kwargs):
      result = f(*args, **kwargs)
      jax.block_until_ready(result)
      for i, arg in enumerate(args):
        leaves = [x for x in jax.tree.leaves(arg) if isinstance(x, jax.Array)]
        for x in leaves:
          if x.size:
            log.append((name, i, x.is_deleted() == (i in donated)))
      return result

    return call

  fns = s.fns
  return dataclasses.replace(
    s,
    fns=fns._replace(
      admit=watch("admit", fns.admit, {0}),
      prefill=watch("prefill", fns.prefill, {1}),
      decode_chunk=watch("decode_chunk", fns.decode_chunk, {1, 2}),
      append={k: watch("append", f, {1}) for k, f in fns.append.items()},
      harvest=watch("harvest", fns.harvest, {0}),
      update=watch("update", fns.update, {0}),
    ),
  )


def test_what_is_replaced_is_donated_and_nothing_else(setup):
  log = []
  train(watched(setup, log), "chunk")
  wrong = {(name, i) for name, i, is_right in log if not is_right}
  assert not wrong
  # Slots, cache and state of every function were among what was looked at.
  assert {(name, i) for name, i, _ in log} >= {
    ("admit", 0),
    ("prefill", 0),
    ("prefill", 1),
    ("decode_chunk", 0),
    ("decode_chunk", 1),
    ("decode_chunk", 2),
    ("append", 0),
    ("append", 1),
    ("append", 2),
    ("harvest", 0),
    ("harvest", 1),
    ("update", 0),
    ("update", 1),
  }


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_a_rollout_waits_once_per_chunk(setup, chunk_size):
  s = setup
  state = flight.admit(
    s.fns,
    flight.init(s.fns),
    num_in_flight=8,
    prompt_of=lambda uid: tiny.prompt_of(uid, 3 + 2 * uid),
    version=0,
  )
  before = metrics.SYNCS.count
  _, _, done = overlap.rollout(
    s.fns,
    state,
    s.start | s.frozen,
    version=0,
    run_key=jax.random.key(3),
    chunk_size=chunk_size,
    intra="chunk",
    timers=metrics.Timers(),
  )
  # The fourth row has 9 tokens: 9 ticks.
  assert done.ticks == 9
  assert done.chunks == -(-9 // chunk_size)
  assert metrics.SYNCS.count - before == done.chunks


def test_a_cast_is_to_the_dtype_that_is_computed_in():
  def cast_of(dtype):
    fns = jit_table.make_fns(
      sizes=tiny.SIZES,
      sampling=tiny.SAMPLING,
      policy=tiny.model(dtype=dtype),
      scorers={},
      algorithm=None,
    )
    assert fns.update is None
    return fns.cast

  params = {"x": np.ones(3, np.float32)}
  assert cast_of("bfloat16")(params)["x"].dtype == "bfloat16"
  placed = cast_of("float32")(params)
  assert isinstance(placed["x"], jax.Array)
  assert cast_of("float32")(placed)["x"] is placed["x"]  # no copy
