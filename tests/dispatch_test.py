# SPDX-License-Identifier: Apache-2.0
"""A chunk and tiles as one program: the same bits as one after the other."""

import dataclasses

import jax
import pytest
import tiny
from compare import assert_exact

from configs import common
from oppo_jax import config as config_lib

DELTAS = (3, 0, 4, 2)
CHUNK_SIZES = (3, 1, 7, 2)


def counted(s, log):
  """`s`, with a note of every call of `decode_and_append`.

  A note says which of its arrays were given up, by position.
  """
  call = s.fns.decode_and_append

  def noted(*args, **kwargs):
    result = call(*args, **kwargs)
    jax.block_until_ready(result)
    is_gone = lambda x: isinstance(x, jax.Array) and x.is_deleted()
    leaves = [jax.tree.leaves(x) for x in args]
    log.append([all(map(is_gone, of)) for of in leaves])
    return result

  return dataclasses.replace(s, fns=s.fns._replace(decode_and_append=noted))


def fused(loop="while", **changes):
  """`tiny.variant` whose fused program is real; the others are shared."""
  sizes = tiny.SIZES._replace(decode_loop=loop)
  made = tiny.setup(sizes, dispatch="fused", **changes).fns.decode_and_append
  s = tiny.variant(decode_loop=loop) if loop != "while" else tiny.setup()
  return dataclasses.replace(s, fns=s.fns._replace(decode_and_append=made))


def train(s, intra):
  return tiny.train(
    s,
    num_steps=len(DELTAS),
    chunk_size=CHUNK_SIZES.__getitem__,
    delta=DELTAS.__getitem__,
    intra=intra,
  )


@pytest.fixture(scope="module")
def separate():
  return train(tiny.setup(), "chunk")


@pytest.mark.parametrize("intra", ["none", "sequence", "chunk"])
def test_one_program_gives_the_bits_of_two(separate, intra):
  log = []
  run = train(counted(fused(), log), intra)
  assert_exact(run.batches, separate.batches)
  assert_exact(run.params, separate.params)
  if intra == "chunk":  # the same tiles, elsewhere
    tiles = lambda run: [r.tiles for r in run.rollouts]
    assert tiles(run) == tiles(separate)
  assert bool(log) == (intra != "none")


def test_tiles_of_a_row_keep_their_order():
  # After 12 ticks every row has two tiles at once: more than one call.
  forced = lambda uid: tiny.prompt_of(uid, 17)
  roll = lambda s: (
    tiny.roll(s, deltas=(3,), prompt_of=forced, chunk_sizes=(12,)).batches
  )
  log = []
  assert_exact(roll(counted(fused(), log)), roll(tiny.setup()))
  assert log


def test_it_does_so_in_a_loop_of_fixed_length(separate):
  run = train(fused("fori"), "chunk")
  assert_exact(run.batches, separate.batches)
  assert_exact(run.params, separate.params)


def test_it_compiles_once_and_gives_up_what_it_replaces():
  s, log = fused(), []
  train(counted(s, log), "chunk")
  assert s.fns.decode_and_append._cache_size() == 1
  # parameters, slots, cache, version, key, scorers' parameters, states, ...
  assert log
  assert all(x == [i in (1, 2, 6) for i in range(len(x))] for x in log)


def test_without_scorers_there_is_nothing_to_fuse():
  assert tiny.setup().fns.decode_and_append is None
  assert tiny.light_loop().fns.decode_and_append is None


def test_two_devices_do_not_share_a_program():
  config = common.base()
  config.overlap.update(placement="disaggregated", dispatch="fused")
  with pytest.raises(ValueError, match=r"config.overlap.dispatch='fused'"):
    config_lib.validate(config)
