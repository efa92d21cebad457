# SPDX-License-Identifier: Apache-2.0
"""Tunix's PPOLearner in `benchmarks.peers`; see shared.py.

  python tunix_worker.py job.json < /dev/null   # in Tunix' environment

Settings: its Llama 3 model in float32 without rematerialisation, its own
sampler with a cache of exactly prompt + response limit; all rows at once in
generation, in scoring and in the update, so one optimizer step per batch, of
policy and of critic; temperature 1, no top-k or top-p; no evaluation, metric
backends or checkpoints. Random instead of zero MLP weights.

Lengths are forced inside the compiled sampler: the k-th call carries the k-th
batch's lengths in the sampling state, and before a row's last token the end
token has logit -inf, at its last token every other one. The padding token is
never sampled. What Tunix does with it stays: generation stops when every row
has ended, the end token itself is not trained on, and everything after
generation is padded to the response limit.
"""

import dataclasses
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared
from flax import nnx
from tunix.generate import sampler
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster, utils
from tunix.rl.ppo import ppo_learner
from tunix.rl.rollout import base_rollout


class Llama(llama.Llama3):
  """Takes, and needs not, the padding mask that scoring passes twice."""

  def __call__(
    self,
    input_tokens,
    positions,
    cache,
    attention_mask,
    segment_ids=None,
  ):
    del segment_ids
    return super().__call__(input_tokens, positions, cache, attention_mask)


class Numbers:
  """A tokenizer: the text of a prompt is its uid."""

  def __init__(self, job):
    self._job = job

  def encode(self, text, **kwargs):
    return shared.prompt_of(int(text), self._job).tolist()

  def decode(self, ids, **kwargs):
    return ""

  def bos_id(self):
    return None

  def eos_id(self):
    return shared.EOS_ID

  def pad_id(self):
    return shared.PAD_ID


def force_lengths(job):
  """Makes every call of the sampler follow the job's lengths."""
  cls = sampler.Sampler
  init, sample, call = cls.init_sample_state, cls._sample, cls.__call__
  calls = []

  def init_sample_state(self, *args, **kwargs):
    state = init(self, *args, **kwargs)
    lengths = shared.lengths_of_step(len(calls), job)
    # The field for forbidden tokens, otherwise unused, carries them.
    return dataclasses.replace(state, forbidden_token_ids=jnp.array(lengths))

  def forced_sample(self, logits, eos, cache, sampler_state):
    lengths = sampler_state.forbidden_token_ids
    index = sampler_state.decoding_step + 1 - job["prompt_len"]
    ids = jnp.arange(logits.shape[-1])
    ends = (index == lengths - 1)[:, None, None]
    allowed = ((ids == shared.EOS_ID) == ends) & (ids != shared.PAD_ID)
    state = sample(
      self,
      logits=jnp.where(allowed, logits[:, -1:], -jnp.inf),
      eos=eos,
      cache=cache,
      sampler_state=dataclasses.replace(
        sampler_state, forbidden_token_ids=None
      ),
    )
    return dataclasses.replace(state, forbidden_token_ids=lengths)

  def checked(self, *args, **kwargs):
    out = call(self, *args, **kwargs)
    lengths = shared.lengths_of_step(len(calls), job)
    found = [len(row) + 1 for row in out.tokens]
    assert found == lengths, (found, lengths)
    calls.append(found)
    return out

  cls.init_sample_state = init_sample_state
  cls._sample = forced_sample
  cls.__call__ = checked


def policy_of(job, seed):
  """A random model; its MLPs too, which start as zeros in Tunix."""
  m = job["model"]
  model = Llama(
    llama.ModelConfig(
      num_layers=m["num_layers"],
      vocab_size=job["vocab_size"],
      embed_dim=m["width"],
      hidden_dim=m["mlp_dim"],
      num_heads=m["num_heads"],
      head_dim=m["head_dim"],
      num_kv_heads=m["num_kv_heads"],
      rope_theta=10_000,
      norm_eps=1e-6,
    ),
    rngs=nnx.Rngs(seed),
  )
  rng = np.random.default_rng(seed)

  def fill(x):
    if x.ndim < 2:
      return x
    return jnp.asarray(rng.normal(0, 0.02, x.shape), jnp.float32)

  nnx.update(model, jax.tree.map(fill, nnx.state(model)))
  return model


def scalar_of(policy, seed):
  """The policy's trunk, copied, with one output."""
  return utils.create_critic_model(policy, seed=seed)


class Learner(ppo_learner.PPOLearner):
  """Tells the meter."""

  def watch(self, meter, job):
    self._meter, self._job, self._steps = meter, job, 0

  def _run_global_step(self, *args, **kwargs):
    if self._steps == self._job["steps"]:  # the data are over
      raise StopIteration
    super()._run_global_step(*args, **kwargs)
    for trainer in (
      self.rl_cluster.actor_trainer,
      self.rl_cluster.critic_trainer,
    ):
      jax.block_until_ready(nnx.state(trainer.model))
      assert trainer.train_steps == self._steps + 1
    tokens = sum(shared.lengths_of_step(self._steps, self._job))
    self._steps += 1
    self._meter.tick(tokens, last=self._steps == self._job["steps"])


def main():
  job = shared.job()
  meter = shared.Meter()
  force_lengths(job)
  size = job["batch_size"]
  mesh = jax.sharding.Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
  )
  policy = policy_of(job, 0)
  num_params = sum(x.size for x in jax.tree.leaves(nnx.state(policy)))
  cluster = rl_cluster.RLCluster(
    actor=policy,
    reference=policy_of(job, 0),
    critic=scalar_of(policy, 1),
    reward=scalar_of(policy_of(job, 2), 2),
    tokenizer=Numbers(job),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={role: mesh for role in rl_cluster.Role},
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6),
        critic_optimizer=optax.adamw(1e-6),
        eval_every_n_steps=10**9,
        max_steps=job["steps"],
        mini_batch_size=size,
        train_micro_batch_size=size,
        rollout_micro_batch_size=size,
        compute_logps_micro_batch_size=size,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=job["response_len"],
        max_prompt_length=job["prompt_len"],
        kv_cache_size=job["prompt_len"] + job["response_len"],
        temperature=1.0,
        top_p=1.0,
        top_k=None,
      ),
    ),
  )
  learner = Learner(cluster, ppo_learner.PPOConfig(num_iterations=1))
  learner.watch(meter, job)
  uids = np.arange(job["steps"] * size).astype(str).reshape(-1, size)
  meter.start()
  learner.train([{"prompts": prompts} for prompts in uids])
  meter.close(parameters=num_params)


if __name__ == "__main__":
  main()
