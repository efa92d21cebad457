# SPDX-License-Identifier: Apache-2.0
"""The engine against the oracle: random workloads, every arm, several steps.

A workload is a number of steps of real PPO on a tiny transformer: rollout,
scores, and two updates on the batch (two epochs: in the second one ratios and
values have moved, and are clipped). The oracle gets the engine's parameters
after every update, and recomputes all else from prompts and seed.
"""

import collections
import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import oracle_model
import pytest
import tiny

from oppo_jax import (
  algos,
  decode,
  flight,
  jit_table,
  keys,
  metrics,
  overlap,
  packing,
  score,
  types,
)
from oppo_jax.algos import ppo, ppo_config

VOCAB, MAX_PROMPT_LEN, MAX_RESPONSE_LEN = 11, 3, 6
EOS_IDS = (1, 4)
# uids of a workload stay below: 4 steps, 4 rows, 4 more in flight.
MAX_UIDS = 24
# Below this a float32 engine may rightly decide otherwise than the oracle.
NEAR_TIE = 1e-5
# arm -> (intra, are prompts overcommitted, workloads in every world)
ARMS = {
  "serial": ("none", False, 4),
  "sequence": ("sequence", False, 4),
  "intra": ("chunk", False, 4),
  "inter": ("none", True, 9),
  "oppo": ("chunk", True, 9),
  "restart": ("none", True, 24),
}
PRESETS = ppo_config.PRESETS


@dataclasses.dataclass(frozen=True)
class World:
  """What is compiled in; workloads vary the rest.

  Attributes:
    algo: changes to a preset of PPO.
    preset: its name.
    sizes: changes to `flight.Sizes`.
    sampling: changes to `decode.Sampling`.
    model: changes to `tiny.model`.
  """

  preset: str
  algo: dict = dataclasses.field(default_factory=dict)
  sizes: dict = dataclasses.field(default_factory=dict)
  sampling: dict = dataclasses.field(default_factory=dict)
  model: dict = dataclasses.field(default_factory=dict)


BIASED = dict(qkv_bias=True, attention_block=4)
DEEP = dict(num_layers=2, qk_norm=True, tie_embeddings=False, attention_block=4)
WORLDS = {
  "trl": World("trl"),
  "openrlhf": World(
    "openrlhf",
    algo=dict(kl_outer_clip=0.5, missing_eos_penalty=0.7, score_clip=0.9),
    sizes=dict(max_staleness=1),
    model=BIASED,
  ),
  "verl": World(
    "verl",
    algo=dict(
      kl_coef=0.1,
      kl_estimator="k3",
      kl_loss_coef=0.2,
      kl_loss_inner_clip=0.8,
      entropy_coef=0.05,
    ),
    sizes=dict(max_staleness=-1),
    sampling=dict(temperature=0.7),
  ),
  "groups": World(
    "trl",
    algo=dict(whiten_rewards=True, whiten_advantages=False, gamma=0.9),
    sizes=dict(group_size=2, batch_size=4, num_slots=8),
    sampling=dict(top_k=5),
  ),
  "decoupled": World(
    "openrlhf",
    algo=dict(denominator="decoupled", behavior_weight_cap=1.05),
    sampling=dict(temperature=1.3, top_p=0.9),
    model=BIASED,
  ),
  "tis": World(
    "trl",
    algo=dict(denominator="tis", kl_target=0.2, kl_horizon=40.0, kl_coef=0.3),
    sizes=dict(decode_loop="fori"),
    model=DEEP,
  ),
  "restart": World(
    "trl",
    algo=dict(kl_estimator="k2", missing_eos_penalty=0.5, whiten_rewards=True),
    sizes=dict(restarts=True),
  ),
  "restart, start": World(
    "verl",
    algo=dict(denominator="start", value_clip_eps=0.05),
    sizes=dict(restarts=True, max_staleness=1),
    sampling=dict(temperature=0.7),
    model=DEEP,
  ),
}


