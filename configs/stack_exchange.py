# SPDX-License-Identifier: Apache-2.0
r"""Questions of Stack Exchange, graded by a reward model of people's votes.

Three commands, each from what the one before it wrote:

  python -m oppo_jax.sft --config=configs/stack_exchange.py:tiny \
      --config.task.data_dir=DIR --workdir=runs/sft
  python -m oppo_jax.reward_model --config=configs/stack_exchange.py:tiny \
      --config.task.data_dir=DIR --config.load.policy=runs/sft/hf \
      --workdir=runs/reward_model
  python -m oppo_jax.train --config=configs/stack_exchange.py:tiny \
      --config.task.data_dir=DIR --config.load.policy=runs/sft/hf \
      --config.load.reward_model=runs/reward_model/hf --workdir=runs/ppo

Data:    DIR holds questions_{finetune,reward,rl,evaluation}.jsonl or .jsonl.gz,
         see tasks/stack_exchange.py.
Sizes:   tiny = a random byte-BPE model of 0.5M parameters, to see the path work
         on real rows, on a CPU; 0.5b, 1.5b, 3b, 7b = for a policy of that size
         in config.load.policy of the first command, with the paper's batch.
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="tiny", arm="oppo", preset="openrlhf")
  if arg.word != "tiny" and arg.word not in common.SIZES:
    raise ValueError(
      f"configs/stack_exchange.py: size {arg.word!r}: not tiny or one of"
      f" {tuple(common.SIZES)}"
    )
  config = common.base(arm=arg.arm, preset=arg.preset)
  config.task_name = "stack_exchange"
  config.task = dict(data_dir="")
  config.reward.update(model_weight=1.0, rule_weight=0.0)  # there is no rule
  config.eval.num_prompts = 0  # nor an accuracy; `evaluate` has the rewards
  # What is asked comes last: "... Answer:".
  config.rollout.long_prompts = "truncate_left"
  if arg.word == "tiny":
    config.num_steps = 40
    config.tokenizer.update(kind="bpe", vocab_size=2048)
    config.model.update(
      num_layers=2, width=64, head_dim=16, mlp_dim=192, rope_theta=1e4
    )
    config.sft.update(
      num_steps=100,
      rows=8,
      width=256,
      lr=3e-3,
      eval_every=50,
      save_every=50,
      long_responses="skip",  # so that all it sees come to an end
    )
    config.reward_model.update(
      num_steps=200,
      rows=12,
      width=320,
      lr=5e-4,
      eval_every=100,
      save_every=50,
      long_responses="truncate",
      center_coef=0.01,
    )
    config.rollout.update(
      batch_size=16, max_prompt_len=64, max_response_len=192
    )
    config.overlap.delta.update(init=4, max=8)
    config.optim.update(policy_lr=2e-4, critic_lr=1e-3)
  else:
    common.pretrained(config, arg.word)
    config.num_steps = 1000
    config.sft.update(num_steps=1000, long_responses="skip")
    config.reward_model.update(num_steps=1000, long_responses="skip")
    config.rollout.update(
      batch_size=112,  # the paper's
      max_prompt_len=512,
      max_response_len=1024,
    )
    config.score.update(tile_rows=16, tile_len=128)
    # The paper tries 100, 500 and 3000, for longer responses.
    config.overlap.chunk.update(kind="tuned", size=250, sizes=(100, 250, 500))
    config.overlap.delta.update(init=16, max=64, step=8)
  return config
