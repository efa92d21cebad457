# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: the one way to the host, clocks, writers, hashes.

`fetch` is the only place of the package where the host waits for the device.
Everything else here works on what has been fetched, and refuses arrays that are
still on a device: reading those would be a wait that nobody counts.

Writers share one method, `write(row)`: a flat dict of numbers with the key
"step", e.g. {"step": 3, "objective/scores": 0.5, "overlap/delta": 4}.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass
class Syncs:
  """Waits of this process for the device.

  Attributes:
    count: calls of `fetch`.
    waited_s: seconds spent in them.
  """

  count: int = 0
  waited_s: float = 0.0


SYNCS = Syncs()


def fetch(tree: Any) -> Any:
  """Waits for a whole pytree of device arrays; returns it as NumPy arrays."""
  start = time.perf_counter()
  tree = jax.device_get(tree)
  SYNCS.count += 1
  SYNCS.waited_s += time.perf_counter() - start
  return tree


def backend() -> dict[str, str]:
  """What this process runs on, for summaries."""
  return {
    "jax": jax.__version__,
    "backend": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
  }


class Timers:
  """Host seconds by phase, and how many of them were waits in `fetch`.

  Dispatch is asynchronous: the host's time in a phase is what it took to
  enqueue, plus what it waited. Phases may nest; each counts all it contains.

    with timers("step"):
      with timers("decode"):
        ...
    timers.take()  # {"time/decode_s": 0.9, "time/decode_wait_s": 0.8, ...}
  """

  def __init__(self):
    self._seconds: dict[str, float] = {}
    self._waited: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    """Adds the time of the `with` block to `phase`."""
    start, waited = time.perf_counter(), SYNCS.waited_s
    try:
      with jax.profiler.TraceAnnotation(f"time/{phase}"):  # seen in profiles
        yield
    finally:
      seconds = time.perf_counter() - start
      self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
      waited = SYNCS.waited_s - waited
      self._waited[phase] = self._waited.get(phase, 0.0) + waited

  def take(self) -> dict[str, float]:
    """Seconds since the last `take`, as metrics; starts anew from zero."""
    row = {}
    for phase in self._seconds:
      row[f"time/{phase}_s"] = self._seconds[phase]
      row[f"time/{phase}_wait_s"] = self._waited[phase]
    self._seconds, self._waited = {}, {}
    return row


def _plain(x: Any) -> Any:
  """NumPy numbers as Python's; NaN and infinities, not in JSON, as None."""
  if isinstance(x, Mapping):
    return {str(k): _plain(v) for k, v in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(v) for v in x]
  if isinstance(x, np.ndarray | np.generic):
    return _plain(x.tolist())
  return None if isinstance(x, float) and not math.isfinite(x) else x


def _dumps(x: Any, **kwargs: Any) -> str:
  try:
    return json.dumps(_plain(x), allow_nan=False, **kwargs)
  except TypeError as e:
    raise TypeError(f"{e}; `fetch` device arrays first") from e


def _replace_file(path: str | os.PathLike[str], text: str) -> None:
  """Writes a file that is either the one before or the new one, never half."""
  temporary = f"{os.fspath(path)}.tmp"
  with open(temporary, "w", encoding="utf-8") as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)


