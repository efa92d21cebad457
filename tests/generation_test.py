# SPDX-License-Identifier: Apache-2.0
"""Generation for its own sake, and the grades it gets."""

import functools

import jax
import numpy as np
import pytest
import tiny
from compare import assert_exact

from oppo_jax import generation, score, tokenizer
from oppo_jax.tasks import base as tasks_base

MAX_PROMPT_LEN = tiny.SIZES.max_prompt_len
MAX_RESPONSE_LEN = tiny.SAMPLING.max_response_len
GREEDY = tiny.SAMPLING._replace(temperature=0.0)
KEY = jax.random.key(3)


@functools.cache
def fns(num_slots=8, sampling=tiny.SAMPLING):
  return generation.make_fns(
    tiny.model(),
    sampling=sampling,
    num_slots=num_slots,
    max_prompt_len=MAX_PROMPT_LEN,
    tile=score.Tile(rows=3, length=8, logprob_chunk=16),
    decode_loop="while",
    decode_rows=0,
  )


@functools.cache
def params():
  return tiny.params(tiny.model(), 0)


def prompts(num):
  return [tiny.prompt_of(uid).tokens for uid in range(num)]


def generate(prompts, *, run_key=KEY, **kwargs):
  return generation.generate(fns(**kwargs), params(), prompts, run_key=run_key)


def test_a_response_follows_its_own_prompt():
  """Greedy decoding is the argmax of a plain forward on the growing prefix."""
  model, asked = tiny.model(), prompts(11)
  width = MAX_PROMPT_LEN + MAX_RESPONSE_LEN
  positions = np.arange(width, dtype=np.int32)[None]
  hidden = lambda row: model.forward(params(), row, positions, 0 * positions)
  forward = jax.jit(lambda row: model.head(params(), hidden(row)))
  for prompt, response in zip(asked, generate(asked, sampling=GREEDY)):
    row = np.concatenate([prompt, response])
    row = np.pad(row, (0, width - len(row)))[None]
    logits = forward(row)[0]
    said = np.argmax(logits[len(prompt) - 1 :], axis=-1)[: len(response)]
    np.testing.assert_array_equal(response, said)


def test_a_response_ends_at_its_eos_or_at_the_limit():
  responses = generate(prompts(40))
  assert len(responses) == 40
  ends = {int(r[-1]) in tiny.EOS_IDS for r in responses}
  assert True in ends
  for response in responses:
    assert not np.isin(response[:-1], tiny.EOS_IDS).any()
    is_full = len(response) == MAX_RESPONSE_LEN
    assert is_full or response[-1] in tiny.EOS_IDS


@pytest.mark.parametrize("num_prompts", [1, 3, 4, 5, 8, 9, 21])
def test_any_number_of_prompts_is_answered(num_prompts):
  """Fewer than are harvested at a time, as many, and more than slots."""
  expected = generate(prompts(21))[:num_prompts]
  assert_exact(generate(prompts(num_prompts)), expected)


def test_a_response_does_not_depend_on_the_other_prompts():
  asked = prompts(12)
  others = [p if i == 7 else p[:1] + 1 for i, p in enumerate(asked)]
  expected, got = generate(asked), generate(others)
  assert_exact(got[7], expected[7])
  assert any(len(a) != len(b) for a, b in zip(got, expected))


def test_the_number_of_slots_changes_no_response():
  """Log-probs may move in the last bit; no draw is as close as that."""
  assert_exact(generate(prompts(21), num_slots=16), generate(prompts(21)))


def test_the_same_prompt_is_answered_differently_under_another_uid_or_key():
  same = [prompts(1)[0]] * 16
  responses = generate(same)
  assert len({tuple(r) for r in responses}) > 8
  again = generate(same, run_key=jax.random.key(4))
  assert {tuple(r) for r in responses} != {tuple(r) for r in again}


# Grades.

TOKENS = tokenizer.make("char", corpus=["0123456789#"])
REWARD = lambda example, text: float(text == example.answer)
TASK = tasks_base.Task("answers", None, REWARD, None, None)


def example(answer):
  return tasks_base.Example(prompt="", answer=answer, solution="")


def ids(text, *, ended):
  eos = [TOKENS.eos_id] if ended else []
  return np.array([*TOKENS.encode(text), *eos])


def test_grades_are_counted():
  """Two of four right; a full response without an EOS is a truncated one."""
  found = generation.grade(
    TASK,
    [example("12"), example("7"), example("345"), example("#")],
    [
      ids("12", ended=True),  # right, 3 tokens
      ids("8", ended=True),  # wrong, 2 tokens
      ids("3456", ended=False),  # wrong, 4 tokens: cut
      ids("#", ended=True),  # right, 2 tokens
    ],
    tokens=TOKENS,
    max_response_len=4,
  )
  assert found == generation.Accuracy(2 / 4, 11 / 4, 1 / 4)


def test_an_eos_in_the_last_place_is_no_truncation():
  found = generation.grade(
    TASK,
    [example("345")],
    [ids("345", ended=True)],
    tokens=TOKENS,
    max_response_len=4,
  )
  assert found == generation.Accuracy(1.0, 4.0, 0.0)


def test_the_sampling_of_an_evaluation_is_its_own():
  """Greedy functions ignore the key; sampling ones do not."""
  asked = prompts(6)
  other = jax.random.key(9)
  greedy = generate(asked, sampling=GREEDY)
  assert_exact(generate(asked, sampling=GREEDY, run_key=other), greedy)
  sampled = generate(asked)
  assert any(
    len(a) != len(b) or (a != b).any()
    for a, b in zip(sampled, generate(asked, run_key=other))
  )
