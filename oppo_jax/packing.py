# SPDX-License-Identifier: Apache-2.0
"""Where rows of uneven length go, so that an update costs tokens, not padding.

First-fit-decreasing into bins of fixed width; NumPy on the host, from lengths
that the host already knows, so that the device programs keep one shape.
"""

import math

import numpy as np

from oppo_jax import types


def first_fit(
  lengths: np.ndarray, *, width: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Packs rows into bins: longest first, each into the first bin it fits.

  Args:
    lengths: [M] row lengths, each in [1, width].
    width: bin width in tokens.

  Returns:
    bin [M] and offset [M] of every row, and the number of bins.

  Raises:
    ValueError: a row is longer than a bin.
  """
  if lengths.max(initial=0) > width:
    raise ValueError(f"a row of {lengths.max()} tokens > bin width {width}")
  bins = np.zeros(len(lengths), np.int32)
  offsets = np.zeros(len(lengths), np.int32)
  used: list[int] = []
  for row in np.argsort(-lengths, kind="stable"):
    n = int(lengths[row])
    k = next((k for k, u in enumerate(used) if u + n <= width), len(used))
    if k == len(used):
      used.append(0)
    bins[row], offsets[row] = k, used[k]
    used[k] += n
  return bins, offsets, len(used)


def plan(
  lengths: np.ndarray,
  *,
  order_seed: tuple[int, ...],
  num_epochs: int,
  num_minibatches: int,
  width: int,
  micro_rows: int,
) -> types.Packing:
  """Minibatches of one update, each packed by itself.

  The order of epoch e is a permutation drawn from (order_seed, e): a function
  of what it is for (run seed, version), never of a key carried along. A
  micro-batch never crosses the border of a minibatch.

  Args:
    lengths: [B] tokens of each row, prompt and response.
    order_seed: non-negative integers, e.g. (run seed, version).
    num_epochs: passes over the batch.
    num_minibatches: optimizer steps per pass; divides B.
    width: bin width; at least the longest row.
    micro_rows: bins per micro-batch.
  """
  num_rows = len(lengths)
  m = num_rows // num_minibatches
  shape = (num_epochs, num_minibatches, m)
  row, bins, offset = (np.zeros(shape, np.int32) for _ in range(3))
  num_micro = np.zeros(shape[:2], np.int32)
  for e in range(num_epochs):
    order = np.random.default_rng((*order_seed, e)).permutation(num_rows)
    for i in range(num_minibatches):
      # Sorted, so that a minibatch that is the whole batch has one order.
      rows = np.sort(order[i * m : (i + 1) * m])
      row[e, i] = rows
      bins[e, i], offset[e, i], num_bins = first_fit(lengths[rows], width=width)
      num_micro[e, i] = math.ceil(num_bins / micro_rows)
  return types.Packing(row=row, bin=bins, offset=offset, num_micro=num_micro)