@dataclasses.dataclass(frozen=True)
class Engine:
  """The compiled half of a world."""

  fns: flight.Fns
  algorithm: object
  config: ppo.PPOConfig
  sampling: decode.Sampling
  models: dict  # name -> Model
  targets: object  # jitted `ppo.make_targets`


@functools.cache
def engine(name):
  world = WORLDS[name]
  sizes = flight.Sizes(
    **dict(
      num_slots=6,
      batch_size=3,
      group_size=1,
      max_prompt_len=MAX_PROMPT_LEN,
      row_len=MAX_PROMPT_LEN + MAX_RESPONSE_LEN,
      max_staleness=2,
      tile=score.Tile(rows=2, length=4, logprob_chunk=5),
      decode_loop="while",
      decode_rows=0,
      restarts=False,
      keep_policy_cache=False,
      keep_critic_cache=False,
      speculates=False,
    )
    | world.sizes
  )
  sampling = decode.Sampling(
    **dict(
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      eos_ids=EOS_IDS,
      max_response_len=MAX_RESPONSE_LEN,
    )
    | world.sampling
  )
  algo = PRESETS[world.preset] | dict(num_epochs=1, logprob_chunk=8)
  algo |= world.algo
  make = functools.partial(
    tiny.model,
    **dict(
      vocab_size=VOCAB,
      num_layers=1,
      width=8,
      num_heads=2,
      num_kv_heads=1,
      head_dim=4,
      mlp_dim=12,
      attention="xla",
      attention_block=0,
    )
    | world.model,
  )
  policy, scalar = make("lm"), make("scalar")
  models = dict(policy=policy, reference=policy, critic=scalar, reward=scalar)
  algorithm = algos.make(
    "ppo",
    algo,
    # Without momentum and clipping the optimizer's first moment is the
    # gradient. Steps are large, so that the next policy says other things.
    tiny.OPTIM | dict(b1=0.0, clip_norm=0.0, eps=1e-3, policy_lr=0.03),
    policy=policy,
    critic=scalar,
    temperature=sampling.temperature,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    num_updates=100,
    bin_width=sizes.row_len,
    micro_rows=1,
  )
  fns = jit_table.make_fns(
    sizes=sizes,
    sampling=sampling,
    policy=policy,
    scorers={k: models[k] for k in algorithm.scorers},
    algorithm=algorithm,
  )
  targets = jax.jit(ppo.make_targets, static_argnums=2)
  config = ppo.PPOConfig(**algo)
  return Engine(fns, algorithm, config, sampling, models, targets)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """What takes the time here is to compile; nothing is compared bit by bit."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


draw_params = functools.cache(tiny.params)


@jax.jit
def noise_table(run_key):
  """The random number of every draw there can be: [uid, position]."""
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  positions = jax.numpy.arange(MAX_PROMPT_LEN + MAX_RESPONSE_LEN)
  # One is enough for so few words.
  of_key = lambda key: 1 - jax.random.uniform(key, (1,))[0]
  of_row = lambda key: jax.vmap(of_key)(fold(key, positions))
  return jax.vmap(of_row)(fold(run_key, jax.numpy.arange(MAX_UIDS)))


@dataclasses.dataclass(frozen=True)
class Workload:
  """What a workload varies.

  Attributes:
    arm: of `ARMS`.
    seed: of parameters, prompts and draws.
    deltas: prompts beyond B, of each step.
    chunk_sizes: C of each step.
    target_lens: forced length of uid k, over and over; 0 = free.
    slot_order: order in which free slots are taken.
  """

  arm: str
  seed: int
  deltas: tuple[int, ...]
  chunk_sizes: tuple[int, ...]
  target_lens: tuple[int, ...]
  slot_order: tuple[int, ...]

  def prompt_of(self, uid):
    # Any token may stand in a prompt, padding's 0 and EOS, too.
    rng = np.random.default_rng([self.seed, uid])
    tokens = rng.integers(0, VOCAB, rng.integers(1, MAX_PROMPT_LEN + 1))
    target_len = self.target_lens[uid % len(self.target_lens)]
    return flight.Prompt(tokens.astype(np.int32), target_len)


@st.composite
def workloads(draw, name, arm):
  sizes, sampling = engine(name).fns.sizes, engine(name).sampling
  num_steps = draw(st.integers(2, 4))
  each = lambda x: st.tuples(*[x] * num_steps)
  most = (sizes.num_slots - sizes.batch_size) * ARMS[arm][1]
  # "fori" compiles once per chunk size.
  chunk_size = st.integers(1, 8)
  if sizes.decode_loop == "fori":
    chunk_size = st.sampled_from([2, 5])
  # Where EOS is forbidden nothing may be left of a truncated distribution.
  is_whole = not sampling.top_k and sampling.top_p == 1.0
  target_len = st.integers(0, MAX_RESPONSE_LEN) if is_whole else st.just(0)
  return Workload(
    arm=arm,
    seed=draw(st.integers(0, 2**20)),
    deltas=draw(each(st.integers(0, most))),
    chunk_sizes=draw(each(chunk_size)),
    target_lens=tuple(draw(st.lists(target_len, min_size=1, max_size=9))),
    slot_order=tuple(draw(st.permutations(range(sizes.num_slots)))),
  )


def close(got, want, what):
  """To 1e-5, of the value where that is more."""
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=what)


def same_row(row, sequence, prompt_len, versions, logprobs, admitted_at):
  """What the engine holds of a row, against the oracle's; arrays from 0."""
  n, length = len(row.response), len(row.sequence)
  assert prompt_len == len(row.prompt)
  assert sequence[:length].tolist() == row.sequence
  assert not sequence[length:].any()
  assert versions[:n].tolist() == row.versions
  close(logprobs[:n], row.logprobs, "behavior_logprobs")
  assert admitted_at == row.admitted_at


