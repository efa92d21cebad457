# SPDX-License-Identifier: Apache-2.0
"""Tiny models, prompts, and a training loop as short as the real one allows."""

import dataclasses
import functools

import fakes
import jax
import numpy as np

from oppo_jax import (
  algos,
  decode,
  flight,
  jit_table,
  metrics,
  models,
  overlap,
  packing,
  score,
  types,
)
from oppo_jax.algos import base as algos_base
from oppo_jax.algos import ppo_config

VOCAB = 32
EOS_IDS = (1, 2, 3)  # three, so that most responses end by themselves
SAMPLING = decode.Sampling(
  temperature=1.0, top_k=0, top_p=1.0, eos_ids=EOS_IDS, max_response_len=17
)
# L = 22 is no multiple of T = 8: the last tile of a full row is a partial one.
SIZES = flight.Sizes(
  num_slots=8,
  batch_size=4,
  group_size=1,
  max_prompt_len=5,
  row_len=22,
  max_staleness=2,
  tile=score.Tile(rows=3, length=8, logprob_chunk=16),
  decode_loop="while",
  decode_rows=0,
  restarts=False,
  keep_policy_cache=False,
  keep_critic_cache=False,
  speculates=True,
)
PPO = ppo_config.PRESETS["openrlhf"] | dict(
  num_epochs=2, num_minibatches=2, logprob_chunk=32
)
OPTIM = dict(
  policy_lr=3e-3,  # large: an update must change what is sampled next
  critic_lr=3e-3,
  schedule="constant",
  warmup_steps=0,
  clip_norm=1.0,
  b1=0.9,
  b2=0.95,
  eps=1e-8,
  weight_decay=0.0,
)
RUN_KEY_SEED = 7


def model(head="lm", **changes):
  """A decoder of two layers, width 32, two query heads per key/value head."""
  config = dict(
    vocab_size=VOCAB,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    rope_theta=100.0,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    tie_embeddings=True,
    dtype="float32",
    attention="xla",
    attention_block=8,
    remat="none",
  )
  return models.make("transformer", head=head, **config | changes)


def gpt(head="lm", **changes):
  """The other decoder, of two layers: GPT-NeoX, if nothing is changed."""
  config = dict(
    vocab_size=VOCAB,
    num_layers=2,
    width=32,
    num_heads=4,
    mlp_dim=64,
    num_positions=0,
    rotary_dim=4,
    rope_theta=100.0,
    norm_eps=1e-5,
    parallel_residual=True,
    activation="gelu",
    attention_bias=True,
    tie_embeddings=False,
    dtype="float32",
    attention="xla",
    attention_block=8,
    remat="none",
  )
  return models.make("gpt", head=head, **config | changes)


def params(model, seed):
  """Parameters far from their special values: logits of order one.

  Fresh ones would hide mistakes: norm scales are 1, biases 0, and the small
  embedding makes every token about as likely as any other.
  """
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = jax.tree_util.keystr(path)
    is_vocab = "embedding" in name or (model.is_lm and "out" in name)
    x = rng.normal(size=leaf.shape)
    if leaf.ndim == 1:
      x = ("scale" in name) + 0.3 * x
    else:
      x *= 0.2 if is_vocab else leaf.shape[0] ** -0.5
    return jax.numpy.asarray(x, leaf.dtype)

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


def prompt_of(uid, target_len=0):
  """1 to 5 tokens, a function of the uid; no EOS among them."""
  rng = np.random.default_rng([5, uid])
  tokens = rng.integers(4, VOCAB, rng.integers(1, 6)).astype(np.int32)
  return flight.Prompt(tokens, target_len)


def light(head="lm"):
  """A model without attention, for what is about the loop alone."""
  return fakes.EmbeddingModel(VOCAB, 4, 24, is_lm=head == "lm")


@functools.lru_cache
def light_loop(**changes):
  """Loop functions without scorers and updates, of other `flight.Sizes`."""
  fns = jit_table.make_fns(
    sizes=SIZES._replace(**changes),
    sampling=SAMPLING,
    policy=light(),
    scorers={},
    algorithm=None,
  )
  return Setup(fns, None, {"policy": params(light(), 0)}, {})


@functools.lru_cache
def setup(
  sizes=SIZES,
  sampling=SAMPLING,
  denominator="behavior",
  make_model=model,
  dispatch="separate",
):
  """Loop functions, algorithm and starting parameters; compiled once."""
  policy, scalar = make_model("lm"), make_model("scalar")
  algorithm = algos.make(
    "ppo",
    PPO | dict(denominator=denominator),
    OPTIM,
    policy=policy,
    critic=scalar,
    temperature=sampling.temperature,
    top_k=sampling.top_k,
    top_p=sampling.top_p,
    num_updates=100,
    bin_width=sizes.row_len,
    micro_rows=2,
  )
  of = dict(reward=scalar, reference=policy, critic=scalar, policy=policy)
  fns = jit_table.make_fns(
    sizes=sizes,
    sampling=sampling,
    policy=policy,
    scorers={k: v for k, v in of.items() if k in algorithm.scorers},
    algorithm=algorithm,
    dispatch=dispatch,
  )
  start = dict(policy=params(policy, 0), critic=params(scalar, 1))
  frozen = dict(reference=start["policy"], reward=params(scalar, 2))
  return Setup(fns, algorithm, start, frozen)


