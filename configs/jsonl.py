# SPDX-License-Identifier: Apache-2.0
r"""Your own rows: files of a folder, and what their fields are called.

Run:     python -m oppo_jax.train --config=configs/jsonl.py \
             --config.task.data_dir=DIR --config.task.prompt=question \
             --config.task.answer=answer --config.task.rule=exact \
             --workdir=runs/own
Data:    DIR holds train.jsonl (.gz, .parquet, ...) and, if there is one, the
         same for test; see tasks/jsonl.py, and tasks/lines.py for file names.
Sizes:   small = a random byte-BPE model, which the solutions are taught to
         first; 0.5b, 1.5b, 3b, 7b = for a policy in config.load.policy.
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="small", arm="oppo", preset="openrlhf")
  if arg.word != "small" and arg.word not in common.SIZES:
    raise ValueError(
      f"configs/jsonl.py: size {arg.word!r}: not small or one of"
      f" {tuple(common.SIZES)}"
    )
  config = common.base(arm=arg.arm, preset=arg.preset)
  config.task_name = "jsonl"
  config.task = dict(
    data_dir="",
    prompt="prompt",  # fields of a row; "" = there is none
    answer="",
    solution="",
    chosen="",
    rejected="",
    margin="",
    template="{prompt}",  # how a prompt is put to the policy
    rule="none",  # none | exact | number
    test_share=10,  # without a test file: one prompt in this many is held out
  )
  config.rollout.long_prompts = "skip"
  if arg.word == "small":
    config.tokenizer.update(kind="bpe", vocab_size=1024)
    config.model.update(rope_theta=1e4)
    config.sft.update(num_steps=200, width=256, long_responses="truncate")
    config.reward_model.update(
      num_steps=200, width=256, long_responses="truncate"
    )
    config.rollout.update(max_prompt_len=128, max_response_len=128)
  else:
    common.pretrained(config, arg.word)
    config.sft.num_steps = 1000
    config.reward_model.num_steps = 1000
    config.rollout.update(
      batch_size=112, max_prompt_len=512, max_response_len=1024
    )
    config.score.update(tile_rows=16, tile_len=128)
    config.overlap.chunk.size = 256
    config.overlap.delta.update(init=16, max=64, step=8)
  return config
