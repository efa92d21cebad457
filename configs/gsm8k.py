# SPDX-License-Identifier: Apache-2.0
r"""GSM8K word problems, graded by their final number.

Run:     python -m oppo_jax.train --config=configs/gsm8k.py:tiny \
             --config.task.data_dir=DIR --workdir=runs/gsm8k
Data:    DIR holds train.jsonl and test.jsonl (or .gz), as published at
         github.com/openai/grade-school-math.
Sizes:   tiny = a random byte-BPE model of 0.3M parameters and 3 steps, to see
         the path work on real rows; small = 25M parameters with a warm start;
         0.5b, 1.5b, 3b, 7b = for a policy of that size in config.load.policy,
         the rule as the only reward, and the paper's batch. A base model is
         taught the format first: python -m oppo_jax.sft with the same config.
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="small", arm="oppo", preset="openrlhf")
  if arg.word not in ("tiny", "small", *common.SIZES):
    raise ValueError(
      f"configs/gsm8k.py: size {arg.word!r}: not tiny, small or one of"
      f" {tuple(common.SIZES)}"
    )
  config = common.base(arm=arg.arm, preset=arg.preset)
  config.task_name = "gsm8k"
  config.task = dict(data_dir="")
  config.rollout.long_prompts = "skip"
  if arg.word == "tiny":
    config.num_steps = 3
    config.tokenizer.update(kind="bpe", vocab_size=512)
    config.model.update(num_layers=2, width=64, head_dim=16, mlp_dim=192)
    config.warm_start.sft.update(num_steps=40, width=448, rows=4)
    config.rollout.update(
      batch_size=8, max_prompt_len=192, max_response_len=256
    )
    config.overlap.delta.update(init=4, max=8)
    config.reward.update(model_weight=0.5, rule_weight=1.0)
    config.eval.num_prompts = 32
  elif arg.word == "small":
    config.num_steps = 500
    config.tokenizer.update(kind="bpe", vocab_size=4096)
    config.model.update(
      num_layers=8,
      width=512,
      num_heads=8,
      num_kv_heads=4,
      head_dim=64,
      mlp_dim=1536,
    )
    config.warm_start.sft.update(num_steps=3000, rows=32, width=640, lr=1e-3)
    config.warm_start.reward_model.update(
      num_steps=500, rows=32, width=640, lr=3e-4
    )
    config.rollout.update(
      batch_size=64, max_prompt_len=256, max_response_len=384
    )
    config.overlap.delta.update(init=16, max=32)
    config.reward.update(model_weight=0.2, rule_weight=1.0)
    config.optim.policy_lr = 2e-5
    config.optim.critic_lr = 1e-4
  else:
    common.pretrained(config, arg.word)
    config.num_steps = 500
    config.sft.update(num_steps=500, width=1024)
    config.rollout.update(
      batch_size=112,  # the paper's
      max_prompt_len=256,
      max_response_len=512,
    )
    config.score.update(tile_rows=16, tile_len=128)
    config.overlap.chunk.size = 128
    config.overlap.delta.update(init=16, max=64, step=8)
    config.reward.update(model_weight=0.0, rule_weight=1.0)
    config.critic.init = "policy"
    config.eval.update(num_prompts=256, every=50)
  return config
