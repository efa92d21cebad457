# SPDX-License-Identifier: Apache-2.0
"""The simulator: its clock by hand, its fit, its readers, its command line."""

import gzip
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from configs import ablation
from oppo_jax import (
  calibrate,
  controllers,
  costs,
  metrics,
  packing,
  predict,
  schedule,
  sweep,
  traces,
  train,
)
from oppo_jax import config as config_lib

TRACES = pathlib.Path(__file__).parents[2] / "shared/data/length_traces"
RULES = schedule.Rules(
  num_slots=8,
  batch_size=2,
  group_size=1,
  max_staleness=2,
  intra="chunk",
  restarts=False,
  tile_rows=1,
  tile_len=4,
  scorers=("reward",),
  keep_policy_cache=False,
  keep_critic_cache=False,
  speculates=False,
  update=schedule.Update(
    num_epochs=2, num_minibatches=1, micro_rows=1, width=50
  ),
)
SECONDS = dict(tick_s=1.0, column_s=0.0, chunk_s=0.0, call_s=0.5)
SECONDS |= dict(update_s=3.0, micro_s=0.0, update_token_s=0.0, step_s=0.0)


def steps(responses, decisions, **changes):
  """The schedule of these responses, all with a prompt of one token."""
  lengths = traces.Lengths(np.ones_like(responses), np.asarray(responses))
  rules = RULES._replace(**changes)
  return list(schedule.replay(rules, lengths.of, decisions)), rules


def times(step, rules, *, num_devices, **changes):
  return costs.times(
    *(step, rules, costs.Costs(**SECONDS | changes)),
    num_devices=num_devices,
    decode_loop="while",
  )


def test_the_drawing_of_the_schedule():
  (step,), rules = steps([4, 6, 9], [(1, 4)])
  assert (step.ticks, step.chunks, step.deferred) == (6, 2, 1)
  assert step.uid.tolist() == [0, 1]
  # uid 0: 5 tokens, two tiles; uid 1: 7 tokens, two; uid 2: one of its 7.
  assert step.tiles(rules) == {"reward": 5}
  assert step.calls["kept"].streamed.tolist() == [4, 1]
  # Longest row that decodes: 1 .. 6 tokens, all rows have the same prefix.
  assert step.columns == 1 + 2 + 3 + 4 + 5 + 6


def test_the_longest_prefix_is_that_of_rows_that_still_decode():
  lengths = traces.Lengths(np.array([3, 1, 5]), np.array([2, 5, 3]))
  (step,) = schedule.replay(RULES._replace(batch_size=3), lengths.of, [(0, 4)])
  # uid 2 holds 5, 6, 7 tokens and ends; then uid 1, the last one, 4, 5.
  assert step.columns == 5 + 6 + 7 + 4 + 5


def test_micro_batches_are_those_of_the_packing_or_a_few_less():
  rng = np.random.default_rng(0)
  fewer = []
  for shortest, longest in ((1, 20), (1, 60), (1, 100), (51, 100)):
    for _ in range(50):
      row_len = rng.integers(shortest, longest + 1, 24)
      plan = packing.plan(
        row_len,
        order_seed=(0,),
        num_epochs=2,
        num_minibatches=1,
        width=100,
        micro_rows=3,
      )
      update = schedule.Update(2, 1, micro_rows=3, width=100)
      fewer.append(int(plan.num_micro.sum()) - update.micro_batches(row_len))
  assert set(fewer) <= {0, 2}  # one micro-batch less in each epoch
  assert np.mean(np.array(fewer) > 0) < 0.2


def test_two_devices_hide_what_is_scored_meanwhile():
  (step,), rules = steps([4, 6, 9], [(1, 4)])
  one = times(step, rules, num_devices=1)
  # 6 ticks, 5 calls of 0.5 s, the update.
  assert one.rollout_s == pytest.approx(6 + 2.5)
  assert one.step_s == pytest.approx(6 + 2.5 + 3)
  # Round 0 ends at 4 s: 4 calls until 6 s. Round 1 at 6 s: 1 call until 6.5 s.
  two = times(step, rules, num_devices=2)
  assert two.rollout_s == pytest.approx(6.5)
  assert two.scorer_busy_s == pytest.approx(2.5)
  assert two.policy_busy_s == pytest.approx(6 + 3)


