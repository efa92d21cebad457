# SPDX-License-Identifier: Apache-2.0
r"""PPO from a pretrained model on a CPU: stories with more exclamation marks.

Model:   stories260K.bin and tok512.bin of llama2.c in one folder DIR:
         python -m oppo_jax.convert --source=DIR --out=stories260k
Run:     python -m oppo_jax.train --config=configs/stories.py \
             --config.load.policy=stories260k --workdir=runs/stories
Reward:  share of a story's sentences that end in "!", nothing else.
Takes:   3 minutes on two cores. Expect a held-out share above 0.9, sampled
         (seed 0: 0.947, from 0.054; greedy 0.990, from 0.004).
Arms:    --config=configs/stories.py:serial   (sequence, intra, inter, ...)
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="oppo", preset="openrlhf")
  config = common.base(arm=arg.word, preset=arg.preset)
  config.num_steps = 24
  config.task_name = "stories"
  config.task = dict(num_test=64, seed=0)
  config.reward.update(model_weight=0.0, rule_weight=1.0)
  config.critic.init = "policy"
  config.rollout.update(batch_size=64, max_prompt_len=64, max_response_len=96)
  config.optim.update(policy_lr=2e-4, critic_lr=1e-3, warmup_steps=10)
  config.algo.update(lam=1.0, num_epochs=2, num_minibatches=2)
  config.overlap.delta.update(init=16, max=32)
  config.eval.num_prompts = 64
  return config
