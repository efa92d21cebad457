# SPDX-License-Identifier: Apache-2.0
"""What the workers of `benchmarks.peers` share; plain Python and NumPy.

A worker is given one JSON file, the job:

  python trl_worker.py job.json < /dev/null

  {"arm": ..., "lengths": [...], "batch_size": B, "prompt_len": P,
   "response_len": R, "steps": n, "delta": ..., "staleness": ...,
   "vocab_size": V, "model": {num_layers, width, num_heads, num_kv_heads,
   head_dim, mlp_dim}}

Step k trains on uids kB .. kB + B - 1 (`oppo`: on the first B that finish), and
the response of a uid has exactly lengths[uid] tokens, the end token included.
Before each step the worker waits for a line on stdin, after it prints a line of
JSON: so the driver lets several of them take turns. The last line is about the
whole process.
"""

import json
import pathlib
import re
import sys
import time

import numpy as np

# Every implementation samples from the other V - 2 tokens.
EOS_ID, PAD_ID = 0, 1


def job():
  """The job in the file that the command names."""
  return json.loads(pathlib.Path(sys.argv[1]).read_text())


def prompt_of(uid, job):
  """Tokens of a prompt, neither end nor padding."""
  rng = np.random.default_rng((7, uid))
  tokens = rng.integers(1, job["vocab_size"], job["prompt_len"])
  return np.maximum(tokens, 2).astype(np.int32)


def lengths_of_step(step, job):
  """Lengths of the B responses of a step."""
  size = job["batch_size"]
  return job["lengths"][step * size : (step + 1) * size]


def peak_rss_mib():
  """Of this process. Unlike ru_maxrss, not inherited from its parent."""
  status = pathlib.Path("/proc/self/status").read_text()
  return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1024


class Meter:
  """Takes a turn for each step, and says what it took."""

  def __init__(self):
    self._out = sys.stdout
    sys.stdout = sys.stderr  # what the libraries print

  def start(self):
    """Everything is built; the first step may begin."""
    self._line(ready=True)
    self._wait()

  def tick(self, tokens, *, last):
    """A step has ended, which trained on so many response tokens."""
    wall = time.perf_counter() - self._wall
    cpu = time.process_time() - self._cpu
    self._line(wall_s=wall, cpu_s=cpu, tokens=int(tokens))
    if not last:
      self._wait()

  def close(self, **facts):
    """Says what is known of the whole process."""
    self._line(peak_rss_mib=peak_rss_mib(), **facts)

  def _wait(self):
    sys.stdin.readline()
    self._wall, self._cpu = time.perf_counter(), time.process_time()

  def _line(self, **fields):
    self._out.write(json.dumps(fields) + "\n")
    self._out.flush()