def test_scorers_that_are_behind_work_through_their_queue():
  (step,), rules = steps([4, 6, 9], [(1, 4)])
  # Round 0: 4 to 8 s. Round 1 exists at 6 s and waits for it: 8 to 9 s.
  assert times(step, rules, num_devices=2, call_s=1.0).rollout_s == 9


def test_a_link_delays_the_last_chunk_and_the_scores():
  (step,), rules = steps([4, 6, 9], [(1, 4)])
  late = times(step, rules, num_devices=2, link_latency_s=10.0)
  assert late.rollout_s == pytest.approx(6.5 + 10 + 10)


def test_small_chunks_pay_for_dispatch_and_large_ones_for_lag():
  seconds = {}
  for size in (1, 16, 4096):
    (step,), rules = steps([256] * 2, [(0, size)])
    costly = dict(chunk_s=0.5, call_s=1.5)
    seconds[size] = times(step, rules, num_devices=2, **costly).rollout_s
  assert seconds[16] < min(seconds[1], seconds[4096])


def test_without_streaming_nothing_is_hidden():
  (step,), rules = steps([4, 6, 9], [(1, 4)], intra="none")
  assert step.calls["kept"].streamed.tolist() == [0, 0]
  two = times(step, rules, num_devices=2)
  assert two.rollout_s == pytest.approx(6 + 4 * 0.5)  # 4 tiles of the batch


def test_masked_ticks_cost_as_much_as_others():
  (step,), rules = steps([4, 6, 9], [(1, 4)])
  work = costs.work_of(step, rules, decode_loop="fori")
  assert work.ticks == 3 * 4  # two rounds, and the one that was sent ahead


def test_a_fit_finds_the_costs_that_made_the_times():
  rng = np.random.default_rng(0)
  true = costs.Costs(1e-3, 2e-6, 3e-3, 4e-3, 0.5, 6e-2, 0.0, 0.01)
  work = [costs.Work(*rng.integers(10, 1000, 6).tolist()) for _ in range(12)]
  rows = []
  for w in work:
    update_s = true.update_s + true.micro_s * w.micro_batches
    rollout_s = costs.seconds(w, true) - update_s - true.step_s
    rows.append(
      {
        "time/decode_s": 0.7 * rollout_s,
        "time/score_s": 0.3 * rollout_s,
        "time/update_s": update_s,
        "time/step_s": rollout_s + update_s + true.step_s,
      }
    )
  found = costs.fit(work, rows)
  for name, value in vars(true).items():
    assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_no_cost_is_below_zero():
  # y = 2 a - b: least squares would take it.
  work = [(1.0, 0.5), (2.0, 0.1), (3.0, 1.0), (1.0, 0.9)]
  found = costs.non_negative(work, [2 * a - b for a, b in work])
  assert found[0] > 0
  assert found[1] == 0


def test_a_bigger_model_is_slower_and_shards_share_it():
  figures = dict(device=costs.DEVICES["h100"], rules=RULES, num_epochs=1)
  of = lambda params, num_shards: costs.from_figures(
    params=params, num_shards=num_shards, link_latency_s=0.0, **figures
  )
  # 2 bytes a weight at 0.6 * 3.35 TB/s: 7 ms a tick.
  assert of(7e9, 1).tick_s == pytest.approx(14e9 / (0.6 * 3.35e12))
  assert of(70e9, 1).call_s == pytest.approx(10 * of(7e9, 1).call_s)
  assert of(70e9, 8).tick_s < of(70e9, 1).tick_s / 4


