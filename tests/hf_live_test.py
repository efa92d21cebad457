# SPDX-License-Identifier: Apache-2.0
"""The same as `hf_test`, beside torch itself: where it is installed.

Other random models than those of the fixtures, and exports of ours, loaded by
transformers.
"""

import functools

import jax
import numpy as np
import pytest
import tiny
from compare import assert_close
from fixtures import make
from three_ways import model_of, say_decode, say_whole

from oppo_jax import decode, generation, hf, score, tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
# Not ours: what torch and transformers warn of.
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = (20, 3, 13, 7)


@pytest.mark.parametrize("name", make.CHECKPOINTS)
def test_logits_of_other_models_are_those_of_torch(name, tmp_path):
  theirs = make.make_model(*make.CHECKPOINTS[name], is_lm=True, seed=101)
  theirs.save_pretrained(tmp_path, max_shard_size="8KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 2
  said = make.reference(theirs, is_lm=True, seed=102, lengths=LENGTHS)
  tokens, length = said["tokens"], said["length"]
  model = model_of(tmp_path, block=8)
  params = hf.load_params(tmp_path, model, dtype="float32")
  for say in (say_whole, say_decode):
    got = say(model, params, tokens, length)
    for row, n in enumerate(length):
      assert_close(got[row, :n], said["logits"][row, :n])


@pytest.mark.parametrize("name", make.REWARD_MODELS)
def test_scores_of_other_models_are_those_of_torch(name, tmp_path):
  folder = tmp_path / "x_reward"
  theirs = make.make_model(*make.CHECKPOINTS[name], is_lm=False, seed=103)
  theirs.save_pretrained(folder, max_shard_size="8KB")
  said = make.reference(theirs, is_lm=False, seed=104, lengths=LENGTHS)
  model = model_of(folder)
  params = hf.load_params(folder, model, dtype="float32")
  got = say_whole(model, params, said["tokens"], said["length"])
  got = got[np.arange(len(LENGTHS)), said["length"] - 1, 0]
  assert_close(got, said["scores"])


def greedy(model, params, prompts, *, eos_ids, max_response_len):
  """Our continuations, by the loop of training."""
  fns = generation.make_fns(
    model,
    sampling=decode.Sampling(0.0, 0, 1.0, eos_ids, max_response_len),
    num_slots=16,
    max_prompt_len=max(map(len, prompts)),
    tile=score.Tile(rows=4, length=8, logprob_chunk=16),
    decode_loop="while",
    decode_rows=0,
  )
  said = generation.generate(fns, params, prompts, run_key=jax.random.key(0))
  return [row.tolist() for row in said]


def greedy_torch(folder, prompts, *, eos_ids, max_response_len):
  """Theirs, of the model in `folder`; prompts of one length in one call."""
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  assert theirs.dtype == torch.float32
  said = {}
  for length in {len(prompt) for prompt in prompts}:
    which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
    fed = torch.tensor(np.stack([prompts[i] for i in which])).long()
    out = theirs.generate(
      fed,
      attention_mask=torch.ones_like(fed),
      do_sample=False,
      max_new_tokens=max_response_len,
      eos_token_id=list(eos_ids),
      pad_token_id=0,
    )
    for i, row in zip(which, out[:, length:].tolist()):
      ends = [k for k, token in enumerate(row) if token in eos_ids]
      said[i] = row[: ends[0] + 1] if ends else row
  return [said[i] for i in range(len(prompts))]


EXPORTS = {
  "llama": tiny.model,
  "qwen2": functools.partial(tiny.model, qkv_bias=True, tie_embeddings=False),
  "qwen3": functools.partial(tiny.model, qk_norm=True, head_dim=16),
  "gpt_neox": tiny.gpt,
  "gpt2": functools.partial(
    tiny.gpt,
    num_positions=32,
    rotary_dim=0,
    parallel_residual=False,
    tie_embeddings=True,
  ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_continues_50_prompts_as_the_policy_does(name, tmp_path):
  model = EXPORTS[name]()
  params = tiny.params(model, 5)
  corpus = "abcdefghijklmnopqrstuvwxyz ."  # and 3 special ones: 31 of 32 ids
  tokens = tokenizer.make("char", corpus=[corpus])
  hf.save(tmp_path / "out", model, params, dtype="float32", tokens=tokens)
  # Not AutoTokenizer: beside "qwen2" it puts the rules of that family in place
  # of what the folder says.
  theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
    tmp_path / "out"
  )
  rng = np.random.default_rng(0)
  texts = [
    "".join(rng.choice(list(corpus), rng.integers(1, 9))) for _ in range(50)
  ]
  prompts = [np.array(tokens.encode(text), np.int32) for text in texts]
  for prompt, text in zip(prompts, texts):
    assert theirs.encode(text, add_special_tokens=False) == prompt.tolist()
  how = dict(eos_ids=(2, 9, 17), max_response_len=16)
  ours = greedy(model, params, prompts, **how)
  assert ours == greedy_torch(tmp_path / "out", prompts, **how)
  assert len({tuple(row) for row in ours}) > 20  # not one for all


def test_an_exported_critic_scores_as_it_does_here(tmp_path):
  model = tiny.model("scalar")
  params = tiny.params(model, 6)
  tokens = tokenizer.make("char", corpus=["abc"])
  hf.save(tmp_path / "out", model, params, dtype="float32", tokens=tokens)
  theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / "out"
  ).eval()
  rng = np.random.default_rng(0)
  length = np.array(LENGTHS)
  rows = rng.integers(3, tiny.VOCAB, (4, max(LENGTHS)))
  is_real = np.arange(max(LENGTHS)) < length[:, None]
  rows = np.where(is_real, rows, tokens.pad_id).astype(np.int32)
  with torch.no_grad():
    want = theirs(
      torch.tensor(rows).long(), attention_mask=torch.tensor(is_real * 1)
    ).logits.numpy()
  got = say_whole(model, params, rows, length)[np.arange(4), length - 1]
  assert_close(got, want)
