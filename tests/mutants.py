# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects, one at a time, in a copy of the package.

Would the tests notice? Each mutant is one textual replacement; the tests named
beside it must fail on it, and pass without it.

  python tests/mutants.py               all of them: a table, and the count
  python tests/mutants.py --only=eos    those with "eos" in their name
  python tests/mutants.py --jobs=2      two at a time

The exit status is 0 only if every mutant is caught. It is no part of the
ordinary run of the tests (`mutants_test.py` keeps the list from rotting).
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = ("oppo_jax", "configs", "tests", "benchmarks", "docs")
LIMIT_S = 600  # a mutant that loops for ever is caught, too
# Appended to conftest.py of the copy. A failing example is failure enough.
CONFTEST = """
import oppo_jax
assert oppo_jax.__file__.startswith({root!r}), oppo_jax.__file__
hypothesis.settings.register_profile(
  "mutants",
  parent=hypothesis.settings.get_profile("tests"),
  phases=[hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("mutants")
"""


class Mutant(NamedTuple):
  """One defect.

  Attributes:
    name: what is wrong.
    file: module of the package.
    old: its text there; occurs once.
    new: what stands there instead.
    tests: modules of tests/, without "_test.py", that must catch it.
  """

  name: str
  file: str
  old: str
  new: str
  tests: str


