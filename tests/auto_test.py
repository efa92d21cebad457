# SPDX-License-Identifier: Apache-2.0
"""What "auto" turns into, and that nothing else is touched."""

import pytest

from oppo_jax import auto


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_what_was_asked_for_is_kept(backend):
  assert auto.decode_loop("fori", backend) == "fori"
  assert auto.decode_loop("while", backend) == "while"
  assert auto.decode_rows(0, backend) == 0
  assert auto.decode_rows(3, backend) == 3
  assert auto.attention_block(0, backend, kind="xla") == 0
  assert auto.attention_block(7, backend, kind="flash") == 7
  sizes = dict(width=100, mlp_dim=None, minibatch_rows=4)
  assert auto.micro_rows(5, backend, **sizes) == 5
  assert auto.attention("flash", backend) == "flash"
  assert auto.dispatch("fused", backend) == "fused"
  assert auto.dispatch("separate", backend) == "separate"


def test_only_a_gpu_runs_all_ticks_of_a_chunk():
  found = {b: auto.decode_loop("auto", b) for b in ("cpu", "gpu", "tpu")}
  assert found == {"cpu": "while", "gpu": "fori", "tpu": "while"}


def test_only_a_cpu_reads_the_cache_in_blocks():
  block = lambda backend: auto.attention_block(-1, backend, kind="xla")
  found = {b: block(b) for b in ("cpu", "gpu", "tpu")}
  assert found == {"cpu": 64, "gpu": 0, "tpu": 0}


def test_only_a_cpu_decodes_a_few_rows_at_a_time():
  assert auto.decode_rows(-1, "cpu") > 0
  assert auto.decode_rows(-1, "gpu") == auto.decode_rows(-1, "tpu") == 0


@pytest.mark.parametrize(
  ("width", "mlp_dim", "rows"),
  [
    (64, 1024, 4),
    (100, 1024, 2),
    (2304, 1024, 1),
    (64, None, 4),
    (64, 256, 16),
  ],
)
def test_a_micro_batch_on_a_cpu_fits_its_caches(width, mlp_dim, rows):
  sizes = dict(width=width, mlp_dim=mlp_dim)
  assert auto.micro_rows(0, "cpu", **sizes, minibatch_rows=32) == rows
  assert auto.micro_rows(0, "gpu", **sizes, minibatch_rows=32) == 8


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_a_micro_batch_has_no_more_rows_than_its_minibatch(backend):
  sizes = dict(width=16, mlp_dim=64, minibatch_rows=4)
  assert auto.micro_rows(0, backend, **sizes) == 4


def test_work_that_may_be_in_vain_is_done_where_decoding_hides_it():
  assert not auto.speculates("colocated", "separate")
  assert auto.speculates("colocated", "fused")
  assert auto.speculates("disaggregated", "separate")


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_no_backend_does_unasked_what_was_not_measured(backend):
  assert auto.attention("auto", backend) == "xla"
  assert auto.dispatch("auto", backend) == "separate"
