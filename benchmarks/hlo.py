# SPDX-License-Identifier: Apache-2.0
"""Reads what a compiler made: optimized HLO text, and XLA:GPU's thunks.

Counts what runs, not what was written: every operation of the entry and of the
loops it calls, times the trips that the compiler knows of.

  ENTRY    fusion.1   while.2 (16 trips)          copy.9
                        fusion.3  while.4 (?)
                                    fusion.5
  kernels  1 + 16 * (1 + 1) + 1; of while.4 one trip, and a note
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
BYTES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
# Names for values; nothing runs.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier"}
FREE |= {"copy-done", "async-done", "slice-done", "all-gather-done"}
IN_PLACE = {"dynamic-update-slice", "scatter"}
PARTS = {"dynamic-slice", "slice", "gather"}
COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter"}
COLLECTIVES |= {"collective-permute"}
CALLS = {"call", "conditional", "async-start"}
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
INSTRUCTION = re.compile(
  r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ?([a-z][\w\-]*)\((.*)$"
)
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(
  r"(?:calls|body|to_apply|called_computations|branch_computations|"
  r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a module.

  Attributes:
    name: unique in the module.
    opcode: "fusion", "while", ...
    shapes: of the result, (dtype, dims) each; several of a tuple.
    operands: names.
    called: names of computations.
    trips: of a while; None = the compiler does not know.
    rest: the line behind the opcode.
    is_root: of its computation.
  """

  name: str
  opcode: str
  shapes: tuple[tuple[str, tuple[int, ...]], ...]
  operands: tuple[str, ...]
  called: tuple[str, ...]
  trips: int | None
  rest: str
  is_root: bool

  @property
  def nbytes(self):
    return sum(BYTES.get(d, 4) * math.prod(s) for d, s in self.shapes)


def _shapes(text):
  return tuple(
    (kind, tuple(int(n) for n in dims.split(",") if n))
    for kind, dims in SHAPE.findall(text)
    if kind in BYTES
  )


def _instruction(match):
  root, name, result, opcode, rest = match.groups()
  depth, end = 1, 0
  for end, letter in enumerate(rest):  # noqa: B007
    depth += {"(": 1, ")": -1}.get(letter, 0)
    if not depth:
      break
  called = [
    x.strip(" %")
    for c in CALLED.findall(rest)
    for x in c.strip("{}").split(",")
  ]
  trips = TRIPS.search(rest)
  return Instruction(
    name,
    opcode,
    _shapes(result),
    tuple(re.findall(r"%([\w.\-]+)", rest[:end])),
    tuple(called),
    int(trips[1]) if trips else None,
    rest,
    bool(root),
  )


def parse(text):
  """Computations by name, each a list of instructions; and the entry's name."""
  found, entry, now = {}, "", None
  for line in text.splitlines():
    head = COMPUTATION.match(line)
    if head:
      now = found.setdefault(head[2], [])
      entry = head[2] if head[1] else entry
    elif now is not None:
      if line.startswith("}"):
        now = None
        continue
      # Comments such as /*index=5*/ stand inside long tuples.
      body = INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
      if body:
        now.append(_instruction(body))
  return found, entry


@dataclasses.dataclass
class Count:
  """What a computation runs, loops included.

  Attributes:
    kernels: operations that run.
    flops: of matrix products alone.
    traffic: bytes that operations read and write, if every operand of an
      operation is read once; a slice counts as the slice, an update in place as
      the update.
    unknown: loops whose trip count is data: body counted once.
    writes: (name, what, shape): bytes written by operations that make an array
      of at least `large` bytes, over all trips.
  """

  kernels: float = 0
  flops: float = 0
  traffic: float = 0
  unknown: float = 0
  writes: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )

  def add(self, other, times):
    for key in ("kernels", "flops", "traffic", "unknown"):
      setattr(self, key, getattr(self, key) + times * getattr(other, key))
    for key, n in other.writes.items():
      self.writes[key] += times * n


