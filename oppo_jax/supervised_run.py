# SPDX-License-Identifier: Apache-2.0
"""A supervised run: steps, evaluations, snapshots, a Hugging Face folder.

  start --step, step, ...--> snapshot --step, ...--> snapshot ... --> hf/
            evaluate             evaluate

The workdir gets config.json, metrics.jsonl (a row per step), the tokenizer, the
trained model in hf/ and, last of all, summary.json. A run that was killed goes
on from its last snapshot and ends in the same bits. What is learned, and how it
is judged, is up to the caller (`Stage`).
"""

import contextlib
import hashlib
import itertools
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from oppo_jax import (
  encoding,
  families,
  hf,
  metrics,
  snapshots,
  supervised,
  texts,
  tokenizer,
  types,
)
from oppo_jax.models import base as models_base

# Of a config: may differ when a killed run is started again.
MAY_DIFFER = ("compile_cache",)
NUM_LINES = 20  # of steps on stdout
SNAPSHOTS = "snapshots"  # in the workdir, while the run is not finished


class Stage(NamedTuple):
  """What is learned.

  Attributes:
    name: section of the config with the fields of `supervised.FitConfig`, and
      `eval_every` and `save_every`.
    model: what is trained.
    start: its float32 parameters; not called when a killed run goes on.
    loss_fn: (params, batch) -> loss, metrics.
    items: what an epoch is made of.
    margins: one per item.
    evaluate: params -> numbers for the log; the same each time.
    seed: of the order of items.
    source: Hugging Face folder that it starts from, if any.
    baselines: what `evaluate` should be held to, for the summary.
  """

  name: str
  model: models_base.Model
  start: Callable[[], types.Params]
  loss_fn: supervised.LossFn
  items: list[tuple[texts.Text, ...]]
  margins: np.ndarray
  evaluate: Callable[[types.Params], dict[str, float]]
  seed: tuple[int, ...]
  source: str
  baselines: dict[str, float]


def limits(
  config: ml_collections.ConfigDict, section: Mapping[str, Any]
) -> encoding.Limits:
  """What fits into a row of a stage."""
  return encoding.Limits(
    max_prompt_len=config.rollout.max_prompt_len,
    long_prompts=config.rollout.long_prompts,
    max_len=section["width"],
    long_responses=section["long_responses"],
  )


def check_workdir(
  workdir: pathlib.Path, config: ml_collections.ConfigDict
) -> None:
  """That a run may begin in the workdir, or go on there; says what it will be.

  Raises:
    ValueError: it holds a finished run, or one of another config.
  """
  if (workdir / "summary.json").exists():
    raise ValueError(f"--workdir={workdir}: holds a finished run already")
  path = workdir / "config.json"
  now = _flat(json.loads(config.to_json_best_effort()))
  if path.exists():
    before = _flat(hf.read_json(path))
    for key in sorted(set(now) | set(before)):
      if key not in MAY_DIFFER and now.get(key) != before.get(key):
        raise ValueError(
          f"--workdir={workdir}: holds a run with config.{key}="
          f"{before.get(key)!r}, now it is {now.get(key)!r}"
        )


def check_exportable(stage: Stage) -> None:
  """Raises ValueError if no Hugging Face family is like the model."""
  if not stage.source:
    families.fitting(getattr(stage.model, "config", None))


def run(
  config: ml_collections.ConfigDict,
  stage: Stage,
  tokens: tokenizer.Tokenizer,
  workdir: pathlib.Path,
  *,
  log: Callable[[str], None],
) -> dict[str, Any]:
  """Trains, from the start or from the last snapshot, and writes the workdir.

  Args:
    config: validated, and checked against the workdir.
    stage: what is learned.
    tokens: tokenizer of the export.
    workdir: of the run.
    log: takes one line of text.

  Returns:
    What was written to summary.json.

  Raises:
    ValueError: nothing to learn from, the data changed since the run began, or
      the model cannot be exported.
  """
  began = time.perf_counter()
  fit = supervised.fit_config(config[stage.name])
  try:
    texts.check(stage.items, fit.width)
  except ValueError as e:
    raise ValueError(f"config.{stage.name}: {e}") from e
  check_exportable(stage)
  as_json = json.loads(config.to_json_best_effort())
  metrics.write_json(workdir / "config.json", as_json)
  with contextlib.ExitStack() as stack:
    learned = _learn(config[stage.name], stage, workdir, stack, log=log)
  hf.save(
    workdir / "hf",
    stage.model,
    learned.params,
    dtype="float32",
    source=stage.source or None,
    tokens=tokens,
  )
  logged = metrics.read_jsonl(workdir / "metrics.jsonl")
  judged = lambda row: {
    k.removeprefix("eval/"): v for k, v in row.items() if k.startswith("eval/")
  }
  summary = {
    "stage": stage.name,
    "steps": fit.num_steps,
    "items": len(stage.items),
    "epochs": learned.position / len(stage.items),
    "tokens": sum(row.get("tokens", 0) for row in logged),
    "wall_s": time.perf_counter() - began,
    "started_at": learned.started_at,
    "before": judged(logged[0]),
    "after": judged(logged[-1]),
    "baselines": stage.baselines,
    "params_sha256": metrics.params_sha256(learned.params),
    **metrics.backend(),
  }
  metrics.write_json(workdir / "summary.json", summary)
  shutil.rmtree(workdir / SNAPSHOTS)
  return summary