def test_a_trace_is_read_with_prompts_counts_and_a_filter(tmp_path):
  path = tmp_path / "t.csv.gz"
  with gzip.open(path, "wt") as f:
    f.write(
      "who,prompt_tokens,output_tokens,count\na,7,3,2\nb,8,5,1\na,9,0,4\n"
    )
  everything = traces.load(path, where="", prompt_len=1)
  assert everything.response_len.tolist() == [3, 3, 5]  # none without tokens
  assert everything.prompt_len.tolist() == [7, 7, 8]
  only = traces.load(path, where="who=b", prompt_len=1)
  assert only.response_len.tolist() == [5]
  plain = tmp_path / "lengths.txt"
  plain.write_text("4\n6\n")
  lengths = traces.load(plain, where="", prompt_len=2)
  assert [x.tolist() for x in lengths] == [[2, 2], [4, 6]]
  assert [x.tolist() for x in lengths.of(np.array([1, 2, 5]))] == [
    [2, 2, 2],
    [6, 4, 6],
  ]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("a,b\n1,2\n", "no column 'output_tokens'"),
    ("output_tokens\n3\nx\n", "line 3: 'x' is no integer"),
    ("output_tokens\n", "no lengths"),
    ("5\n0\n", "line 2: 0 is not >= 1"),
  ],
)
def test_a_bad_trace_is_named(tmp_path, text, message):
  path = tmp_path / "t.csv"
  path.write_text(text)
  with pytest.raises(ValueError, match=message) as e:
    traces.load(path, where="", prompt_len=1)
  assert str(path) in str(e.value)


def test_lengths_that_a_run_did_not_log_are_drawn_from_those_it_did():
  row = lambda uid, p, r: dict(
    uid=uid, prompt_tokens=[0] * p, response_tokens=[0] * r
  )
  lengths, num = traces.of_run(
    [row(1, 2, 5), row(4, 3, 9)], np.array([6, 5, 7]), seed=0
  )
  assert num == 2
  assert lengths.prompt_len[[1, 4]].tolist() == [2, 3]
  assert set(lengths.prompt_len.tolist()) <= {2, 3}
  assert lengths.response_len.tolist() == [6, 5, 7, 6, 5]


def test_arms_are_those_of_the_config():
  assert sweep.ARMS == config_lib.ARMS


def test_a_real_run_is_predicted_number_by_number(tmp_path):
  """`metrics.jsonl` against the simulator with the same controllers."""
  num_steps, lengths = 9, tmp_path / "lengths.txt"
  targets = np.random.default_rng(3).integers(1, 49, num_steps * 8 + 8)
  lengths.write_text("".join(f"{n}\n" for n in targets))
  config = ablation.get_config("oppo")
  config.num_steps = num_steps
  config.model.num_layers = 1
  config.rollout.update(batch_size=8, max_response_len=48)
  config.rollout.target_lengths_path = str(lengths)
  config.score.update(tile_rows=3, tile_len=16)
  config.overlap.chunk.size = 7
  config.overlap.delta.update(kind="paper", init=3, max=8, window=1, step=1)
  config.log.rollouts_per_step = 8
  config_lib.validate(config)
  train.train(config, tmp_path / "run")
  rows = metrics.read_jsonl(tmp_path / "run/metrics.jsonl")
  run = calibrate.read(str(tmp_path / "run"))
  points = predict.run(
    *(run.rules, run.lengths),
    controllers.make(config.overlap, num_steps=num_steps),
    [predict.Machine(costs.Costs(**SECONDS), 1, "while")],
    score_of=run.scores.__getitem__,
    num_steps=num_steps,
  )
  assert len({row["overlap/delta"] for row in rows}) > 2
  for row, (delta, step, _) in zip(rows, points, strict=True):
    trained = int(step.response_len.sum())
    said = {
      "overlap/delta": delta,
      "overlap/chunk_size": step.chunk_size,
      "overlap/chunks": step.chunks,
      "overlap/ticks": step.ticks,
      "overlap/deferred": step.deferred,
      "overlap/deferrals_max": int(step.deferrals.max()),
      "overlap/staleness_max": step.staleness_max,
      "overlap/staleness_mean": step.staleness_sum / trained,
      "overlap/slot_fill": step.generated / (step.ticks * step.in_flight),
      "tokens/generated": step.generated,
      "tokens/trained": trained,
    }
    # Prompts of rows that are never trained on are not in the log.
    if row["step"] < num_steps - run.rules.max_staleness:
      tiles = step.tiles(run.rules)
      said |= {f"score/tiles_{name}": n for name, n in tiles.items()}
      said["score/tiles"] = sum(tiles.values())
    assert {key: row[key] for key in said} == pytest.approx(said, rel=1e-9)


