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
  config.num_steps = 60
  config.model.rope_theta = 30.0  # short rows
  # Half of the demonstrations give the answer without the work. The policy
  # learns to do so too, and is mostly wrong then; PPO finds that out.
  config.warm_start.sft.update(num_steps=800, lr=6e-3, terse=0.5)
  config.warm_start.reward_model.update(num_steps=200, lr=1e-3)
  config.rollout.batch_size = 128
  # The learned reward model alone was exploited in trials (README says more):
  # it gets a twentieth of the weight of the rule.
  config.reward.update(model_weight=0.05, rule_weight=1.0)
  config.critic.init = "random"
  config.optim.update(policy_lr=2.5e-4, critic_lr=1e-3)
  config.optim.update(warmup_steps=10, schedule="linear")
  config.algo.update(lam=1.0, num_epochs=2, num_minibatches=2)
  config.overlap.delta.update(init=16, max=48, step=4)
  return config