def same_batch(batch, scored, denominator):
  """The harvested batch against the oracle's scored rows."""
  assert batch.uid.tolist() == [s.row.uid for s in scored]
  for i, s in enumerate(scored):
    of = jax.tree.map(lambda x, i=i: x[i], batch)
    n = len(s.row.response)
    same_row(
      s.row,
      of.sequences,
      of.prompt_len,
      of.token_version,
      of.behavior_logprobs,
      of.admitted_at,
    )
    assert of.response_len == n
    assert of.mask.tolist() == [t < n for t in range(MAX_RESPONSE_LEN)]
    assert of.responses.tolist()[:n] == s.row.response
    assert of.has_eos == s.has_eos
    close(of.scores, s.score, "scores")
    close(of.ref_logprobs[:n], s.reference, "ref_logprobs")
    if denominator in ("start", "decoupled"):
      close(of.start_logprobs[:n], s.start, "start_logprobs")
    close(of.values[: n + 1], s.values[:MAX_RESPONSE_LEN], "values")
    for x in (
      of.responses,
      of.token_version,
      of.behavior_logprobs,
      of.ref_logprobs,
      of.values[1:],
    ):
      assert not x[n:].any()


def same_slots(slots, rows):
  """What stays in flight: the same rows, as far as they are."""
  slots = metrics.fetch(slots)
  place = {uid: i for i, uid in enumerate(slots.uid) if uid != slots.FREE}
  assert sorted(place) == [row.uid for row in rows]
  for row in rows:
    i, first = place[row.uid], len(row.prompt)
    same_row(
      row,
      slots.tokens[i],
      slots.prompt_len[i],
      slots.token_version[i, first:],
      slots.behavior_logprobs[i, first:],
      slots.admitted_at[i],
    )
    assert slots.length[i] == len(row.sequence)
    assert slots.done[i] == (row.finished_at is not None)
    if slots.done[i]:
      assert slots.finished_tick[i] == row.finished_at


def same_targets(targets, shaped):
  close(targets.scores, shaped.scores, "scores")
  for name in (
    "kl",
    "rewards",
    "advantages",
    "returns",
    "values",
    "denominator",
  ):
    got = np.asarray(getattr(targets, name))
    for row, want in zip(got, getattr(shaped, name)):
      close(row[: len(want)], want, name)
      # An advantage after the last token is multiplied with no ratio.
      assert name == "advantages" or not row[len(want) :].any(), name
  got = np.asarray(targets.value_mask).sum(axis=1)
  assert got.tolist() == [len(x) for x in shaped.values]