# The command.


def command(*args):
  done = subprocess.run(
    [sys.executable, "-m", "oppo_jax.simulate", *args],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.returncode, done.stdout, done.stderr


@pytest.fixture
def lengths_path(tmp_path):
  path = tmp_path / "lengths.txt"
  lengths = np.random.default_rng(0).geometric(1 / 60, 500)
  path.write_text("".join(f"{n}\n" for n in lengths))
  return path


def test_a_sweep_prints_the_best_and_says_that_it_is_simulated(
  lengths_path, tmp_path
):
  out = tmp_path / "out.json"
  flags = ["--batch_size=16", "--delta=0,8,32", "--chunk=4,64", "--steps=20"]
  code, said, wrong = command(f"--trace={lengths_path}", f"--out={out}", *flags)
  assert code == 0, wrong
  assert said.startswith("SIMULATED: 6 runs of 20 steps")
  assert said.count(" best\n") == 1
  assert "MiB at most" in said
  runs = json.loads(out.read_text())["runs"]
  assert {run["simulated"] for run in runs} == {True}
  # delta 32 > B is left out: staleness is bounded. serial has no delta.
  assert [(r["arm"], r["delta"], r["chunk"]) for r in runs] == [
    ("serial", 0, [4]),
    ("serial", 0, [64]),
    ("oppo", 0, [4]),
    ("oppo", 0, [64]),
    ("oppo", 8, [4]),
    ("oppo", 8, [64]),
  ]
  ticks = {(r["arm"], r["delta"]): r["ticks"] for r in runs}
  assert ticks["oppo", 0] == ticks["serial", 0] > ticks["oppo", 8]
  assert max(r["over_serial"] for r in runs) > 1.2


def test_controllers_move_and_made_up_scores_are_said_to_be(lengths_path):
  code, said, wrong = command(
    f"--trace={lengths_path}",
    *("--batch_size=16", "--delta=2", "--delta_max=16", "--steps=30"),
    *("--delta_rule=paper", "--chunk_rule=tuned", "--chunk=4,64"),
    *("--chunk_period=10", "--arm=oppo", "--delta_window=2"),
  )
  assert code == 0, wrong
  assert "MADE UP" in said


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "--trace or --run: one of them is needed"),
    (["--trace=nowhere.csv"], "nowhere.csv"),
    (["--arm=opo"], "--arm: 'opo'"),
    (["--delta=x"], "--delta: 'x' is no int"),
    (["--batch_size=0"], "--batch_size=0: must be >= 1"),
    (["--delta=99", "--batch_size=8", "--arm=oppo"], "--delta: over"),
    (["--devices=3"], "--devices=3: must be 1 or 2"),
    (["--steps=0"], "--steps=0: must be >= 1"),
    (["--run=nowhere"], "nowhere"),
  ],
)
def test_bad_input_ends_with_one_line(lengths_path, flags, message):
  takes = [f"--trace={lengths_path}"]
  if not flags or flags[0].startswith(("--trace", "--run")):
    takes = []
  code, said, wrong = command(*takes, *flags)
  assert code == 1
  assert wrong.startswith("error: ")
  assert message in wrong
  assert wrong.count("\n") == 1
  assert not said


def test_the_simulator_imports_no_jax():
  program = "import sys, oppo_jax.simulate; sys.exit('jax' in sys.modules)"
  done = subprocess.run([sys.executable, "-c", program], check=False)
  assert done.returncode == 0


