# SPDX-License-Identifier: Apache-2.0
r"""From nothing to a policy improved by PPO, on a laptop CPU.

Run:     python -m oppo_jax.train --config=configs/quickstart.py \
             --workdir=runs/quickstart
Arms:    --config=configs/quickstart.py:serial   (sequence, intra, inter, ...)
Presets: --config=configs/quickstart.py:preset=trl
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="oppo", preset="openrlhf")
  config = common.base(arm=arg.word, preset=arg.preset)
  config.num_steps = 100
  config.warm_start.sft.num_steps = 350
  config.warm_start.reward_model.num_steps = 200
  config.warm_start.reward_model.lr = 1e-3
  config.rollout.batch_size = 64
  config.reward = dict(model_weight=1.0, rule_weight=0.0)
  config.optim.policy_lr = 2e-4
  config.optim.critic_lr = 1e-3
  config.overlap.delta.init = 8
  config.overlap.delta.max = 24
  return config
