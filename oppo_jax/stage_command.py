# SPDX-License-Identifier: Apache-2.0
"""What the commands of the supervised stages share: flags, and first checks."""

import pathlib
from collections.abc import Callable

import ml_collections
from absl import flags

from oppo_jax import cli, compile_cache, encoding, supervised_run
from oppo_jax import config as config_lib

Train = Callable[[ml_collections.ConfigDict, pathlib.Path], None]


def run(train: Train, section: str) -> None:
  """Reads --config and --workdir, checks both, and trains."""

  def define() -> None:
    cli.define_config()
    flags.DEFINE_string("workdir", None, "Folder of the run.")

  def main(args: flags.FlagValues) -> None:
    if not args.workdir:
      raise ValueError("--workdir='': must be a folder")
    config, workdir = args.config, pathlib.Path(args.workdir)
    config_lib.validate(without_reward(config))
    if not config[section].num_steps:
      raise ValueError(f"config.{section}.num_steps=0: must be at least 1 here")
    supervised_run.check_workdir(workdir, config)
    compile_cache.enable(config.compile_cache, workdir)
    train(config, workdir)

  cli.run(main, define, required=["config", "workdir"])


def without_reward(
  config: ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
  """A copy that asks for no reward model: before PPO there may be none."""
  copied = config.copy_and_resolve_references()
  copied.reward.model_weight = 0.0
  return copied


def say_found(
  name: str, split: str, found: encoding.Encoded, what: str
) -> None:
  """How much there is to learn from, and what was left out."""
  ties = f", {found.num_tied} without a difference" if found.num_tied else ""
  cli.say(
    f"{name}: {split} split: {len(found.items)} {what}"
    f" ({found.num_long} too long{ties})"
  )
