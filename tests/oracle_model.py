# SPDX-License-Identifier: Apache-2.0
"""The decoder once more: one sequence, NumPy float64, no cache, no batch.

Reads the parameters of `models.transformer` and nothing else of it.
"""

import numpy as np


def norm(x, scale, eps):
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope(x, theta):
  """Rotates pairs (i, i + half) of x [T, heads, dim] by their position."""
  half = x.shape[-1] // 2
  frequency = theta ** (-np.arange(half) / half)
  angle = np.arange(len(x))[:, None, None] * frequency
  a, b = x[..., :half], x[..., half:]
  cos, sin = np.cos(angle), np.sin(angle)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax(x):
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def attention(params, x, c):
  """Every query looks at the keys up to its own position."""

  def heads(name, num):
    y = x @ params[name]["kernel"]
    if c.qkv_bias:
      y = y + params[name]["bias"]
    return y.reshape(len(x), num, c.head_dim)

  q, k = heads("q", c.num_heads), heads("k", c.num_kv_heads)
  if c.qk_norm:
    q = norm(q, params["q_norm"]["scale"], c.norm_eps)
    k = norm(k, params["k_norm"]["scale"], c.norm_eps)
  q, k = rope(q, c.rope_theta), rope(k, c.rope_theta)
  v = heads("v", c.num_kv_heads)
  # Query head h reads key/value head h // (H / K).
  k, v = (np.repeat(y, c.num_heads // c.num_kv_heads, axis=1) for y in (k, v))
  scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
  is_future = np.triu(np.ones((len(x), len(x)), bool), 1)
  weights = softmax(np.where(is_future, -np.inf, scores))
  out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
  return out @ params["o"]["kernel"]


def forward(params, tokens, c):
  """What the model says at every position of one sequence.

  Args:
    params: of `transformer.Transformer(c)`, any float dtype.
    tokens: the sequence, T token ids.
    c: `transformer.Config`; its dtype, blocks and remat do not matter here.

  Returns:
    logits [T, V], or values [T] of a "scalar" head; float64.
  """
  x = params["embedding"][np.asarray(tokens)]
  for i in range(c.num_layers):
    layer = params[f"layer_{i}"]
    y = norm(x, layer["attention_norm"]["scale"], c.norm_eps)
    x = x + attention(layer["attention"], y, c)
    y = norm(x, layer["mlp_norm"]["scale"], c.norm_eps)
    gate, up = y @ layer["gate"]["kernel"], y @ layer["up"]["kernel"]
    x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]["kernel"]
  x = norm(x, params["norm"]["scale"], c.norm_eps)
  if c.head == "scalar":
    return (x @ params["out"])[:, 0]
  return x @ (params["embedding"].T if c.tie_embeddings else params["out"])
