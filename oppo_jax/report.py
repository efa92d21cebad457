# SPDX-License-Identifier: Apache-2.0
"""What a run tells: one row per step, a summary, and the table at the end."""

from collections.abc import Mapping
from typing import Any

from oppo_jax import generation, metrics, overlap, types


def step_row(
  step: int,
  batch: types.Batch,
  done: overlap.Rollout,
  *,
  delta: int,
  chunk_size: int,
  in_flight: int,
) -> dict[str, float]:
  """The metrics of a step that the host knows itself.

  Args:
    step: policy version the batch was harvested at.
    batch: fetched.
    done: what the rollout did.
    delta: prompts in flight beyond B.
    chunk_size: C.
    in_flight: rows in flight while decoding.
  """
  staleness = (step - batch.token_version)[batch.mask]  # per token
  return {
    "overlap/delta": delta,
    "overlap/chunk_size": chunk_size,
    "overlap/chunks": done.chunks,
    "overlap/deferred": done.deferred,
    "overlap/staleness_mean": float(staleness.mean()),
    "overlap/staleness_max": int(staleness.max()),
    "overlap/deferrals_max": int(step - batch.admitted_at.min()),
    "overlap/slot_fill": done.generated / max(done.ticks * in_flight, 1),
    "overlap/ticks": done.ticks,
    "score/tiles": sum(done.tiles.values()),
    **{f"score/tiles_{name}": n for name, n in done.tiles.items()},
    "tokens/generated": done.generated,
    "tokens/trained": int(batch.mask.sum()),
    "tokens/response_len": float(batch.response_len.mean()),
    "tokens/truncated": float(1 - batch.has_eos.mean()),
  }


def spread(num_rows: int, num_picked: int) -> list[int]:
  """Rows to log, evenly spaced: the first ones alone are those that waited."""
  num_picked = min(num_rows, num_picked)
  return [i * num_rows // num_picked for i in range(num_picked)]


def rollout_row(
  step: int, batch: types.Batch, i: int, prompt: str, response: str
) -> dict[str, Any]:
  """Row i of a fetched batch, for people and audits."""
  n = int(batch.response_len[i])
  return {
    "step": step,
    "uid": int(batch.uid[i]),
    "prompt": prompt,
    "response": response,
    "score": float(batch.scores[i]),
    "has_eos": bool(batch.has_eos[i]),
    "admitted_at": int(batch.admitted_at[i]),
    "prompt_tokens": batch.sequences[i, : batch.prompt_len[i]].tolist(),
    "response_tokens": batch.responses[i, :n].tolist(),
    "versions": batch.token_version[i, :n].tolist(),
    "behavior_logprobs": batch.behavior_logprobs[i, :n].tolist(),
    "ref_logprobs": batch.ref_logprobs[i, :n].tolist(),
    "values": batch.values[i, :n].tolist(),
  }


def serial_ticks(response_len: Mapping[int, int], batch_size: int) -> int:
  """Decode ticks if the same responses were made one whole batch at a time.

  In order of admission, B at a time; a batch takes as many ticks as its longest
  response has tokens. What overcommitment saved is measured against this.

  Args:
    response_len: tokens of the response of each uid trained on.
    batch_size: B.
  """
  lengths = [n for _, n in sorted(response_len.items())]
  cuts = range(0, len(lengths), batch_size)
  return sum(max(lengths[i : i + batch_size]) for i in cuts)


class Totals:
  """What a run adds up over its steps.

  Attributes:
    batches: the running hash over the batches.
  """

  SUMS = ("tokens/generated", "tokens/trained", "overlap/ticks", "score/tiles")

  def __init__(self):
    self.batches = metrics.BatchHash()
    self._sums = dict.fromkeys(self.SUMS, 0)
    self._response_len: dict[int, int] = {}

  def add(self, batch: types.Batch, row: Mapping[str, float]) -> None:
    """One step: its fetched batch, and its metrics."""
    self.batches.update(**{k: getattr(batch, k) for k in self.batches.FIELDS})
    self._sums = {k: v + row[k] for k, v in self._sums.items()}
    self._response_len |= zip(batch.uid.tolist(), batch.response_len.tolist())

  def summary(self, *, batch_size: int, ppo_s: float) -> dict[str, float]:
    """Sums over the steps so far, as summary.json names them."""
    generated = self._sums["tokens/generated"]
    return {
      "tokens_generated": generated,
      "tokens_trained": self._sums["tokens/trained"],
      "tokens_per_s": generated / max(ppo_s, 1e-9),
      "decode_ticks": self._sums["overlap/ticks"],
      "serial_ticks": serial_ticks(self._response_len, batch_size),
      "score_tiles": self._sums["score/tiles"],
    }


def table(
  summary: Mapping[str, Any],
  before: Mapping[str, generation.Accuracy],
  after: Mapping[str, generation.Accuracy],
) -> list[str]:
  """The lines a run ends with."""
  lines = [""]
  if before:
    lines.append("held-out accuracy       before PPO   after PPO")
  for name in before:
    lines.append(
      f"  {name:20s} {before[name].accuracy:12.3f} {after[name].accuracy:11.3f}"
    )
  if not summary["steps"]:
    return [*lines, "no updates asked for"]
  saved = 1 - summary["decode_ticks"] / summary["serial_ticks"]
  lines += [
    f"arm                     {summary['arm']}, {summary['steps']} updates",
    f"time                    {summary['wall_s']:.0f} s,"
    f" of which PPO {summary['ppo_s']:.0f} s",
    f"tokens per second       {summary['tokens_per_s']:.0f} generated, in PPO",
    f"decode ticks            {summary['decode_ticks']}; the same responses"
    f" batch by batch: {summary['serial_ticks']}",
    f"saved by overcommitment {saved:.1%} of decode ticks",
  ]
  if summary["forced_lengths"]:
    lines.append("FORCED LENGTHS: a benchmark; nothing useful was learned")
  return lines
