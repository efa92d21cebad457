# SPDX-License-Identifier: Apache-2.0
"""What the host does to rows in flight when an update comes."""

import jax
import numpy as np
import pytest
import tiny
from compare import assert_exact

from oppo_jax import flight

OF_TRAINED = {flight.POLICY_CACHE, "critic"}
STALE = {
  "by default": ({}, OF_TRAINED),
  "kept": ({"keep_policy_cache": True, "keep_critic_cache": True}, set()),
  "restarts": ({"restarts": True}, OF_TRAINED | {"reference", "reward"}),
}


def caches(state):
  held = {name: s.cache for name, s in state.scorers.items()}
  return held | {flight.POLICY_CACHE: state.cache}


def deferring(changes):
  """Two rollouts that leave rows in flight."""
  return tiny.roll(
    tiny.variant(**changes),
    deltas=(4, 4),
    prompt_of=lambda uid: tiny.prompt_of(uid, 2 + 5 * uid % 13),
    chunk_sizes=(4, 4),
  )


@pytest.mark.parametrize("case", STALE)
def test_caches_that_go_stale_are_given_back_and_no_others(case):
  changes, stale = STALE[case]
  fns, state = tiny.variant(**changes).fns, deferring(changes).in_flight
  held = caches(state)
  during = flight.before_update(fns, state)
  for name, cache in held.items():
    is_gone = {x.is_deleted() for x in jax.tree.leaves(cache)}
    assert is_gone == {name in stale}, name
    assert (caches(during)[name] is None) == (name in stale), name
  after = caches(flight.after_update(fns, during))
  for name in set(held) - stale:
    assert after[name] is held[name]
  for name in stale:
    assert not any(np.any(x) for x in jax.tree.leaves(after[name]))


@pytest.mark.parametrize("case", STALE)
def test_who_waits_for_the_batch_are_scorers_that_may_work_in_vain(case):
  changes, stale = STALE[case]
  fns = tiny.variant(**changes).fns
  sizes = fns.sizes._replace(speculates=False)
  with_extra = lambda extra: flight.admit(
    fns,
    flight.init(fns),
    num_in_flight=sizes.batch_size + extra,
    prompt_of=tiny.prompt_of,
    version=0,
  )
  scorers = stale - {flight.POLICY_CACHE}
  assert flight.waiting(sizes, with_extra(1)) == scorers
  assert flight.waiting(sizes, with_extra(0)) == set()  # all will be taken
  assert flight.waiting(fns.sizes, with_extra(1)) == set()  # hidden anyway


@pytest.mark.parametrize("case", STALE)
def test_giving_caches_back_changes_no_bit(case, monkeypatch):
  changes, _ = STALE[case]
  kept = deferring(changes)
  assert kept.rollouts[0].deferred
  after = flight.after_update
  monkeypatch.setattr(
    flight,
    "after_update",
    lambda fns, state: after(fns, flight.before_update(fns, state)),
  )
  assert_exact(deferring(changes).batches, kept.batches)
