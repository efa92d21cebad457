# SPDX-License-Identifier: Apache-2.0
r"""One arm of the ablation, small enough for a minute: same work in every arm.

Run:     python -m oppo_jax.train --config=configs/ablation.py:oppo \
             --workdir=runs/ablation/oppo
Arms:    serial sequence intra inter restart oppo
Expect:  `batches_sha256` and `params_sha256` of summary.json are equal for
         serial, sequence and intra; and for inter and oppo.

A random policy, no warm start: an EOS is as likely as any other token, so
lengths are geometric and rows are deferred at every step.
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="oppo", preset="openrlhf")
  config = common.base(arm=arg.word, preset=arg.preset)
  config.num_steps = 20
  config.task.num_train = 2_000
  config.task.num_test = 64
  config.model.update(num_layers=2, width=64, head_dim=16, mlp_dim=192)
  config.rollout.batch_size = 16
  config.rollout.max_response_len = 96
  config.overlap.delta.update(kind="paper", init=8, max=16, window=3)
  config.optim.policy_lr = 3e-4
  config.reward.update(model_weight=0.5, rule_weight=1.0)
  config.eval.num_prompts = 0
  return config