MUTANTS = (
  # What is drawn, and with which key.
  Mutant(
    "one key for every position of a row",
    "decode.py",
    "keys = jax.vmap(jax.random.fold_in)(fold(run_key, uid), position)",
    "keys = fold(run_key, uid)",
    "oracle",
  ),
  Mutant(
    "one random number for all digits of a draw",
    "inverse_cdf.py",
    "_digit(below, u[:, place])",
    "_digit(below, u[:, 0])",
    "inverse_cdf",
  ),
  Mutant(
    "what has no probability is drawn where a sum begins",
    "inverse_cdf.py",
    "jnp.argmax(has_mass & (up_to",
    "jnp.argmax((up_to",
    "inverse_cdf",
  ),
  Mutant(
    "keys of the slot instead of the uid",
    "decode.py",
    "    pick(slots.uid),\n    length,",
    "    pick(jnp.arange(slots.uid.shape[0])),\n    length,",
    "oracle",
  ),
  Mutant(
    "one key for all purposes",
    "keys.py",
    "PURPOSES.index(purpose)",
    "0",
    "keys",
  ),
  Mutant(
    "temperature missing in the behavior log-probs",
    "decode.py",
    "    logits, **distribution, keep=tokens\n",
    '    logits, **distribution | {"temperature": 1.0}, keep=tokens\n',
    "decode",
  ),
  Mutant(
    "temperature missing in the scorers' log-probs",
    "score.py",
    "      temperature=temperature,\n      top_k=top_k,",
    "      temperature=1.0,\n      top_k=top_k,",
    "score",
  ),
  Mutant(
    "temperature missing in the loss",
    "algos/ppo.py",
    "    **sampling,\n  )\n  logprobs, entropy = ",
    '    **sampling | {"temperature": 1.0},\n  )\n  logprobs, entropy = ',
    "ppo",
  ),
  Mutant(
    "the token that crosses top_p is cut",
    "ops.py",
    "is_kept = jnp.cumsum(probs, axis=-1) - probs < top_p",
    "is_kept = jnp.cumsum(probs, axis=-1) < top_p",
    "ops",
  ),
  # Cursors, ends, ticks.
  Mutant(
    "decode feeds the token before the last",
    "decode.py",
    "at = jnp.where(is_live, length - 1, 0)",
    "at = jnp.where(is_live, jnp.maximum(length - 2, 0), 0)",
    "decode",
  ),
  Mutant(
    "the last call of live rows is left out",
    "decode.py",
    "num_calls = (num_live + decode_rows - 1) // decode_rows",
    "num_calls = jnp.maximum(num_live // decode_rows, 1)",
    "decode",
  ),
  Mutant(
    "the EOS is dropped from the response",
    "decode.py",
    "length=slots.length + advance,",
    "length=slots.length + (advance & ~is_eos),",
    "oracle",
  ),
  Mutant(
    "only the first EOS id ends a response",
    "decode.py",
    "is_eos = jnp.isin(token, jnp.asarray(sampling.eos_ids, jnp.int32))",
    "is_eos = token == sampling.eos_ids[0]",
    "oracle",
  ),
  Mutant(
    "one token too many at the length limit",
    "decode.py",
    "(response_len == sampling.max_response_len)",
    "(response_len > sampling.max_response_len)",
    "oracle",
  ),
  Mutant(
    "finished rows go on",
    "decode.py",
    "advance = slots.is_live & ~is_frozen",
    "advance = ~slots.is_free & ~is_frozen",
    "buffer_machine",
  ),
  Mutant(
    "tokens carry the version of their row's admission",
    "decode.py",
    "put(slots.token_version, version)",
    "put(slots.token_version, slots.admitted_at)",
    "oracle",
  ),
  Mutant(
    "the while loop stops at the end of a chunk, not in token time",
    "decode.py",
    """      return (i < chunk_size) & ~complete

    def one_tick(carry):
      i, complete, slots, cache = carry
      slots, cache = step(slots, cache, complete)
""",
    """      return i < chunk_size

    def one_tick(carry):
      i, complete, slots, cache = carry
      slots, cache = step(slots, cache, False)
""",
    "oracle",
  ),
  Mutant(
    "the fori loop stops at the end of a chunk, not in token time",
    "decode.py",
    "step(slots, cache, complete)\n      return is_complete",
    "step(slots, cache, False)\n      return is_complete",
    "decode",
  ),
  # Who leaves, when, and in which order.
  Mutant(
    "a batch is left in the order of completion",
    "slots.py",
    "uid = jnp.where(selected, slots.uid, jnp.iinfo(jnp.int32).max)",
    "uid = jnp.where(selected, slots.finished_tick, jnp.iinfo(jnp.int32).max)",
    "slots",
  ),
  Mutant(
    "the first admitted leave, not the first finished",
    "slots.py",
    "jnp.lexsort((slots.uid, tick, ~starving, ~ready))",
    "jnp.lexsort((slots.uid, ~starving, ~ready))",
    "buffer_machine",
  ),
  Mutant(
    "on one tick the lower slot leaves first",
    "slots.py",
    "jnp.lexsort((slots.uid, tick, ~starving, ~ready))",
    "jnp.lexsort((tick, ~starving, ~ready))",
    "buffer_machine",
  ),
  Mutant(
    "nobody waits for a starving row",
    "slots.py",
    "(jnp.sum(ready) >= batch_size) & ~jnp.any(missing)",
    "jnp.sum(ready) >= batch_size",
    "buffer_machine",
  ),
  Mutant(
    "a row may be deferred once more than allowed",
    "slots.py",
    "(version - slots.admitted_at >= max_staleness)",
    "(version - slots.admitted_at > max_staleness)",
    "buffer_machine",
  ),
  Mutant(
    "a group is split",
    "slots.py",
    "return num_done == group_size, tick",
    "return done & (num_done > 0), tick",
    "slots",
  ),
  Mutant(
    "a restarted row keeps its log-probs",
    "slots.py",
    "    behavior_logprobs=jnp.zeros_like(slots.behavior_logprobs),\n",
    "",
    "slots",
  ),
  Mutant(
    "responses are aligned one column late",
    "slots.py",
    "columns = prompt_len[:, None] - 1 + jnp.arange(max_response_len)",
    "columns = prompt_len[:, None] + jnp.arange(max_response_len)",
    "slots",
  ),
  Mutant(
    "the score is read before the last token",
    "slots.py",
    'outputs["reward"][rows, length - 1]',
    'outputs["reward"][rows, length - 2]',
    "slots",
  ),
  # Tiles, caches, and what survives an update.
  Mutant(
    "a cache write past the end is clamped",
    "models/attention.py",
    '.set(new, mode="drop")',
    '.set(new, mode="clip")',
    "cache",
  ),
  Mutant(
    "a cache has no room for the last tile",
    "score.py",
    "return -(-row_len // tile_len) * tile_len",
    "return row_len",
    "cache",
  ),
  Mutant(
    "tiles predict their own tokens",
    "score.py",
    "return cache, hidden, columns, at(columns + 1)",
    "return cache, hidden, columns, at(columns)",
    "score",
  ),
  Mutant(
    "a tile runs before the token after it exists",
    "tiling.py",
    "max(length - 1, 0) // tile_len",
    "length // tile_len",
    "tiling",
  ),
  Mutant(
    "the last tile of every call runs again",
    "tiling.py",
    "frontier[s] = t + 1",
    "frontier[s] = t",
    "tiling",
  ),
  Mutant(
    "no scorer waits for the batch",
    "flight.py",
    "if sizes.speculates or",
    "if True or",
    "score",
  ),
  Mutant(
    "the last tiles of a batch are never scored",
    "overlap.py",
    "state, report.tokens, rows, flush=True,",
    "state, report.tokens, rows, flush=False,",
    "oracle",
  ),
  Mutant(
    "row lengths are reported by slot, not by uid",
    "overlap.py",
    "  taken = taken[np.argsort(state.uid[taken])]\n",
    "",
    "oracle",
  ),
  Mutant(
    "prompts are prefilled but for their last tile",
    "overlap.py",
    "-(-(state.length - 1) // tile.length)",
    "(state.length - 1) // tile.length",
    "oracle",
  ),
  Mutant(
    "the policy cache of a deferred row survives the update",
    "flight.py",
    "    stale |= {POLICY_CACHE}\n",
    "    pass\n",
    "oracle",
  ),
  Mutant(
    "the values of a deferred row survive the update",
    "flight.py",
    '    stale |= {"critic"}\n',
    "    pass\n",
    "oracle",
  ),
  Mutant(
    "start log-probs of a deferred row survive the update",
    "flight.py",
    '  stale = {"policy"}',
    "  stale = set()",
    "oracle",
  ),
  Mutant(
    "a new row inherits the scores of the slot's last one",
    "flight.py",
    "frontier={k: np.where(is_new, 0, v) for k, v in state.frontier.items()},",
    "frontier=state.frontier,",
    "oracle",
  ),
  Mutant(
    "one prompt too many is admitted",
    "flight.py",
    "missing = num_in_flight - int(state.in_flight.sum())",
    "missing = num_in_flight - int(state.in_flight.sum()) + 1",
    "oracle",
  ),
  Mutant(
    "the uid of the last prompt is given away twice",
    "flight.py",
    "next_uid=state.next_uid + len(free),",
    "next_uid=state.next_uid + len(free) - 1,",
    "oracle",
  ),
  # The model.
  Mutant(
    "a token does not see itself",
    "models/attention.py",
    "<= at[:, None, None, :, None]",
    "< at[:, None, None, :, None]",
    "cache oracle",
  ),
  Mutant(
    "rows of a packed bin see each other",
    "models/attention.py",
    "segments[:, start:end, None] == segments[:, None, :end]",
    "segments[:, start:end, None] >= -1",
    "oracle",
  ),
  Mutant(
    "the online softmax is not rescaled",
    "models/attention.py",
    "keep = jnp.exp(top - new_top)",
    "keep = jnp.ones_like(top)",
    "oracle",
  ),
  Mutant(
    "a kernel reads a column that is not written yet",
    "models/flash.py",
    "jnp.repeat(start, kv)",
    "jnp.repeat(start + 1, kv)",
    "flash",
  ),
  # Rewards and advantages.
  Mutant(
    "scores are truncated to integers",
    "rewards.py",
    "landed = ops.at_least_float32(scores)[:, None]",
    "landed = scores.astype(jnp.int32)[:, None]",
    "rewards",
  ),
  Mutant(
    "the score lands one column late",
    "rewards.py",
    "      return response_len - 1\n",
    "      return response_len\n",
    "rewards",
  ),
  Mutant(
    "the KL is a reward",
    "rewards.py",
    "-kl_coef * ops.at_least_float32(kl)",
    "kl_coef * ops.at_least_float32(kl)",
    "rewards",
  ),
  Mutant(
    "the penalty meets those that ended",
    "rewards.py",
    "jnp.where(has_eos, scores, scores - missing_eos_penalty)",
    "jnp.where(has_eos, scores - missing_eos_penalty, scores)",
    "rewards",
  ),
  Mutant(
    "k3 of the wrong direction",
    "ops.py",
    "jnp.expm1(-difference) + difference",
    "jnp.expm1(difference) - difference",
    "ops",
  ),
  Mutant(
    "GAE discounts by lambda alone",
    "ops.py",
    "advantage = delta + gamma * lam * advantage",
    "advantage = delta + lam * advantage",
    "ops",
  ),
  Mutant(
    "GAE reads values outside the mask",
    "ops.py",
    "values = jnp.where(mask, at_least_float32(values), 0)",
    "values = at_least_float32(values)",
    "ops",
  ),
  Mutant(
    "a masked mean counts padding",
    "ops.py",
    "x = jnp.where(mask, at_least_float32(x), 0)\n  return jnp.sum(x)",
    "x = at_least_float32(x)\n  return jnp.sum(x)",
    "ops",
  ),
  # The update.
  Mutant(
    "the ratio is upside down",
    "algos/losses.py",
    "jnp.where(mask, logprobs - denominator, 0)",
    "jnp.where(mask, denominator - logprobs, 0)",
    "ppo",
  ),
  Mutant(
    "the surrogate takes the better branch",
    "algos/losses.py",
    "return jnp.maximum(unclipped, clipped), clipped > unclipped",
    "return jnp.minimum(unclipped, clipped), clipped > unclipped",
    "ppo",
  ),
  Mutant(
    "values are trained under the mask of the tokens",
    "algos/ppo.py",
    "micro.is_inside & take(targets.value_mask),",
    "mask,",
    "ppo",
  ),
  Mutant(
    "means are over the batch, not the minibatch",
    "algos/ppo.py",
    "tokens=ops.count(batch.mask[minibatch.row]),",
    "tokens=ops.count(batch.mask),",
    "ppo",
  ),
  Mutant(
    "prompt tokens are trained on",
    "algos/microbatch.py",
    "is_token & (0 <= predicted) & (predicted < max_response_len)",
    "is_token & (predicted < max_response_len)",
    "ppo",
  ),
  Mutant(
    "rows lie on each other in a bin",
    "packing.py",
    "bins[row], offsets[row] = k, used[k]",
    "bins[row], offsets[row] = k, 0",
    "packing",
  ),
  Mutant(
    "every epoch has the same minibatches",
    "packing.py",
    "np.random.default_rng((*order_seed, e))",
    "np.random.default_rng(order_seed)",
    "packing",
  ),
  Mutant(
    "the critic learns at the policy's rate",
    "algos/optim.py",
    'peak=getattr(config, f"{name}_lr"),',
    "peak=config.policy_lr,",
    "ppo",
  ),
  Mutant(
    "the first step of a warm-up learns nothing",
    "algos/optim.py",
    "jnp.minimum((step + 1) / max(warmup_steps, 1), 1)",
    "jnp.minimum(step / max(warmup_steps, 1), 1)",
    "ppo",
  ),
  # The controllers.
  Mutant(
    "delta leaves its bounds",
    "delta.py",
    "delta=sorted((min, wish, max))[1]",
    "delta=wish",
    "delta",
  ),
  Mutant(
    "the window of the slope is one step short",
    "delta.py",
    "[-(window + 1) :]",
    "[-window:]",
    "delta",
  ),
  Mutant(
    "the fastest chunk is chosen per step, not per token",
    "chunking.py",
    "cost = observed.step_s / observed.generated",
    "cost = observed.step_s",
    "chunking",
  ),
)


