# SPDX-License-Identifier: Apache-2.0
"""What "auto" means: the choices of a config that depend on the backend.

No JAX: the simulator asks too, of runs on other machines. `backend` is "cpu",
"gpu" or "tpu". Where the numbers come from: benchmarks/LOG.md.
"""


def decode_loop(asked: str, backend: str) -> str:
  """Form of the decode loop, "while" or "fori"; "auto" is what suits.

  On a GPU a loop whose length depends on data waits for the host every tick.
  """
  if asked != "auto":
    return asked
  return "fori" if backend == "gpu" else "while"


def attention(asked: str, backend: str) -> str:
  """How attention is computed, "xla" or "flash".

  "auto" is the form whose gain is measured; of "flash" none is yet.
  """
  del backend
  return "xla" if asked == "auto" else asked


def attention_block(asked: int, backend: str, *, kind: str) -> int:
  """Columns that cached attention reads at a time, 0 = all; -1 is what suits.

  On a CPU the cost then follows the longest live prefix. On a GPU the loop over
  blocks would be one of the host's, per layer and tick; kernels (`kind` is
  "flash") are given parts of a row that keep many of them busy.
  """
  if asked >= 0:
    return asked
  if kind == "flash":
    return 256
  return 64 if backend == "cpu" else 0


def decode_rows(asked: int, backend: str) -> int:
  """Rows that one model call decodes, 0 = all slots; -1 is what suits.

  A CPU pays for every row, so there live rows alone are decoded, a few at a
  time. An accelerator pays for reading the weights: all slots at once.
  """
  if asked >= 0:
    return asked
  return 8 if backend == "cpu" else 0


def micro_rows(
  asked: int,
  backend: str,
  *,
  width: int,
  mlp_dim: int | None,
  minibatch_rows: int,
) -> int:
  """Packed rows of `width` tokens in a micro-batch; 0 is what suits.

  On a CPU as many as keep the largest activation, tokens x `mlp_dim` (None =
  not known: 1024) float32, within 1 MiB, which stays in its caches. Elsewhere
  8, for the matrix units. A minibatch of fewer rows never fills more.
  """
  if asked:
    return asked
  tokens = 2**18 // (mlp_dim or 1024)
  suits = max(tokens // width, 1) if backend == "cpu" else 8
  return min(suits, minibatch_rows)


def speculates(placement: str, dispatch: str) -> bool:
  """Whether trained scorers score rows that may be deferred, in vain then.

  For nothing where decoding hides it: on devices of their own, or inside of
  the chunk's program. `dispatch` is what was chosen.
  """
  return placement == "disaggregated" or dispatch == "fused"


def dispatch(asked: str, backend: str) -> str:
  """Chunks and tiles as "separate" programs, or "fused" into one.

  "auto" is the form whose gain is measured; of "fused" none is yet.
  """
  del backend
  return "separate" if asked == "auto" else asked
