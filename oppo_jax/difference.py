# SPDX-License-Identifier: Apache-2.0
"""How far two pytrees are apart, and where they part first."""

from typing import Any, NamedTuple

import jax
import numpy as np


class Difference(NamedTuple):
  """What two trees have in common, in numbers.

  Attributes:
    max_abs: largest |a - b|; infinite where one of them is no number, or where
      integers differ.
    max_ulp: largest distance in representable numbers of the dtype; 0 = equal
      bits (-0.0 and 0.0 count as equal, and so do two NaNs).
    path: the first leaf that differs, in tree order; "" = none.
    index: where in that leaf, first in C order.
    pair: the two numbers there.
  """

  max_abs: float = 0.0
  max_ulp: int = 0
  path: str = ""
  index: tuple[int, ...] = ()
  pair: tuple[float, float] = (0.0, 0.0)

  @property
  def is_exact(self) -> bool:
    return self.max_ulp == 0

  def __str__(self) -> str:
    """The place, as a reader wants it; "" if there is none."""
    if self.is_exact:
      return ""
    where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
    return f"{self.path}{where}: {self.pair[0]:.9g} vs {self.pair[1]:.9g}"


def worse(a: Difference, b: Difference) -> Difference:
  """Both together: the larger distances, the place of the first with one."""
  place = b if a.is_exact else a
  return place._replace(
    max_abs=max(a.max_abs, b.max_abs), max_ulp=max(a.max_ulp, b.max_ulp)
  )


def _order(x: np.ndarray) -> np.ndarray:
  """Integers in the order of the floats, neighbors one apart.

  The bits of a float, read as an integer, count upwards from 0.0; a negative
  one has its sign bit set, and counts downwards.
  """
  bits = x.view(f"i{x.dtype.itemsize}").astype(
    object if x.itemsize > 4 else int
  )
  sign = -(2 ** (8 * x.dtype.itemsize - 1))
  return np.where(bits < 0, sign - bits, bits)


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Distance of equal-shaped float arrays in representable numbers.

    0.0, -0.0 -> 0      1.0, 1.0 + 2**-23 -> 1 (float32)      nan, nan -> 0

  Of integers and bools, the plain distance. A NaN on one side is as far as any.
  """
  if a.dtype != b.dtype or a.shape != b.shape:
    raise ValueError(f"{a.dtype}{a.shape} and {b.dtype}{b.shape}: not alike")
  if a.dtype.kind in "iub":
    return np.abs(a.astype(np.int64) - b.astype(np.int64))
  distance = np.abs(_order(a) - _order(b))
  is_nan = np.isnan(a) | np.isnan(b)
  both = np.isnan(a) & np.isnan(b)
  return np.where(is_nan, np.where(both, 0, np.iinfo(np.int64).max), distance)


def _leaf(path: str, a: np.ndarray, b: np.ndarray) -> Difference:
  distance = ulps(a, b)
  if not a.size or not distance.any():
    return Difference()
  first = np.unravel_index(np.argmax(distance != 0), a.shape)
  if a.dtype.kind in "iub":
    max_abs = np.inf
  else:
    with np.errstate(invalid="ignore"):
      apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    max_abs = np.nan_to_num(apart[distance != 0], nan=np.inf).max()
  return Difference(
    max_abs=float(max_abs),
    max_ulp=int(distance.max()),
    path=path,
    index=tuple(int(i) for i in first),
    pair=(float(a[first]), float(b[first])),
  )


def between(a: Any, b: Any, *, name: str = "") -> Difference:
  """Compares two pytrees of NumPy arrays, leaf by leaf.

  Args:
    a: one tree.
    b: another of the same structure, shapes and dtypes.
    name: goes before every path.

  Raises:
    ValueError: structures, shapes or dtypes differ.
  """
  leaves = jax.tree_util.tree_leaves_with_path
  found = Difference()
  for (path, x), (other, y) in zip(leaves(a), leaves(b), strict=True):
    if path != other:
      raise ValueError(f"{name}{path} and {name}{other}: not alike")
    where = name + jax.tree_util.keystr(path, simple=True, separator="/")
    found = worse(found, _leaf(where, np.asarray(x), np.asarray(y)))
  return found
