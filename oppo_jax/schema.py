# SPDX-License-Identifier: Apache-2.0
"""Rules for one value of a config: a test, and the same in words."""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
  """What a value must be.

  Attributes:
    is_valid: true on allowed values.
    expected: the same in words, after "must be".
  """

  is_valid: Callable[[Any], bool]
  expected: str


def integer(low: float = -math.inf, high: float = math.inf) -> Rule:
  """An int (not a bool) in [low, high]."""
  is_valid = lambda x: type(x) is int and low <= x <= high
  bounds = f" >= {low}" if low > -math.inf else ""
  return Rule(is_valid, f"an integer{bounds}")


def number(
  low: float = -math.inf,
  high: float = math.inf,
  *,
  above: float = -math.inf,
  below: float = math.inf,
) -> Rule:
  """A finite float in [low, high] and in (above, below), written with a dot.

  An int is refused: a command-line override must have the type that is here.
  So are NaN and infinities, by the outer bounds.
  """
  is_valid = lambda x: (
    type(x) is float and low <= x <= high and above < x < below
  )
  bounds = (("> ", above), (">= ", low), ("< ", below), ("<= ", high))
  words = [f"{sign}{x}" for sign, x in bounds if math.isfinite(x)]
  return Rule(is_valid, " ".join(["a float", " and ".join(words)]).strip())


def choice(*options: str) -> Rule:
  """One of a few words."""
  return Rule(lambda x: x in options, f"one of {options}")


BOOL = Rule(lambda x: type(x) is bool, "True or False")
TEXT = Rule(lambda x: type(x) is str, "a string")
NAME = Rule(lambda x: type(x) is str and x != "", "a name")
FILE = Rule(
  lambda x: type(x) is str and (not x or os.path.isfile(x)),
  "'' or a file that exists",
)
FOLDER = Rule(
  lambda x: type(x) is str and (not x or os.path.isdir(os.path.expanduser(x))),
  "'' or a folder that exists",
)
SIZES = Rule(
  lambda x: (
    type(x) is tuple
    and all(type(n) is int and n >= 1 for n in x)
    and 0 < len(x) == len(set(x))
  ),
  "a tuple of different integers >= 1, at least one",
)
STALENESS = Rule(
  lambda x: type(x) is int and (x >= 1 or x == -1),
  "an integer >= 1, or -1 (unbounded)",
)
SECTION = Rule(lambda x: True, "a section")  # its keys are not listed here