def float64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


class Checker:
  """Runs a workload on both; raises where they differ."""

  def __init__(self, name, work):
    self.engine, self.work = engine(name), work
    e = self.engine
    # Of the run's key nothing but its noise is told to the oracle.
    self.run_key = keys.named(work.seed, "rollout")
    noise = np.asarray(noise_table(self.run_key), np.float64)
    self.sampler = oracle.Sampler(
      *(e.sampling.temperature, e.sampling.top_k, e.sampling.top_p),
      *(EOS_IDS, MAX_RESPONSE_LEN),
      noise=lambda uid, position: noise[uid, position],
    )
    draw = lambda name, k: draw_params(e.models[name], 4 * (work.seed % 4) + k)
    trained = dict(policy=draw("policy", 0), critic=draw("critic", 1))
    # The reference is another model: an untrained policy has KL to it.
    self.frozen = dict(reference=draw("policy", 2), reward=draw("reward", 3))
    self.state = e.algorithm.init(jax.tree.map(jax.numpy.copy, trained))
    self.rng = np.random.default_rng(work.seed)
    self.seen = collections.Counter()

  def model(self, name, params):
    config = self.engine.models[name].config
    params = float64(params)
    return lambda tokens: oracle_model.forward(params, tokens, config)

  def models(self, params):
    return {k: self.model(k, v) for k, v in params.items()}

  def run(self):
    """All steps; counts what there was to see."""
    e, work = self.engine, self.work
    sizes = e.fns.sizes
    rows, next_uid, tick = [], 0, 0
    in_flight = flight.init(e.fns)

    def prompt_of(uid):
      prompt = work.prompt_of(uid)
      return prompt.tokens.tolist(), prompt.target_len

    for version, (delta, chunk_size) in enumerate(
      zip(work.deltas, work.chunk_sizes)
    ):
      new = oracle.admit(
        rows,
        next_uid,
        prompt_of,
        num_in_flight=sizes.batch_size + delta,
        group_size=sizes.group_size,
        version=version,
      )
      rows, next_uid = rows + new, next_uid + len(new)
      in_flight = flight.admit(
        e.fns,
        in_flight,
        num_in_flight=sizes.batch_size + delta,
        prompt_of=work.prompt_of,
        version=version,
        slot_order=np.array(work.slot_order),
      )
      params = dict(self.state.params)
      models = self.models(params | self.frozen)
      drawn = sum(len(row.response) for row in rows)
      batch, deferred, now = oracle.rollout(
        rows,
        models["policy"],
        self.sampler,
        version=version,
        tick=tick,
        batch_size=sizes.batch_size,
        group_size=sizes.group_size,
        max_staleness=sizes.max_staleness,
      )
      drawn = sum(len(row.response) for row in rows) - drawn
      scored = oracle.score(batch, models, self.sampler)
      in_flight, on_device, done = overlap.rollout(
        e.fns,
        in_flight,
        params | self.frozen,
        version=version,
        run_key=self.run_key,
        chunk_size=chunk_size,
        intra=ARMS[work.arm][0],
        timers=metrics.Timers(),
        debug=True,
      )
      hypothesis.assume(self.sampler.margin > NEAR_TIE)

      assert (done.ticks, done.generated) == (now - tick, drawn)
      assert done.deferred == len(deferred)
      assert done.row_len.tolist() == [len(row.sequence) for row in batch]
      same_batch(metrics.fetch(on_device), scored, e.config.denominator)
      if sizes.restarts:
        for row in deferred:
          row.restart()
      same_slots(in_flight.slots, deferred)
      self.update(on_device, scored, done)
      self.update(on_device, scored, done)
      in_flight = flight.after_update(e.fns, in_flight)
      self.seen["deferred rows"] += len(deferred)
      self.seen["tokens of an earlier policy"] += sum(
        v < version for r in batch for v in r.versions
      )
      self.seen["tokens"] += sum(len(row.response) for row in batch)
      rows, tick = deferred, now
    return self.seen

  def update(self, on_device, scored, done):
    """One update on a batch: targets, losses, gradient, KL coefficient."""
    e, params = self.engine, metrics.fetch(self.state.params)
    kl_coef = float(self.state.algo_state["kl_coef"])
    shaped = oracle.shape(
      scored, kl_coef, e.config, max_response_len=MAX_RESPONSE_LEN
    )
    targets = e.targets(on_device, np.float32(kl_coef), e.config)
    same_targets(targets, shaped)
    losses = lambda params: oracle.losses(
      scored, shaped, self.models(params), kl_coef, self.sampler, e.config
    )
    want = losses(params)
    plan = packing.plan(
      done.row_len,
      order_seed=(0, 0),
      num_epochs=1,
      num_minibatches=1,
      width=e.fns.sizes.row_len,
      micro_rows=1,
    )
    self.state, seen = e.fns.update(self.state, on_device, plan)
    hypothesis.assume(self.sampler.margin > NEAR_TIE)
    # Of returns that are almost constant it is rounding divided by rounding:
    # then it is that of the engine's own returns, which are right to 1e-5.
    skipped, explained = {"loss"}, "val/explained_variance"
    returns = np.concatenate(shaped.returns)
    if np.std(returns) < 0.05:
      skipped.add(explained)
    if np.var(returns) >= 1e-6:
      of = lambda x: np.asarray(x, np.float64)[np.asarray(targets.value_mask)]
      close(
        seen[explained],
        oracle.explained_variance(of(targets.returns), of(targets.values)),
        explained,
      )
    for name in want.keys() - skipped:
      close(seen[name], want[name], name)
    coef = oracle.next_kl_coef(
      kl_coef, want["objective/kl"], len(scored), e.config
    )
    close(self.state.algo_state["kl_coef"], coef, "kl_coef")
    self.seen["updates with clipped ratios"] += bool(
      want["policy/clipfrac_avg"]
    )
    self.seen["updates with clipped values"] += bool(want["val/clipfrac_avg"])
    # A truncated ratio has a gradient that is of no loss.
    if e.config.denominator != "tis" or want["policy/clipfrac_avg"] == 0:
      self.same_gradient(params, losses)

  def same_gradient(self, params, losses, step=1e-6):
    """Along one direction, against the oracle's loss on both sides of here."""
    gradient = {
      k: float64(metrics.fetch(self.state.opt_state[k][0].mu)) for k in params
    }
    leaves, tree = jax.tree.flatten(gradient)
    norm = np.sqrt(sum(np.sum(g**2) for g in leaves))
    noise = [self.rng.normal(size=g.shape) for g in leaves]
    size = np.sqrt(sum(np.sum(x**2) for x in noise))
    along = [g / max(norm, 1e-9) + x / size for g, x in zip(leaves, noise)]
    slope = sum(np.sum(g * x) for g, x in zip(leaves, along))
    moved = lambda by: jax.tree.map(
      lambda p, x: p + by * x, float64(params), tree.unflatten(along)
    )
    ahead, behind = (losses(moved(by))["loss"] for by in (step, -step))
    np.testing.assert_allclose(
      slope, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-5
    )
    self.seen["gradients"] += 1


