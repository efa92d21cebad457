# SPDX-License-Identifier: Apache-2.0
"""TRL's PPOTrainer in `benchmarks.peers`; see shared.py.

  python trl_worker.py job.json < /dev/null   # in TRL's virtual environment

Settings: float32 on the CPU, torch threads as the job says (the cores), sdpa
attention, no gradient checkpointing; all rows at once in generation, in scoring
and in the update, so one optimizer step per batch; generation stops when every
row has ended (stop_token="eos"); temperature 1; no sample generations,
evaluation, logging backends or checkpoints.

Lengths are forced by a logits processor handed to `policy.generate`: the k-th
call gives row i the k-th batch's i-th length. Before its last token a row
cannot sample the end token, as its last token it can sample nothing else. The
padding token is never sampled.
"""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import shared
import tokenizers
import torch
import transformers
from trl.experimental import ppo


class ForcedLengths(transformers.LogitsProcessor):
  """Row i ends after lengths[i] tokens."""

  def __init__(self, lengths, prompt_len):
    self._last = torch.tensor(lengths) + prompt_len - 1

  def __call__(self, input_ids, scores):
    ends = (self._last == input_ids.shape[1])[:, None]
    is_eos = torch.arange(scores.shape[1]) == shared.EOS_ID
    is_pad = torch.arange(scores.shape[1]) == shared.PAD_ID
    allowed = (is_eos == ends) & ~is_pad
    # A row that has ended is padded by the caller, whatever is sampled.
    done = (self._last < input_ids.shape[1])[:, None]
    return scores.masked_fill(~(allowed | done), -torch.inf)


def tokenizer_of(vocab_size):
  """Tokens that mean nothing."""
  words = {f"<{i}>": i for i in range(vocab_size)}
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(
      tokenizers.models.WordLevel(words, unk_token=f"<{vocab_size - 1}>")
    ),
    eos_token=f"<{shared.EOS_ID}>",
    pad_token=f"<{shared.PAD_ID}>",
    padding_side="left",
  )


def models_of(job):
  """Policy, reference, reward model and critic of one size."""
  m = job["model"]
  config = transformers.LlamaConfig(
    vocab_size=job["vocab_size"],
    hidden_size=m["width"],
    intermediate_size=m["mlp_dim"],
    num_hidden_layers=m["num_layers"],
    num_attention_heads=m["num_heads"],
    num_key_value_heads=m["num_kv_heads"],
    head_dim=m["head_dim"],
    max_position_embeddings=job["prompt_len"] + job["response_len"],
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=shared.EOS_ID,
    pad_token_id=shared.PAD_ID,
    attn_implementation="sdpa",
    dtype="float32",
    num_labels=1,
  )
  policy, reference = (transformers.LlamaForCausalLM(config) for _ in range(2))
  reward, critic = (
    transformers.LlamaForSequenceClassification(config) for _ in range(2)
  )
  return policy, reference, reward, critic


class Steps(transformers.TrainerCallback):
  """Tells the meter."""

  def __init__(self, meter, job):
    self._meter, self._job = meter, job
    self._steps = 0

  def on_train_begin(self, args, state, control, **kwargs):
    self._meter.start()

  def on_step_end(self, args, state, control, **kwargs):
    tokens = sum(shared.lengths_of_step(self._steps, self._job))
    self._steps += 1
    self._meter.tick(tokens, last=self._steps == self._job["steps"])


def force_lengths(policy, job):
  """Makes every call of `policy.generate` follow the job's lengths."""
  generate, calls = policy.generate, []

  def forced(*args, **kwargs):
    lengths = shared.lengths_of_step(len(calls), job)
    processor = ForcedLengths(lengths, job["prompt_len"])
    out = generate(*args, logits_processor=[processor], **kwargs)
    found = (out.sequences[:, job["prompt_len"] :] == shared.EOS_ID).int()
    assert (found.argmax(1) + 1).tolist() == lengths, (found.argmax(1), lengths)
    calls.append(out.sequences.shape)
    return out

  policy.generate = forced


def main():
  job = shared.job()
  transformers.logging.set_verbosity_error()
  torch.set_num_threads(job["threads"])
  torch.manual_seed(0)
  policy, reference, reward, critic = models_of(job)
  force_lengths(policy, job)
  num = job["steps"] * job["batch_size"]
  meter = shared.Meter()
  with tempfile.TemporaryDirectory() as folder:
    args = ppo.PPOConfig(
      output_dir=folder,
      use_cpu=True,
      bf16=False,
      gradient_checkpointing=False,
      per_device_train_batch_size=job["batch_size"],
      gradient_accumulation_steps=1,
      num_mini_batches=1,
      num_ppo_epochs=1,
      local_rollout_forward_batch_size=job["batch_size"],
      total_episodes=num,
      response_length=job["response_len"],
      stop_token="eos",
      temperature=1.0,
      num_sample_generations=0,
      logging_steps=num,
      save_strategy="no",
      report_to="none",
      disable_tqdm=True,
    )
    trainer = ppo.PPOTrainer(
      args=args,
      processing_class=tokenizer_of(job["vocab_size"]),
      model=policy,
      ref_model=reference,
      reward_model=reward,
      value_model=critic,
      train_dataset=datasets.Dataset.from_dict(
        {"input_ids": [shared.prompt_of(uid, job) for uid in range(num)]}
      ),
      callbacks=[Steps(meter, job)],
    )
    trainer.train()
  meter.close(
    parameters=sum(p.numel() for p in policy.parameters()),
    threads=torch.get_num_threads(),
  )


if __name__ == "__main__":
  main()