def copy_to(folder: pathlib.Path, mutant: Mutant | None) -> None:
  """The package and its tests, with the defect (None = without)."""
  for name in COPIED:
    if (ROOT / name).is_dir():
      ignore = shutil.ignore_patterns("__pycache__")
      shutil.copytree(ROOT / name, folder / name, ignore=ignore)
  for path in ROOT.iterdir():
    if path.is_file():
      shutil.copy(path, folder)
  with open(folder / "tests" / "conftest.py", "a") as f:
    f.write(CONFTEST.format(root=str(folder)))
  if mutant is not None:
    path = folder / "oppo_jax" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
      raise ValueError(f"{mutant.name}: {mutant.old!r} is not in there once")
    path.write_text(text.replace(mutant.old, mutant.new))


def run_tests(mutant: Mutant | None, names: list[str], cache: str):
  """pytest on a copy.

  Returns:
    What it came to ("passed", "failed", "hangs" or "error"), the first failing
    test or the end of the output, and the seconds it took.
  """
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder).resolve()
    copy_to(folder, mutant)
    environment = os.environ | {
      "PYTHONPATH": str(folder),
      "PYTHONDONTWRITEBYTECODE": "1",
      # Most of what a mutant compiles the others compile, too.
      "JAX_COMPILATION_CACHE_DIR": cache,
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q"]
    command += ["-p", "no:cacheprovider", "--tb=line"]
    command += [f"tests/{name}_test.py" for name in names]
    began = time.monotonic()
    try:
      done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return "hangs", "", time.monotonic() - began
    seconds = time.monotonic() - began
  failed = re.search(
    r"^FAILED tests/(\S+)|^ERROR tests/(\S+)", done.stdout, re.M
  )
  # 1 = tests failed; anything else (nothing collected, ...) proves nothing.
  outcome = {0: "passed", 1: "failed"}.get(done.returncode, "error")
  if outcome == "failed" and failed:
    return outcome, failed[1] or failed[2], seconds
  return outcome, (done.stdout + done.stderr)[-2000:], seconds


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--only", default="", help="part of the names")
  parser.add_argument("--jobs", type=int, default=1, help="at one time")
  args = parser.parse_args()
  chosen = [m for m in MUTANTS if args.only in m.name]
  names = sorted({name for m in chosen for name in m.tests.split()})
  with tempfile.TemporaryDirectory() as cache:
    outcome, told, seconds = run_tests(None, names, cache)
    print(f"{outcome:8} {seconds:4.0f} s  without a defect", flush=True)
    if outcome != "passed":
      print(told)
      return 1
    caught = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      runs = pool.map(lambda m: run_tests(m, m.tests.split(), cache), chosen)
      for mutant, (outcome, told, seconds) in zip(chosen, runs):
        is_caught = outcome in ("failed", "hangs")
        caught += is_caught
        verdict = "caught" if is_caught else "MISSED"
        where = told.splitlines()[-1] if told else outcome
        print(
          f"{verdict:8} {seconds:4.0f} s  {mutant.file}: {mutant.name}\n"
          f"{'':17}{where}",
          flush=True,
        )
  print(f"caught / planted: {caught} / {len(chosen)}")
  return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
  sys.exit(main())
