# SPDX-License-Identifier: Apache-2.0
r"""Compiles the loop's programs for a GPU or TPU that is not there, and reads
what the compiler made.

  python -m benchmarks.aot --target=h200 --models=qwen2.5-0.5b --out=aot.json
  python -m benchmarks.aot --target=v5e:2x4 --shard=data --layers=2,4

Nothing is allocated and nothing runs: arguments are shapes. A GPU target needs
the plugin alone, no CUDA and no driver:

  pip install -e . && pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt

in the version of jax that is installed, and XLA's autotuning is off: it would
time kernels. So matrix products show as the default kernels, not the fastest. A
TPU target needs `pip install -e '.[tpu]'`, in an environment of its own.

Two numbers in --layers (the default) compile both depths, and everything that
grows linearly is carried on to the model's own depth; "full" compiles that.

What is reported: kernels per tick (of decoding) or per call; CUDA graphs, and
loops that the host drives, with a launch per trip and, where the trip count is
data, a wait per trip; new arrays at least as large as one layer's keys; memory
of arguments, of temporaries, and how much of what is donated is really reused;
flops of the matrix products and bytes moved, and the time that either takes at
least. `floor_ms` is a bound, not a prediction.
"""

import os
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import numpy as np
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks import bench, hlo, programs
from oppo_jax import jit_table

_TARGET = flags.DEFINE_string("target", "h200", "h200, or a TPU: v5e:2x4, ...")
_MODELS = flags.DEFINE_list("models", list(bench.PUBLISHED), "Their shapes.")
_PROGRAMS = flags.DEFINE_list("programs", [], "Some of them; all if empty.")
_LAYERS = flags.DEFINE_string("layers", "2,4", "Depths compiled, or full.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 112, "B")
_DELTA = flags.DEFINE_integer("delta", 32, "Prompts in flight beyond B.")
_PROMPT = flags.DEFINE_integer("prompt_len", 256, "P, tokens.")
_RESPONSE = flags.DEFINE_integer("response_len", 2048, "R, tokens.")
_CHUNK = flags.DEFINE_integer("chunk", 32, "C, ticks.")
_SHARD = flags.DEFINE_enum(
  "shard", "none", ["none", "data", "fsdp"], "Over the devices of a slice."
)
_SET = flags.DEFINE_list("set", [], "Config keys: score.tile_len=64, ...")
_OPTIONS = flags.DEFINE_multi_string("option", [], "Compiler: xla_...=...")
_DUMP = flags.DEFINE_string("dump", None, "Folder for the optimized modules.")
_OUT = flags.DEFINE_string("out", None, "JSON file for the result.")

# As XLA describes the device; without a driver version it captures no loops.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
# Measured on such devices, or their data sheet: flop/s in bfloat16, bytes/s.
PEAK = {
  "h200": (790e12, 4.3e12),
  "v5e": (197e12, 0.82e12),
  "v5p": (459e12, 2.76e12),
  "v6e": (918e12, 1.64e12),
}
GIB = 2**30
CHOICES = {  # what is not the default, and meant for an accelerator
  "rollout.decode_loop": "fori",
  "rollout.decode_rows": 0,
  "model.attention_block": 0,
  "score.tile_rows": 32,
  "score.tile_len": 128,
  "optim.micro_rows": 4,
  "algo.num_minibatches": 4,
}


class Target:
  """A device, or a slice of them, that is compiled for."""

  def __init__(self, name):
    self.is_gpu = name == "h200"
    self.peak = PEAK[name.split(":")[0]]
    if self.is_gpu:
      topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name,
        target_config=H200,
        topology="1x1x1",
      )
    else:
      topology = topologies.get_topology_desc(
        platform="tpu", topology_name=name
      )
    self.devices = topology.devices
    self.mesh = jax.sharding.Mesh(np.array(self.devices), ("x",))

  def place(self, args):
    """Arguments of a program, with where they lie.

    data: rows of slots, caches, scorers and the batch are split; parameters
    are not. fsdp: likewise, and of every matrix the first axis that divides.
    """
    one = SingleDeviceSharding(self.devices[0])
    num, row_counts = len(self.devices), (_num_slots(), _BATCH_SIZE.value)

    def spec(x):
      axes = [None] * x.ndim
      if x.ndim and x.shape[0] in row_counts and x.shape[0] % num == 0:
        axes[0] = "x"
      elif _SHARD.value == "fsdp" and x.ndim >= 2:
        even = [i for i, n in enumerate(x.shape) if n % num == 0]
        if even:
          axes[even[0]] = "x"
      return NamedSharding(self.mesh, PartitionSpec(*axes))

    where = (lambda x: one) if _SHARD.value == "none" else spec
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), args
    )


