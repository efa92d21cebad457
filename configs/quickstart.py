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
  config.model.rope_theta = 30.0  # short rows
  # Half of the demonstrations have a mistake in them, as those of people do:
  # the policy learns to work, but also to be sloppy. PPO is to mend that.
  config.warm_start.sft.update(num_steps=400, spoiled=0.5)
  config.warm_start.reward_model.update(num_steps=400, rows=12, lr=2e-3)
  config.rollout.batch_size = 128
  config.reward = dict(model_weight=1.0, rule_weight=0.0)
  config.optim.policy_lr = 1e-4
  config.optim.critic_lr = 3e-4
  config.optim.warmup_steps = 10
  config.algo.lam = 0.95
  config.overlap.delta.update(init=16, max=48, step=4)
  return config
