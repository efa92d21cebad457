# SPDX-License-Identifier: Apache-2.0
"""What crosses between a program and its tests, and as what."""

import collections
import enum
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_jax import wire


def refuse(x):
  raise AssertionError(f"{x!r} is plain data")


def crossed(x):
  """What arrives when x is sent."""
  reader, writer = os.pipe()
  try:
    wire.send(writer, wire.pack(x, refuse))
    return wire.unpack(wire.receive(reader), refuse)
  finally:
    os.close(reader)
    os.close(writer)


SCALARS = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.integers(-(10**30), 10**30)
  | st.floats(allow_nan=False)
  | st.complex_numbers(allow_nan=False)
  | st.text()
  | st.binary()
)
FROZEN = st.recursive(
  SCALARS, lambda x: st.tuples(x, x) | st.frozensets(x), max_leaves=8
)
VALUES = st.recursive(
  FROZEN,
  lambda x: st.lists(x) | st.dictionaries(FROZEN, x) | st.tuples(x),
  max_leaves=8,
)


def exact(x):
  """A text that tells apart what == does not: 1, 1.0 and True."""
  if isinstance(x, set | frozenset):
    return f"{type(x)} {sorted(map(exact, x))}"
  if isinstance(x, dict):
    return f"dict {[(exact(k), exact(v)) for k, v in x.items()]}"
  if isinstance(x, list | tuple):
    return f"{type(x)} {[exact(y) for y in x]}"
  return f"{type(x)} {x!r}"


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_plain_data_arrives_as_it_was(x):
  assert exact(crossed(x)) == exact(x)


def test_long_integers_and_what_is_no_number_arrive():
  assert crossed(7**9999) == 7**9999
  assert crossed(-(10**5000)) == -(10**5000)
  assert math.isnan(crossed(math.nan))
  assert crossed("\ud800") == "\ud800"


class Yes(int):
  def __eq__(self, other):
    return True

  __hash__ = int.__hash__

  def __int__(self):
    return 4


class Text(str):
  def __str__(self):
    return "4"


def test_an_object_arrives_as_what_it_is_built_on():
  assert exact(crossed(Yes(5))) == exact(5)
  assert exact(crossed(Text("5"))) == exact("5")
  pair = collections.namedtuple("Pair", "a b")(1, 2)
  assert exact(crossed(pair)) == exact((1, 2))
  assert exact(crossed(collections.Counter("aab"))) == exact({"a": 2, "b": 1})
  assert exact(crossed(enum.IntEnum("E", "a b").b)) == exact(2)


def test_types_of_the_language_are_plain_data():
  assert crossed([int, KeyError]) == [int, KeyError]


def test_what_is_no_plain_data_stays():
  kept = []
  x = wire.pack([Yes, 1], lambda y: kept.append(y) or 7)
  assert x == ["list", ["ref", 7], 1]
  assert kept == [Yes]
  assert wire.unpack(x, lambda n: f"stands for {n}") == ["stands for 7", 1]


@pytest.mark.parametrize(
  "forged",
  [
    {"a": 1},
    [],
    ["no such tag"],
    ["int", "xyz"],
    ["type", "open"],
    ["dict", 1],
    [1],
  ],
)
def test_a_forged_message_is_refused(forged):
  with pytest.raises((ValueError, TypeError, KeyError)):
    wire.unpack(forged, refuse)


def test_a_long_message_is_not_read_and_a_closed_one_is_noticed():
  reader, writer = os.pipe()
  os.write(writer, wire.LENGTH.pack(wire.MAX_BYTES + 1))
  with pytest.raises(wire.TooLong):
    wire.receive(reader)
  os.write(writer, wire.LENGTH.pack(3) + b"1")
  os.close(writer)
  with pytest.raises(wire.Closed):
    wire.receive(reader)
  os.close(reader)
