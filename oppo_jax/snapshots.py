# SPDX-License-Identifier: Apache-2.0
"""Where a run was: arrays and a few numbers on disk, kept by Orbax.

A snapshot is there as a whole or not at all, whenever the process ends. It is
written while the run goes on, and the one before it stays until it is there.
"""

import pathlib
import shutil
from typing import Any, NamedTuple

import jax

TRASH = "trash"


class Snapshot(NamedTuple):
  """What `Snapshots.latest` found.

  Attributes:
    step: what it was saved under.
    state: arrays, in the tree they were saved in.
    numbers: what else was saved.
  """

  step: int
  state: Any
  numbers: dict[str, Any]


class Snapshots:
  """The newest snapshot of one run."""

  def __init__(self, folder: pathlib.Path):
    """Opens the folder; makes it if it is missing."""
    import orbax.checkpoint as ocp  # on first use: it takes half a second

    self._args, self._folder = ocp.args, folder.absolute()
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=1,
        # A snapshot that is deleted file by file can be found half; what is
        # renamed first cannot.
        todelete_subdir=TRASH,
        cleanup_tmp_directories=True,
      ),
    )

  def latest(self, like: Any) -> Snapshot | None:
    """The newest snapshot; None if there is none.

    Args:
      like: tree of what must be there, as `jax.ShapeDtypeStruct`s or arrays.

    Raises:
      ValueError: the snapshot is of another tree, or of other shapes.
    """
    step = self._manager.latest_step()
    if step is None:
      return None
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here
    )
    try:
      found = self._manager.restore(
        step,
        args=self._args.Composite(
          state=self._args.StandardRestore(jax.tree.map(place, like)),
          numbers=self._args.JsonRestore(),
        ),
      )
    except (ValueError, KeyError) as e:
      line = str(e).strip().splitlines()[0]
      raise ValueError(f"{self._folder / str(step)}: {line}") from e
    return Snapshot(step, found.state, found.numbers)

  def save(self, step: int, state: Any, numbers: dict[str, Any]) -> None:
    """Saves a snapshot, and then drops the one before.

    Args:
      step: larger than that of any snapshot before.
      state: tree of arrays; may be donated as soon as this returns.
      numbers: what JSON can hold.
    """
    saved = self._manager.save(
      step,
      args=self._args.Composite(
        state=self._args.StandardSave(state),
        numbers=self._args.JsonSave(numbers),
      ),
    )
    if not saved:
      raise RuntimeError(f"{self._folder}: snapshot {step} was not saved")
    shutil.rmtree(self._folder / TRASH, ignore_errors=True)

  def close(self) -> None:
    """Waits until what was saved is there."""
    self._manager.wait_until_finished()
    self._manager.close()