# Which sizes a function looks at, of those that tests vary.
LOOKS_AT = {
  "decode_chunk": {"group_size", "max_staleness", "decode_loop", "decode_rows"},
  "harvest": {"group_size", "max_staleness", "restarts"},
}


@functools.lru_cache
def variant(**changes):
  """`setup()` with other sizes; compiles again only what looks at them."""
  s = setup()
  sizes = s.fns.sizes._replace(**changes)
  made = setup(sizes).fns
  fns = s.fns._replace(sizes=sizes)
  for name, fields in LOOKS_AT.items():
    if fields & changes.keys():
      fns = fns._replace(**{name: getattr(made, name)})
  return dataclasses.replace(s, fns=fns)


@dataclasses.dataclass(frozen=True)
class Setup:
  """What a run starts from; `start` and `frozen` are parameters by name."""

  fns: flight.Fns
  algorithm: algos_base.Algorithm | None
  start: dict[str, types.Params]
  frozen: dict[str, types.Params]


@dataclasses.dataclass
class Run:
  """What a run leaves behind, on the host.

  Attributes:
    batches: one `types.Batch` per step.
    params: after the last update.
    seen: metrics of every update.
    rollouts: one `overlap.Rollout` per step.
    in_flight: what the next step would start from.
  """

  batches: list[types.Batch]
  params: dict
  seen: list[dict]
  rollouts: list[overlap.Rollout]
  in_flight: flight.OverlapState

  @property
  def uids(self):
    """Of all batches, in the order in which they were trained on."""
    return np.concatenate([b.uid for b in self.batches]).tolist()


def roll(s, *, deltas, prompt_of, chunk_sizes):
  """One rollout per delta, without updates: only the version changes."""
  run = Run([], {}, [], [], flight.init(s.fns))
  for step, (delta, chunk_size) in enumerate(zip(deltas, chunk_sizes)):
    state = flight.admit(
      s.fns,
      run.in_flight,
      num_in_flight=s.fns.sizes.batch_size + delta,
      prompt_of=prompt_of,
      version=step,
    )
    state, batch, done = overlap.rollout(
      s.fns,
      state,
      s.start | s.frozen,
      version=step,
      run_key=jax.random.key(RUN_KEY_SEED),
      chunk_size=chunk_size,
      intra="chunk",
      timers=metrics.Timers(),
    )
    run.in_flight = flight.after_update(s.fns, state)
    run.batches.append(metrics.fetch(batch))
    run.rollouts.append(done)
  return run


def train(
  s,
  *,
  num_steps,
  intra="chunk",
  chunk_size=lambda step: 5,
  delta=lambda step: 0,
  slot_order=None,
  prompt_of=prompt_of,
  on_step=lambda state, in_flight: None,
):
  """PPO for a few steps, as `train.train` does it; see there.

  Args:
    s: of `setup`.
    num_steps: updates.
    intra: when tiles are dispatched.
    chunk_size: C of a step.
    delta: prompts beyond B of a step.
    slot_order: order in which free slots are taken.
    prompt_of: prompt of a uid.
    on_step: is shown the train state and what is in flight after every update.
  """
  fns, sizes = s.fns, s.fns.sizes
  state = s.algorithm.init(jax.tree.map(jax.numpy.copy, s.start))
  in_flight = flight.init(fns)
  run = Run([], {}, [], [], in_flight)
  for step in range(num_steps):
    in_flight = flight.admit(
      fns,
      in_flight,
      num_in_flight=sizes.batch_size + delta(step),
      prompt_of=prompt_of,
      version=step,
      slot_order=slot_order,
    )
    in_flight, batch, done = overlap.rollout(
      fns,
      in_flight,
      {k: fns.cast(v) for k, v in state.params.items()} | s.frozen,
      version=step,
      run_key=jax.random.key(RUN_KEY_SEED),
      chunk_size=chunk_size(step),
      intra=intra,
      timers=metrics.Timers(),
      debug=True,
    )
    run.batches.append(metrics.fetch(batch))
    run.rollouts.append(done)
    plan = packing.plan(
      done.row_len,
      order_seed=(0, step),
      num_epochs=PPO["num_epochs"],
      num_minibatches=PPO["num_minibatches"],
      width=sizes.row_len,
      micro_rows=2,
    )
    in_flight = flight.before_update(fns, in_flight)
    state, seen = fns.update(state, batch, plan)
    run.seen.append(metrics.fetch(seen))
    in_flight = flight.after_update(fns, in_flight)
    on_step(state, in_flight)
  run.params, run.in_flight = metrics.fetch(state.params), in_flight
  return run
