# SPDX-License-Identifier: Apache-2.0
"""Messages between a program and its tests: plain data, and nothing else.

A message is JSON after its length. What JSON has is sent as it is, the rest as
a list that begins with a tag; an object of a class goes as the number, text or
collection that it is built on, and what is built on none stays where it is,
behind a number that stands for it:

  (1, {2, 3})   ["tuple", 1, ["set", 2, 3]]
  a generator   ["ref", 0]
"""

import builtins
import json
import os
import struct

MAX_BYTES = 8 << 20  # the longest message
LENGTH = struct.Struct("I")


class Closed(Exception):
  """The other side is gone."""


class TooLong(Exception):
  """A message over the limit."""


def _read(fd: int, size: int) -> bytes:
  parts = []
  while size:
    part = os.read(fd, min(size, 1 << 16))
    if not part:
      raise Closed
    parts.append(part)
    size -= len(part)
  return b"".join(parts)


def receive(fd: int):
  """The next message: JSON, after its length."""
  (size,) = LENGTH.unpack(_read(fd, LENGTH.size))
  if size > MAX_BYTES:
    raise TooLong
  return json.loads(_read(fd, size))


def send(fd: int, message) -> None:
  """Writes a message as `receive` reads it."""
  raw = json.dumps(message).encode()
  raw = LENGTH.pack(min(len(raw), 2**32 - 1)) + raw
  try:
    while raw:
      raw = raw[os.write(fd, raw) :]
  except BrokenPipeError as e:
    raise Closed from e


_BUILT_ON = (  # tag, type; a subclass goes as what it is built on
  ("list", list),
  ("tuple", tuple),
  ("set", set),
  ("frozenset", frozenset),
)


def pack(x, refer):
  """Plain data as JSON: what JSON has as it is, the rest as [tag, ...].

  Args:
    x: any value.
    refer: takes what is no plain data, returns what stands for it.
  """
  if x is None or x is True or x is False:
    return x
  if isinstance(x, int):
    x = int.__int__(x)
    return x if abs(x) < 2**63 else ["int", int.__format__(x, "x")]
  if isinstance(x, float):
    return float.__float__(x)
  if isinstance(x, str):
    return str.__str__(x)
  if isinstance(x, complex):
    return ["complex", x.real, x.imag]
  if isinstance(x, bytes | bytearray):
    return ["bytes", bytes(x).hex()]
  if isinstance(x, dict):
    pairs = dict.items(x)
    return ["dict", *([pack(k, refer), pack(v, refer)] for k, v in pairs)]
  for tag, kind in _BUILT_ON:
    if isinstance(x, kind):
      return [tag, *(pack(y, refer) for y in kind.__iter__(x))]
  if isinstance(x, type) and getattr(builtins, x.__name__, None) is x:
    return ["type", x.__name__]
  return ["ref", refer(x)]


def unpack(x, resolve):
  """The inverse of `pack`; raises ValueError or TypeError on anything else."""
  if not isinstance(x, list):
    if isinstance(x, dict):
      raise ValueError("not packed")
    return x
  tag, *rest = x
  many = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
  if tag in many:
    return many[tag](unpack(y, resolve) for y in rest)
  if tag == "dict":
    return {unpack(k, resolve): unpack(v, resolve) for k, v in rest}
  if tag == "int":
    return int(rest[0], 16)
  if tag == "complex":
    return complex(*rest)
  if tag == "bytes":
    return bytes.fromhex(rest[0])
  if tag == "type" and isinstance(getattr(builtins, rest[0], None), type):
    return getattr(builtins, rest[0])
  if tag == "ref":
    return resolve(rest[0])
  raise ValueError("not packed")