CASES = [
  (name, arm)
  for name, world in WORLDS.items()
  for arm in ARMS
  if (arm == "restart") == world.sizes.get("restarts", False)
]
NUM_WORKLOADS = sum(ARMS[arm][2] for _, arm in CASES)
TRIED = collections.Counter()


@pytest.mark.parametrize(("name", "arm"), CASES)
def test_the_engine_equals_the_oracle(name, arm):
  seen = collections.Counter()

  @hypothesis.seed(CASES.index((name, arm)))
  @hypothesis.settings(
    max_examples=ARMS[arm][2],
    # A failing workload may be made smaller, but not explained.
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
  )
  @hypothesis.given(work=workloads(name, arm))
  def holds(work):
    seen["begun"] += 1
    seen.update(Checker(name, work).run())
    seen["workloads"] += 1

  holds()
  TRIED.update(seen | {f"{arm}: workloads": seen["workloads"]})
  assert seen["workloads"] == ARMS[arm][2]


def test_at_least_200_workloads_are_tried_and_have_something_to_show():
  assert NUM_WORKLOADS >= 200
  if TRIED["workloads"] < NUM_WORKLOADS:
    pytest.skip("not all workloads were tried in this process")
  print(", ".join(f"{n} {what}" for what, n in sorted(TRIED.items())))
  # Workloads with a near tie are discarded; there are few.
  assert TRIED["begun"] - TRIED["workloads"] <= 0.1 * TRIED["workloads"]
  for what, least in {
    "deferred rows": 300,
    "tokens of an earlier policy": 500,
    "tokens": 5000,
    "gradients": 1000,
    "updates with clipped ratios": 400,
    "updates with clipped values": 300,
  }.items():
    assert TRIED[what] >= least, what


