# SPDX-License-Identifier: Apache-2.0
"""Trains a policy: python -m oppo_jax.train --config=... --workdir=...

Supervised stages, then PPO with the chosen arm. The workdir gets config.json,
metrics.jsonl, rollouts.jsonl, decisions.jsonl, the tokenizer, the stages, the
trained parameters, the policy as a Hugging Face folder (hf/) and, last of all,
summary.json: a run is finished if and only if that file is there.

Bad input ends a run with one line; --verbosity=1 shows where it was noticed.
"""

import contextlib
import functools
import json
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from absl import flags

from oppo_jax import (
  assemble,
  checkpoint,
  cli,
  compile_cache,
  controllers,
  generation,
  hf,
  keys,
  metrics,
  report,
  step,
  stream,
  types,
  warm_start,
)
from oppo_jax import config as config_lib


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
    self,
    s: assemble.Setup,
    policy: types.Params,
    when: str,
    *,
    step: int,
    log: Callable[[dict[str, Any]], None],
    num_logged: int,
  ) -> dict[str, generation.Accuracy]:
    """Greedy, and sampled as in training; says what it found.

    Args:
      s: setup.
      policy: its parameters.
      when: in words.
      step: updates so far.
      log: takes the first responses of either kind.
      num_logged: how many.
    """
    found, tokens = {}, s.parts.tokens
    for name, fns in (("greedy", s.greedy), ("sampled", s.parts.sampler)):
      said = generation.generate(fns, policy, self.prompts, run_key=self.key)
      found[name] = generation.grade(
        s.parts.task,
        self.examples,
        said,
        tokens=tokens,
        max_response_len=s.max_response_len,
      )
      for i in range(min(num_logged, len(said))):
        text = tokens.decode_after(self.prompts[i], said[i])
        prompt = self.examples[i].prompt
        log({"step": step, "how": name, "prompt": prompt, "response": text})
    numbers = ", ".join(f"{k} {v.accuracy:.3f}" for k, v in found.items())
    cli.say(f"{when}: held-out accuracy {numbers}")
    return found


class Files:
  """The run's files that grow by the step."""

  def __init__(self, workdir: pathlib.Path, *, tensorboard: bool):
    new = lambda name: metrics.JsonlWriter(workdir / name, resume_at=0)
    self.rollouts = new("rollouts.jsonl")
    self.decisions = new("decisions.jsonl")
    self.samples = new("samples.jsonl")
    self.rows = [new("metrics.jsonl"), metrics.ConsoleLine()]
    if tensorboard:
      self.rows.append(metrics.TensorBoardWriter(workdir / "tensorboard"))

  def write(self, s: assemble.Setup, done: step.Done, num_logged: int) -> None:
    """Everything of one step."""
    index, batch = done.row["step"], done.batch
    self.decisions.write({"step": index, **done.decision})
    for i in report.spread(len(done.texts), num_logged):
      prompt = s.examples[s.row_of(batch.uid[i])].prompt
      self.rollouts.write(
        report.rollout_row(index, batch, i, prompt, done.texts[i])
      )
    for writer in self.rows:
      writer.write(done.row)

  def close(self) -> None:
    for writer in (self.rollouts, self.decisions, self.samples, *self.rows):
      writer.close()


def save(folder: pathlib.Path, params: types.Params) -> None:
  """One file per model; the folder is there as a whole or not at all."""
  with checkpoint.stage(folder) as temporary:
    for name, tree in params.items():
      checkpoint.save_params(temporary / f"{name}.safetensors", tree)


def export(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  policy: types.Params,
  folder: pathlib.Path,
) -> None:
  """The policy as a Hugging Face folder, if a published family is like it."""
  try:
    hf.save(
      folder,
      s.parts.policy,
      policy,
      dtype=config.model.dtype,
      source=config.load.policy or None,
      tokens=s.parts.tokens,
    )
  except ValueError as e:
    cli.say(f"{folder}: not written: {e}")


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
  # Before the stages: a log that cannot be replayed should end the run early.
  controllers.make(config.overlap, num_steps=config.num_steps)
  s = assemble.setup(config, workdir, log=cli.say)
  stack.callback(s.grader.close)
  has_grades = config.eval.num_prompts and s.parts.task.reward
  held_out = HeldOut.make(config, s) if has_grades else None
  files = Files(workdir, tensorboard=config.log.tensorboard)
  stack.callback(files.close)
  shutil.rmtree(workdir / "versions", ignore_errors=True)  # of a killed run
  as_json = json.loads(config.to_json_best_effort())
  metrics.write_json(workdir / "config.json", as_json)
  params = warm_start.run(config, s.parts, workdir=workdir, log=cli.say)
  before, accuracy = {}, None
  if held_out:
    accuracy = functools.partial(
      held_out.accuracy,
      s,
      log=files.samples.write,
      num_logged=config.log.rollouts_per_step,
    )
    before = accuracy(params["policy"], "before PPO", step=0)

  state = step.init(config, s, params)
  timers, totals = metrics.Timers(), report.Totals()
  ppo_began = time.perf_counter()
  while state.step < config.num_steps:
    state, done = step.run(config, s, state, timers)
    totals.add(done.batch, done.row)
    files.write(s, done, config.log.rollouts_per_step)
    if config.log.params_every and state.step % config.log.params_every == 0:
      save(workdir / "versions" / str(state.step), state.train.params)
    is_due = config.eval.every and state.step % config.eval.every == 0
    if accuracy and is_due and state.step < config.num_steps:
      when = f"after step {state.step - 1}"
      accuracy(state.train.params["policy"], when, step=state.step)

  ppo_s = time.perf_counter() - ppo_began
  after, trained = before, state.train.params
  if accuracy and config.num_steps:
    after = accuracy(trained["policy"], "after PPO", step=state.step)
  save(workdir / "params", trained)
  export(config, s, trained["policy"], workdir / "hf")
  summary = {
    "steps": config.num_steps,
    "arm": config_lib.arm_name(config.overlap.intra, config.overlap.inter),
    "wall_s": time.perf_counter() - began,
    "ppo_s": ppo_s,
    **totals.summary(batch_size=config.rollout.batch_size, ppo_s=ppo_s),
    "prompts_admitted": state.in_flight.next_uid,
    "prompts_in_flight": int(state.in_flight.in_flight.sum()),
    "accuracy_before": {k: v.accuracy for k, v in before.items()},
    "accuracy_after": {k: v.accuracy for k, v in after.items()},
    "batches_sha256": totals.batches.hexdigest(),
    "params_sha256": metrics.params_sha256(trained),
    "forced_lengths": bool(config.rollout.target_lengths_path),
    **metrics.backend(),
  }
  metrics.write_json(workdir / "summary.json", summary)
  for line in report.table(summary, before, after):
    cli.say(line)


def define_flags() -> None:
  """--config and --workdir."""
  cli.define_config()
  flags.DEFINE_string("workdir", None, "Folder of the run.")


def main(args: flags.FlagValues) -> None:
  """Checks what was asked for, and trains."""
  if not args.workdir:
    raise ValueError("--workdir='': must be a folder")
  config, workdir = args.config, pathlib.Path(args.workdir)
  config_lib.validate(config)
  if (workdir / "summary.json").exists():
    raise ValueError(f"--workdir={workdir}: holds a finished run already")
  compile_cache.enable(config.compile_cache, workdir)
  train(config, workdir)


if __name__ == "__main__":
  cli.run(main, define_flags, required=["config", "workdir"])