class _Learned(NamedTuple):
  """Parameters, items seen, and the step this process began with."""

  params: types.Params
  position: int
  started_at: int


def _learn(
  section: ml_collections.ConfigDict,
  stage: Stage,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
  *,
  log: Callable[[str], None],
) -> _Learned:
  """All steps, rows and snapshots; what `stack` is given is closed."""
  fit = supervised.fit_config(section)
  learner = supervised.learner(stage.loss_fn, fit)
  kept = snapshots.Snapshots(workdir / SNAPSHOTS)
  stack.callback(kept.close)
  data = _digest(stage)
  draw = lambda: learner.init(stage.model.init(jax.random.key(0)))
  found = kept.latest(jax.eval_shape(draw))
  if found is not None and found.numbers["data"] != data:
    raise ValueError(f"--workdir={workdir}: the data changed since the run")
  # Rows of the step of the snapshot, and before, are there already.
  resume_at = 0 if found is None else found.step + 1
  rows = metrics.JsonlWriter(workdir / "metrics.jsonl", resume_at=resume_at)
  stack.callback(rows.close)
  if found is None:
    step, position, state = 0, 0, learner.init(stage.start())
    row = {"step": 0, **_judged(stage, state[0])}
    rows.write(row)
    log(_line(stage.name, row))
  else:
    step, position, state = found.step, found.numbers["position"], found.state
    log(f"{stage.name}: goes on from step {step}")

  started_at = step
  stream = texts.batches(
    stage.items,
    stage.margins,
    rows=fit.rows,
    width=fit.width,
    seed=stage.seed,
    start=position,
  )
  for batch, position in itertools.islice(stream, fit.num_steps - step):
    began = time.perf_counter()
    *state, seen = learner.step(*state, batch)
    step += 1
    row = {
      "step": step,
      **{k: float(v) for k, v in metrics.fetch(seen).items()},
    }
    row |= {
      "epoch": position / len(stage.items),
      "tokens": int((batch.segments >= 0).sum()),
      "time/step_s": time.perf_counter() - began,
    }
    is_last = step == fit.num_steps
    if _is_due(step, section.eval_every) or is_last:
      row |= _judged(stage, state[0])
    rows.write(row)
    is_shown = step % -(-fit.num_steps // NUM_LINES) == 0
    if is_shown or is_last or "eval/loss" in row:
      log(_line(stage.name, row))
    if _is_due(step, section.save_every) or is_last:
      kept.save(step, tuple(state), {"position": position, "data": data})
  return _Learned(state[0], position, started_at)


def _judged(stage: Stage, params: types.Params) -> dict[str, float]:
  return {f"eval/{k}": v for k, v in stage.evaluate(params).items()}


def _is_due(step: int, every: int) -> bool:
  return bool(every) and step % every == 0


def _line(name: str, row: Mapping[str, Any]) -> str:
  """A row for people."""
  quiet = ("step", "tokens", "epoch")
  numbers = "  ".join(
    f"{k} {v:.4f}"
    for k, v in row.items()
    if k not in quiet and not k.startswith("time/")
  )
  return f"{name} step {row['step']:5d}  {numbers}"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Keys with dots."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, dict) and value:
      flat |= _flat(value, f"{prefix}{key}.")
    else:
      flat[prefix + key] = value
  return flat


def _digest(stage: Stage) -> str:
  """Hash of everything that is learned from."""
  digest = hashlib.sha256(stage.margins.astype("<f4").tobytes())
  for item in stage.items:
    for text in item:
      digest.update(f"{text.prompt_len} {len(text.tokens)}".encode())
      digest.update(text.tokens.astype("<i4").tobytes())
  return digest.hexdigest()
