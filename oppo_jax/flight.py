# SPDX-License-Identifier: Apache-2.0
"""What is in flight between two steps, seen from the host.

The device holds the rows (`types.Slots`) and the caches; the host remembers the
little that decides what runs next: who is where, how long, and which tiles have
been run. Nothing here waits for the device.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from oppo_jax import score, types

POLICY_CACHE = "policy_cache"  # its frontier: prompt tiles, not scores


class Sizes(NamedTuple):
  """Static sizes and rules of the loop.

  Attributes:
    num_slots: S.
    batch_size: B.
    group_size: G, responses of one prompt that leave together.
    max_prompt_len: P.
    row_len: L = P + R.
    max_staleness: updates a row may be deferred, negative = unbounded.
    tile: Q and T of the scorers.
    decode_loop: "while" or "fori", see `decode.decode_chunk`.
    decode_rows: rows per call of the model, see there.
    restarts: unfinished rows start again from their prompt at an update.
    keep_policy_cache: a deferred row's policy cache survives the update.
    keep_critic_cache: a deferred row's values survive the update.
    speculates: scorers that the update makes stale run tiles of rows that may
      yet be deferred, see `waiting`.
  """

  num_slots: int
  batch_size: int
  group_size: int
  max_prompt_len: int
  row_len: int
  max_staleness: int
  tile: score.Tile
  decode_loop: str
  decode_rows: int
  restarts: bool
  keep_policy_cache: bool
  keep_critic_cache: bool
  speculates: bool


class Fns(NamedTuple):
  """The jitted functions, the sizes they were made for, and where they run.

  `devices` are that of the policy and that of the scorers; None = one for all.
  """

  init: Callable
  new_cache: Callable
  admit: Callable
  prefill: Callable
  decode_chunk: Callable
  append: dict[str, Callable]
  decode_and_append: Callable | None
  harvest: Callable
  update: Callable
  cast: Callable
  sizes: Sizes
  devices: tuple[jax.Device, jax.Device] | None

  def for_scorers(self, tree):
    """A copy where the scorers run; the tree itself if it is there already."""
    return (
      tree if self.devices is None else jax.device_put(tree, self.devices[1])
    )

  def for_policy(self, tree):
    """The same for where the policy is."""
    return (
      tree if self.devices is None else jax.device_put(tree, self.devices[0])
    )


@dataclasses.dataclass(frozen=True)
class OverlapState:
  """Everything in flight between two steps. The host's part is small and plain.

  Attributes:
    slots: the buffer.
    cache: policy cache; None while an update runs that makes it stale.
    scorers: by name.
    uid: host's copy of `slots.uid`.
    prompt_len: host's copy of `slots.prompt_len`.
    length: host's copy of `slots.length`.
    done: host's copy of `slots.done`.
    tick: host's copy of `slots.tick`.
    frontier: by scorer (and `POLICY_CACHE`): tiles of each row already run.
    next_uid: uid of the next prompt to be admitted.
  """

  slots: types.Slots
  cache: types.KVCache | None
  scorers: dict[str, types.ScorerState]
  uid: np.ndarray  # [S] int32
  prompt_len: np.ndarray  # [S] int32
  length: np.ndarray  # [S] int32
  done: np.ndarray  # [S] bool
  tick: int
  frontier: dict[str, np.ndarray]  # name -> [S] int32
  next_uid: int

  @property
  def in_flight(self) -> np.ndarray:  # [S] bool
    return self.uid != types.Slots.FREE


class Prompt(NamedTuple):
  """A prompt as the loop needs it.

  Attributes:
    tokens: token ids, at least one.
    target_len: response length at which EOS is forced; 0 = none.
  """

  tokens: np.ndarray
  target_len: int


def init(fns: Fns) -> OverlapState:
  """Nothing in flight."""
  buffer, cache, scorers = fns.init()
  scorers = fns.for_scorers(scorers)
  num = fns.sizes.num_slots
  return OverlapState(
    slots=buffer,
    cache=cache,
    scorers=scorers,
    uid=np.full(num, types.Slots.FREE, np.int32),
    prompt_len=np.zeros(num, np.int32),
    length=np.zeros(num, np.int32),
    done=np.zeros(num, bool),
    tick=0,
    frontier={
      name: np.zeros(num, np.int32) for name in (*scorers, POLICY_CACHE)
    },
    next_uid=0,
  )


def admit(
  fns: Fns,
  state: OverlapState,
  *,
  num_in_flight: int,
  prompt_of: Callable[[int], Prompt],
  version: int,
  slot_order: np.ndarray | None = None,
) -> OverlapState:
  """Fills free slots until `num_in_flight` rows (whole groups) are in flight.

  Args:
    fns: jitted functions.
    state: in flight now.
    num_in_flight: B + delta.
    prompt_of: the prompt of a uid.
    version: policy version now.
    slot_order: order in which free slots are taken (ascending if None); it
      changes no result, and tests use it to show that.
  """
  s = fns.sizes
  missing = num_in_flight - int(state.in_flight.sum())
  missing -= missing % s.group_size
  order = np.arange(s.num_slots) if slot_order is None else slot_order
  free = [i for i in order if not state.in_flight[i]][: max(missing, 0)]
  if not free:
    return state
  new_uid = np.full(s.num_slots, types.Slots.FREE, np.int32)
  tokens = np.zeros((s.num_slots, s.max_prompt_len), np.int32)
  prompt_len, target_len = np.zeros((2, s.num_slots), np.int32)
  for uid, slot in enumerate(free, start=state.next_uid):
    prompt = prompt_of(uid)
    new_uid[slot], target_len[slot] = uid, prompt.target_len
    prompt_len[slot] = len(prompt.tokens)
    tokens[slot, : len(prompt.tokens)] = prompt.tokens
  is_new = new_uid != types.Slots.FREE
  buffer = fns.admit(
    state.slots, new_uid, tokens, prompt_len, target_len, np.int32(version)
  )
  return dataclasses.replace(
    state,
    slots=buffer,
    uid=np.where(is_new, new_uid, state.uid),
    prompt_len=np.where(is_new, prompt_len, state.prompt_len),
    length=np.where(is_new, prompt_len, state.length),
    done=state.done & ~is_new,
    frontier={k: np.where(is_new, 0, v) for k, v in state.frontier.items()},
    next_uid=state.next_uid + len(free),
  )


def goes_stale(sizes: Sizes, names) -> set[str]:
  """What an update makes worthless, of frontiers by name.

  Reward model and reference are frozen: what they have scored stays, unless
  rows start again.
  """
  if sizes.restarts:
    return set(names)
  stale = {"policy"}  # its log-probs are those at the start of the update
  if not sizes.keep_policy_cache:
    stale |= {POLICY_CACHE}
  if not sizes.keep_critic_cache:
    stale |= {"critic"}
  return stale & set(names)


def waiting(sizes: Sizes, state: OverlapState) -> set[str]:
  """Scorers that wait until it is known which rows leave.

  What they say of a row that is deferred is lost with the update. Where
  decoding hides their work it may be tried; else it would take time for
  nothing, unless no row is going to be deferred.
  """
  if sizes.speculates or int(state.in_flight.sum()) == sizes.batch_size:
    return set()
  return goes_stale(sizes, state.scorers)


def before_update(fns: Fns, state: OverlapState) -> OverlapState:
  """Gives the memory of caches back that the coming update makes stale.

  They are deleted, whoever holds them: an update needs its memory just then.
  """
  stale = goes_stale(fns.sizes, state.frontier)
  free = lambda cache: jax.tree.map(lambda x: x.delete(), cache)
  cache, scorers = state.cache, dict(state.scorers)
  if POLICY_CACHE in stale:
    free(cache)
    cache = None
  for name in stale & set(scorers):
    free(scorers[name].cache)
    scorers[name] = scorers[name].replace(cache=None)
  return dataclasses.replace(state, cache=cache, scorers=scorers)


def after_update(fns: Fns, state: OverlapState) -> OverlapState:
  """Forgets what the previous policy and critic had cached of deferred rows.

  Restarting rows (already cut back on the device by `harvest`) are scored from
  the start. What `before_update` gave back is there again, empty.
  """
  stale = goes_stale(fns.sizes, state.frontier)
  if fns.sizes.restarts:
    state = dataclasses.replace(
      state, length=state.prompt_len, done=np.zeros_like(state.done)
    )
  cache, scorers = state.cache, dict(state.scorers)
  if cache is None:
    cache = fns.new_cache(POLICY_CACHE)
  for name, scorer in scorers.items():
    if scorer.cache is None:
      new = fns.for_scorers(fns.new_cache(name))
      scorers[name] = scorer.replace(cache=new)
  frontier = {
    name: np.zeros_like(v) if name in stale else v
    for name, v in state.frontier.items()
  }
  return dataclasses.replace(
    state, cache=cache, scorers=scorers, frontier=frontier
  )
