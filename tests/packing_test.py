# SPDX-License-Identifier: Apache-2.0
"""Rows in bins: each once per epoch, none on another, no border crossed."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from compare import assert_exact

from oppo_jax import packing

WIDTH = 12
lengths_of = st.lists(st.integers(1, WIDTH), min_size=1, max_size=16)


def test_longest_rows_are_placed_first_and_each_where_it_first_fits():
  # Width 8. Longest first: 6 opens bin 0, 5 bin 1; 3 fits into bin 1 after the
  # 5, the first 2 into bin 0 after the 6, the second opens bin 2.
  bins, offsets, num = packing.first_fit(np.array([2, 5, 3, 2, 6]), width=8)
  assert bins.tolist() == [0, 1, 1, 2, 0]
  assert offsets.tolist() == [6, 0, 5, 0, 0]
  assert num == 3


def test_a_row_longer_than_a_bin_is_refused():
  with pytest.raises(ValueError, match="9 tokens > bin width 8"):
    packing.first_fit(np.array([3, 9]), width=8)


@hypothesis.given(lengths=lengths_of)
def test_rows_lie_inside_bins_and_never_on_each_other(lengths):
  bins, offsets, num = packing.first_fit(np.array(lengths), width=WIDTH)
  used = np.zeros((num, WIDTH), int)
  for b, at, n in zip(bins, offsets, lengths):
    assert at + n <= WIDTH
    used[b, at : at + n] += 1
  assert used.max() == 1
  assert used.sum() == sum(lengths)
  # Without holes: a bin is filled from the left. And no bin is empty.
  assert (np.diff(used, axis=1) <= 0).all()
  assert used[:, 0].all()
  # Two bins that are both half empty would have been one.
  assert num <= max(1, math.ceil(2 * sum(lengths) / WIDTH))


plans = st.integers(1, 4).flatmap(
  lambda num_minibatches: st.fixed_dictionaries(
    dict(
      lengths=st.integers(1, 4).flatmap(
        lambda m: st.lists(
          st.integers(1, WIDTH),
          min_size=m * num_minibatches,
          max_size=m * num_minibatches,
        ).map(np.array)
      ),
      num_minibatches=st.just(num_minibatches),
      num_epochs=st.integers(1, 3),
      micro_rows=st.integers(1, 3),
    )
  )
)


@hypothesis.given(sizes=plans)
def test_an_epoch_trains_on_every_row_once(sizes):
  plan = packing.plan(**sizes, order_seed=(1, 2), width=WIDTH)
  num_rows = len(sizes["lengths"])
  shape = (
    sizes["num_epochs"],
    sizes["num_minibatches"],
    num_rows // sizes["num_minibatches"],
  )
  for x in (plan.row, plan.bin, plan.offset):
    assert x.shape == shape
    assert x.dtype == np.int32
  for epoch in plan.row:
    assert sorted(epoch.reshape(-1)) == list(range(num_rows))


@hypothesis.given(sizes=plans)
def test_a_minibatch_is_packed_by_itself(sizes):
  plan = packing.plan(**sizes, order_seed=(1, 2), width=WIDTH)
  for at in np.ndindex(plan.num_micro.shape):
    lengths = sizes["lengths"][plan.row[at]]
    bins, offsets, num = packing.first_fit(lengths, width=WIDTH)
    assert plan.bin[at].tolist() == bins.tolist()
    assert plan.offset[at].tolist() == offsets.tolist()
    # The last micro-batch in use holds a bin in use, the next would not.
    rows = sizes["micro_rows"]
    assert (plan.num_micro[at] - 1) * rows < num <= plan.num_micro[at] * rows


def plan_of(seed, lengths=(3, 5, 7, 2, 9, 1, 4, 4), num_minibatches=2):
  return packing.plan(
    np.array(lengths),
    order_seed=seed,
    num_epochs=2,
    num_minibatches=num_minibatches,
    width=WIDTH,
    micro_rows=2,
  )


def test_a_plan_is_a_function_of_its_seed():
  assert_exact(plan_of((0, 3)), plan_of((0, 3)))
  rows = [plan_of(seed).row.tolist() for seed in ((0, 3), (0, 4), (1, 3))]
  assert rows[0] != rows[1]
  assert rows[0] != rows[2]


def test_epochs_shuffle_differently():
  row = plan_of((0, 3)).row
  assert row[0].tolist() != row[1].tolist()


def test_membership_of_minibatches_does_not_depend_on_lengths():
  assert_exact(plan_of((0, 3)).row, plan_of((0, 3), lengths=(5,) * 8).row)


def test_a_minibatch_that_is_the_whole_batch_has_one_order():
  plan = plan_of((0, 3), num_minibatches=1)
  assert plan.row.tolist() == [[list(range(8))]] * 2
  first, second = (jax.tree.map(lambda x, e=e: x[e], plan) for e in (0, 1))
  assert_exact(first, second)
