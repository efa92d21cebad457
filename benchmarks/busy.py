# SPDX-License-Identifier: Apache-2.0
"""Seconds in which devices executed something, from a profile.

  busy    length of the union of a device's intervals: it executed something
  double  of these, at least two intervals at once
  shared  likewise among all devices: also two devices at once

    stream or call  ---    -----           busy    9
    another           ---                  double  1

**GPU.** A plane per device, a line per stream; an interval is a kernel or a
copy. Other lines of the plane repeat them ("XLA Ops") and are left out. CUPTI
runs kernels one after the other, and XLA leaves CUDA graphs out, unless asked
before jax is imported: `ENVIRONMENT`.

**CPU.** All host devices execute on the threads of one pool, so a thread tells
no device; but every operation says its `device_ordinal` and `run_id`. An
interval is a stretch in which a call has an operation that has begun and not
ended ("end: ..." on whatever thread ends it). So a device that waits for a core
amid a program counts as busy, and two devices may be busy on one core.

A program that profiles runs slower: take times from runs without.
"""

import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

Interval = tuple[float, float]  # start, end

ENVIRONMENT = {
  "TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL": "1",
  "XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=true",
}
_WHOLE = "profiled call"


def profile(call: Callable[[], Any]) -> jax.profiler.ProfileData:
  """What the profiler sees of one call, which waits for its results itself."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  options.enable_hlo_proto = False
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      with jax.profiler.TraceAnnotation(_WHOLE):
        call()
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    return jax.profiler.ProfileData.from_file(str(path))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
  """The union, as intervals that do not touch, in order."""
  return _covered(intervals, at_least=1)


def doubled(intervals: Iterable[Interval]) -> list[Interval]:
  """Where at least two of the intervals are."""
  return _covered(intervals, at_least=2)


def length(intervals: Iterable[Interval]) -> float:
  """Of disjoint intervals, together."""
  return sum(end - start for start, end in intervals)


def devices(data: jax.profiler.ProfileData) -> dict[str, list[Interval]]:
  """By device, "gpu:0" or "cpu:0", what overlaps only where two run at once.

  In nanoseconds.
  """
  gpus = {
    plane.name.removeprefix("/device:").lower(): [
      (event.start_ns, event.end_ns)
      for line in plane.lines
      if line.name.startswith("Stream #")
      for event in line.events
    ]
    for plane in data.planes
    if plane.name.startswith("/device:GPU:")
  }
  return gpus or _host_devices(data)


def windows(
  data: jax.profiler.ProfileData, names: Iterable[str]
) -> list[Interval]:
  """Where the host was in one of these annotations, in nanoseconds."""
  return merged(
    (event.start_ns, event.end_ns)
    for plane in data.planes
    if plane.name == "/host:CPU"
    for line in plane.lines
    for event in line.events
    if event.name in names
  )


def report(
  data: jax.profiler.ProfileData, within: Iterable[str] = (_WHOLE,)
) -> dict[str, Any]:
  """Busy time, as in the docstring of this file, in seconds.

  Args:
    data: of `profile`.
    within: annotations that are looked at, such as "time/decode" of
      `metrics.Timers`; the rest of the call is left out.

  Returns:
    "wall_s", "shared_s", and by device "busy_s" and "double_s".
  """
  wall = windows(data, within)
  run = _devices_within(data, wall)
  everything = [one for intervals in run.values() for one in intervals]
  return {
    "wall_s": length(wall) / 1e9,
    "shared_s": length(doubled(everything)) / 1e9,
    "busy_s": {name: length(merged(x)) / 1e9 for name, x in run.items()},
    "double_s": {name: length(doubled(x)) / 1e9 for name, x in run.items()},
  }


def idle(
  data: jax.profiler.ProfileData, within: Iterable[str] = (_WHOLE,)
) -> float:
  """Share of `within`, see `report`, in which no device executed anything."""
  wall = windows(data, within)
  run = _devices_within(data, wall).values()
  return 1 - length(merged(sum(run, []))) / length(wall)


def shares(of: dict[str, Any]) -> str:
  """A report in a line for people, as shares of its wall time."""
  parts = {**of["busy_s"], "shared": of["shared_s"]}
  wall = max(of["wall_s"], 1e-9)
  return "  ".join(f"{name} {x / wall:4.2f}" for name, x in parts.items())


def _covered(intervals, *, at_least):
  """Where at least so many of the intervals are."""
  # Ends before starts: those that touch do not overlap.
  turns = sorted(
    turn for start, end in intervals for turn in ((start, 1), (end, -1))
  )
  found, depth, began = [], 0, None
  for time, change in turns:
    depth += change
    if began is None and depth >= at_least:
      began = time
    elif began is not None and depth < at_least:
      if found and found[-1][1] == began:  # touches the one before
        began = found.pop()[0]
      if time > began:
        found.append((began, time))
      began = None
  return found


def _devices_within(data, wall):
  """`devices`, in order, cut to these windows."""
  return {
    name: [part for one in intervals for part in _within(one, wall)]
    for name, intervals in sorted(devices(data).items())
  }


def _within(interval, windows):
  start, end = interval
  return [
    (max(start, first), min(end, last))
    for first, last in windows
    if first < end and start < last
  ]


def _host_devices(data):
  """By device: one union per call, since its operations nest."""
  begun, ended = {}, {}
  for plane in data.planes:
    if plane.name != "/host:CPU":
      continue
    for line in plane.lines:
      for event in line.events:
        stats = dict(event.stats)
        if "hlo_op" in stats and "device_ordinal" in stats:
          begun[stats["_p"]] = (
            (f"cpu:{stats['device_ordinal']}", stats["run_id"]),
            (event.start_ns, event.end_ns),
          )
        elif event.name.startswith("end: "):
          ended[stats["_c"]] = event.end_ns
  calls = {}
  for operation, (call, (start, end)) in begun.items():
    # One that hands its work to other threads returns before it is done.
    end = max(end, ended.get(operation, end))
    calls.setdefault(call, []).append((start, end))
  run = {}
  for (device, _), intervals in calls.items():
    run.setdefault(device, []).extend(merged(intervals))
  return run