# Shaping alone, at any options: what the worlds above choose a few of.

either = st.booleans()
some = lambda low, high: st.floats(low, high, width=16)
or_off = lambda x: st.just(0.0) | x
configs = st.fixed_dictionaries(
  dict(
    gamma=some(0.5, 1.0),
    lam=some(0.0, 1.0),
    kl_coef=some(0.0, 1.0),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_inner_clip=or_off(some(0.25, 1.0)),
    kl_outer_clip=or_off(some(0.25, 1.0)),
    whiten_advantages=either,
    whiten_rewards=either,
    whitening=st.sampled_from(["unbiased", "population"]),
    score_clip=or_off(some(0.25, 1.0)),
    missing_eos_penalty=or_off(some(0.25, 1.0)),
    score_position=st.sampled_from(["last", "after_eos"]),
    denominator=st.sampled_from(ppo_config.DENOMINATORS),
    behavior_weight_cap=some(0.5, 2.0),
  )
)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  changes=configs,
  lengths=st.lists(st.integers(1, MAX_RESPONSE_LEN), min_size=3, max_size=3),
  seed=st.integers(0, 2**20),
)
def test_shaping_equals_the_oracle_at_any_options(changes, lengths, seed):
  rng = np.random.default_rng(seed)
  rows = []
  for uid, n in enumerate(lengths):
    values = np.zeros(MAX_RESPONSE_LEN + 1)
    values[: n + 1] = rng.normal(size=n + 1)
    rows.append(
      oracle.Scored(
        row=oracle.Row(uid, [5], 0, 0, response=[7] * n),
        has_eos=bool(rng.integers(2)),
        score=rng.normal(),
        behavior=-rng.exponential(size=n),
        start=-rng.exponential(size=n),
        reference=-rng.exponential(size=n),
        values=values[: n + 1],
      )
    )

  def padded(name):
    out = np.zeros((len(rows), MAX_RESPONSE_LEN), np.float32)
    for i, s in enumerate(rows):
      x = getattr(s, name)[:MAX_RESPONSE_LEN]
      out[i, : len(x)] = x
    return out

  n = np.array(lengths, np.int32)[:, None]
  zeros = np.zeros((len(rows), MAX_RESPONSE_LEN), np.int32)
  batch = types.Batch(
    uid=zeros[:, 0],
    sequences=zeros,
    prompt_len=zeros[:, 0] + 1,
    response_len=n[:, 0],
    has_eos=np.array([s.has_eos for s in rows]),
    responses=zeros,
    mask=np.arange(MAX_RESPONSE_LEN) < n,
    behavior_logprobs=padded("behavior"),
    start_logprobs=padded("start"),
    ref_logprobs=padded("reference"),
    values=padded("values"),
    scores=np.array([s.score for s in rows], np.float32),
    token_version=zeros,
    admitted_at=zeros[:, 0],
  )
  config = ppo.PPOConfig(**PRESETS["trl"] | changes)
  shaped = oracle.shape(
    rows, config.kl_coef, config, max_response_len=MAX_RESPONSE_LEN
  )
  batch = jax.tree.map(jax.numpy.asarray, batch)
  same_targets(ppo.make_targets(batch, config.kl_coef, config), shaped)
