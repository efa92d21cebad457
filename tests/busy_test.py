# SPDX-License-Identifier: Apache-2.0
"""Busy time of devices: of intervals, of planes made by hand, of a real run."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import busy
from oppo_jax import metrics


def test_what_overlaps_counts_once():
  intervals = [(5, 7), (0, 3), (2, 4), (2, 3), (4, 4)]
  assert busy.merged(intervals) == [(0, 4), (5, 7)]
  assert busy.length(busy.merged(intervals)) == 6
  assert busy.doubled(intervals) == [(2, 3)]


def test_what_touches_does_not_overlap():
  assert busy.merged([(0, 2), (2, 3)]) == [(0, 3)]
  assert busy.doubled([(0, 2), (2, 3)]) == []
  assert busy.doubled([(0, 4), (0, 2), (2, 4)]) == [(0, 4)]


def event(kind, start, end, **stats):
  """Of a plane; microseconds."""
  told = "".join(
    f"stats {{ metadata_id: {STATS.index(name) + 1} int64_value: {value} }}"
    for name, value in stats.items()
  )
  return (
    f"events {{ metadata_id: {EVENTS.index(kind) + 1} offset_ps: {start}000000"
    f" duration_ps: {end - start}000000 {told} }}"
  )


def plane(name, **lines):
  """A plane of these lines of events."""
  names = lambda of, field: "".join(
    f'{field} {{ key: {i} value {{ id: {i} name: "{x}" }} }}'
    for i, x in enumerate(of, 1)
  )
  told = "".join(
    f'lines {{ name: "{LINES.get(line, line)}" {"".join(events)} }}'
    for line, events in lines.items()
  )
  return (
    f'planes {{ name: "{name}" {told} {names(EVENTS, "event_metadata")}'
    f" {names(STATS, 'stat_metadata')} }}"
  )


EVENTS = ("kernel", "while", "dot", "end: while", "time/decode", "time/score")
STATS = ("hlo_op", "device_ordinal", "run_id", "_p", "_c")
LINES = {
  "first": "Stream #13(Compute)",
  "second": "Stream #14(MemcpyD2H)",
  "derived": "XLA Ops",
}
profile_of = lambda *planes: jax.profiler.ProfileData.from_text_proto(
  "".join(planes)
)


def test_a_gpu_is_busy_where_a_stream_is():
  host = plane(
    "/host:CPU",
    python=[event("time/decode", 0, 10), event("time/score", 10, 20)],
  )
  gpu = plane(
    "/device:GPU:0",
    first=[event("kernel", 1, 4), event("kernel", 8, 12)],
    second=[event("kernel", 3, 6)],
    derived=[event("kernel", 0, 20)],
  )
  idle = plane("/device:GPU:1", first=[event("kernel", 11, 13)])
  data = profile_of(host, gpu, idle)
  seen = busy.report(data, ("time/decode",))
  assert seen == {
    "wall_s": pytest.approx(10e-6),
    "shared_s": pytest.approx(1e-6),  # 3 to 4
    "busy_s": {"gpu:0": pytest.approx(7e-6), "gpu:1": 0},  # 1 to 6, 8 to 10
    "double_s": {"gpu:0": pytest.approx(1e-6), "gpu:1": 0},
  }
  assert busy.idle(data, ("time/decode",)) == pytest.approx(0.3)
  # 0 to 1, 6 to 8, 13 to 20: a gap of one device counts if the other has it.
  assert busy.idle(data, ("time/decode", "time/score")) == pytest.approx(0.5)
  both = busy.report(data, ("time/decode", "time/score"))
  assert both["shared_s"] == pytest.approx(2e-6)  # and 11 to 12
  assert both["double_s"]["gpu:0"] == pytest.approx(1e-6)


def test_a_host_device_is_told_by_what_its_operations_say():
  said = lambda device, run, number: dict(
    hlo_op=0, device_ordinal=device, run_id=run, _p=number
  )
  host = plane(
    "/host:CPU",
    python=[event("time/decode", 0, 20)],
    # A loop that returns at 3 and is over at 9, on another thread; inside it,
    # an operation that is no second call.
    first=[
      event("while", 1, 3, **said(0, 7, 1)),
      event("dot", 12, 14, **said(1, 8, 3)),
    ],
    second=[
      event("dot", 4, 8, **said(0, 7, 2)),
      event("end: while", 9, 9, _c=1),
      event("dot", 13, 15, **said(0, 9, 4)),
      event("dot", 13, 14, **said(1, 10, 5)),
    ],
  )
  # 0 to 1, 9 to 12, 15 to 20
  assert busy.idle(profile_of(host), ("time/decode",)) == pytest.approx(0.45)
  assert busy.report(profile_of(host), ("time/decode",)) == {
    "wall_s": pytest.approx(20e-6),
    "shared_s": pytest.approx(1e-6),  # 13 to 14
    "busy_s": {"cpu:0": pytest.approx(10e-6), "cpu:1": pytest.approx(2e-6)},
    "double_s": {"cpu:0": 0, "cpu:1": pytest.approx(1e-6)},
  }


def test_a_real_call_is_busy_for_part_of_its_time():
  timers = metrics.Timers()
  square = jax.jit(lambda x: x @ x)
  x = jax.block_until_ready(square(jnp.ones((256, 256))))

  def call():
    with timers("decode"):
      jax.block_until_ready(square(square(x)))
    with timers("score"):
      pass

  data = busy.profile(call)
  whole = busy.report(data)
  assert 0 < whole["busy_s"]["cpu:0"] <= whole["wall_s"]
  assert 0 <= busy.idle(data) < 1
  decode, score = (
    busy.report(data, (f"time/{phase}",)) for phase in ("decode", "score")
  )
  assert 0 < decode["busy_s"]["cpu:0"] <= decode["wall_s"] < whole["wall_s"]
  # No zero: a thread may note the end of its work after it said so.
  assert score["busy_s"]["cpu:0"] < decode["busy_s"]["cpu:0"]