def write_json(path: str | os.PathLike[str], x: Any) -> None:
  """Writes a JSON file atomically; NaN and infinities become null."""
  _replace_file(path, _dumps(x, indent=2) + "\n")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The rows of a JSON-lines file.

  A last line without its line end is what a killed run leaves: dropped.

  Raises:
    ValueError: another line is not JSON; names file and line.
  """
  with open(path, encoding="utf-8") as f:
    lines = f.read().split("\n")[:-1]
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as e:
      raise ValueError(f"{path}, line {number}: not JSON ({e})") from e
  return rows


class JsonlWriter:
  """Appends rows to a JSON-lines file; each row is flushed at once.

  NaN and infinities are written as null: they are not JSON, and most readers
  stop at them. NumPy numbers and arrays are accepted.
  """

  def __init__(
    self, path: str | os.PathLike[str], *, resume_at: int | None = None
  ):
    """Opens the file.

    Args:
      path: created if missing.
      resume_at: first step of this run. Rows of that step and later, which a
        killed run left behind, are dropped; 0 starts a new file. None keeps
        all rows (but not half a line at the end).
    """
    rows = read_jsonl(path) if os.path.exists(path) else []
    if resume_at is not None:
      rows = [r for r in rows if r.get("step", -1) < resume_at]
    _replace_file(path, "".join(json.dumps(r) + "\n" for r in rows))
    self._file = open(path, "a", encoding="utf-8")

  def write(self, row: Mapping[str, Any]) -> None:
    """Appends one row and flushes."""
    self._file.write(_dumps(row) + "\n")
    self._file.flush()

  def close(self) -> None:
    self._file.close()


class TensorBoardWriter:
  """Writes the numbers of a row as TensorBoard scalars, by tensorboardX."""

  def __init__(self, path: str | os.PathLike[str]):
    try:
      import tensorboardX
    except ImportError as e:
      raise ImportError(
        "log.tensorboard=True: install oppo-jax[tensorboard]"
      ) from e
    self._writer = tensorboardX.SummaryWriter(os.fspath(path))

  def write(self, row: Mapping[str, Any]) -> None:
    """Adds one scalar per number of the row, at row["step"]."""
    for key, value in row.items():
      is_number = isinstance(value, int | float | np.number)
      if is_number and key != "step":
        self._writer.add_scalar(key, float(value), int(row["step"]))
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class ConsoleLine:
  """One line per step on stdout, while the run goes.

  step     3  score  0.512  kl  0.0210  delta   4  chunk   64  deferred   3 ...
  """

  FIELDS = (
    ("score", "objective/scores", "7.3f"),
    ("kl", "objective/kl", "8.4f"),
    ("delta", "overlap/delta", "3d"),
    ("chunk", "overlap/chunk_size", "4d"),
    ("deferred", "overlap/deferred", "3d"),
    ("ticks", "overlap/ticks", "5d"),
    ("seconds", "time/step_s", "6.2f"),
  )

  def write(self, row: Mapping[str, Any]) -> None:
    """Prints the row; what it lacks is shown as "-"."""
    parts = [f"step {int(row['step']):5d}"]
    for label, key, form in self.FIELDS:
      text = "-"
      if key in row:
        number = int if form.endswith("d") else float
        text = format(number(row[key]), form)
      parts.append(f"{label} {text}")
    sys.stdout.write("  ".join(parts) + "\n")
    sys.stdout.flush()

  def close(self) -> None:
    """Nothing to close."""


def _feed(digest: Any, name: str, array: Any) -> None:
  """Adds name, dtype, shape and little-endian bytes of a host array."""
  if isinstance(array, jax.Array):
    raise TypeError(f"{name} is on the device: `fetch` it first")
  array = np.asarray(array)
  array = array.astype(array.dtype.newbyteorder("<"), copy=False)
  digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
  digest.update(array.tobytes())


class BatchHash:
  """One number for all batches of a run so far: equal only if all of them are.

    h_0 = ""      h_n = sha256(h_{n-1}, fields of batch n)

  A chain of hashes, not one long hash, so that `hexdigest()` is all there is to
  save: `BatchHash(saved)` goes on where the killed run was.
  """

  FIELDS = (
    "uid",
    "sequences",
    "behavior_logprobs",
    "ref_logprobs",
    "values",
    "scores",
  )

  def __init__(self, start: str = ""):
    self._hex = start

  def update(self, **arrays: Any) -> None:
    """Adds one batch, rows in canonical order: exactly the arrays `FIELDS`."""
    if set(arrays) != set(self.FIELDS):
      raise TypeError(f"fields {sorted(arrays)}: must be {self.FIELDS}")
    digest = hashlib.sha256(self._hex.encode())
    for name in self.FIELDS:
      _feed(digest, name, arrays[name])
    self._hex = digest.hexdigest()

  def hexdigest(self) -> str:
    """Hash so far; "" before the first batch."""
    return self._hex


def params_sha256(tree: Any) -> str:
  """Hash of parameters: path, dtype, shape and bytes of every leaf, by path."""
  leaves = {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(fetch(tree))
  }
  digest = hashlib.sha256()
  for path in sorted(leaves):
    _feed(digest, path, leaves[path])
  return digest.hexdigest()
