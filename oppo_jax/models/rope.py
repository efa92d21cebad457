# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings, also those that were stretched to longer rows."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Scaling:
  """How the frequencies of a shorter model were changed.

  A frequency that turns often within the original length is kept, one that
  turns seldom is divided by `factor`, and in between the two are mixed.

  Attributes:
    kind: one of `KINDS`; "linear" divides all of them.
    factor: how many times longer.
    original_len: row length before the change, in tokens.
    low: turns within `original_len` up to which a frequency is divided.
    high: turns from which on it is kept; "linear" reads neither.
    attention_factor: on queries and keys alike ("yarn").
    truncate: the bounds of the mix are whole indices ("yarn").
  """

  kind: str
  factor: float
  original_len: int = 0
  low: float = 0.0
  high: float = 0.0
  attention_factor: float = 1.0
  truncate: bool = True

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f"rope_scaling: kind={self.kind!r}: not one of {KINDS}")


def frequencies(half: int, *, theta: float, scaling: Scaling) -> np.ndarray:
  """Radians per position of each pair, [half] float32.

  Chen et al. 2023 ("linear"), the Llama 3.1 model card ("llama3", mixed by
  number of turns), Peng et al. 2023 ("yarn", mixed by index of the pair).
  """
  index = np.arange(half)
  plain = theta ** (-index / half)
  if scaling.kind == "linear":
    kept = np.zeros(half)
  elif scaling.kind == "llama3":
    turns = scaling.original_len * plain / (2 * math.pi)
    kept = (turns - scaling.low) / (scaling.high - scaling.low)
  else:
    first, last = (  # pairs that turn `high` and `low` times
      half * math.log(scaling.original_len / (n * 2 * math.pi), theta)
      for n in (scaling.high, scaling.low)
    )
    if scaling.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    kept = 1 - (index - first) / max(last - first, 1e-3)
  kept = np.clip(kept, 0.0, 1.0)
  return (plain * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def turns(positions, row_len, dim, *, theta, scaling=None):
  """Cosine and sine of position * theta^(-i / half), [rows, C, 1, half] each.

  They are read from a table of all positions, a constant of the program: a
  cosine XLA would fuse into its uses, and compute in every head of every layer.

  Args:
    positions: [rows, C], below row_len.
    row_len: columns of a row.
    dim: of a head, or what of it is rotated; half = dim / 2.
    theta: base of the frequencies.
    scaling: how they were changed, None = not.
  """
  half = dim // 2
  if scaling is None:
    frequency = (theta ** (-np.arange(half) / half)).astype(np.float32)
  else:
    frequency = frequencies(half, theta=theta, scaling=scaling)
  angle = np.arange(row_len, dtype=np.float32)[:, None] * frequency
  factor = np.float32(1.0 if scaling is None else scaling.attention_factor)

  def read(table):
    return jnp.asarray(table).at[positions].get(mode="clip")[:, :, None]

  return read(np.cos(angle) * factor), read(np.sin(angle) * factor)


def rotate(x, cos, sin):
  """Rotates pairs (i, i + half) of each head by the angles of `turns`.

  x: [rows, C, heads, dim]. Su et al. 2021, in the half-split pairing of the
  Hugging Face checkpoints.
  """
  half = x.shape[-1] // 2
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  # Written in place: XLA puts a concatenation together element by element.
  rotated = jnp.zeros(x.shape, jnp.float32)
  rotated = rotated.at[..., :half].set(a * cos - b * sin)
  rotated = rotated.at[..., half:].set(b * cos + a * sin)
  return rotated.astype(x.dtype)
