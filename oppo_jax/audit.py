# SPDX-License-Identifier: Apache-2.0
"""Recomputes what a finished run has logged of its rows, from its parameters.

`rollouts.jsonl` says which policy version sampled each token. Version 0 (and
the reference, which never changes) is in the run's stages; `versions/` holds
those that `config.log.params_every` kept. Every logged number of a version that
is there is computed again, in one plain forward pass.
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from oppo_jax import assemble, checkpoint, metrics, one_shot, types, warm_start
from oppo_jax import config as config_lib


class Check(NamedTuple):
  """Numbers of one kind and version, logged and recomputed.

  Attributes:
    what: "behavior_logprobs", "ref_logprobs" or "values".
    version: policy version; -1 = any (the reference).
    num: numbers compared.
    max_abs: largest difference.
    where: where that is: step, uid and token.
  """

  what: str
  version: int
  num: int
  max_abs: float
  where: str


def load_config(workdir: pathlib.Path) -> ml_collections.ConfigDict:
  """The config of a run.

  Raises:
    ValueError: the folder is not that of a finished run.
  """
  for name in ("summary.json", "config.json", "rollouts.jsonl"):
    if not (workdir / name).is_file():
      raise ValueError(f"{workdir}: no finished run, {name} is missing")
  saved = json.loads((workdir / "config.json").read_text())
  config = ml_collections.ConfigDict(_with_tuples(saved))
  config.rollout.target_lengths_path = config.overlap.replay_path = ""
  for controller in (config.overlap.chunk, config.overlap.delta):
    controller.kind = "fixed"  # what was decided is not asked again
  config_lib.validate(config)
  return config


def _with_tuples(x: Any) -> Any:
  """JSON has no tuples, and configs no lists."""
  if isinstance(x, dict):
    return {k: _with_tuples(v) for k, v in x.items()}
  return tuple(x) if isinstance(x, list) else x


def versions(
  workdir: pathlib.Path, params: dict[str, types.Params]
) -> Iterator[tuple[int, dict[str, types.Params]]]:
  """Version, and parameters of "policy" and "critic", as far as kept."""
  yield 0, {name: params[name] for name in ("policy", "critic")}
  for folder in sorted(workdir.glob("versions/*"), key=lambda f: int(f.name)):
    kept = {}
    for name in ("policy", "critic"):
      path = folder / f"{name}.safetensors"
      kept[name] = checkpoint.load_params(path, params[name])
    yield int(folder.name), kept


def checks(workdir: pathlib.Path, *, log: Callable[[str], None]):
  """Yields a `Check` per kind and version; see `run`."""
  config = load_config(workdir)
  if config.warm_start.sft.num_steps and not (workdir / "stages").is_dir():
    raise ValueError(f"{workdir}: stages/ is missing, so version 0 is")
  s = assemble.setup(config, workdir, log=log)
  params = warm_start.run(config, s.parts, workdir=workdir, log=log)
  rows = metrics.read_jsonl(workdir / "rollouts.jsonl")
  if not rows:
    raise ValueError(f"{workdir}/rollouts.jsonl: no rows were logged")

  row_len = config_lib.row_len(config)
  tokens = np.zeros((len(rows), row_len), np.int32)
  for i, row in enumerate(rows):
    whole = row["prompt_tokens"] + row["response_tokens"]
    tokens[i, : len(whole)] = whole

  def said(model, params, where):
    """Per row, the words on the prefixes before its response tokens."""
    length = [
      len(rows[i]["prompt_tokens"] + rows[i]["response_tokens"]) for i in where
    ]
    plain = one_shot.outputs(
      model,
      s.fns.cast(params),
      tokens[where],
      np.array(length),
      chunk=config.score.logprob_chunk,
      temperature=config.rollout.temperature,
      top_k=config.rollout.top_k,
      top_p=config.rollout.top_p,
    )
    first = [len(rows[i]["prompt_tokens"]) - 1 for i in where]
    return [p[a : n - 1] for p, a, n in zip(plain, first, length)]

  def check(what, version, model, params, is_asked):
    """Compares the tokens t of the rows i where is_asked(row)[t]."""
    asked = [np.asarray(is_asked(row), bool) for row in rows]
    where = np.array([i for i, a in enumerate(asked) if a.any()], int)
    if not len(where):
      return
    worst, at, num = 0.0, "", 0
    for i, plain in zip(where, said(model, params, where)):
      apart = np.abs(np.array(rows[i][what]) - plain)
      apart = np.where(asked[i], apart, 0.0)
      num += int(asked[i].sum())
      if not apart.max() <= worst:  # NaN is the worst
        t, worst = int(apart.argmax()), float(apart.max())
        at = f"step {rows[i]['step']}, uid {rows[i]['uid']}, token {t}"
    yield Check(what, version, num, worst, at)

  everything = lambda row: np.ones(len(row["response_tokens"]), bool)
  if "reference" in s.algorithm.scorers:
    yield from check(
      "ref_logprobs",
      -1,
      s.parts.reference,
      params.get("reference", params["policy"]),
      everything,
    )
  for version, kept in versions(workdir, params):
    sampled = lambda row: np.array(row["versions"]) == version  # noqa: B023
    yield from check(
      "behavior_logprobs", version, s.parts.policy, kept["policy"], sampled
    )
    is_recomputed = config.overlap.critic_cache == "recompute"
    if "critic" in s.algorithm.scorers and is_recomputed:
      valued = lambda row: everything(row) & (row["step"] == version)  # noqa: B023
      yield from check(
        "values", version, s.parts.critic, kept["critic"], valued
      )


def run(workdir: pathlib.Path, *, log: Callable[[str], None]) -> bool:
  """Audits a finished run; says what it found, one line per kind and version.

  Args:
    workdir: of the run.
    log: takes one line of text.

  Returns:
    Whether everything agrees.

  Raises:
    ValueError: there is no finished run there, or it logged no rows.
  """
  config = load_config(workdir)
  bound, good = one_shot.TOLERANCE[config.model.dtype], True
  for c in checks(workdir, log=log):
    verdict = "CLOSE" if c.max_abs <= bound else "FAIL"
    good &= verdict == "CLOSE"
    version = "reference" if c.version < 0 else f"version {c.version}"
    log(
      f"{verdict}  {c.what:18s} {version:12s} {c.num:7d} tokens"
      f"  largest difference {c.max_abs:.1e} ({c.where})"
    )
  log(f"{'all agree' if good else 'NOT all agree'} to {bound}")
  return good
