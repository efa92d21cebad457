# SPDX-License-Identifier: Apache-2.0
"""What a step of the schedule costs in seconds: figures, fits, two devices.

Modelled: a decode tick (a constant, and a part that grows with the longest
prefix), a call of tiles, a chunk's dispatch, the update (a constant, and per
micro-batch or token), what a step costs besides, the latency of a link. The
scorers run

  one device    d0 d1 s0 d2 s1 d3 s2 f u     between the chunks: times add up

  two devices   d0 d1 d2 d3       u          s_k starts when the report of
                   s0 s1 s2 s3 f             chunk k has crossed the link

Not modelled: that kernels of two programs share a device, memory and what does
not fit into it, the network inside a group of devices but for an all-reduce's
latency, queues on a link, stragglers, compilation, evaluation, checkpoints.
The update is one program: with two devices the second one waits for it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oppo_jax import schedule


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds.

  Attributes:
    tick_s: of a decode tick of all slots.
    column_s: added to a tick per token of the longest prefix.
    chunk_s: of dispatching a chunk and reading its report.
    call_s: of a call of tiles, of one model.
    update_s: of an update, whatever is in it.
    micro_s: of an update, per micro-batch; they have a fixed shape.
    update_token_s: of an update, per token of its rows, prompts included.
    step_s: of a step besides: admission, the task's rule.
    link_latency_s: between the devices of policy and scorers, one way.
  """

  tick_s: float
  column_s: float
  chunk_s: float
  call_s: float
  update_s: float
  micro_s: float
  update_token_s: float
  step_s: float
  link_latency_s: float = 0.0


class Times(NamedTuple):
  """Seconds of one step.

  Attributes:
    step_s: the whole step.
    rollout_s: decoding and scoring, until the last score is there.
    policy_busy_s: of the policy's device.
    scorer_busy_s: of the scorers' device; 0 with one device.
  """

  step_s: float
  rollout_s: float
  policy_busy_s: float
  scorer_busy_s: float


class Work(NamedTuple):
  """What a step is charged for.

  Attributes:
    ticks: decode ticks that are run.
    columns: sum over them of the longest prefix.
    chunks: chunks that are dispatched.
    calls: calls of tiles, of all scorers and of the policy's prefill.
    micro_batches: of the update.
    tokens: of the batch, prompts included.
  """

  ticks: float
  columns: float
  chunks: float
  calls: float
  micro_batches: float
  tokens: float


def dispatched(
  ticks: int, chunks: int, chunk_size: int, *, decode_loop: str
) -> tuple[int, int]:
  """Ticks that are run and chunks that are dispatched in a step.

  The host is one chunk ahead. After the batch is complete a tick costs nothing
  in the "while" form, and as much as any other in the "fori" form.
  """
  is_while = decode_loop == "while"
  return ticks if is_while else (chunks + 1) * chunk_size, chunks + 1


def calls(step: schedule.Step, rules: schedule.Rules) -> tuple[np.ndarray, int]:
  """Of all scorers: calls dispatched after each round, and left at the end."""
  of = [step.calls[rules.class_of(s)] for s in rules.scorers]
  streamed = sum((c.streamed for c in of), np.zeros(step.chunks, np.int64))
  return streamed, sum(c.flushed for c in of)


def work_of(
  step: schedule.Step, rules: schedule.Rules, *, decode_loop: str
) -> Work:
  """Of a step of the schedule."""
  ticks, chunks = dispatched(
    step.ticks, step.chunks, step.chunk_size, decode_loop=decode_loop
  )
  streamed, flushed = calls(step, rules)
  return Work(
    ticks=ticks,
    columns=step.columns * ticks / max(step.ticks, 1),
    chunks=chunks,
    calls=int(streamed.sum()) + flushed + step.prefill_calls,
    micro_batches=step.micro_batches,
    tokens=int(step.row_len.sum()),
  )


