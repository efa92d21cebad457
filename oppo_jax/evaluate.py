# SPDX-License-Identifier: Apache-2.0
r"""What a policy says to held-out prompts, and what it is worth.

  python -m oppo_jax.evaluate --config=configs/gsm8k.py:0.5b \
      --config.load.policy=runs/gsm8k/hf --out=evaluated
  ... --config.load.reference=runs/sft/hf             KL to another policy
  ... --config.load.reward_model=runs/reward_model/hf   mean score
  ... --samples=10 --temperature=0.8 --k=1,10         pass@k by the task's rule

`out` gets evaluation.json, the numbers, and completions.jsonl, a row per
response; a few of them are printed.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from absl import flags

from oppo_jax import (
  assemble,
  cli,
  compile_cache,
  generation,
  grading,
  keys,
  metrics,
  one_shot,
  pretrained,
  report,
  stage_command,
  stream,
  types,
)
from oppo_jax import config as config_lib
from oppo_jax.tasks import base as tasks_base

SHOWN_CHARS = 600  # of a prompt's end and of a response's start, printed


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
  """Chance that one of k samples is right, of which n were drawn, c right.

    1 - C(n - c, k) / C(n, k)

  Unbiased; Chen et al. 2021, eq. 1 (arXiv 2107.03374), as the product of its
  appendix A.

  Args:
    num_samples: n.
    num_right: c, in [0, n].
    k: in [1, n].
  """
  if not 1 <= k <= num_samples:
    raise ValueError(f"k={k}: must be in [1, {num_samples}], the samples")
  if num_samples - num_right < k:
    return 1.0
  left = np.arange(num_samples - num_right + 1, num_samples + 1)
  return float(1.0 - np.prod(1.0 - k / left))


class Asked(NamedTuple):
  """What to evaluate.

  Attributes:
    split: "train" or "test".
    num_prompts: at most; 0 = all.
    samples: responses per prompt.
    ks: of pass@k.
    is_greedy: or drawn as the config says.
    shown: responses to print.
  """

  split: str
  num_prompts: int
  samples: int
  ks: tuple[int, ...]
  is_greedy: bool
  shown: int


class Said(NamedTuple):
  """Responses to the prompts of a split, `samples` in a row to each.

  Attributes:
    examples: one per response.
    prompts: token ids, one per response.
    responses: token ids, an EOS included.
    texts: the responses, decoded.
    has_eos: which ended by themselves.
  """

  examples: list[tasks_base.Example]
  prompts: list[np.ndarray]
  responses: list[np.ndarray]
  texts: list[str]
  has_eos: np.ndarray


def say(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  policy: types.Params,
  asked: Asked,
) -> Said:
  """Lets the policy answer."""
  examples = s.parts.task.prompts(asked.split)
  examples = examples[: asked.num_prompts or None]
  prompts = stream.encode_prompts(
    examples,
    s.parts.tokens,
    max_prompt_len=config.rollout.max_prompt_len,
    long_prompts=config.rollout.long_prompts,
  )
  each = [i for i in range(len(prompts.rows)) for _ in range(asked.samples)]
  responses = generation.generate(
    s.greedy if asked.is_greedy else s.parts.sampler,
    policy,
    [prompts.tokens[i] for i in each],
    run_key=keys.named(config.seed, "held_out"),
  )
  return Said(
    [examples[prompts.rows[i]] for i in each],
    [prompts.tokens[i] for i in each],
    responses,
    [s.parts.tokens.decode(r) for r in responses],
    np.array([r[-1] in s.parts.tokens.eos_ids for r in responses]),
  )


def rows_of(said: Said, *, row_len: int) -> tuple[np.ndarray, np.ndarray]:
  """Prompts and responses as rows [N, L] from column 0, and their lengths."""
  tokens = np.zeros((len(said.texts), row_len), np.int32)
  length = np.zeros(len(said.texts), np.int32)
  for i, parts in enumerate(zip(said.prompts, said.responses)):
    row = np.concatenate(parts)
    tokens[i, : len(row)], length[i] = row, len(row)
  return tokens, length


def scores_of(
  config: ml_collections.ConfigDict, s: assemble.Setup, said: Said
) -> np.ndarray:
  """What the reward model says of each response."""
  params = s.fns.cast(
    pretrained.load_params(
      "reward_model", config.load.reward_model, s.parts.reward
    )
  )
  if s.rescore_fn is not None:
    asked = [example.prompt for example in said.examples]
    return s.rescore_fn(params, asked, said.texts, said.has_eos)
  tokens, length = rows_of(said, row_len=config_lib.row_len(config))
  chunk = config.score.logprob_chunk
  found = one_shot.outputs(s.parts.reward, params, tokens, length, chunk=chunk)
  return found[np.arange(len(found)), length - 1]


def kl_of(
  config: ml_collections.ConfigDict,
  s: assemble.Setup,
  policy: types.Params,
  said: Said,
) -> np.ndarray:
  """log policy(response) - log reference(response), at the temperature of
  training; its mean over sampled responses estimates the KL."""
  reference = pretrained.load_params(
    "reference", config.load.reference, s.parts.reference
  )
  tokens, length = rows_of(said, row_len=config_lib.row_len(config))
  r = config.rollout
  logprobs = [
    one_shot.outputs(
      model,
      s.fns.cast(params),
      tokens,
      length,
      chunk=config.score.logprob_chunk,
      temperature=r.temperature,
      top_k=r.top_k,
      top_p=r.top_p,
    ).astype(np.float64)
    for model, params in (
      (s.parts.policy, policy),
      (s.parts.reference, reference),
    )
  ]
  # Column p speaks of the token after it: the response's from its prompt's last
  # column on.
  columns = np.arange(tokens.shape[1])[None, :]
  first = np.array([len(prompt) for prompt in said.prompts])[:, None] - 1
  is_response = (columns >= first) & (columns < length[:, None] - 1)
  return np.sum(np.where(is_response, logprobs[0] - logprobs[1], 0), axis=1)


def numbers_of(
  task: tasks_base.Task, said: Said, columns: dict[str, np.ndarray], ks, samples
) -> dict[str, float]:
  """Means over responses, and pass@k."""
  length = np.array([len(r) for r in said.responses])
  found = {
    "responses": len(length),
    "response_len": float(length.mean()),
    "truncated": float(1 - said.has_eos.mean()),
  }
  names = {"rule": "accuracy"}
  found |= {names.get(k, k): float(v.mean()) for k, v in columns.items()}
  if task.reward is not None:
    right = (columns["rule"] >= 1).reshape(-1, samples).sum(axis=1)
    for k in ks:
      chances = [pass_at_k(samples, int(c), k) for c in right]
      found[f"pass@{k}"] = float(np.mean(chances))
  return found


def evaluate(
  config: ml_collections.ConfigDict, out: pathlib.Path, asked: Asked
) -> dict[str, Any]:
  """Evaluates config.load.policy; writes `out`, and returns the numbers."""
  began = time.perf_counter()
  s = assemble.setup(config, out, log=cli.say)
  task, load = s.parts.task, config.load
  if asked.ks and task.reward is None:
    raise ValueError(f"--k: task {task.name!r} has no rule")
  policy = pretrained.load_params("policy", load.policy, s.parts.policy)
  said = say(config, s, policy, asked)
  columns: dict[str, np.ndarray] = {}
  if task.reward is not None:
    grader = grading.Grader(task)
    items = zip(range(len(said.texts)), said.examples, said.texts)
    grades = grader.results([grading.Item(*item) for item in items])
    grader.close()
    for name in ("rule", *task.rules):
      columns[name] = np.array([g[name] for g in grades], np.float64)
  if load.reward_model:
    columns["score"] = scores_of(config, s, said)
  if load.reference:
    columns["kl"] = kl_of(config, s, policy, said)
  found = {
    "policy": load.policy,
    "split": asked.split,
    "samples": asked.samples,
    "temperature": 0.0 if asked.is_greedy else config.rollout.temperature,
    **numbers_of(task, said, columns, asked.ks, asked.samples),
    "wall_s": time.perf_counter() - began,
  }
  write(out, said, columns, found, samples=asked.samples)
  show(said, columns, found, asked.shown)
  return found


def write(
  out: pathlib.Path,
  said: Said,
  columns: dict[str, np.ndarray],
  found: dict[str, Any],
  *,
  samples: int,
) -> None:
  """The two files."""
  table = metrics.JsonlWriter(out / "completions.jsonl", resume_at=0)
  for i, example in enumerate(said.examples):
    row = {
      "step": 0,
      "prompt_index": i // samples,
      "sample": i % samples,
      "prompt": example.prompt,
      "response": said.texts[i],
      "answer": example.answer,
      "response_len": len(said.responses[i]),
      "has_eos": bool(said.has_eos[i]),
    }
    table.write(row | {name: float(x[i]) for name, x in columns.items()})
  table.close()
  metrics.write_json(out / "evaluation.json", found)


def show(
  said: Said,
  columns: dict[str, np.ndarray],
  found: dict[str, Any],
  num_shown: int,
) -> None:
  """A few responses, and the numbers."""
  for i in report.spread(len(said.texts), num_shown):
    seen = "  ".join(f"{name} {x[i]:.3f}" for name, x in columns.items())
    cli.say(f"--- response {i}: {len(said.responses[i])} tokens  {seen}")
    cli.say(f"{said.examples[i].prompt[-SHOWN_CHARS:]}")
    cli.say(f">>>{said.texts[i][:SHOWN_CHARS]}")
  for name, x in found.items():
    text = f"{x:.4f}" if isinstance(x, float) else str(x)
    cli.say(f"{name:16s} {text}")


def define_flags() -> None:
  cli.define_config()
  flags.DEFINE_string("out", None, "Folder to write; made if missing.")
  flags.DEFINE_enum("split", "test", tasks_base.SPLITS, "Which prompts.")
  flags.DEFINE_integer("num_prompts", 256, "At most; 0 = all.", lower_bound=0)
  flags.DEFINE_integer("samples", 1, "Responses per prompt.", lower_bound=1)
  flags.DEFINE_float(
    "temperature", 0.0, "0 = greedy; else responses are drawn.", lower_bound=0
  )
  flags.DEFINE_list("k", [], "Of pass@k, as 1,10.")
  flags.DEFINE_integer("shown", 3, "Responses to print.", lower_bound=0)


def read_ks(texts: Sequence[str], samples: int) -> tuple[int, ...]:
  """The k of pass@k; a ValueError names a bad one."""
  try:
    ks = tuple(int(text) for text in texts)
  except ValueError:
    raise ValueError(f"--k={','.join(texts)}: must be integers") from None
  for k in ks:
    if not 1 <= k <= samples:
      raise ValueError(f"--k={k}: must be in [1, {samples}], see --samples")
  return ks


def main(args: flags.FlagValues) -> None:
  """Checks what was asked for, and evaluates."""
  if not args.out:
    raise ValueError("--out='': must be a folder")
  config, out = args.config, pathlib.Path(args.out)
  ks = read_ks(args.k, args.samples)
  if args.temperature:
    config.rollout.temperature = args.temperature
  config_lib.validate(stage_command.without_reward(config))
  if not config.load.policy:
    raise ValueError("config.load.policy='': must be a folder to evaluate")
  asked = Asked(
    split=args.split,
    num_prompts=args.num_prompts,
    samples=args.samples,
    ks=ks,
    is_greedy=not args.temperature,
    shown=args.shown,
  )
  compile_cache.enable(config.compile_cache, out)
  out.mkdir(parents=True, exist_ok=True)
  evaluate(config, out, asked)


if __name__ == "__main__":
  cli.run(main, define_flags, required=["config", "out"])
