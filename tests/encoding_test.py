# SPDX-License-Identifier: Apache-2.0
"""Rows of a task as training texts: what fits, is cut, is left out."""

import numpy as np
import pytest

from oppo_jax import encoding, tokenizer
from oppo_jax.tasks import base

TOKENS = tokenizer.make("char", corpus=["abcdefgh?"])
BOS, EOS = TOKENS.bos_id, TOKENS.eos_id


def limits(**changes):
  fields = dict(
    max_prompt_len=4, long_prompts="skip", max_len=7, long_responses="skip"
  )
  return encoding.Limits(**fields | changes)


def ids(text):
  return TOKENS.encode(text)


def example(prompt, solution):
  return base.Example(prompt, answer="", solution=solution)


def test_a_demonstration_is_prompt_solution_and_eos():
  found = encoding.demonstrations([example("a?", "bc")], TOKENS, limits())
  ((text,),) = found.items
  np.testing.assert_array_equal(text.tokens, [BOS, *ids("a?bc"), EOS])
  assert text.prompt_len == 3


def test_what_is_too_long_or_has_no_solution_is_left_out():
  asked = [
    example("a?", "bc"),
    example("abc?", "b"),  # prompt of 5
    example("b?", ""),
    example("c?", "bcde"),  # 3 + 5 = 8
    example("d?", "bcd"),  # 3 + 4 = 7
  ]
  found = encoding.demonstrations(asked, TOKENS, limits())
  np.testing.assert_array_equal(found.rows, [0, 4])
  assert found.num_long == 2


def test_a_response_that_is_cut_has_no_eos():
  asked = [example("a?", "bcdefgh")]
  found = encoding.demonstrations(
    asked, TOKENS, limits(long_responses="truncate")
  )
  ((text,),) = found.items
  np.testing.assert_array_equal(text.tokens, [BOS, *ids("a?bcde")])
  assert found.num_long == 1


def test_pairs_without_a_difference_are_left_out():
  pairs = [
    base.Pair("a?", "b", "c", 0.0),
    base.Pair("a?", "b", "b", 0.0),
    base.Pair("a?", "bcdef", "bcdeg", 0.0),  # equal where they are cut
  ]
  found = encoding.preferences(pairs, TOKENS, limits(long_responses="truncate"))
  ((chosen, rejected),) = found.items
  np.testing.assert_array_equal(chosen.tokens, [BOS, *ids("a?b"), EOS])
  np.testing.assert_array_equal(rejected.tokens, [BOS, *ids("a?c"), EOS])
  assert found.num_tied == 2
  np.testing.assert_array_equal(found.rows, [0])


def test_a_pair_with_one_long_side_is_left_out_whole():
  pairs = [base.Pair("a?", "b", "cdefgh", 0.0)]
  found = encoding.preferences(pairs, TOKENS, limits())
  assert (found.items, found.num_long) == ([], 1)


def test_a_long_prompt_keeps_its_end():
  asked = [example("abcd?", "e")]
  found = encoding.demonstrations(
    asked, TOKENS, limits(long_prompts="truncate_left")
  )
  ((text,),) = found.items
  np.testing.assert_array_equal(text.tokens, [BOS, *ids("cd?e"), EOS])


def test_nothing_asked_is_nothing_found():
  assert encoding.demonstrations([], TOKENS, limits()).items == []


@pytest.mark.parametrize("response", [[], [5, 6]])
def test_a_text_knows_where_its_response_begins(response):
  text = encoding.text(np.array([1, 2, 3], np.int32), response)
  assert text.prompt_len == 3
  assert text.tokens.dtype == np.int32
  np.testing.assert_array_equal(text.tokens, [1, 2, 3, *response])