def work_of_row(
  row: dict[str, float],
  rules: schedule.Rules,
  *,
  prompt_len: float,
  prefill_calls: int,
  decode_loop: str,
) -> Work:
  """Of a row of metrics.jsonl, where the lengths of the run are not known.

  The longest prefix is not in it: its time is counted as that of ticks. Nor is
  the policy's prefill, which must be given.
  """
  ticks, chunks = dispatched(
    *(int(row[f"overlap/{k}"]) for k in ("ticks", "chunks", "chunk_size")),
    decode_loop=decode_loop,
  )
  tokens = row["tokens/trained"] + rules.batch_size * prompt_len
  tiles = [n for k, n in row.items() if k.startswith("score/tiles_")]
  return Work(
    ticks=ticks,
    columns=0,
    chunks=chunks,
    calls=prefill_calls + sum(-(-n // rules.tile_rows) for n in tiles),
    micro_batches=rules.update.micro_batches(np.array([math.ceil(tokens)])),
    tokens=tokens,
  )


def seconds(work: Work, costs: Costs) -> float:
  """Of a step on one device, where everything is done one after the other."""
  return (
    work.ticks * costs.tick_s
    + work.columns * costs.column_s
    + work.chunks * costs.chunk_s
    + work.calls * costs.call_s
    + work.micro_batches * costs.micro_s
    + work.tokens * costs.update_token_s
    + costs.update_s
    + costs.step_s
  )


def times(
  step: schedule.Step,
  rules: schedule.Rules,
  costs: Costs,
  *,
  num_devices: int,
  decode_loop: str,
) -> Times:
  """Seconds of a step.

  Args:
    step: what was done.
    rules: of the schedule.
    costs: of its parts.
    num_devices: 1 = everything in one queue, 2 = scorers have their own.
    decode_loop: "while" or "fori".
  """
  work = work_of(step, rules, decode_loop=decode_loop)
  streamed, flushed = calls(step, rules)
  prefill_s = step.prefill_calls * costs.call_s
  tick_s = costs.tick_s + costs.column_s * step.columns / max(step.ticks, 1)
  decode_s = work.ticks * tick_s + work.chunks * costs.chunk_s
  score_s = (int(streamed.sum()) + flushed) * costs.call_s
  update_s = costs.update_s + costs.update_token_s * work.tokens
  update_s += costs.micro_s * work.micro_batches
  if num_devices == 1:
    rollout_s = prefill_s + decode_s + score_s
    step_s = rollout_s + update_s + costs.step_s
    return Times(step_s, rollout_s, rollout_s + update_s, 0.0)
  ends = np.arange(1, step.chunks + 1) * step.chunk_size
  if decode_loop == "while":
    ends = np.minimum(ends, step.ticks)
  ends = prefill_s + ends * tick_s
  ends += np.arange(1, step.chunks + 1) * costs.chunk_s
  # The scorers' queue: a call starts when it is there and those before it done.
  busy = np.cumsum(streamed) * costs.call_s
  starts = ends + costs.link_latency_s - (busy - streamed * costs.call_s)
  scored_s = starts.max() + busy[-1] + flushed * costs.call_s
  rollout_s = max(prefill_s + decode_s, float(scored_s) + costs.link_latency_s)
  return Times(
    rollout_s + update_s + costs.step_s,
    rollout_s,
    prefill_s + decode_s + update_s,
    score_s,
  )


# Calibration.


def fit(work: Sequence[Work], rows: Sequence[dict[str, float]]) -> Costs:
  """Least squares of measured times on counted work, no cost below 0.

  A tick and a chunk can be told apart only if the chunk size varies.

  Args:
    work: of steps without compilation, of one device; two at least.
    rows: of metrics.jsonl, of the same steps.

  Raises:
    ValueError: too few steps, or a row without times; says what.
  """
  if len(work) < 2:
    raise ValueError(f"{len(work)} measured steps: at least 2 are needed")
  try:
    phases = np.array(
      [
        [row[f"time/{k}_s"] for k in ("decode", "score", "update")]
        for row in rows
      ]
    )
    whole = np.array([row["time/step_s"] for row in rows])
  except KeyError as e:
    raise ValueError(f"a measured step has no {e}") from e
  rollout = [(w.ticks, w.columns, w.chunks, w.calls) for w in work]
  tick_s, column_s, chunk_s, call_s = non_negative(
    rollout, phases[:, 0] + phases[:, 1]
  )
  once_s, micro_s = non_negative(
    [(1, w.micro_batches) for w in work], phases[:, 2]
  )
  rest_s = float(np.median(whole - phases.sum(axis=1)))
  return Costs(
    tick_s=tick_s,
    column_s=column_s,
    chunk_s=chunk_s,
    call_s=call_s,
    update_s=once_s,
    micro_s=micro_s,
    update_token_s=0.0,
    step_s=max(rest_s, 0.0),
  )


def non_negative(
  work: Sequence[Sequence[float]], seconds: Sequence[float]
) -> list[float]:
  """Least squares with coefficients >= 0, by relative error.

  Every subset of the columns is tried (there are at most four), so the
  solution is the best one, not one that an iteration ended at.
  """
  y = np.asarray(seconds, float)
  x = np.asarray(work, float) / y[:, None]
  best = (np.inf, np.zeros(x.shape[1]))
  for subset in range(1, 2 ** x.shape[1]):
    used = [i for i in range(x.shape[1]) if subset >> i & 1]
    scale = np.linalg.norm(x[:, used], axis=0)
    if not scale.all():
      continue
    part = np.linalg.lstsq(x[:, used] / scale, np.ones(len(y)), rcond=1e-9)[0]
    if (part < 0).any():
      continue
    part = part / scale
    error = float(((x[:, used] @ part - 1) ** 2).sum())
    if error < best[0] - 1e-12:
      best = (error, np.zeros(x.shape[1]))
      best[1][used] = part
  return best[1].tolist()


# From figures.


class Device(NamedTuple):
  """Figures of a data sheet.

  Attributes:
    flops: dense bfloat16 operations per second.
    bytes_per_s: of its memory.
    memory_bytes: of its memory.
  """

  flops: float
  bytes_per_s: float
  memory_bytes: float


# NVIDIA's data sheets of the SXM versions (without sparsity), and Google
# Cloud's pages "TPU v5e", "TPU v5p", "TPU v6e".
DEVICES = {
  "a100": Device(312e12, 2.039e12, 80e9),
  "h100": Device(989e12, 3.35e12, 80e9),
  "h200": Device(989e12, 4.8e12, 141e9),
  "v5e": Device(197e12, 0.819e12, 16e9),
  "v5p": Device(459e12, 2.765e12, 95e9),
  "v6e": Device(918e12, 1.64e12, 32e9),
}

# Assumed, not measured: shares of these figures that well-tuned programs reach.
DECODE_SHARE = 0.6  # of the memory's speed, in a decode tick
PREFILL_SHARE = 0.5  # of the arithmetic, in a call of tiles
UPDATE_SHARE = 0.4  # of the arithmetic, in the update
DISPATCH_S = 2e-4  # a chunk: enqueue it, read its report
ALL_REDUCE_S = 1e-5  # latency of one all-reduce between the shards of a model
UPDATE_FLOPS = 8  # per weight and token: 6, and the forward pass again (remat)
OPTIMIZER_BYTES = 32  # per weight: gradient, master copy, two moments, in, out
STATE_BYTES = (
  18  # per weight: master copy, two moments, gradient, bfloat16 copy
)


def layers_of(params: float) -> int:
  """Layers of a decoder, between those of Llama 3 at 8e9 (32), 70e9 (80)."""
  return max(1, round(32 * (params / 8e9) ** 0.42))


def cache_bytes(params: float) -> float:
  """Keys and values of a token in bfloat16: 8 heads of 128 in every layer."""
  return layers_of(params) * 2 * 8 * 128 * 2


def from_figures(
  *,
  params: float,
  device: Device,
  num_shards: int,
  rules: schedule.Rules,
  num_epochs: int,
  link_latency_s: float,
) -> Costs:
  """Costs of four equal models in bfloat16: policy, critic, reference, reward.

  A tick reads the weights and every slot's cache up to the longest prefix, or
  multiplies for longer than that takes. Policy and critic are trained.

  Args:
    params: weights of each model.
    device: one device.
    num_shards: devices that share each model; figures add up, and each layer
      waits for two all-reduces.
    rules: of the schedule.
    num_epochs: passes of an update over its batch.
    link_latency_s: between policy and scorers, one way.
  """
  flops = device.flops * num_shards
  bytes_per_s = device.bytes_per_s * num_shards * DECODE_SHARE
  shared_s = 2 * layers_of(params) * ALL_REDUCE_S if num_shards > 1 else 0.0
  weights_s = 2 * params / bytes_per_s
  forward_s = 2 * params / (flops * PREFILL_SHARE)  # per token
  tile_tokens = rules.tile_rows * rules.tile_len
  trained = 2 * params
  return Costs(
    tick_s=max(weights_s, rules.num_slots * forward_s) + shared_s,
    column_s=rules.num_slots * cache_bytes(params) / bytes_per_s,
    chunk_s=DISPATCH_S,
    call_s=max(weights_s, tile_tokens * forward_s) + shared_s,
    update_s=trained * OPTIMIZER_BYTES * num_epochs / bytes_per_s,
    micro_s=0.0,
    update_token_s=trained * num_epochs * UPDATE_FLOPS / (flops * UPDATE_SHARE),
    step_s=0.0,
    link_latency_s=link_latency_s,
  )


def memory_bytes(
  *, params: float, rules: schedule.Rules, row_len: int, num_devices: int
) -> tuple[float, float]:
  """Bytes of weights, optimizer states and caches: policy's side, scorers'.

  Activations of the update are not in it. With one device all is on the first.
  """
  cache = rules.num_slots * row_len * cache_bytes(params)
  policy = STATE_BYTES * params + cache
  scorers = (STATE_BYTES + 4) * params + cache * len(rules.scorers)
  return (policy, scorers) if num_devices == 2 else (policy + scorers, 0.0)
