# SPDX-License-Identifier: Apache-2.0
"""Every pytree that crosses a jit boundary, and the axis letters.

Axis letters, the same in the whole package:

  S slots (rows in flight)    B rows of a batch       M rows of a minibatch
  G responses per prompt      P max prompt length     R max response length
  L = P + R                   C decode chunk          T tokens of a tile
  V vocabulary                D width                 H heads
  K key/value heads           N layers                Q tiles per call
  W width of a packed row     E epochs per update

Rows are left-packed: prompt, then response, from column 0, right padding.
Cache index = position = column. A prompt of 3 and 2 response tokens so far:

  column      0  1  2  3  4  5  6  7
  tokens      p  p  p  r  r  .  .  .      prompt_len = 3, length = 5
  decode feeds column 4, writes its key/value there, samples column 5.
"""

from typing import Any, ClassVar

import jax
from flax import struct

Params = Any  # a nested dict of arrays, as returned by `Model.init`
KVCache = tuple[tuple[jax.Array, jax.Array], ...]  # N pairs [rows, K, L, D/H]


@struct.dataclass
class Slots:
  """Sequences in flight: the functional buffer behind inter-step overlap.

  One row is one sequence from admission to harvest; a row never moves.

  Attributes:
    uid: identity of the sequence (never reused), `FREE` if the row is empty.
    tokens: prompt and response, packed from column 0, 0 beyond `length`.
    prompt_len: number of prompt tokens.
    length: number of tokens written so far.
    done: the last token is an EOS, or the response is full.
    target_len: response length at which EOS is forced (benchmarks); 0 = none.
    behavior_logprobs: log-prob (nats) of the token in that column under the
      sampling distribution it was drawn from; 0 in prompt columns.
    token_version: `TrainState.version` of the policy that sampled the token.
    admitted_at: `TrainState.version` when the row was admitted.
    finished_tick: value of `tick` when the row became done.
    tick: decode ticks run so far by the whole buffer; token time.
  """

  uid: jax.Array  # [S] int32
  tokens: jax.Array  # [S, L] int32
  prompt_len: jax.Array  # [S] int32
  length: jax.Array  # [S] int32
  done: jax.Array  # [S] bool
  target_len: jax.Array  # [S] int32
  behavior_logprobs: jax.Array  # [S, L] float32
  token_version: jax.Array  # [S, L] int32
  admitted_at: jax.Array  # [S] int32
  finished_tick: jax.Array  # [S] int32
  tick: jax.Array  # [] int32

  FREE: ClassVar[int] = -1

  @property
  def is_free(self) -> jax.Array:  # [S] bool
    return self.uid == self.FREE

  @property
  def is_live(self) -> jax.Array:  # [S] bool: still to be decoded
    return ~self.is_free & ~self.done


@struct.dataclass
class ChunkReport:
  """What the host learns of a decoded chunk, one round late.

  `tokens` stays on the device: scorers read it, so that they never wait for
  the chunk that is already being decoded.

  Attributes:
    uid: as in `Slots`.
    length: as in `Slots`.
    done: as in `Slots`.
    selected: rows that the next harvest would take.
    is_complete: B rows (whole groups) are ready and no starving row is missing.
    tick: as in `Slots`.
    tokens: copy of `Slots.tokens`.
  """

  uid: jax.Array  # [S] int32
  length: jax.Array  # [S] int32
  done: jax.Array  # [S] bool
  selected: jax.Array  # [S] bool
  is_complete: jax.Array  # [] bool
  tick: jax.Array  # [] int32
  tokens: jax.Array  # [S, L] int32


@struct.dataclass
class ScorerState:
  """One scorer's cache over the slots, and what it has said so far.

  How far each row has been scored is known to the host alone, in tiles
  (`flight.OverlapState.frontier`): it decides which tiles run.

  Attributes:
    cache: keys and values of the scored prefix of every slot; None while an
      update runs that makes it stale.
    outputs: column p holds the scorer's word on the prefix [0, p]: the critic's
      value, the reward model's score, or the log-prob of the token in column
      p + 1. Columns beyond the scored prefix are garbage.
  """

  cache: KVCache | None
  outputs: jax.Array  # [S, L] float32


@struct.dataclass
class Batch:
  """What an algorithm sees: B finished rows, sorted by uid.

  `[B, R]` arrays are response-aligned: column t belongs to response token t.

  Attributes:
    uid: identities, ascending.
    sequences: prompt and response, packed from column 0, 0 beyond.
    prompt_len: number of prompt tokens.
    response_len: number of response tokens (the EOS included).
    has_eos: the response ended by an EOS, not at the length limit.
    responses: response tokens, 0 outside `mask`.
    mask: true on response tokens.
    behavior_logprobs: at sampling time, possibly under several versions.
    start_logprobs: under the policy at the start of the update; zeros unless
      the algorithm asks for the "policy" scorer.
    ref_logprobs: under the reference; zeros unless it asks for "reference".
    values: critic *before* token t; one column more than `mask` is valid: the
      value after the last token, if it fits. Zeros unless it asks for "critic".
    scores: what the learned and rule-based rewards add up to.
    token_version: policy version that sampled each token.
    admitted_at: policy version when the row was admitted.
  """

  uid: jax.Array  # [B] int32
  sequences: jax.Array  # [B, L] int32
  prompt_len: jax.Array  # [B] int32
  response_len: jax.Array  # [B] int32
  has_eos: jax.Array  # [B] bool
  responses: jax.Array  # [B, R] int32
  mask: jax.Array  # [B, R] bool
  behavior_logprobs: jax.Array  # [B, R] float32
  start_logprobs: jax.Array  # [B, R] float32
  ref_logprobs: jax.Array  # [B, R] float32
  values: jax.Array  # [B, R] float32
  scores: jax.Array  # [B] float32
  token_version: jax.Array  # [B, R] int32
  admitted_at: jax.Array  # [B] int32


@struct.dataclass
class TrainState:
  """Everything an update changes.

  Attributes:
    params: {"policy": ..., "critic": ...} (what the algorithm trains).
    opt_state: one optimizer state per entry of `params`.
    version: number of updates so far = the policy version.
    algo_state: the algorithm's own scalars (PPO: the adaptive KL coefficient).
  """

  params: Params
  opt_state: Any
  version: jax.Array  # [] int32
  algo_state: dict[str, jax.Array]


@struct.dataclass
class Packing:
  """Where each row of a minibatch lies in packed micro-batches.

  Rows are laid end to end into bins of fixed width W; bins are grouped into
  micro-batches of fixed shape [rows, W], of which the first `num_micro` are
  used. Leading axes: E epochs, then minibatches, then M rows of one minibatch.

    bin 0   a a a a a b b b .        row:    a  b  c
    bin 1   c c c c c c c . .        bin:    0  0  1
                                     offset: 0  5  0

  Attributes:
    row: index into the batch.
    bin: bin the row lies in.
    offset: its first column there.
    num_micro: micro-batches in use.
  """

  row: jax.Array  # [E, num_minibatches, M] int32
  bin: jax.Array  # [E, num_minibatches, M] int32
  offset: jax.Array  # [E, num_minibatches, M] int32
  num_micro: jax.Array  # [E, num_minibatches] int32
