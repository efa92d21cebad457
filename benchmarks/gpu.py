# SPDX-License-Identifier: Apache-2.0
r"""Everything there is to know from one GPU, in eight minutes.

  python -m benchmarks.gpu --lengths=trace.csv.gz --out=gpu.json
  python -m benchmarks.gpu --tiny --out=tiny.json

Random models of the shapes of Qwen2.5-0.5B and -3B in bfloat16, B = 112, prompt
256, response up to 2048 with the lengths of a trace. In order:

  machine   bytes/s of a copy, flop/s of a matrix product: what the rest is held
            against
  decode    seconds per tick against the bytes it must move; aim 1.5 x
  score     share of the peak by a call of tiles; aim 45 %
  update    likewise, of a whole update; aim 40 %
  arms      PPO steps per arm and form of dispatch; the share of scoring hidden,
            and from a profile of a shorter step, how long the device executed
            something, and two things at once (`busy.py`)

Every part is a process of its own with a time of its own, so that one that
hangs or runs out of memory costs nothing else; the file is written after every
measurement. --only=decode,arms runs some of them. --tiny checks that all of it
runs, on any machine. 3B with critic, reference and reward model fits with fewer
rows only (see docs/accelerators.md): its arms run at B = 24.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time

import jax
from absl import app, flags

from benchmarks import bench, busy, gpu_parts

_LENGTHS = flags.DEFINE_string("lengths", "lognormal", "See bench.lengths_of.")
_TINY = flags.DEFINE_bool("tiny", False, "A check that it runs.")
_LIMIT = flags.DEFINE_float("limit_s", 480.0, "Seconds for everything.")
_ONLY = flags.DEFINE_list("only", [], "Parts; all if empty.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")
_PART = flags.DEFINE_string("part", None, "Internal: a part, as JSON.")

COMMON = dict(
  batch_size=112,
  delta=32,
  prompt_len=256,
  response_len=2048,
  chunk=64,
  tile_rows=32,
  tile_len=128,
  logprob_chunk=4096,
  minibatches=4,
  micro_rows=[4],
  steps=1,
  lives=[512, 1280],
  profiled_len=256,  # of responses: 420 kernels a tick are many events
  attention={
    "dense": {"model.attention": "xla", "model.attention_block": 0},
    "blocks": {"model.attention": "xla", "model.attention_block": 256},
    "flash": {"model.attention": "flash", "model.attention_block": 256},
  },
  # (attention, form), see `gpu_parts.FORMS`. The most wanted first here and
  # below: the rest may find no time.
  decode_forms=[
    ["dense", "plain"],
    ["flash", "plain"],
    ["flash", "graph"],
    ["blocks", "graph"],
  ],
  score_forms=[["dense", "plain"], ["flash", "plain"], ["blocks", "graph"]],
  update_forms=["dense", "flash"],  # attention; blocks are of a cache
  arms=[  # (arm, dispatch, attention)
    ["serial", "separate", "dense"],
    ["oppo", "separate", "dense"],
    ["serial", "separate", "flash"],
    ["oppo", "separate", "flash"],
    ["intra", "separate", "flash"],
    ["intra", "fused", "flash"],
    ["oppo", "fused", "flash"],
    ["inter", "separate", "flash"],
  ],
)
SMALL = dict(batch_size=24, delta=8, minibatches=2, micro_rows=[1])
PLAN = [  # part, model, seconds
  ("machine", "qwen2.5-0.5b", 20, {}),
  ("decode", "qwen2.5-0.5b", 45, {}),
  ("score", "qwen2.5-0.5b", 35, {}),
  ("update", "qwen2.5-0.5b", 80, {}),
  ("arms", "qwen2.5-0.5b", 150, {}),
  ("decode", "qwen2.5-3b", 45, {}),
  ("score", "qwen2.5-3b", 35, {}),
  ("update", "qwen2.5-3b", 90, dict(micro_rows=[2])),
  ("arms", "qwen2.5-3b", 120, SMALL),
]
TINY = dict(
  model="small",
  batch_size=4,
  delta=2,
  prompt_len=8,
  response_len=64,
  chunk=8,
  tile_rows=4,
  tile_len=8,
  logprob_chunk=64,
  minibatches=2,
  micro_rows=[2, 1],
  steps=1,
  lives=[16],
  profiled_len=16,
  attention={
    "dense": {"model.attention": "xla", "model.attention_block": 0},
    "flash": {
      "model.attention": "flash",
      "model.attention_block": 16,
      "model.dtype": "bfloat16",
    },
  },
  decode_forms=[["dense", "plain"], ["flash", "graph"]],
  score_forms=[["dense", "plain"], ["flash", "graph"]],
  arms=[
    ["serial", "separate", "dense"],
    ["intra", "fused", "dense"],
    ["oppo", "separate", "flash"],
  ],
  copy_bytes=2**22,
  matmul=256,
)


def spec_of(model, changes):
  spec = COMMON | dict(model=model, lengths=_LENGTHS.value)
  spec |= dict(copy_bytes=2**31, matmul=8192) | changes
  return spec | (TINY if _TINY.value else {})


def child(given):
  """Runs one part; prints a line of JSON per measurement."""
  part, spec, seconds, cache = json.loads(given)
  # Parts share what they compile.
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  until = time.monotonic() + seconds
  about = bench.conditions() if part == "machine" else {}
  about.pop("command", None)
  for row in gpu_parts.PARTS[part](spec, until):
    row |= about | {"peak_bytes": gpu_parts.peak_bytes()}
    sys.stdout.write("RESULT " + json.dumps(row) + "\n")
    sys.stdout.flush()


def run(part, spec, seconds, cache, on_row):
  """Runs a part in a process; ends it a little after its time."""
  given = json.dumps([part, spec, seconds, cache])
  xla_flags = [os.environ.get("XLA_FLAGS", ""), busy.ENVIRONMENT["XLA_FLAGS"]]
  process = subprocess.Popen(
    [sys.executable, "-m", "benchmarks.gpu", f"--part={given}"],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ
    | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    | busy.ENVIRONMENT
    | {"XLA_FLAGS": " ".join(xla_flags).strip()},
  )
  lines, errors = queue.Queue(), []

  def read():
    for line in process.stdout:
      lines.put(line)
    lines.put(None)

  def read_errors():
    for line in process.stderr:
      errors.append(line)
      del errors[:-20]

  for target in (read, read_errors):
    threading.Thread(target=target, daemon=True).start()
  end = time.monotonic() + 1.25 * seconds
  while True:
    try:
      line = lines.get(timeout=max(end - time.monotonic(), 0.01))
    except queue.Empty:
      process.kill()
      process.wait()
      return f"ended after {1.25 * seconds:.0f} s"
    if line is None:
      break
    if line.startswith("RESULT "):
      on_row(json.loads(line.removeprefix("RESULT ")))
  if process.wait():
    return "failed: " + "".join(errors)[-600:]
  return "done"


def judged(part, row, machine):
  """The row, with what it comes to against the machine."""
  copy = machine.get("copy_bytes_per_s")
  peak = machine.get("matmul_flop_per_s")
  if part == "decode" and copy:
    row["floor_s"] = row["bytes"] / copy
    row["over_floor"] = row["s_per_tick"] / row["floor_s"]
  if "model_flops" in row and peak:
    row["utilization"] = row["model_flops"] / row["s"] / peak
  return row


def hidden(rows):
  """Of the shorter of decoding and scoring, the share that took no time.

  By dispatch and attention, where both arms have run.
  """
  by = {(r["arm"], r["dispatch"], r["attention"]): r["raw"] for r in rows}
  mean = lambda of, key: sum(r[key] for r in of) / len(of)
  phases = lambda of: [mean(of, f"time/{k}_s") for k in ("decode", "score")]
  found = {}
  for (arm, dispatch, attention), streamed in by.items():
    alone = by.get(("serial", "separate", attention))
    if arm == "intra" and alone:
      apart, together = phases(alone), sum(phases(streamed))
      share = (sum(apart) - together) / max(min(apart), 1e-9)
      found[f"{dispatch} {attention}"] = share
  return found


def line(part, row):
  """A line for people."""
  if part == "decode":
    over = row.get("over_floor", float("nan"))
    return (
      f"{row['attention']:6s} {row['form']:6s}"
      f" live {row['live']:5d} {1e3 * row['s_per_tick']:8.3f} ms a tick,"
      f" {over:5.2f} x the floor"
    )
  if part == "arms":
    said = (
      f"{row['arm']:9s} {row['dispatch']:9s} {row['attention']:6s}"
      f" {row['s']:8.3f} s a step,"
      f" {row['tokens'] / row['s']:9.0f} tokens/s"
    )
    for phase, of in row.get("busy", {}).items():
      said += f"\n     profiled: {phase:8s}  {busy.shares(of)}"
    return said
  shown = {k: v for k, v in row.items() if k not in ("raw", "model_flops")}
  return json.dumps(shown)


def main(argv):
  del argv
  if _PART.value:
    child(_PART.value)
    return
  began = time.monotonic()
  # This process leaves the device alone: its memory is for the parts.
  command = "python -m benchmarks.gpu " + " ".join(sys.argv[1:])
  result = {"command": command, "machine": {}, "parts": []}
  save = lambda: _OUT.value and bench.write(_OUT.value, result)
  say = lambda text: (sys.stdout.write(text + "\n"), sys.stdout.flush())
  plan = [p for p in PLAN if not _TINY.value or p[1] == PLAN[0][1]]
  with tempfile.TemporaryDirectory() as cache:
    for part, model, seconds, changes in plan:
      left = _LIMIT.value - (time.monotonic() - began)
      if (_ONLY.value and part not in [*_ONLY.value, "machine"]) or left < 10:
        continue
      spec = spec_of(model, changes)
      of = {"part": part, "model": spec["model"], "rows": []}
      of["batch_size"] = spec["batch_size"]
      result["parts"].append(of)
      say(f"-- {part} {spec['model']}, B = {spec['batch_size']}")

      def on_row(row):
        if part == "machine":  # noqa: B023
          result["machine"] = row
        of["rows"].append(judged(part, row, result["machine"]))  # noqa: B023
        if part == "arms":  # noqa: B023
          of["hidden"] = hidden(of["rows"])  # noqa: B023
        say("   " + line(part, row))  # noqa: B023
        save()

      of["ended"] = run(part, spec, min(seconds, left / 1.25), cache, on_row)
      if of["ended"] != "done":
        say("   " + of["ended"])
      if of.get("hidden"):
        say(f"   hidden: {of['hidden']}")
      save()
  say(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
  app.run(main)
