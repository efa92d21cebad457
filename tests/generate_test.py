# SPDX-License-Identifier: Apache-2.0
"""The command that continues prompts, and what it refuses."""

import pathlib
import types

import pytest
import tiny

from oppo_jax import generate, hf, tokenizer

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
HOW = dict(
  max_len=6, temperature=0.0, chat=False, system="", dtype="float32", seed=0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  model = tiny.gpt(num_positions=32, rotary_dim=0, parallel_residual=False)
  folder = tmp_path_factory.mktemp("model") / "gpt2"
  tokens = tokenizer.make("char", corpus=["abcdefghijklmnopqrstuvwxyz. "])
  params = tiny.params(model, 4)
  hf.save(folder, model, params, dtype="float32", tokens=tokens)
  return folder


def test_a_response_depends_on_its_prompt_and_place_alone(folder):
  prompts = ["ab", "zyx.", "ab"]
  drawn = HOW | dict(temperature=1.0)
  said = generate.responses(folder, prompts, **drawn)
  assert said[0] != said[2]  # drawn, by place
  assert generate.responses(folder, prompts[:2], **drawn) == said[:2]
  greedy = generate.responses(folder, prompts, **HOW)
  assert greedy[0] == greedy[2] != greedy[1]
  assert all(greedy)


def test_what_cannot_be_answered_is_named(folder):
  with pytest.raises(ValueError, match="more than the 32 that the model is"):
    generate.responses(folder, ["ab"], **HOW | dict(max_len=32))
  with pytest.raises(ValueError, match="chat template"):
    generate.responses(folder, ["ab"], **HOW | dict(chat=True))
  with pytest.raises(ValueError, match="gpt2"):
    generate.responses(FIXTURES / "gpt2_reward", ["ab"], **HOW)


def test_prompts_are_the_lines_of_a_file_or_one_text(tmp_path):
  path = tmp_path / "prompts.txt"
  path.write_text("one\ntwo\n")
  read = lambda **kwargs: generate.read_prompts(
    types.SimpleNamespace(**dict(prompt="", prompts="") | kwargs)
  )
  assert read(prompts=str(path)) == ["one", "two"]
  assert read(prompt="three") == ["three"]
  assert read() == [""]
  with pytest.raises(ValueError, match="only one of them"):
    read(prompt="a", prompts=str(path))
  path.write_text("")
  with pytest.raises(ValueError, match="no lines"):
    read(prompts=str(path))
