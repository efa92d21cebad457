# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept on disk: the next run starts without compiling.

XLA programs are found again by what they are (code, shapes, flags, device,
versions), so a stale one is never used, and results do not change.
"""

import os
import pathlib

import jax

CHOICES = ("user", "workdir", "off")


def folder_of(choice: str, workdir: pathlib.Path) -> pathlib.Path | None:
  """Where programs are kept; None = nowhere.

  Args:
    choice: "user" (the user's cache folder, shared by runs), "workdir", "off".
    workdir: of the run.
  """
  if choice == "user":
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "oppo_jax" / "compiled"
  return workdir / "compiled" if choice == "workdir" else None


def enable(choice: str, workdir: pathlib.Path) -> str:
  """Turns the cache on, unless JAX was told of one already.

  Returns:
    The folder in use, "" = none (turned off, or it cannot be written).
  """
  if jax.config.jax_compilation_cache_dir:
    return jax.config.jax_compilation_cache_dir
  folder = folder_of(choice, workdir)
  if folder is None:
    return ""
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    return ""
  if not os.access(folder, os.W_OK):
    return ""
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  return str(folder)
