# SPDX-License-Identifier: Apache-2.0
"""What the commands share: bad input ends a run with one line, and exit code 1.

A bug in a config file, or in the package, still shows where it happened; and
with --verbosity=1 bad input does too.
"""

import re
import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_flags


def say(line: str) -> None:
  """One line on stdout."""
  sys.stdout.write(line + "\n")
  sys.stdout.flush()


def explain(e: Exception, argv: Sequence[str]) -> str:
  """One line for what absl and ml_collections say of a flag in many."""
  # KeyErrors carry the repr of a text: undone.
  text = str(e.args[0]).replace("\\n", "\n").replace("\\'", "'")
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  name = re.fullmatch(r"[\"']*(\w+)[\"']*", lines[0])
  if isinstance(e, AttributeError | KeyError) and name:
    key = rf"--?(no)?config\.(\w+\.)*{name[1]}(\.|=|$)"
    where = [arg for arg in argv if re.match(key, arg)] or [name[1]]
    meant = re.search('Did you mean "(.+?)"', text)
    hint = f"; did you mean {meant[1]!r}?" if meant else ""
    return f"{where[0]}: unknown key{hint}"
  return lines[-1].removeprefix("ValueError: ")


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Flags; says what is wrong with them in one line."""
  known = flags.FLAGS
  try:
    rest = known(argv)
    if "config" in known and known["config"].present:
      known.config.lock()  # a missing file is only noticed when it is read
  except (flags.Error, LookupError, AttributeError, OSError, ValueError) as e:
    line = explain(e, argv)
    if re.match(r"\w+Error: ", line):  # not bad input: a bug in a config file
      raise
    sys.exit(f"error: {line}")
  if known["verbosity"].using_default_value:
    known.verbosity = logging.WARNING
  return rest


def define_config() -> None:
  """--config=FILE.py[:ARGUMENT], and --config.KEY=VALUE."""
  config_flags.DEFINE_config_file("config", lock_config=True)


def run(
  main: Callable[[flags.FlagValues], None],
  define: Callable[[], None],
  *,
  required: Sequence[str],
) -> None:
  """Parses the flags, calls `main`, and ends the process.

  Args:
    main: takes the flags; raises ValueError, OSError or ImportError on bad
      input.
    define: defines the flags: here and not at import, so that one command can
      be imported by another.
    required: names of the flags that must be given.
  """

  def checked(argv: list[str]) -> None:
    try:
      if len(argv) > 1:
        raise ValueError(f"unknown arguments {argv[1:]}")
      main(flags.FLAGS)
    except (ValueError, OSError, ImportError) as e:
      if logging.level_debug():
        raise
      sys.exit(f"error: {' '.join(str(e).split())}")

  define()
  flags.mark_flags_as_required(list(required))
  app.run(checked, flags_parser=parse_flags)
