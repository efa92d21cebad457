# SPDX-License-Identifier: Apache-2.0
"""OPPO: PPO-based RLHF with pipeline overlap, in JAX.

Start reading at `overlap.py` (the paper's algorithm), then `types.py` (what is
stored per sequence), then `algos/ppo.py` (the losses).
"""
