# SPDX-License-Identifier: Apache-2.0
"""The schedule in token time against the engine: every number of every step.

The engine is the real host loop with models of one matrix and forced response
lengths; the schedule knows the lengths alone.
"""

import collections
import functools

import jax
import numpy as np
import pytest
import tiny

from oppo_jax import flight, jit_table, metrics, overlap, schedule

SCORERS = ("reward", "reference", "critic", "policy")
NUM_STEPS = 12
R = tiny.SAMPLING.max_response_len
DELTAS = (3, 4, 0, 2, 4, 1, 4, 4, 0, 3, 2, 4)
CHUNKS = (5, 1, 64, 3, 2, 17, 4, 4, 7, 1, 5, 6)


@functools.lru_cache
def functions(**changes):
  """The engine, of models without attention; `append` and `prefill` counted.

  Compiles again only what looks at the sizes that are changed.
  """
  lm, scalar = tiny.light("lm"), tiny.light("scalar")
  models = dict(reward=scalar, reference=lm, critic=scalar, policy=lm)
  fns = jit_table.make_fns(
    sizes=tiny.SIZES._replace(**changes),
    sampling=tiny.SAMPLING,
    policy=lm,
    scorers=models,
    algorithm=None,
  )
  if changes:
    base, count = functions()
    looks = [k for k, v in tiny.LOOKS_AT.items() if v & changes.keys()]
    own = {name: getattr(fns, name) for name in looks}
    return base._replace(sizes=fns.sizes, **own), count
  count = collections.Counter()

  def counted(name, fn):
    def call(*args):
      count[name] += 1
      return fn(*args)

    return call

  return fns._replace(
    append={k: counted(k, fn) for k, fn in fns.append.items()},
    prefill=counted("prefill", fns.prefill),
  ), count


def prompts(seed):
  """Random prompts and lengths: a third are short, a few the longest."""

  def prompt_of(uid):
    rng = np.random.default_rng([seed, uid])
    long = rng.integers(1, R + 1)
    target = rng.choice([long, rng.integers(1, 4), R], p=[0.5, 0.35, 0.15])
    return flight.Prompt(tiny.prompt_of(uid).tokens, int(target))

  return prompt_of


def engine(intra, prompt_of, **changes):
  """What the real loop does: a dict of numbers per step."""
  fns, count = functions(**changes)
  state, rows = flight.init(fns), []
  lm, scalar = (tiny.params(tiny.light(head), 0) for head in ("lm", "scalar"))
  params = dict(policy=lm, reference=lm, reward=scalar, critic=scalar)
  for step in range(NUM_STEPS):
    count.clear()
    state = flight.admit(
      fns,
      state,
      num_in_flight=fns.sizes.batch_size + DELTAS[step],
      prompt_of=prompt_of,
      version=step,
    )
    in_flight = int(state.in_flight.sum())
    state, batch, done = overlap.rollout(
      fns,
      state,
      params,
      version=step,
      run_key=jax.random.key(0),
      chunk_size=CHUNKS[step],
      intra=intra,
      timers=metrics.Timers(),
    )
    state = flight.after_update(fns, state)
    batch = metrics.fetch(batch)
    staleness = (step - batch.token_version)[batch.mask]
    rows.append(
      dict(
        in_flight=in_flight,
        ticks=done.ticks,
        chunks=done.chunks,
        generated=done.generated,
        deferred=done.deferred,
        uid=batch.uid.tolist(),
        row_len=done.row_len.tolist(),
        response_len=batch.response_len.tolist(),
        deferrals=(step - batch.admitted_at).tolist(),
        staleness_sum=int(staleness.sum()),
        staleness_max=int(staleness.max()),
        tiles=dict(done.tiles),
        calls=dict(count),
      )
    )
  return rows


def rules_of(intra, **changes):
  sizes = tiny.SIZES._replace(**changes)
  shared = set(schedule.Rules._fields) & set(sizes._fields)
  return schedule.Rules(
    **{name: getattr(sizes, name) for name in shared},
    intra=intra,
    tile_rows=sizes.tile.rows,
    tile_len=sizes.tile.length,
    scorers=SCORERS,
    update=schedule.Update(1, 1, 2, sizes.row_len),
  )


def simulated(rules, prompt_of, deltas=DELTAS, chunks=CHUNKS):
  def lengths_of(uids):
    of = [prompt_of(uid) for uid in uids]
    return [len(p.tokens) for p in of], [p.target_len for p in of]

  return list(schedule.replay(rules, lengths_of, zip(deltas, chunks)))


def as_row(step, rules):
  """A step, in the engine's words."""
  calls = {}
  for name in SCORERS:
    of = step.calls[rules.class_of(name)]
    calls[name] = int(of.streamed.sum()) + of.flushed
  calls["prefill"] = step.prefill_calls
  row = {
    "tiles": step.tiles(rules),
    "calls": {k: n for k, n in calls.items() if n},
  }
  for name in ("uid", "row_len", "response_len", "deferrals"):
    row[name] = getattr(step, name).tolist()
  for name in ("in_flight", "ticks", "chunks", "generated", "deferred"):
    row[name] = getattr(step, name)
  return row | {
    "staleness_sum": step.staleness_sum,
    "staleness_max": step.staleness_max,
  }


@pytest.mark.parametrize(
  ("intra", "changes"),
  [
    ("none", {}),
    ("sequence", {}),
    ("chunk", {}),
    ("sequence", {"speculates": False}),
    ("chunk", {"speculates": False}),
    ("chunk", {"max_staleness": -1}),
    ("chunk", {"max_staleness": 1}),
    ("chunk", {"group_size": 2}),
    ("chunk", {"keep_critic_cache": True, "keep_policy_cache": True}),
    ("none", {"restarts": True}),
    ("chunk", {"restarts": True, "keep_policy_cache": True}),
    ("chunk", {"restarts": True, "speculates": False}),
  ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_step_is_that_of_the_engine(intra, changes, seed):
  prompt_of, rules = prompts(seed), rules_of(intra, **changes)
  expected = engine(intra, prompt_of, **changes)
  steps = simulated(rules, prompt_of)
  for row, step in zip(expected, steps, strict=True):
    assert as_row(step, rules) == row
