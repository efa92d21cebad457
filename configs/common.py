# SPDX-License-Identifier: Apache-2.0
"""Every field there is, and what it means; experiments start from here.

Sizes are those of a laptop run; `oppo_jax/config.py` states allowed ranges.
"""

import ml_collections

from oppo_jax import config as config_lib
from oppo_jax.algos import ppo

ARMS = config_lib.ARMS


def base(*, arm: str = "oppo", preset: str = "openrlhf"):
  """A complete config: `arm` of `ARMS`, PPO arithmetic of `ppo.PRESETS`."""
  if preset not in ppo.PRESETS:
    raise ValueError(f"preset {preset!r}: not one of {sorted(ppo.PRESETS)}")
  config = ml_collections.ConfigDict()
  config.seed = 0
  config.num_steps = 100  # PPO updates, one batch each
  config.compile_cache = "user"  # user | workdir | off: where programs are kept

  # What is asked, and how text becomes tokens.
  config.task_name = "arithmetic"
  config.task = dict(
    difficulty=1,  # 1 .. 5, see tasks/arithmetic.py
    max_ops=12,
    num_train=20_000,
    num_test=512,
    seed=0,
  )
  config.tokenizer = dict(kind="char", vocab_size=0, path="")

  # Hugging Face folders to start from; "" = as the other sections say.
  config.load = dict(
    policy="",  # its tokenizer too, unless tokenizer.path names another
    reference="",  # "" = a frozen copy of the policy
    reward_model="",  # a *ForSequenceClassification with one label
    critic="",  # "" = as critic.init says
    retokenize=False,  # the reward model reads finished responses as text
  )

  # Policy; whatever has no folder has its trunk. Of a policy from a folder only
  # dtype, attention, attention_block and remat count, for all four models.
  config.model_name = "transformer"
  config.model = dict(
    num_layers=3,
    width=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    mlp_dim=288,
    rope_theta=100.0,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=True,
    dtype="float32",
    attention="auto",  # or "xla", or "flash": kernels for GPUs, bfloat16
    attention_block=-1,  # columns read at a time: -1 = auto, 0 = the whole row
    remat="none",  # none | attention | layer: recomputed in the backward pass
  )
  # Without a folder. reward: its trunk and head; policy: its trunk and a new
  # head; random.
  config.critic = dict(init="reward")

  # Supervised stages before PPO; num_steps = 0 skips one.
  fit = dict(
    rows=8, width=144, lr=3e-3, warmup_steps=20, weight_decay=0.1, clip_norm=1.0
  )
  config.warm_start = dict(
    # terse: share of demonstrations that give the answer without the work
    sft=dict(num_steps=0, terse=0.0, **fit),
    # num_prompts: sampled num_samples times each from the policy
    # num_spoiled: further prompts, with a spoiled solution as the wrong one
    reward_model=dict(
      num_steps=0, num_prompts=512, num_samples=4, num_spoiled=8_000, **fit
    ),
  )

  # The stages as commands of their own: sft.py, reward_model.py.
  stage = dict(
    num_steps=0,
    eval_every=0,  # steps between held-out evaluations; 0 = ends only
    save_every=0,  # steps between snapshots, to go on from after a kill
    num_eval=0,  # held-out items at most; 0 = all
    long_responses="skip",  # of more than `width` tokens; or truncate
    **fit,
  )
  config.sft = stage
  config.reward_model = dict(
    margin_coef=0.0,  # of the pair's margin, taken off the gap of scores
    center_coef=0.0,  # of the squared sum of a pair's scores
    **stage,
  )

  config.rollout = dict(
    batch_size=32,  # B, rows trained on per update
    max_prompt_len=32,  # P, tokens
    max_response_len=112,  # R, tokens
    temperature=1.0,
    top_k=0,  # 0 = off
    top_p=1.0,  # 1.0 = off
    long_prompts="refuse",  # refuse | skip | truncate_left
    chat=False,  # prompts in the tokenizer's chat template
    system="",  # message before them there
    target_lengths_path="",  # benchmarks: one response length per uid
    decode_loop="auto",  # while | fori; auto = fori on GPU
    decode_rows=-1,  # rows per model call: -1 = auto, 0 = all slots
  )
  config.score = dict(
    tile_rows=16,  # Q, tiles per scoring call
    tile_len=32,  # T, tokens
    logprob_chunk=512,  # tokens whose logits exist at one time
  )
  config.reward = dict(
    model_weight=1.0,
    rule_weight=0.0,  # of the task's main rule
    # Further rules: two of every task, and what a task brings, by name.
    rules=dict(
      length=0.0,  # - tokens / R
      ended=0.0,  # 1 if an EOS ended the response
    ),
  )

  config.overlap = dict(
    intra="none",  # none | sequence | chunk
    inter="none",  # none | resume | restart
    placement="colocated",  # or disaggregated: scorers on a second device
    dispatch="auto",  # separate | fused: a chunk and tiles as one program
    max_staleness=2,  # updates a row may be deferred; -1 = unbounded
    policy_cache="recompute",  # of deferred rows after an update; or keep
    critic_cache="recompute",  # keep: values then depend on `intra`
    replay_path="",  # decisions.jsonl, for kind="replay" of chunk and delta
  )
  config.overlap.chunk = dict(
    kind="fixed",  # fixed | tuned | replay
    size=16,
    sizes=(8, 16, 32, 64),  # candidates of tuned; paper: (100, 500, 3000)
    period=50,
  )
  config.overlap.delta = dict(
    kind="robust",  # fixed | paper | paper_proportional | robust | replay
    init=8,
    min=0,
    max=16,
    window=8,  # steps
    step=2,
    dead_band=2.0,  # standard errors, robust only
  )

  config.update_from_flattened_dict(config_lib.arm_overrides(arm))

  config.algo_name = "ppo"
  # denominator of the ratio: auto = behavior in float32, decoupled in bfloat16
  config.algo = ppo.PRESETS[preset] | dict(denominator="auto")
  config.optim = dict(
    policy_lr=1e-4,
    critic_lr=3e-4,
    schedule="constant",  # constant | linear | cosine
    warmup_steps=0,  # optimizer steps
    clip_norm=1.0,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    micro_rows=0,  # packed rows per micro-batch, 0 = auto
    pack_width=0,  # tokens per packed row, 0 = prompt + response limit
  )

  config.eval = dict(num_prompts=256, every=0)  # every: steps, 0 = ends only
  config.log = dict(
    rollouts_per_step=4,
    params_every=0,  # steps between kept versions, for audits; 0 = none
    tensorboard=False,
  )
  return config


