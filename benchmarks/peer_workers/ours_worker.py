# SPDX-License-Identifier: Apache-2.0
"""An arm of oppo_jax in `benchmarks.peers`; see shared.py.

python benchmarks/peer_workers/ours_worker.py job.json < /dev/null
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import shared

from benchmarks import bench


def main():
  job = shared.job()
  config = bench.config_of(
    job["arm"],
    model="peer",
    batch_size=job["batch_size"],
    delta=job["delta"],
    prompt_len=job["prompt_len"],
    response_len=job["response_len"],
    staleness=job["staleness"],
  )
  arm = bench.Arm(config, job["lengths"])
  meter = shared.Meter()
  meter.start()
  for step in range(job["steps"]):
    tokens = arm.step()["tokens/trained"]
    meter.tick(tokens, last=step == job["steps"] - 1)
  meter.close(parameters=arm.num_params)


if __name__ == "__main__":
  main()
