# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: workloads, a random model in the real step, reports.

A benchmark runs `oppo_jax.step.run`, the step that training runs, on random
prompts with forced response lengths. Text and grading alone are left out.
"""

import json
import os
import pathlib
import platform
import sys
import time

import flax
import jax
import jaxlib
import numpy as np

from benchmarks import busy
from configs import common
from oppo_jax import (
  assemble,
  flight,
  grading,
  metrics,
  stage_data,
  step,
  traces,
)
from oppo_jax import config as config_lib
from oppo_jax.tasks import base as tasks_base

MODELS = {
  # The shape that other implementations are compared at.
  "peer": dict(
    num_layers=4,
    width=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    mlp_dim=1024,
    tie_embeddings=False,
  ),
  "small": dict(
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=192,
  ),
}
MODELS["100m"] = MODELS["peer"] | dict(
  num_layers=12, width=768, num_heads=12, num_kv_heads=12, mlp_dim=2304
)
VOCAB_SIZE = 512  # of the models above
QWEN = dict(
  rope_theta=1e6,
  norm_eps=1e-6,
  qkv_bias=True,
  tie_embeddings=True,
  dtype="bfloat16",
  attention_block=0,
  remat="layer",
)
PUBLISHED = {  # the shapes of Qwen2.5, to be drawn at random
  f"qwen2.5-{size}": QWEN | common.SIZES[size] for size in ("0.5b", "3b")
}
VOCAB_SIZES = dict.fromkeys(PUBLISHED, 151_936)
MODELS |= PUBLISHED


def trace_lengths(path, *, limit, num, seed):
  """Response lengths of a CSV trace, scaled so that its longest fills `limit`.

  Drawn without order from the whole trace.
  """
  tokens = traces.load(str(path), where="", prompt_len=1).response_len
  drawn = np.random.default_rng(seed).choice(tokens, num)
  return np.round(drawn * limit / tokens.max())


def lengths_of(workload, *, limit, num, seed=0):
  """Response lengths, in [1, limit].

  Args:
    workload: "full", "half" (all at half the limit), "short" (uniform to an
      eighth of it), "uniform", "geometric" (mean a quarter), "lognormal"
      (median 48/256 of the limit, sigma 1), "lognormal_half" (the same
      lengths, halved; see also `prompt_len_of`), or the path of a CSV trace.
    limit: R.
    num: how many.
    seed: of the draw.
  """
  rng = np.random.default_rng(seed)
  lognormal = lambda: np.minimum(
    np.round(np.exp(rng.normal(np.log(limit * 48 / 256), 1.0, num))), limit
  )
  draws = {
    "full": lambda: np.full(num, limit),
    "half": lambda: np.full(num, limit // 2),
    "short": lambda: rng.integers(1, limit // 8 + 1, num),
    "uniform": lambda: rng.integers(1, limit + 1, num),
    "geometric": lambda: rng.geometric(4 / limit, num),
    "lognormal": lognormal,
    "lognormal_half": lambda: np.round(lognormal() / 2),
  }
  if workload not in draws:
    if not pathlib.Path(workload).is_file():
      raise ValueError(f"workload {workload!r}: not a file, nor of {[*draws]}")
    draws[workload] = lambda: trace_lengths(
      workload, limit=limit, num=num, seed=seed
    )
  return np.clip(draws[workload](), 1, limit).astype(int)


def prompt_len_of(workload, prompt_len):
  """A workload of halved lengths has halved prompts, too."""
  return prompt_len // 2 if workload.endswith("_half") else prompt_len


def config_of(
  arm,
  *,
  model,
  batch_size,
  delta,
  prompt_len,
  response_len,
  staleness,
  **changes,
):
  """A config of this arm and these sizes; `changes` by dotted key."""
  config = common.base(arm=arm, preset="openrlhf")
  config.model.update(MODELS[model])
  config.rollout.batch_size = batch_size
  config.rollout.max_prompt_len = prompt_len
  config.rollout.max_response_len = response_len
  extra = 0 if config.overlap.inter == "none" else delta
  config.overlap.delta.update(kind="fixed", init=extra, max=extra)
  config.overlap.max_staleness = staleness
  config.update_from_flattened_dict(changes)
  config_lib.validate(config)
  return config


class _NoText:
  """A tokenizer for tokens that mean nothing."""

  def decode(self, tokens):
    del tokens
    return ""


class Arm:
  """One arm at steady state: every call of `step` is one PPO step.

  Args:
    config: of `config_of`.
    lengths: response length of uid 0, 1, ...; then from the start.
    vocab_size: V.

  Attributes:
    longest: of further responses; to be lowered where a profile of a whole step
      would be too large.
  """

  def __init__(self, config, lengths, *, vocab_size=VOCAB_SIZE):
    engine = assemble.build(config, vocab_size=vocab_size, eos_ids=(0,))
    prompt_len = config.rollout.max_prompt_len
    self.longest = config.rollout.max_response_len

    def prompt_of(uid):
      rng = np.random.default_rng((7, uid))
      tokens = rng.integers(1, vocab_size, prompt_len).astype(np.int32)
      length = min(int(lengths[uid % len(lengths)]), self.longest)
      return flight.Prompt(tokens, length)

    task = tasks_base.Task(
      name="none",
      prompts=None,
      reward=lambda example, text: 0.0,
      terse=None,
      corrupt=None,
    )
    self.setup = assemble.Setup(
      parts=stage_data.Parts(
        task, _NoText(), None, *engine.models, sampler=None
      ),
      examples=[None],
      algorithm=engine.algorithm,
      fns=engine.fns,
      greedy=None,
      prompt_of=prompt_of,
      row_of=lambda uid: 0,
      max_response_len=config.rollout.max_response_len,
      grader=grading.Grader(task),
    )
    init = lambda model, i: jax.jit(model.init)(jax.random.key(i))
    params = {
      "policy": init(engine.models.policy, 0),
      "reward": init(engine.models.reward, 1),
      "critic": init(engine.models.critic, 2),
    }
    self.config = config
    self.num_params = sum(x.size for x in jax.tree.leaves(params["policy"]))
    self.state = step.init(config, self.setup, params)
    self._timers = metrics.Timers()

  def step(self):
    """Runs one; its metrics, with wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    self.state, done = step.run(
      self.config, self.setup, self.state, self._timers
    )
    jax.block_until_ready(self.state.train.params)
    return {
      **{k: v for k, v in done.row.items() if k.startswith(KEPT)},
      "wall_s": time.perf_counter() - wall,
      "cpu_s": time.process_time() - cpu,
    }

  def busy(self):
    """Profiles one step: `busy.report` of decoding, scoring, and of both."""
    data = busy.profile(self.step)
    within = {"decode": ["decode"], "score": ["score"]}
    within["together"] = ["decode", "score"]
    return {
      name: busy.report(data, [f"time/{phase}" for phase in phases])
      for name, phases in within.items()
    }


KEPT = ("overlap/", "score/tiles", "tokens/", "time/")


def conditions():
  """What every result says of itself."""
  return {
    "command": "python -m " + " ".join([_module(), *_told()]),
    **metrics.backend(),
    "python": platform.python_version(),
    "jaxlib": jaxlib.__version__,
    "flax": flax.__version__,
    "processor": _processor(),
    "cores": _cores(),
    "load_before": os.getloadavg()[0],
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
  }


def _cores():
  """Those that this process may use: `taskset` counts."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _told():
  """The arguments, without places that are of one machine."""
  places = ("--out=", "--venvs=")
  return [x for x in sys.argv[1:] if not x.startswith(places)]


def _module():
  name = pathlib.Path(sys.argv[0]).stem
  return f"benchmarks.{name}"


def _processor():
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  return next(
    (x.split(":")[1].strip() for x in lines if x.startswith("model name")), ""
  )


def write(path, result):
  """Prints the result, and writes it if asked."""
  if path:
    metrics.write_json(path, result)
  else:
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