def test_a_run_gives_its_rules_lengths_scores_and_costs(tmp_path):
  """A workdir with the times of known costs: they are found again."""
  true = costs.Costs(2e-3, 0.0, 1e-2, 5e-3, 0.1, 3e-2, 0.0, 0.02)
  delta = dict(kind="fixed", init=1, max=2, window=3, step=1, dead_band=2.0)
  config = {
    "seed": 0,
    "rollout": dict(
      batch_size=2,
      max_prompt_len=10,
      max_response_len=40,
      decode_loop="while",
      target_lengths_path="",
    ),
    "algo": dict(num_epochs=2, num_minibatches=1),
    "model": {},
    "optim": dict(micro_rows=1, pack_width=0),
    "score": dict(tile_rows=1, tile_len=4),
    "reward": dict(model_weight=0.5, rule_weight=1.0, rules=dict(length=0.1)),
    "overlap": dict(
      intra="chunk",
      inter="resume",
      max_staleness=2,
      policy_cache="recompute",
      critic_cache="recompute",
      placement="colocated",
      dispatch="auto",
      delta=delta,
      chunk=dict(kind="fixed", size=4, sizes=(4,), period=9),
    ),
  }
  (tmp_path / "config.json").write_text(json.dumps(config))
  lengths = np.random.default_rng(1).integers(1, 40, 64)
  decisions = [(1, 4 if i % 2 else 16) for i in range(16)]
  schedule_, rules = steps(lengths, decisions)
  rows, logged = [], []
  for i, step in enumerate(schedule_):
    work = costs.work_of(step, rules, decode_loop="while")
    update_s = true.update_s + true.micro_s * work.micro_batches
    whole_s = costs.seconds(work, true)
    rows.append(
      {
        "step": i,
        "reward/model": 0.5,
        "reward/rule": 0.25,
        "reward/length": -0.5,
        "overlap/delta": 1,
        "overlap/chunk_size": step.chunk_size,
        "overlap/ticks": step.ticks,
        "score/tiles_reward": step.tiles(rules)["reward"],
        "time/decode_s": whole_s - update_s - true.step_s,
        "time/score_s": 0.0,
        "time/update_s": update_s,
        "time/step_s": whole_s,
      }
    )
    logged += [
      {"uid": int(u), "prompt_tokens": [0], "response_tokens": [0] * int(n)}
      for u, n in zip(step.uid, step.response_len)
    ]
  jsonl = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "metrics.jsonl").write_text(jsonl(rows))
  (tmp_path / "rollouts.jsonl").write_text(jsonl(logged))
  run = calibrate.read(str(tmp_path))
  assert run.rules == RULES
  assert run.scores == pytest.approx([0.5 * 0.5 + 0.25 - 0.05] * 16)
  work, is_exact = calibrate.work(run)
  assert is_exact
  found = calibrate.fit([run], skip=2)
  assert found.tick_s == pytest.approx(true.tick_s, rel=0.05)
  assert found.chunk_s == pytest.approx(true.chunk_s, rel=0.05)
  assert abs(calibrate.relative_error(run, found, skip=2)).max() < 0.01
  code, said, wrong = command(f"--run={tmp_path}")
  assert code == 0, wrong
  assert "calibrated: Costs(tick_s=" in said
  mean_s = float(np.mean([row["time/step_s"] for row in rows]))
  assert f"{'oppo':9s}" in said
  assert mean_s > 0


@pytest.mark.skipif(
  not TRACES.exists(), reason="the length traces are not beside the repository"
)
def test_real_traces_have_long_tails_that_deferral_takes_out_of_the_way():
  for path in sorted(TRACES.glob("*.csv.gz")):
    lengths = traces.shuffled(
      traces.load(str(path), where="", prompt_len=64), seed=0
    )
    ticks = {}
    for delta in (0, 32):
      rules = RULES._replace(num_slots=96, batch_size=64, intra="none")
      made = schedule.replay(rules, lengths.of, [(delta, 64)] * 20)
      ticks[delta] = sum(step.ticks for step in made)
    assert ticks[32] < 0.75 * ticks[0], path
