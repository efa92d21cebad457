# SPDX-License-Identifier: Apache-2.0
r"""Programs, graded by running them: the code task of the paper.

Run:     python -m oppo_jax.train --config=configs/opencoder.py:1.5b \
             --config.task.train_path=FILE --config.load.policy=FOLDER \
             --workdir=runs/opencoder
Data:    FILE holds rows of MBPP (mbpp.jsonl), HumanEval (HumanEval.jsonl.gz) or
         OpenCoder's instructions with tests; tasks/code_rows.py says how they
         are told apart. --config.task.test_path names another one for the test
         split, e.g. HumanEval's.
Sizes:   tiny = a random byte-BPE model of 0.3M parameters and 3 steps, to see
         the path work on real rows of MBPP (a CPU and a minute or two);
         0.5b, 1.5b, 3b, 7b = for a policy of that size in config.load.policy,
         with the paper's batch.
Safety:  programs run in a sandbox; oppo_jax/sandbox.py says what that is worth.
         Where the system does not grant it, isolation="required" ends the run
         at its start. `python -m benchmarks.sandbox` shows what holds here.

A base model goes on where the prompt ends ([BEGIN] ... [DONE]); one that chats
is asked (style="ask") within its template (rollout.chat).
"""

from configs import common
from oppo_jax import config as config_lib


def get_config(arg=None):
  arg = config_lib.parse_arg(arg, word="tiny", arm="oppo", preset="openrlhf")
  if arg.word != "tiny" and arg.word not in common.SIZES:
    raise ValueError(
      f"configs/opencoder.py: size {arg.word!r}: not tiny or one of"
      f" {tuple(common.SIZES)}"
    )
  config = common.base(arm=arg.arm, preset=arg.preset)
  config.task_name = "code"
  config.task = dict(
    train_path="",
    test_path="",  # "" = the file of train_path
    style="complete",  # complete | ask
    # Tests in the prompt. All of them grade: what is not shown cannot be
    # answered by heart.
    shown_tests=1,
    cpu_s=6,  # of a program; the slowest reference program takes 5
    wall_s=30.0,  # with its tests; far more, as graders share the cores
    memory_mb=512,  # of a process
    processes=8,  # and threads
    isolation="required",  # any = run programs where nothing holds them
    workers=8,  # threads that grade while other rows decode
  )
  config.rollout.long_prompts = "skip"
  # The main rule is 1 if all tests pass. `tests` is the share that do, which
  # has something to say of programs that are nearly right.
  with config.unlocked():
    config.reward.rules.update(tests=0.0, code_timeout=0.0, code_empty=0.0)
  if arg.word == "tiny":
    config.num_steps = 3
    config.task.workers = 2
    config.tokenizer.update(kind="bpe", vocab_size=512)
    config.model.update(num_layers=2, width=64, head_dim=16, mlp_dim=192)
    config.warm_start.sft.update(num_steps=60, width=512, rows=4)
    config.rollout.update(
      batch_size=8, max_prompt_len=224, max_response_len=160
    )
    config.overlap.delta.update(init=4, max=8)
    config.reward.update(model_weight=0.5, rule_weight=1.0)
    config.reward.rules.update(tests=0.5, ended=0.2)
    config.eval.num_prompts = 16
  else:
    common.pretrained(config, arg.word)
    config.num_steps = 500
    config.rollout.update(
      batch_size=112,  # the paper's
      max_prompt_len=512,
      max_response_len=1024,
    )
    config.score.update(tile_rows=16, tile_len=128)
    # The paper finds 500 best among 100, 500 and 3000; chunks of whole tiles.
    config.overlap.chunk.update(size=512, sizes=(128, 512, 1024))
    config.overlap.delta.update(init=16, max=64, step=8)
    # The rule is the only reward: nothing learned that could be exploited.
    config.reward.update(model_weight=0.0, rule_weight=1.0)
    config.reward.rules.tests = 0.1
    config.critic.init = "policy"
    config.eval.update(num_prompts=250, every=50)
  return config
