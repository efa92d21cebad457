# SPDX-License-Identifier: Apache-2.0
r"""The same PPO steps by TRL, by Tunix and by oppo_jax.

  python -m benchmarks.peers --venvs=/tmp/peer_venvs --out=peers.json
  python -m benchmarks.peers --peers=trl,ours --workloads=lognormal

The peers are TRL's PPOTrainer (1.12.0, the last release that has one; torch
2.13.0 on the CPU) and Tunix's PPOLearner (0.1.7). Each is installed in a
virtual environment of its own below --venvs, on the first run; where the
default torch is built for CUDA, --pip_args names an index of CPU builds.
Settings and the way in which lengths are forced: peer_workers/*_worker.py.

Everyone trains float32 Llama models of one size (policy, critic, reference,
reward model; random weights) on the same number of prompts of the same length,
with the same response lengths in the same batches, one epoch, one minibatch.
Each (implementation, workload) is a process; those of a workload take turns, a
step each, after warm-up steps that are left out. Per step: wall seconds, CPU
seconds of the process (all threads), response tokens trained, and the CPU
seconds that other processes took meanwhile, which should be about none. Peak
RSS is of the whole process, compilation included.

`oppo` trains on the first B of B + delta prompts that finish, so its batches
are its own; compare CPU seconds per 1000 tokens.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app, flags

from benchmarks import bench

_WORKLOADS = flags.DEFINE_list(
  "workloads",
  ["lognormal", "full", "lognormal_half"],
  "See bench.py; lognormal_half beside lognormal shows what halving buys.",
)
_PEERS = flags.DEFINE_list("peers", ["trl", "tunix", "ours"], "Who takes part.")
_ARMS = flags.DEFINE_list("arms", ["serial", "oppo"], "Of ours.")
_VENVS = flags.DEFINE_string("venvs", "runs/peer_venvs", "Folder for them.")
_PIP = flags.DEFINE_list("pip_args", [], "More arguments of pip install.")
_STEPS = flags.DEFINE_integer("steps", 4, "Measured steps in a round.")
_WARM_UP = flags.DEFINE_integer("warm_up", 2, "Steps before, in each process.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "New processes, other lengths.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "B")
_DELTA = flags.DEFINE_integer("delta", 8, "Of oppo.")
_STALENESS = flags.DEFINE_integer("max_staleness", 2, "Of oppo.")
_PROMPT = flags.DEFINE_integer("prompt_len", 32, "P, tokens.")
_RESPONSE = flags.DEFINE_integer("response_len", 256, "R, tokens.")
_THREADS = flags.DEFINE_integer("torch_threads", 0, "0 = one per core.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")

WORKERS = pathlib.Path(__file__).parent / "peer_workers"
PINNED = {
  "trl": (
    "torch==2.13.0",
    "trl==1.12.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
  ),
  "tunix": (
    "google-tunix==0.1.7",
    "jax==0.10.2",
    "jaxlib==0.10.2",
    "flax==0.12.8",
    "optax==0.2.8",
  ),
}


def python_of(peer):
  """The interpreter of a peer; its environment is made if there is none."""
  if peer == "ours":
    return sys.executable
  folder = pathlib.Path(_VENVS.value) / peer
  python, done = folder / "bin" / "python", folder / "pinned.txt"
  wanted = "\n".join(PINNED[peer])
  if not done.exists() or done.read_text() != wanted:
    sys.stdout.write(f"installing {' '.join(PINNED[peer])} in {folder}\n")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run(
      [python, "-m", "pip", "install", "-q", *_PIP.value, *PINNED[peer]],
      check=True,
    )
    done.write_text(wanted)
  return str(python)


def machine_cpu_s():
  """CPU seconds of everything that runs here, since the machine started."""
  try:
    line = pathlib.Path("/proc/stat").read_text().splitlines()[0]
  except OSError:
    return float("nan")
  user, nice, system = map(int, line.split()[1:4])
  return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def names():
  """Implementations, peers first: (name, peer)."""
  for peer in _PEERS.value:
    if peer == "ours":
      yield from ((arm, "ours") for arm in _ARMS.value)
    else:
      yield peer, peer


class Worker:
  """A process that does a step whenever told to."""

  def __init__(self, name, peer, job, folder):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job | {"arm": name}))
    self.name = name
    self._log = folder / f"{name}.log"
    self._process = subprocess.Popen(
      [python_of(peer), WORKERS / f"{peer}_worker.py", path],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log.open("w"),
      text=True,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )

  def send(self):
    """Lets it begin a step."""
    self._process.stdin.write("go\n")
    self._process.stdin.flush()

  def receive(self):
    """Its next line."""
    line = self._process.stdout.readline()
    if not line:
      self._process.wait()
      raise RuntimeError(f"{self.name} ended:\n{self._log.read_text()[-4000:]}")
    return json.loads(line)

  def kill(self):
    self._process.kill()
    self._process.wait()


def run(workload, seed):
  """Steps and facts of every implementation, as they told them."""
  steps = _WARM_UP.value + _STEPS.value
  num = (steps + 1) * _BATCH_SIZE.value + _DELTA.value
  lengths = bench.lengths_of(
    workload, limit=_RESPONSE.value, num=num, seed=seed
  )
  job = {
    "lengths": [int(n) for n in lengths],
    "batch_size": _BATCH_SIZE.value,
    "prompt_len": bench.prompt_len_of(workload, _PROMPT.value),
    "response_len": _RESPONSE.value,
    "steps": steps,
    "delta": _DELTA.value,
    "staleness": _STALENESS.value,
    "threads": _THREADS.value or os.cpu_count(),
    "vocab_size": bench.VOCAB_SIZE,
    "model": bench.MODELS["peer"],
  }
  workers = []
  with tempfile.TemporaryDirectory() as folder:
    try:
      for name, peer in names():
        workers.append(Worker(name, peer, job, pathlib.Path(folder)))
      for worker in workers:
        worker.receive()  # ready
      found = {w.name: {"steps": []} for w in workers}
      for _ in range(_WARM_UP.value):
        for worker in workers:
          worker.send()
        for worker in workers:
          worker.receive()
      for index in range(_STEPS.value):
        order = workers if index % 2 == 0 else workers[::-1]
        for worker in order:
          before = machine_cpu_s()
          worker.send()
          row = worker.receive()
          row["others_cpu_s"] = machine_cpu_s() - before - row["cpu_s"]
          found[worker.name]["steps"].append(row)
      for worker in workers:
        found[worker.name] |= worker.receive()
    finally:
      for worker in workers:
        worker.kill()
  return found


def summary(rounds):
  """Means over the steps of all rounds; the largest peak."""
  rows = [row for r in rounds for row in r["steps"]]
  mean = lambda key: statistics.mean(row[key] for row in rows)
  return {
    "wall_s": mean("wall_s"),
    "cpu_s": mean("cpu_s"),
    "cpu_s_min": min(row["cpu_s"] for row in rows),
    "cpu_s_max": max(row["cpu_s"] for row in rows),
    "others_cpu_s": mean("others_cpu_s"),
    "tokens": mean("tokens"),
    "tokens_per_s": mean("tokens") / mean("wall_s"),
    "cpu_s_per_1000": 1000 * mean("cpu_s") / mean("tokens"),
    "peak_rss_mib": max(r["peak_rss_mib"] for r in rounds),
  }


def table(workload, found):
  """Lines for people."""
  num = _STEPS.value * _ROUNDS.value
  others = statistics.mean(s["others_cpu_s"] for s in found.values())
  yield (
    f"{workload}: means of {num} steps of B = {_BATCH_SIZE.value}; other"
    f" processes used {others:.2f} CPU s meanwhile"
  )
  yield (
    f"{'':8s} {'wall s':>7s} {'CPU s':>7s} {'(min - max)':>15s}"
    f" {'tokens':>7s} {'tok/s':>7s} {'CPU s/1000 tok':>15s} {'peak MiB':>9s}"
  )
  for name, s in found.items():
    spread = f"({s['cpu_s_min']:.2f} - {s['cpu_s_max']:.2f})"
    yield (
      f"{name:8s} {s['wall_s']:7.2f} {s['cpu_s']:7.2f} {spread:>15s}"
      f" {s['tokens']:7.0f} {s['tokens_per_s']:7.0f}"
      f" {s['cpu_s_per_1000']:15.2f} {s['peak_rss_mib']:9.0f}"
    )
  peers = [s for name, s in found.items() if name in PINNED]
  if peers and "serial" in found:
    best = min(s["cpu_s"] for s in peers)
    yield (
      "CPU seconds per step, better peer / serial:"
      f" {best / found['serial']['cpu_s']:.2f}"
    )


def main(argv):
  del argv
  for _, peer in names():
    python_of(peer)
  result = bench.conditions() | {"pinned": PINNED, "workloads": {}}
  means = {}
  for workload in _WORKLOADS.value:
    rounds = [run(workload, seed) for seed in range(_ROUNDS.value)]
    means[workload] = {
      name: summary([r[name] for r in rounds]) for name in rounds[0]
    }
    result["workloads"][workload] = {"means": means[workload], "raw": rounds}
    sys.stdout.write("\n".join(table(workload, means[workload])) + "\n\n")
    sys.stdout.flush()
    if _OUT.value:
      bench.write(_OUT.value, result)
  if {"lognormal", "lognormal_half"} <= set(means):
    sys.stdout.write("lognormal / lognormal_half, wall and CPU s per step:\n")
    for name, s in means["lognormal"].items():
      half = means["lognormal_half"][name]
      ratios = (s[key] / half[key] for key in ("wall_s", "cpu_s"))
      sys.stdout.write(f"{name:8s} " + " ".join(f"{r:.2f}" for r in ratios))
      sys.stdout.write("\n")


if __name__ == "__main__":
  app.run(main)
