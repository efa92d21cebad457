# SPDX-License-Identifier: Apache-2.0
"""The two sides of a trial: the program, and the tests that ask it.

  tests    ["call", "f", ["list", 1, 2]]  -->     program
           <--                     ["is", 3]

Each side is a process (`trial.py` starts them). What the tests expect, and what
came out, is never in the process of the program. A name that the program is to
define is a stand-in among the tests; so is what it returns that is no plain
data, and no stand-in is equal to anything but itself.
"""

import builtins
import contextlib
import os
import random
import sys
import types

from oppo_jax import wire

DETAIL = 200  # characters of an explanation


def serve(requests: int, answers: int) -> None:
  """Runs the program, then does what it is asked to."""
  me, kept = os.getpid(), {}
  module = types.ModuleType("program")
  sys.modules["program"] = module
  sys.argv = ["program"]
  random.seed(0)  # what draws from it draws the same in every trial
  sys.stdout.reconfigure(line_buffering=True)

  def refer(x):
    kept[len(kept)] = x
    return len(kept) - 1

  def resolve(what):
    if isinstance(what, int):
      return kept[what]
    try:
      return module.__dict__[what]
    except KeyError:
      raise NameError(f"name {what!r} is not defined") from None

  def do(kind, what, *args):
    if kind == "run":
      exec(compile(what, "program", "exec", dont_inherit=True), module.__dict__)
      return None
    on = resolve(what)
    args = [wire.unpack(x, resolve) for x in args]
    match kind:
      case "call":
        return on(*args[0], **args[1])
      case "get":
        return getattr(on, *args)
      case "set":
        return setattr(on, *args)
      case "item":
        return on[args[0]]
      case "len":
        return len(on)
      case "bool":
        return bool(on)
      case "iter":
        return list(on)

  while True:
    with contextlib.suppress(wire.Closed):
      request = wire.receive(requests)
      try:
        answer = ["is", wire.pack(do(*request), refer)]
      except BaseException as e:  # of the program, so anything
        answer = ["raised", type(e).__name__, _text(e)]
      if os.getpid() != me:
        os._exit(0)  # a fork of the program that came back from it
      wire.send(answers, answer)
      continue
    os._exit(0)


def _text(e: BaseException) -> str:
  try:
    return str(e)[:DETAIL]
  except BaseException:
    return ""


class _Raised(Exception):
  """The program raised; `kind` is the name of what."""

  def __init__(self, kind: str, text: str):
    super().__init__(f"{kind}: {text}" if text else kind)
    self.kind = kind


class _Remote:
  """What stands in the tests for an object of the program."""

  def __init__(self, link, what):
    object.__setattr__(self, "_link", link)
    object.__setattr__(self, "_what", what)

  def _ask(self, kind, *args):
    return self._link.ask(kind, self._what, *args)

  def __call__(self, *args, **kwargs):
    return self._ask("call", args, kwargs)

  def __getattr__(self, name):
    return self._ask("get", name)

  def __setattr__(self, name, value):
    self._ask("set", name, value)

  def __getitem__(self, key):
    return self._ask("item", key)

  def __iter__(self):
    return iter(self._ask("iter"))

  def __len__(self):
    return int(self._ask("len"))

  def __bool__(self):
    return bool(self._ask("bool"))


class _Link:
  """The way to the program."""

  def __init__(self, requests: int, answers: int):
    self._requests, self._answers = requests, answers

  def ask(self, kind, what, *args):
    """Does something over there; raises what the program raised."""
    args = [wire.pack(x, self._name) for x in args]
    wire.send(self._requests, [kind, what, *args])
    answer = wire.receive(self._answers)
    match answer:
      case ["is", value]:
        return wire.unpack(value, lambda what: _Remote(self, what))
      case ["raised", str(kind), str(text)]:
        known = getattr(builtins, kind, None)
        is_error = isinstance(known, type) and issubclass(known, Exception)
        bases = (_Raised, known) if is_error else (_Raised,)
        raise type("Raised", bases, {"__init__": _Raised.__init__})(kind, text)
    raise wire.Closed  # no answer of ours

  def _name(self, x):
    if isinstance(x, _Remote):
      return object.__getattribute__(x, "_what")
    raise TypeError(f"a test passes a {type(x).__name__}: not plain data")


def judge(job, requests: int, answers: int, verdict: int) -> None:
  """Runs the tests; sends one line per test: [outcome, explanation]."""
  link = _Link(requests, answers)
  say = lambda outcome, why="": wire.send(verdict, [outcome, why[:DETAIL]])
  names = {"__name__": "tests"}
  stages = [
    lambda: link.ask("run", job["program"]),
    lambda: exec(compile(job["preamble"], "preamble", "exec"), names),
    lambda: names.update({k: _Remote(link, k) for k in job["names"]}),
    lambda: exec(compile(job["setup"], "setup", "exec"), names),
  ]
  for run in stages:
    outcome, why = _attempt(run)
    if outcome != "passed":
      say(outcome, why)
      return
  for test in job["tests"]:
    say(*_attempt(lambda test=test: exec(compile(test, "test", "exec"), names)))


def _attempt(run) -> tuple[str, str]:
  """Calls `run`; what came of it, and why."""
  try:
    run()
  except wire.Closed:
    return "gone", ""
  except wire.TooLong:
    return "output", f"an answer of more than {wire.MAX_BYTES} bytes"
  except _Raised as e:
    return ("memory" if e.kind == "MemoryError" else "crash"), str(e)
  except MemoryError:
    return "memory", "in the tests"
  except Exception as e:  # an answer that the test cannot use
    text = f"{type(e).__name__}: {_text(e)}"
    return "wrong", "" if type(e) is AssertionError else text
  return "passed", ""
