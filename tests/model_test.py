# SPDX-License-Identifier: Apache-2.0
"""The transformer: one set of numbers, whatever entry they come from."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compare import assert_close, assert_exact

from oppo_jax import models
from oppo_jax.models import dense, rope, rowwise

# What published families differ in.
VARIANTS = {
  "llama": dict(),
  "qwen2": dict(qkv_bias=True, num_kv_heads=1, tie_embeddings=False),
  "qwen3": dict(qk_norm=True, head_dim=16, rope_theta=1e4),
  "scalar": dict(head="scalar", num_kv_heads=4),
}
CAPACITY = 48  # six blocks of 8
GPT2 = dict(num_positions=CAPACITY, rotary_dim=0, parallel_residual=False)
# What is claimed of any decoder is claimed of each of these.
DECODERS = {
  "llama": tiny.model,
  "gpt_neox": tiny.gpt,
  "gpt2": functools.partial(tiny.gpt, **GPT2),
}


def tokens_of(rows, length, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, tiny.VOCAB, (rows, length)).astype(np.int32)


apply = jax.jit(
  lambda model, *args: model.apply(*args), static_argnames="model"
)


@functools.partial(jax.jit, static_argnames="model")
def forward(model, params, tokens, positions, segments):
  hidden = model.forward(params, tokens, positions, segments)
  return hidden, model.head(params, hidden)


def whole(model, params, tokens):
  """Hidden states and outputs of rows that lie one to a bin; no cache."""
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return forward(model, params, tokens, positions, np.zeros_like(tokens))


def plain_llama(config, params, tokens):
  """One row, float64, from the formulas; loops instead of batched axes.

  RMSNorm (Zhang & Sennrich 2019), rotary embedding in the half-split pairing
  (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU
  (Shazeer 2020).
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  dim = config.head_dim
  half = dim // 2

  def norm(x, scale):
    return x / np.sqrt((x * x).mean() + config.norm_eps) * scale

  def rotate(x, position):
    out = np.empty(dim)
    for i in range(half):
      angle = position / config.rope_theta ** (2 * i / dim)
      out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
      out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out

  def heads(p, x, name, position):
    y = x @ p[name]["kernel"]
    y = y + p[name]["bias"] if config.qkv_bias else y
    y = list(y.reshape(-1, dim))
    if config.qk_norm and name in "qk":
      y = [norm(h, p[f"{name}_norm"]["scale"]) for h in y]
    return y if name == "v" else [rotate(h, position) for h in y]

  stream = [params["embedding"][t] for t in tokens]
  for i in range(config.num_layers):
    layer, keys, values = params[f"layer_{i}"], [], []
    p = layer["attention"]
    for position, x in enumerate(stream):
      y = norm(x, layer["attention_norm"]["scale"])
      keys.append(heads(p, y, "k", position))
      values.append(heads(p, y, "v", position))
      mixed = []
      for h, q in enumerate(heads(p, y, "q", position)):
        shared = h // (config.num_heads // config.num_kv_heads)
        scores = np.array([q @ k[shared] for k in keys]) / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        mixed.append(sum(w * v[shared] for w, v in zip(weights, values)))
      x = x + np.concatenate(mixed) @ p["o"]["kernel"]
      y = norm(x, layer["mlp_norm"]["scale"])
      gate, up = y @ layer["gate"]["kernel"], y @ layer["up"]["kernel"]
      silu = gate / (1 + np.exp(-gate))
      stream[position] = x + (silu * up) @ layer["down"]["kernel"]
  stream = np.stack([norm(x, params["norm"]["scale"]) for x in stream])
  is_tied = config.head == "lm" and config.tie_embeddings
  return stream @ (params["embedding"].T if is_tied else params["out"])


@pytest.fixture(params=VARIANTS, scope="module")
def variant(request):
  model = tiny.model(**VARIANTS[request.param])
  return model, tiny.params(model, 0)


@pytest.fixture(params=DECODERS)
def make(request):
  return DECODERS[request.param]


def test_forward_equals_a_llama_written_out_in_numpy(variant):
  model, params = variant
  tokens = tokens_of(2, 11)
  _, got = whole(model, params, tokens)
  want = np.stack([plain_llama(model.config, params, row) for row in tokens])
  assert got.dtype == jnp.float32
  assert want.std() > 0.3  # not a comparison of small numbers
  assert_close(np.asarray(got), want.astype(np.float32))


def check_appends(model, params):
  tokens = tokens_of(3, 30)
  cache = model.init_cache(3, CAPACITY)
  hidden = np.zeros((3, 30, model.config.width), np.float32)
  # Three rows at different cursors: after an append of 12 tokens, row 1 takes
  # back 4 columns and row 2 takes back 7, which they then append anew.
  #   append     12         12         1  1  1  1
  #   row 0     0..11     12..23      24 25 26 27
  #   row 1     0..11      8..19      18 19 20 21      (took back 2)
  #   row 2     0..11      5..16      16 17 18 19      (took back 1)
  start = np.zeros(3, np.int32)
  for size, back in ((12, (0, 4, 7)), (12, (0, 2, 1)), *[(1, (0, 0, 0))] * 4):
    piece = np.stack([t[s : s + size] for t, s in zip(tokens, start)])
    said, cache = apply(model, params, piece, start, cache)
    for row in range(3):
      hidden[row, start[row] : start[row] + size] = said[row]
    start = start + size - np.array(back, np.int32)
  assert start.tolist() == [28, 22, 20]
  want, _ = whole(model, params, tokens)
  for row, end in enumerate(start):
    assert_close(hidden[row, :end], np.asarray(want)[row, :end])


def test_cached_appends_equal_a_forward(variant):
  check_appends(*variant)


@pytest.mark.parametrize("block", [0, 8])
def test_cached_appends_of_any_decoder_equal_a_forward(make, block):
  model = make(attention_block=block)
  check_appends(model, tiny.params(model, 0))


def draw(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def plain_rms_norm(x, scale):
  y = x.astype(jnp.float32)
  y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-2)
  return (y * scale).astype(x.dtype)


# ours, what it computes, shapes of the arguments
HAND_WRITTEN = {
  "dense": (dense.product, jnp.matmul, [(2, 5, 3), (3, 4)]),
  "norm": (
    lambda *args: rowwise.rms_norm(*args, 1e-2),
    plain_rms_norm,
    [(2, 5, 3), (3,)],
  ),
  "softmax": (rowwise.softmax, jax.nn.softmax, [(2, 5, 3)]),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_derivative_written_out_is_the_derivative(name):
  ours, plain, shapes = HAND_WRITTEN[name]
  args = [draw(i, *shape) for i, shape in enumerate(shapes)]
  want, backward = jax.vjp(plain, *args)
  got, our_backward = jax.vjp(ours, *args)
  same = assert_close if name == "norm" else assert_exact
  same(got, want)
  dy = draw(9, *want.shape)
  assert_close(our_backward(dy), backward(dy))


def test_a_norm_of_bfloat16_is_computed_in_float32_and_says_bfloat16():
  x, scale, dy = (
    draw(0, 4, 64).astype(jnp.bfloat16),
    draw(1, 64),
    draw(2, 4, 64),
  )
  norm = lambda x, scale: rowwise.rms_norm(x, scale, 1e-2)
  got, backward = jax.vjp(norm, x, scale)
  assert_exact(got, plain_rms_norm(x, scale))
  dx, dscale = backward(dy.astype(jnp.bfloat16))
  assert (dx.dtype, dscale.dtype) == (jnp.bfloat16, jnp.float32)
  want = jax.vjp(plain_rms_norm, x, scale)[1](dy.astype(jnp.bfloat16))
  assert_close((dx, dscale), want)


def test_the_turns_of_a_position_are_its_cosines_and_sines():
  positions = np.array([[0, 3, 63], [5, 5, 70]])  # 70: beyond the row, so 63
  cos, sin = rope.turns(positions, 64, 6, theta=100.0)
  angle = np.minimum(positions, 63)[..., None, None] / 100.0 ** (
    np.arange(3) / 3
  )
  assert_close(cos, np.cos(angle).astype(np.float32))
  assert_close(sin, np.sin(angle).astype(np.float32))


def test_packed_rows_see_their_own_segment_only(make):
  model = make()
  params = tiny.params(model, 0)
  a, b = tokens_of(1, 5)[0], tokens_of(1, 9, seed=1)[0]
  # bin     a a a a a b b b b b b b b b . .
  packed = np.concatenate([a, b, [0, 0]])[None].astype(np.int32)
  positions = np.concatenate([np.arange(5), np.arange(9), [0, 0]])[None]
  segments = np.repeat([0, 1, -1], [5, 9, 2])[None]
  hidden, _ = forward(model, params, packed, positions, segments)
  assert_close(hidden[0, :5], whole(model, params, a[None])[0][0])
  assert_close(hidden[0, 5:14], whole(model, params, b[None])[0][0])


def filled_cache(model, rows, seed):
  """A cache whose every column holds something."""
  shape = model.init_cache(rows, CAPACITY)
  rng = np.random.default_rng(seed)
  draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
  return jax.tree.map(draw, shape)


def test_attention_by_blocks_equals_dense_attention(make):
  params = tiny.params(make(), 0)
  tokens, start = tokens_of(4, 3), np.array([0, 7, 20, 44], np.int32)
  said = []
  for block in (0, 8, 16):
    model = make(attention_block=block)
    cache = filled_cache(model, 4, seed=3)
    said.append(apply(model, params, tokens, start, cache)[0])
  assert_close(said[1], said[0])
  assert_close(said[2], said[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 8])
def test_a_row_does_not_depend_on_how_far_others_make_the_loop_run(
  size, dtype, make
):
  model = make(dtype=dtype)
  params = tiny.params(model, 0)
  cache, tokens = filled_cache(model, 4, seed=3), tokens_of(4, size)
  # Row 2 stands at column 5, in block 0; the others make the loop run over
  # 1 to 6 blocks, with other tokens.
  near = np.array([0, 0, 5, 0], np.int32)
  alone, _ = apply(model, params, tokens, near, cache)
  for far in (9, 21, CAPACITY - size):
    start = np.array([far, 0, 5, far], np.int32)
    others = tokens_of(4, size, seed=far)
    others[2] = tokens[2]
    said, _ = apply(model, params, others, start, cache)
    assert_exact(said[2], alone[2])
    assert not np.array_equal(said[0], alone[0])


@pytest.mark.parametrize("block", [0, 8])
def test_tiles_of_a_slot_in_one_call_equal_one_after_the_other(block, make):
  model = make(attention_block=block)
  params = tiny.params(model, 0)
  tokens = tokens_of(1, 24)[0].reshape(3, 8)
  start, slots = np.array([0, 8, 16], np.int32), np.array([1, 1, 1], np.int32)
  empty = model.init_cache(2, 24)
  at_once, cache_at_once = apply(model, params, tokens, start, empty, slots)
  cache = empty
  for tile in range(3):
    only = np.where(np.arange(3) == tile, 1, 2).astype(np.int32)  # 2: no slot
    said, cache = apply(model, params, tokens, start, cache, only)
    assert_exact(said[tile], at_once[tile])
  assert_exact(cache, cache_at_once)
  assert not cache[0][0][0].any()  # slot 0 was nobody's
  want, _ = whole(model, params, tokens.reshape(1, 24))
  assert_close(at_once.reshape(want.shape), want)


def test_bfloat16_computes_in_bfloat16_and_answers_in_float32():
  model = tiny.model(dtype="bfloat16")
  params = tiny.params(model, 0)
  tokens, start = tokens_of(2, 12), np.zeros(2, np.int32)
  hidden, cache = apply(model, params, tokens, start, model.init_cache(2, 24))
  logits = model.head(params, hidden)
  assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
  assert hidden.dtype == jnp.bfloat16
  assert logits.dtype == jnp.float32
  # 8 bits of mantissa: a hidden state of order 1 is off by percents.
  error = np.abs(hidden - whole(tiny.model(), params, tokens)[0]).mean()
  assert 1e-4 < error < 0.05


def test_rematerialisation_changes_no_gradient(make):
  tokens = tokens_of(2, 9)
  params = tiny.params(make(), 0)

  def gradient(remat):
    model = make(remat=remat)
    loss = lambda p: (whole(model, p, tokens)[0] ** 3).mean()
    return jax.jit(jax.grad(loss))(params)

  want = gradient("none")
  assert_close(gradient("layer"), want)
  assert_close(gradient("attention"), want)


def test_a_scalar_head_says_one_number_per_token(make):
  model = make("scalar")
  params = tiny.params(model, 0)
  assert not model.is_lm
  said = model.head(params, jnp.ones((2, 3, 32)))
  assert said.shape == (2, 3, 1)
  assert said.dtype == jnp.float32


def test_fresh_parameters_are_float32_and_leave_the_stream_alone():
  model = tiny.model(dtype="bfloat16", qk_norm=True)
  params = jax.jit(model.init)(jax.random.key(0))
  leaves = {
    jax.tree_util.keystr(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  assert {x.dtype for x in leaves.values()} == {jnp.dtype("float32")}
  scales = [x for name, x in leaves.items() if "scale" in name]
  assert len(scales) == 2 * 4 + 1
  assert all((x == 1).all() for x in scales)
  # Tied logits of order one: 32 * 32 draws of standard deviation 32^-0.5.
  assert 0.9 < leaves["['embedding']"].std() * 32**0.5 < 1.1


def test_a_cache_holds_whole_blocks():
  # 22 columns are 3 blocks of 8; without blocks they stay 22.
  shape = lambda **kw: tiny.model(**kw).init_cache(5, 22)[1][0].shape
  assert shape(attention_block=8) == (5, 2, 24, 8)
  assert shape(attention_block=0) == (5, 2, 22, 8)


def test_a_scalar_head_sits_on_the_trunk_of_the_language_model(make):
  """The reward model starts from the policy's trunk, with its own `out`."""
  shapes = lambda head: jax.eval_shape(make(head).init, jax.random.key(0))
  lm, scalar = shapes("lm"), shapes("scalar")
  assert scalar.pop("out").shape == (32, 1)
  lm.pop("out", None)
  assert lm == scalar


def plain_gpt(config, params, tokens):
  """One row, float64, from the formulas; rows of a matrix instead of a batch.

  LayerNorm (Ba et al. 2016), GELU (Hendrycks & Gimpel 2016); GPT-NeoX rotates
  the first dimensions of a head and adds attention and MLP to one stream
  (Black et al. 2022).
  """
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  dim, turned = config.head_dim, config.rotary_dim
  half = turned // 2

  def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
    return x * p["scale"] + p["bias"]

  def dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)

  def gelu(x):
    if config.activation == "gelu":
      return x * np.vectorize(math.erf)(x / 2**0.5) / 2 + x / 2
    inner = (2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)
    return x * (1 + np.tanh(inner)) / 2

  def rotate(x):  # [T, dim]
    out = x.copy()
    for t in range(len(x)):
      for i in range(half):
        angle = t / config.rope_theta ** (2 * i / turned)
        a, b = x[t, i], x[t, i + half]
        out[t, i] = a * np.cos(angle) - b * np.sin(angle)
        out[t, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out

  def attention(x, p):
    q, k, v = np.split(dense(x, p["qkv"]), 3, axis=-1)
    mixed = []
    for h in range(config.num_heads):
      part = slice(h * dim, (h + 1) * dim)
      scores = rotate(q[:, part]) @ rotate(k[:, part]).T / np.sqrt(dim)
      scores = np.where(np.tri(len(x)) > 0, scores, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
    return dense(np.concatenate(mixed, -1), p["o"])

  x = params["embedding"][tokens]
  if config.num_positions:
    x = x + params["position_embedding"][: len(tokens)]
  for i in range(config.num_layers):
    p = params[f"layer_{i}"]
    mlp = lambda y, p=p: dense(
      gelu(dense(norm(y, p["mlp_norm"]), p["up"])), p["down"]
    )
    added = attention(norm(x, p["attention_norm"]), p["attention"])
    x = x + added + mlp(x if config.parallel_residual else x + added)
  x = norm(x, params["norm"])
  is_tied = config.head == "lm" and config.tie_embeddings
  return x @ (params["embedding"].T if is_tied else params["out"])


@pytest.mark.parametrize(
  "changes",
  [
    dict(),
    dict(parallel_residual=False, rotary_dim=8, attention_bias=False),
    dict(**GPT2, activation="gelu_tanh", tie_embeddings=True),
    dict(head="scalar", num_positions=20),
  ],
)
def test_forward_equals_a_gpt_written_out_in_numpy(changes):
  model = tiny.gpt(**changes)
  params = tiny.params(model, 0)
  tokens = tokens_of(2, 11)
  _, got = whole(model, params, tokens)
  want = np.stack([plain_gpt(model.config, params, row) for row in tokens])
  assert want.std() > 0.3
  assert_close(np.asarray(got), want.astype(np.float32))


def test_an_unknown_model_or_key_is_named():
  with pytest.raises(ValueError, match="rnn"):
    models.make("rnn")
  with pytest.raises(ValueError, match="depth"):
    tiny.model(depth=3)