def _num_slots():
  return -(-(_BATCH_SIZE.value + _DELTA.value) // 8) * 8


def config_of(model, num_layers):
  changes = dict(pair.split("=", 1) for pair in _SET.value)
  typed = {
    k: int(v) if v.lstrip("-").isdigit() else v for k, v in changes.items()
  }
  return bench.config_of(
    "oppo",
    model=model,
    batch_size=_BATCH_SIZE.value,
    delta=_DELTA.value,
    prompt_len=_PROMPT.value,
    response_len=_RESPONSE.value,
    staleness=2,
    **(CHOICES | {"model.num_layers": num_layers} | typed),
  )


def nbytes_here(tree):
  """Bytes that one device holds of a tree of shapes with shardings."""
  local = lambda x: jax.ShapeDtypeStruct(
    x.sharding.shard_shape(x.shape), x.dtype
  )
  return programs.nbytes(jax.tree.map(local, tree))


def compiled(target, name, program, layer_bytes):
  """Compiles one program; what it shows, as numbers."""
  typed = {"true": True, "false": False}
  given = (pair.split("=", 1) for pair in _OPTIONS.value)
  options = {k: typed.get(v, v) for k, v in given}
  if name == "decode_and_append" and target.is_gpu:
    options = jit_table.ONE_GRAPH | options
  args = target.place(program.args)
  with tempfile.TemporaryDirectory() as folder:
    if target.is_gpu:
      options |= {"xla_gpu_autotune_level": 0, "xla_dump_to": folder}
    lowered = program.jitted.trace(*args, **program.static).lower()
    began = time.perf_counter()
    made = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - began
    listing = [
      os.path.join(folder, x)
      for x in os.listdir(folder)
      if x.endswith("thunk_sequence_after_thunk_passes.txt")
    ]
    launched = open(max(listing, key=os.path.getsize)).read() if listing else ""
  text = made.as_text()
  if _DUMP.value:
    os.makedirs(_DUMP.value, exist_ok=True)
    for kind, what in (("hlo", text), ("thunks", launched)):
      path = f"{_DUMP.value}/{name.replace(' ', '_')}.{kind}.txt"
      with open(path, "w") as f:
        f.write(what)
  module = hlo.Module(text, large=layer_bytes // 2)
  total, memory = module.total(), made.memory_analysis()
  chunk = program.static.get("chunk_size")
  # The TPU compiler does not say how long a loop is.
  ticks = [x for x in module.loops() if chunk and x[1] in (chunk, None)]
  per = max(ticks, key=lambda x: x[2].traffic)[2] if ticks else None
  flop_s, byte_s = target.peak
  seen = {
    "compile_s": seconds,
    "kernels": total.kernels,
    "tick_kernels": per and per.kernels,
    "tick_flops": per and per.flops,
    "tick_traffic": per and per.traffic,
    "flops": total.flops,
    "traffic": total.traffic,
    "loops_of_unknown_length": total.unknown,
    "argument_bytes": memory.argument_size_in_bytes,
    "temporary_bytes": memory.temp_size_in_bytes,
    "aliased_bytes": memory.alias_size_in_bytes,  # of one device
    "donated_here": nbytes_here([args[i] for i in program.donated]),
    "floor_ms": 1e3 * max(total.flops / flop_s, total.traffic / byte_s),
    "writes": [
      {"name": n, "what": what, "shape": shape, "bytes": size}
      for (n, what, shape), size in total.writes.most_common(8)
    ],
    "copied_bytes": sum(
      size
      for (_, what, _), size in total.writes.items()
      if what in ("copy", "transpose", "copy-start")
    ),
  }
  if target.is_gpu:
    seen |= {k: v for k, v in hlo.thunks(launched).items() if k != "kernels"}
  cost = made.cost_analysis()
  if cost:  # TPU: of the device's share, every loop taken once
    keys = ("flops", "bytes accessed", "optimal_seconds")
    seen["cost"] = {k: cost[k] for k in keys if k in cost}
    seen["flops"] = cost.get("flops", 0.0)
    seen["collectives"] = module.collectives()
  return seen


LINEAR = (
  "kernels", "tick_kernels", "tick_flops", "tick_traffic", "flops", "traffic",
  "argument_bytes", "temporary_bytes", "aliased_bytes", "donated_here",
  "copied_bytes", "host_loops", "loops_of_unknown_length",
)  # fmt: skip


def carried_on(depths, full, peak):
  """Both depths' numbers as a line over layers, read at the full depth."""
  (a, first), (b, second) = sorted(depths.items())[:2]
  line = {}
  for key in LINEAR:
    if first.get(key) is not None:
      slope = (second[key] - first[key]) / (b - a)
      line[key] = first[key] + slope * (full - a)
  flop_s, byte_s = peak
  line["floor_ms"] = 1e3 * max(line["flops"] / flop_s, line["traffic"] / byte_s)
  return line


HEAD = (
  f"{'program':18s} {'layers':>6s} {'compile':>8s} {'kernels':>8s}"
  f" {'graphs':>6s} {'host loops':>10s} {'beside':>6s}"
  f" {'args':>6s} {'temp':>6s}"
  f" {'reused':>7s} {'TFLOP':>8s} {'GB':>8s} {'floor':>8s}"
)


def row(name, layers, x):
  """A line for people: kernels per tick where there are ticks, GiB, ms."""
  kernels = x.get("tick_kernels") or x["kernels"]
  reused = x["aliased_bytes"] / max(x["donated_here"], 1)
  return (
    f"{name:18s} {layers:>6} {x.get('compile_s', 0):7.1f}s {kernels:8.0f}"
    f" {x.get('graphs', ''):>6} {x.get('host_loops', ''):>10}"
    f" {x.get('beside_loop', ''):>6}"
    f" {x['argument_bytes'] / GIB:6.2f} {x['temporary_bytes'] / GIB:6.2f}"
    f" {reused:7.1%} {x['flops'] / 1e12:8.2f} {x['traffic'] / 1e9:8.1f}"
    f" {x['floor_ms']:6.2f}ms"
  )


def main(argv):
  del argv
  target = Target(_TARGET.value)
  result = bench.conditions() | {"target": _TARGET.value, "models": {}}
  say = lambda line: (sys.stdout.write(line + "\n"), sys.stdout.flush())
  for model in _MODELS.value:
    full = bench.MODELS[model]["num_layers"]
    given = _LAYERS.value
    depths = [full] if given == "full" else [int(x) for x in given.split(",")]
    say(f"{model} for {_TARGET.value}, B = {_BATCH_SIZE.value}")
    say(HEAD)
    seen = result["models"][model] = {}
    for layers in depths:
      config = config_of(model, layers)
      made = programs.make(
        config,
        vocab_size=bench.VOCAB_SIZES.get(model, bench.VOCAB_SIZE),
        chunk_size=_CHUNK.value,
      )
      chosen = _PROGRAMS.value or list(made)
      leaf = made["decode_chunk"].args[2][0][0]
      for name in chosen:
        numbers = compiled(
          target, name, made[name], leaf.size * leaf.dtype.itemsize
        )
        seen.setdefault(name, {})[layers] = numbers
        say(row(name, str(layers), numbers))
        if _OUT.value:
          bench.write(_OUT.value, result)
    for name, by_depth in seen.items():
      if len(by_depth) > 1 and full not in by_depth:
        line = carried_on(by_depth, full, target.peak)
        by_depth[f"{full}, carried on"] = line
        say(row(name, f"~{full}", line))
    if _OUT.value:
      bench.write(_OUT.value, result)


if __name__ == "__main__":
  app.run(main)
