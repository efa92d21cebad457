# SPDX-License-Identifier: Apache-2.0
"""Trains a policy: python -m oppo_jax.train --config=... --workdir=...

Supervised stages, then PPO with the chosen arm. The workdir gets config.json,
metrics.jsonl, rollouts.jsonl, decisions.jsonl, the tokenizer, the stages, the
trained parameters and, last of all, summary.json: a run is finished if and only
if that file is there.

Bad input ends a run with one line; --verbosity=1 shows where it was noticed.
"""

import contextlib
import json
import pathlib
import re
import sys
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from oppo_jax import (
  assemble,
  checkpoint,
  chunking,
  delta,
  evaluate,
  flight,
  keys,
  metrics,
  overlap,
  packing,
  report,
  rewards,
  stream,
  types,
  warm_start,
)
from oppo_jax import config as config_lib

_CONFIG = config_flags.DEFINE_config_file("config", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")


def say(line: str) -> None:
  """One line on stdout."""
  sys.stdout.write(line + "\n")
  sys.stdout.flush()


class Controllers(NamedTuple):
  """The two decisions of a step, and how they are taken."""

  delta: delta.DeltaState
  chunk: chunking.ChunkState
  delta_rule: dict[str, Any]
  chunk_rule: dict[str, Any]

  @classmethod
  def make(
    cls, config: ml_collections.ConfigDict, *, num_steps: int
  ) -> "Controllers":
    """From config.overlap; without inter-step overlap delta stays 0."""
    chunk_rule, delta_rule = config.chunk.to_dict(), config.delta.to_dict()
    log = []
    if config.inter == "none":
      delta_rule |= dict(kind="fixed", init=0, min=0)
    if "replay" in (config.chunk.kind, delta_rule["kind"]):
      path = config.chunk.replay_path
      log = [d["delta"] for d in chunking.load_decisions(path)]
      if len(log) < num_steps:
        raise ValueError(
          f"config.overlap.chunk.replay_path={path!r}: holds {len(log)}"
          f" decisions, num_steps is {num_steps}"
        )
    return cls(
      delta.init(**delta_rule, log=log),
      chunking.init(**chunk_rule),
      delta_rule,
      chunk_rule,
    )

  def observe(
    self,
    mean_score: float,
    done: overlap.Rollout,
    chunk_size: int,
    step_s: float,
  ) -> "Controllers":
    """The controllers of the coming step."""
    of_delta = delta.StepObservation(mean_score, done.deferred, step_s)
    of_chunk = chunking.ChunkObservation(step_s, done.generated, chunk_size)
    return self._replace(
      delta=delta.update(self.delta, of_delta, **self.delta_rule),
      chunk=chunking.observe(self.chunk, of_chunk, **self.chunk_rule),
    )


def model_params(
  fns: flight.Fns, state: types.TrainState, frozen: dict[str, types.Params]
) -> dict[str, types.Params]:
  """What each model computes with in a rollout, in the dtype it is used in."""
  return {k: fns.cast(v) for k, v in state.params.items()} | frozen


def grade(
  s: assemble.Setup, batch: types.Batch, weights: dict[str, float]
) -> tuple[np.ndarray, dict[str, float], list[str]]:
  """Total scores [B] of a fetched batch, the mean of each part, the texts."""
  task, examples, decode = s.parts.task, s.examples, s.parts.tokens.decode
  texts = [decode(r[:n]) for r, n in zip(batch.responses, batch.response_len)]
  by_rule = [
    task.reward(examples[s.row_of(u)], text)
    for u, text in zip(batch.uid, texts)
  ]
  parts = {"model": batch.scores, "rule": np.array(by_rule, np.float32)}
  total = rewards.weighted_sum(parts, weights)
  return (
    total,
    {f"reward/{k}": float(v.mean()) for k, v in parts.items()},
    texts,
  )


class HeldOut(NamedTuple):
  """The test prompts, and how they are answered and graded."""

  examples: list[Any]
  prompts: list[np.ndarray]
  key: jax.Array

  @classmethod
  def make(
    cls, config: ml_collections.ConfigDict, s: assemble.Setup
  ) -> "HeldOut":
    examples = s.parts.task.prompts("test")[: config.eval.num_prompts]
    prompts = stream.encode_prompts(
      examples,
      s.parts.tokens,
      max_prompt_len=config.rollout.max_prompt_len,
      long_prompts=config.rollout.long_prompts,
    )
    return cls(
      [examples[i] for i in prompts.rows],
      prompts.tokens,
      keys.named(config.seed, "held_out"),
    )

  def accuracy(
    self, s: assemble.Setup, policy: types.Params, when: str
  ) -> dict[str, evaluate.Accuracy]:
    """Greedy, and sampled as in training; says what it found."""
    found = {}
    for name, fns in (("greedy", s.greedy), ("sampled", s.parts.sampler)):
      found[name] = evaluate.grade(
        s.parts.task,
        self.examples,
        evaluate.generate(fns, policy, self.prompts, run_key=self.key),
        tokens=s.parts.tokens,
        max_response_len=s.max_response_len,
      )
    numbers = ", ".join(f"{k} {v.accuracy:.3f}" for k, v in found.items())
    say(f"{when}: held-out accuracy {numbers}")
    return found


class Files:
  """The run's files that grow by the step."""

  def __init__(self, workdir: pathlib.Path, *, tensorboard: bool):
    new = lambda name: metrics.JsonlWriter(workdir / name, resume_at=0)
    self.rollouts = new("rollouts.jsonl")
    self.decisions = new("decisions.jsonl")
    self.rows = [new("metrics.jsonl"), metrics.ConsoleLine()]
    if tensorboard:
      self.rows.append(metrics.TensorBoardWriter(workdir / "tensorboard"))

  def close(self) -> None:
    for writer in (self.rollouts, self.decisions, *self.rows):
      writer.close()


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Runs the stages and PPO, and writes the workdir; see the module."""
  with contextlib.ExitStack() as stack:
    _train(config, workdir, stack)


def _train(
  config: ml_collections.ConfigDict,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
) -> None:
  """`train`; what `stack` is given is closed, whatever happens."""
  began = time.perf_counter()
  controllers = Controllers.make(config.overlap, num_steps=config.num_steps)
  s = assemble.setup(config, workdir, log=say)
  fns, sizes = s.fns, s.fns.sizes
  held_out = HeldOut.make(config, s) if config.eval.num_prompts else None
  files = Files(workdir, tensorboard=config.log.tensorboard)
  stack.callback(files.close)
  as_json = json.loads(config.to_json_best_effort())
  metrics.write_json(workdir / "config.json", as_json)
  params = warm_start.run(config, s.parts, workdir=workdir, log=say)
  frozen = {
    "reference": fns.cast(params["policy"]),
    "reward": fns.cast(params["reward"]),
  }
  before = (
    held_out.accuracy(s, params["policy"], "before PPO") if held_out else {}
  )

  # Copies, since updates donate what they replace.
  trained = {k: params[k] for k in ("policy", "critic")}
  state = s.algorithm.init(jax.tree.map(jax.numpy.copy, trained))
  in_use = model_params(fns, state, frozen)
  in_flight = flight.init(fns)
  run_key = keys.named(config.seed, "rollout")
  timers, digest = metrics.Timers(), metrics.BatchHash()
  totals = dict.fromkeys(("tokens/generated", "tokens/trained"), 0)
  totals |= dict.fromkeys(("overlap/ticks", "score/tiles"), 0)
  response_len: dict[int, int] = {}
  ppo_began = time.perf_counter()

  for step in range(config.num_steps):
    step_began = time.perf_counter()
    chunk_size = chunking.chunk_size(controllers.chunk)
    extra = delta.overcommit(controllers.delta)
    files.decisions.write(
      {"step": step, "delta": extra, "chunk_size": chunk_size}
    )
    in_flight = flight.admit(
      fns,
      in_flight,
      num_in_flight=sizes.batch_size + extra,
      prompt_of=s.prompt_of,
      version=step,
    )
    num_in_flight = int(in_flight.in_flight.sum())
    in_flight, on_device, done = overlap.rollout(
      fns,
      in_flight,
      in_use,
      version=step,
      run_key=run_key,
      chunk_size=chunk_size,
      intra=config.overlap.intra,
      timers=timers,
    )
    with timers("score"):
      batch = metrics.fetch(on_device)
    scores, parts, texts = grade(s, batch, config.reward.to_dict())
    batch = batch.replace(scores=scores)

    with timers("update"):
      plan = packing.plan(
        done.row_len,
        order_seed=(config.seed, step),
        num_epochs=config.algo.num_epochs,
        num_minibatches=config.algo.num_minibatches,
        width=config.optim.pack_width or sizes.row_len,
        micro_rows=config.optim.micro_rows,
      )
      state, seen = fns.update(state, on_device.replace(scores=scores), plan)
      seen = metrics.fetch(seen)
    in_flight = flight.after_update(fns, in_flight)
    in_use = model_params(fns, state, frozen)
    step_s = time.perf_counter() - step_began

    digest.update(**{k: getattr(batch, k) for k in digest.FIELDS})
    response_len |= zip(batch.uid.tolist(), batch.response_len.tolist())
    row = {"step": step, **{k: float(v) for k, v in seen.items()}, **parts}
    row |= report.step_row(
      step,
      batch,
      done,
      delta=extra,
      chunk_size=chunk_size,
      in_flight=num_in_flight,
    )
    row |= timers.take() | {"time/step_s": step_s}
    totals = {k: v + row[k] for k, v in totals.items()}
    for writer in files.rows:
      writer.write(row)
    for i in report.spread(len(texts), config.log.rollouts_per_step):
      files.rollouts.write(
        report.rollout_row(
          step, batch, i, s.examples[s.row_of(batch.uid[i])].prompt, texts[i]
        )
      )
    controllers = controllers.observe(
      float(scores.mean()), done, chunk_size, step_s
    )
    is_last = step + 1 == config.num_steps
    if held_out and config.eval.every and not is_last:
      if (step + 1) % config.eval.every == 0:
        held_out.accuracy(s, state.params["policy"], f"after step {step}")

  ppo_s = time.perf_counter() - ppo_began
  after = before
  if held_out and config.num_steps:
    after = held_out.accuracy(s, state.params["policy"], "after PPO")
  with checkpoint.stage(workdir / "params") as folder:
    for name, tree in state.params.items():
      checkpoint.save_params(folder / f"{name}.safetensors", tree)
  summary = {
    "steps": config.num_steps,
    "arm": config_lib.arm_name(config.overlap.intra, config.overlap.inter),
    "wall_s": time.perf_counter() - began,
    "ppo_s": ppo_s,
    "tokens_generated": totals["tokens/generated"],
    "tokens_trained": totals["tokens/trained"],
    "tokens_per_s": totals["tokens/generated"] / max(ppo_s, 1e-9),
    "decode_ticks": totals["overlap/ticks"],
    "serial_ticks": report.serial_ticks(response_len, sizes.batch_size),
    "score_tiles": totals["score/tiles"],
    "prompts_admitted": in_flight.next_uid,
    "prompts_in_flight": int(in_flight.in_flight.sum()),
    "accuracy_before": {k: v.accuracy for k, v in before.items()},
    "accuracy_after": {k: v.accuracy for k, v in after.items()},
    "batches_sha256": digest.hexdigest(),
    "params_sha256": metrics.params_sha256(state.params),
    "forced_lengths": bool(config.rollout.target_lengths_path),
    "jax": jax.__version__,
    "backend": jax.default_backend(),
    "device": jax.devices()[0].device_kind,
  }
  metrics.write_json(workdir / "summary.json", summary)
  for line in report.table(summary, before, after):
    say(line)


def explain(e: Exception, argv: list[str]) -> str:
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


def parse_flags(argv: list[str]) -> list[str]:
  """Flags; says what is wrong with them in one line."""
  try:
    rest = flags.FLAGS(argv)
    _CONFIG.value.lock()  # a missing file is only noticed when it is read
  except (flags.Error, LookupError, AttributeError, OSError, ValueError) as e:
    line = explain(e, argv)
    if re.match(r"\w+Error: ", line):  # not bad input: a bug in a config file
      raise
    sys.exit(f"error: {line}")
  if flags.FLAGS["verbosity"].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING
  return rest


def main(argv: list[str]) -> None:
  """Checks what was asked for, and trains."""
  try:
    if len(argv) > 1:
      raise ValueError(f"unknown arguments {argv[1:]}")
    if not _WORKDIR.value:
      raise ValueError("--workdir='': must be a folder")
    config, workdir = _CONFIG.value, pathlib.Path(_WORKDIR.value)
    config_lib.validate(config)
    if (workdir / "summary.json").exists():
      raise ValueError(f"--workdir={workdir}: holds a finished run already")
    train(config, workdir)
  except (ValueError, OSError, ImportError) as e:
    if logging.level_debug():
      raise
    sys.exit(f"error: {' '.join(str(e).split())}")


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main, flags_parser=parse_flags)