# Qwen2.5. With config.load.policy, which these sizes are for, the folder says
# them; without, they are those of a random model, for benchmarks.
SIZES = {
  "0.5b": dict(
    num_layers=24,
    width=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=4864,
  ),
  "1.5b": dict(
    num_layers=28,
    width=1536,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    mlp_dim=8960,
  ),
  "3b": dict(
    num_layers=36,
    width=2048,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    mlp_dim=11008,
  ),
  "7b": dict(
    num_layers=28,
    width=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    mlp_dim=18944,
    tie_embeddings=False,
  ),
}


def pretrained(config: ml_collections.ConfigDict, size: str) -> None:
  """Sets what a pretrained policy of a size of `SIZES` wants."""
  config.tokenizer.update(kind="bpe", vocab_size=32_000)  # without a folder
  config.model.update(
    rope_theta=1e6,
    norm_eps=1e-6,
    qkv_bias=True,
    dtype="bfloat16",  # parameters and optimizer are float32
    remat="layer",
    **SIZES[size],
  )
  config.critic.init = "reward"
  is_small = size in ("0.5b", "1.5b")
  config.optim.update(
    policy_lr=1e-6 if is_small else 5e-7,
    critic_lr=1e-5 if is_small else 5e-6,
    warmup_steps=10,
    weight_decay=0.0,
  )
  fit = dict(rows=32, width=2048, warmup_steps=20, weight_decay=0.0)
  config.sft.update(lr=1e-5, save_every=100, eval_every=100, **fit)
  config.reward_model.update(
    lr=1e-5 if is_small else 5e-6,
    save_every=100,
    eval_every=100,
    center_coef=0.01,  # TRL's example
    **fit,
  )