class Module:
  """An optimized module, counted.

  Args:
    text: of `Compiled.as_text()`.
    large: bytes from which a new array is noted.
  """

  def __init__(self, text, *, large):
    self.computations, self.entry = parse(text)
    self.large = large
    self._counts = {}

  def total(self):
    return self.count(self.entry)

  def loops(self):
    """Whiles of the module: (name, trips or None, count of one trip)."""
    return [
      (x.name, x.trips, self.count(x.called[0]))
      for body in self.computations.values()
      for x in body
      if x.opcode == "while"
    ]

  def collectives(self):
    """Operations that talk to other devices, by kind."""
    every = [x for body in self.computations.values() for x in body]
    names = [x.opcode.removesuffix("-start") for x in every]
    return dict(collections.Counter(n for n in names if n in COLLECTIVES))

  def count(self, name):
    if name not in self._counts:
      self._counts[name] = self._count(self.computations.get(name, []))
    return self._counts[name]

  def _count(self, body):
    by_name = {x.name: x for x in body}
    result = Count()
    for x in body:
      if x.opcode == "while":
        result.add(self.count(x.called[0]), x.trips or 1)
        result.unknown += x.trips is None
      elif x.opcode in CALLS:
        for callee in x.called:
          result.add(self.count(callee), 1)
      elif x.opcode not in FREE:
        self._launch(x, by_name, result)
    return result

  def _launch(self, x, by_name, result):
    inside = [y for c in x.called for y in self.computations.get(c, [])]
    parts = [y for y in inside if y.opcode in IN_PLACE] or (
      [x] if x.opcode in IN_PLACE else []
    )
    result.kernels += 1
    dots = [y for y in [x, *inside] if y.opcode in ("dot", "convolution")]
    scope = {y.name: y for y in inside} | by_name
    result.flops += sum(_dot_flops(y, scope) for y in dots)
    reads = [
      self._read(i, by_name[o], inside)
      for i, o in enumerate(x.operands)
      if o in by_name
    ]
    if parts:
      # The array that is written into is neither read nor written as a whole.
      whole = set(x.shapes)
      reads = [
        r
        for r, o in zip(reads, x.operands)
        if o in by_name and not whole & set(by_name[o].shapes)
      ]
      result.traffic += 2 * sum(reads)
      return
    result.traffic += x.nbytes + sum(reads)
    if x.nbytes >= self.large:
      root = next((y.opcode for y in inside if y.is_root), x.opcode)
      what = "dot" if dots else root
      shape = " ".join(f"{d}{list(s)}" for d, s in x.shapes)
      result.writes[x.name, what, shape] += x.nbytes

  @staticmethod
  def _read(index, operand, inside):
    """Bytes of an operand; of a fusion that slices it, of the slices."""
    given = [
      y
      for y in inside
      if y.opcode == "parameter" and y.rest.startswith(f"{index})")
    ]
    users = _users(given, inside)
    if users and all(y.opcode in PARTS for y in users):
      return sum(y.nbytes for y in users)
    return operand.nbytes


def _users(values, inside):
  """What takes these values, seen through other names of them."""
  names, users = {x.name for x in values}, []
  for x in inside:  # operands stand before their users
    if names & set(x.operands):
      if x.opcode == "bitcast":
        names.add(x.name)
      else:
        users.append(x)
  return users


def _dot_flops(x, scope):
  """2 * (elements of the result) * (elements contracted)."""
  contracted = CONTRACTED.search(x.rest)
  if x.opcode != "dot" or not contracted or x.operands[0] not in scope:
    return 0
  lhs = scope[x.operands[0]].shapes[0][1]
  dims = [int(i) for i in contracted[1].split(",") if i]
  return 2 * math.prod(x.shapes[0][1]) * math.prod(lhs[i] for i in dims)


def thunks(text):
  """What XLA:GPU launches, from its `thunk_sequence_after_thunk_passes`.

  Returns:
    graphs: command buffers (CUDA graphs), each one launch; host_loops: whiles
    that the host drives; graph_loops: whiles captured in a graph; beside_loop:
    the most kernels that neither wait for a captured loop of their graph nor it
    for them, as far as nearest neighbors tell; async_starts: regions on a
    stream of their own; kernels: leaves.
  """
  found = [_thunk(x) for x in text.splitlines() if THUNK.match(x)]
  counts = collections.Counter()
  stack = []  # enclosing thunks
  children = collections.defaultdict(list)
  for i, x in enumerate(found):
    while stack and found[stack[-1]].indent >= x.indent:
      stack.pop()
    if stack:
      children[stack[-1]].append(x)
    captured = any(found[j].kind == "kCommandBuffer" for j in stack)
    if x.kind == "kCommandBuffer":
      counts["graphs"] += 1
    elif x.kind == "kWhile":
      counts["graph_loops" if captured else "host_loops"] += 1
    elif x.kind == "kAsyncStart":
      counts["async_starts"] += 1
    elif x.kind not in ("kAsyncDone", "kConditional", "kSequential"):
      counts["kernels"] += 1
    stack.append(i)
  for i, inside in children.items():
    if found[i].kind == "kCommandBuffer":
      loops = [x for x in inside if x.kind == "kWhile"]
      free = [
        sum(x.after < y.index < x.before and y is not x for y in inside)
        for x in loops
      ]
      counts["beside_loop"] = max([counts["beside_loop"], *free])
  keys = (
    "graphs",
    "host_loops",
    "graph_loops",
    "beside_loop",
    "async_starts",
    "kernels",
  )
  return {k: counts[k] for k in keys}


class Thunk(NamedTuple):
  """A line of the listing.

  `after` is the last thunk that it waits for, `before` the first that waits for
  it; all in between in the same sequence are independent of it.
  """

  indent: int
  index: int
  kind: str
  after: int
  before: float


THUNK = re.compile(r"^(\s*)(\d+): (k\w+)")


def _thunk(line):
  indent, index, kind = THUNK.match(line).groups()
  after, before = re.search(r"prev=(\d+)", line), re.search(r"next=(\d+)", line)
  return Thunk(
    len(indent),
    int(index),
    kind,
    int(after[1]) if after else -1,
    int(before[1]) if before else math.inf,
  )
