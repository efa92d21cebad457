# SPDX-License-Identifier: Apache-2.0
"""Admit, decode and harvest in any order: a state machine beside the buffer.

The machine keeps what is in flight as Python lists. It learns from the buffer
only which token was drawn; which rows advance, end, leave, and when, it works
out by itself, and after every rule the two must agree on everything.
"""

import collections
import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import tiny
from hypothesis import stateful

from oppo_jax import metrics, slots, types

NUM_SLOTS, BATCH_SIZE = tiny.SIZES.num_slots, tiny.SIZES.batch_size
MAX_PROMPT_LEN = tiny.SIZES.max_prompt_len
MAX_RESPONSE_LEN = tiny.SAMPLING.max_response_len
FREE = types.Slots.FREE
SEEN = collections.Counter()


@dataclasses.dataclass
class Row:
  """A row in flight, as the machine knows it."""

  slot: int
  prompt: list[int]
  target_len: int
  admitted_at: int
  response: list[int] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  finished_at: int | None = None


@hypothesis.seed(0)
class Buffer(stateful.RuleBasedStateMachine):
  """Loop functions of a policy without attention; see `tiny.light_loop`."""

  @stateful.initialize(
    rule=st.sampled_from([(1, -1), (1, 1), (2, 1), (4, 2)]),
  )
  def begin(self, rule):
    self.group_size, self.max_staleness = rule
    loop = tiny.light_loop(
      group_size=self.group_size, max_staleness=self.max_staleness
    )
    self.fns, self.params = loop.fns, loop.start["policy"]
    self.slots, self.cache, _ = self.fns.init()
    self.rows, self.trained = {}, []
    self.next_uid = self.version = self.tick = 0

  # What the machine expects.

  def groups(self):
    found = {}
    for uid in self.rows:
      found.setdefault(uid // self.group_size, []).append(uid)
    return list(found.values())

  def is_ready(self, group):
    return all(self.rows[uid].finished_at is not None for uid in group)

  def is_starving(self, group):
    age = self.version - self.rows[group[0]].admitted_at
    return 0 <= self.max_staleness <= age

  def is_complete(self):
    ready = [self.is_ready(g) for g in self.groups()]
    missing = any(
      self.is_starving(g) and not self.is_ready(g) for g in self.groups()
    )
    return sum(ready) * self.group_size >= BATCH_SIZE and not missing

  def leaving(self):
    """uids that a harvest would take now, ascending."""
    at = lambda g: max(self.rows[uid].finished_at for uid in g)
    ready = [g for g in self.groups() if self.is_ready(g)]
    ready.sort(key=lambda g: (not self.is_starving(g), at(g), g))
    return sorted(sum(ready, [])[:BATCH_SIZE])

  def ends(self, row):
    is_eos = row.response[-1] in tiny.EOS_IDS
    if row.target_len:
      assert is_eos == (len(row.response) == row.target_len)
    return is_eos or len(row.response) == MAX_RESPONSE_LEN

  # Rules.

  def free(self):
    used = {row.slot for row in self.rows.values()}
    return [i for i in range(NUM_SLOTS) if i not in used]

  @stateful.precondition(lambda self: len(self.free()) >= self.group_size)
  @stateful.rule(data=st.data())
  def admit(self, data):
    num = len(self.free()) // self.group_size
    num = data.draw(st.integers(1, num)) * self.group_size
    uid = np.full(NUM_SLOTS, FREE, np.int32)
    tokens = np.zeros((NUM_SLOTS, MAX_PROMPT_LEN), np.int32)
    prompt_len, target_len = np.zeros((2, NUM_SLOTS), np.int32)
    for slot in data.draw(st.permutations(self.free()))[:num]:
      # EOS and 0, which pads, may stand in a prompt.
      prompt = data.draw(
        st.lists(st.integers(0, 5), min_size=1, max_size=MAX_PROMPT_LEN)
      )
      target = data.draw(st.sampled_from([0, 1, 2, 3, 5, MAX_RESPONSE_LEN]))
      self.rows[self.next_uid] = Row(slot, prompt, target, self.version)
      uid[slot], prompt_len[slot] = self.next_uid, len(prompt)
      tokens[slot, : len(prompt)], target_len[slot] = prompt, target
      self.next_uid += 1
    self.slots = self.fns.admit(
      *(self.slots, uid, tokens, prompt_len, target_len),
      np.int32(self.version),
    )

  @stateful.rule(chunk_size=st.sampled_from([1, 3, 6, 17]))
  def decode(self, chunk_size):
    self.slots, self.cache, report = self.fns.decode_chunk(
      self.params,
      *(self.slots, self.cache, np.int32(self.version), jax.random.key(3)),
      chunk_size=chunk_size,
    )
    report = metrics.fetch(report)
    for _ in range(chunk_size):
      if self.is_complete():
        break
      self.tick += 1
      for row in self.rows.values():
        if row.finished_at is None:
          column = len(row.prompt) + len(row.response)
          assert column < report.length[row.slot], "a row stood still"
          row.response.append(int(report.tokens[row.slot, column]))
          row.versions.append(self.version)
          if self.ends(row):
            row.finished_at = self.tick
    ready = sum(self.is_ready(g) for g in self.groups()) * self.group_size
    is_short = ready < BATCH_SIZE
    SEEN["chunks that wait for a starving row"] += not (
      is_short or self.is_complete()
    )
    assert report.is_complete == self.is_complete()
    assert sorted(report.uid[report.selected]) == self.leaving()
    assert report.tick == self.tick

  @stateful.precondition(lambda self: self.is_complete())
  @stateful.rule()
  def harvest(self):
    leaving = self.leaving()
    self.slots, batch = self.fns.harvest(self.slots, {}, np.int32(self.version))
    batch = metrics.fetch(batch)
    assert batch.uid.tolist() == leaving
    for i, uid in enumerate(leaving):
      row = self.rows.pop(uid)
      n = len(row.response)
      sequence = row.prompt + row.response
      assert batch.sequences[i, : len(sequence)].tolist() == sequence
      assert batch.responses[i, :n].tolist() == row.response
      assert batch.mask[i].tolist() == [t < n for t in range(MAX_RESPONSE_LEN)]
      assert batch.token_version[i, :n].tolist() == row.versions
      if self.max_staleness >= 0:
        assert self.version - batch.admitted_at[i] <= self.max_staleness
    self.trained += leaving
    SEEN["harvests"] += 1
    SEEN["rows deferred"] += len(self.rows)
    SEEN["ready rows left over"] += sum(
      row.finished_at is not None for row in self.rows.values()
    )
    self.version += 1

  # What holds after every rule.

  @stateful.invariant()
  def the_check_passes(self):
    slots.check(self.slots)

  @stateful.invariant()
  def nobody_is_lost_or_doubled(self):
    assert sorted(self.trained + list(self.rows)) == list(range(self.next_uid))

  @stateful.invariant()
  def groups_are_whole(self):
    for uids in ([*self.rows], self.trained):
      for uid in uids:
        first = uid - uid % self.group_size
        assert set(range(first, first + self.group_size)) <= set(uids)

  @stateful.invariant()
  def the_buffer_holds_what_the_machine_holds(self):
    s = metrics.fetch(self.slots)
    assert sorted(s.uid[s.uid != FREE]) == sorted(self.rows)
    assert s.tick == self.tick
    for uid, row in self.rows.items():
      sequence, first = row.prompt + row.response, len(row.prompt)
      i, n = row.slot, len(sequence)
      assert (s.uid[i], s.prompt_len[i], s.length[i]) == (uid, first, n)
      assert s.tokens[i, :n].tolist() == sequence
      assert s.token_version[i, first:n].tolist() == row.versions
      assert (s.behavior_logprobs[i, first:n] < 0).all()
      assert s.done[i] == (row.finished_at is not None)
      assert not s.done[i] or s.finished_tick[i] == row.finished_at
      assert s.admitted_at[i] == row.admitted_at
      assert s.target_len[i] == row.target_len


def test_the_buffer_agrees_with_the_machine_after_every_rule():
  SEEN.clear()
  stateful.run_state_machine_as_test(
    Buffer,
    settings=hypothesis.settings(max_examples=60, stateful_step_count=40),
  )
  print(dict(SEEN))
  # The machine has been where it matters.
  assert SEEN["harvests"] >= 50
  assert SEEN["rows deferred"] >= 100
  assert SEEN["ready rows left over"] >= 20
  assert SEEN["chunks that wait for a starving row"] >= 5
