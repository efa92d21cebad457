# SPDX-License-Identifier: Apache-2.0
"""The scripts of benchmarks/ run, at sizes that measure nothing."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZES = {
  "decode": ["--rows=4", "--lives=8", "--chunks=2", "--capacity=24"],
  "score": ["--batch_size=4", "--response_len=24", "--tiles=16", "--call=32"],
  "step": [
    *("--batch_size=4", "--delta=2", "--prompt_len=8", "--response_len=16"),
    *("--arms=oppo", "--steps=1", "--warm_up=1"),
  ],
}


@pytest.mark.parametrize("name", SIZES)
def test_a_benchmark_leaves_its_result(name, tmp_path):
  out = tmp_path / "result.json"
  command = [sys.executable, "-m", f"benchmarks.{name}", "--model=small"]
  rounds = [] if name == "step" else ["--rounds=1"]
  subprocess.run(
    [*command, *SIZES[name], *rounds, f"--out={out}"], cwd=ROOT, check=True
  )
  result = json.loads(out.read_text())
  assert result["command"].startswith(f"python -m benchmarks.{name} ")
  assert result.get("cases") or result.get("workloads")
