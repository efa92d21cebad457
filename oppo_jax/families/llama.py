# SPDX-License-Identifier: Apache-2.0
"""Llama, and those that differ from it in a bias, a norm or a window."""

import math
from typing import Any

from oppo_jax.families import base
from oppo_jax.models import rope, transformer


def dense(theirs: str, ours: str) -> tuple[base.Row, base.Row]:
  return (
    base.Row(f"layers.{{i}}.{theirs}.weight", f"{ours}.kernel", "transposed"),
    base.Row(f"layers.{{i}}.{theirs}.bias", f"{ours}.bias"),
  )


_LLAMA_ROWS = (
  base.Row("embed_tokens.weight", "embedding"),
  base.Row("norm.weight", "norm.scale"),
  base.Row("layers.{i}.input_layernorm.weight", "attention_norm.scale"),
  base.Row("layers.{i}.post_attention_layernorm.weight", "mlp_norm.scale"),
  *(r for x in "qkvo" for r in dense(f"self_attn.{x}_proj", f"attention.{x}")),
  base.Row("layers.{i}.self_attn.q_norm.weight", "attention.q_norm.scale"),
  base.Row("layers.{i}.self_attn.k_norm.weight", "attention.k_norm.scale"),
  *(r for x in ("gate", "up", "down") for r in dense(f"mlp.{x}_proj", x)),
)


def _read_scaling(c: Any) -> dict[str, Any]:
  """Our `rope_scaling`, as keywords; nothing where there is none."""
  p = dict(c.rope_parameters)
  base.require(
    p.get("partial_rotary_factor", 1.0), "partial_rotary_factor", 1.0
  )
  kind = p.get("rope_type", "default")
  base.require(kind, "rope_type", "default", *rope.KINDS)
  if kind == "default":
    return {}
  length = p.get("original_max_position_embeddings", c.max_position_embeddings)
  scaling = dict(kind=kind, factor=float(p["factor"]))
  if kind == "llama3":
    scaling |= dict(
      original_len=length,
      low=float(p["low_freq_factor"]),
      high=float(p["high_freq_factor"]),
    )
  if kind == "yarn":
    grown = lambda m: 0.1 * m * math.log(max(p["factor"], 1.0)) + 1.0
    scale, scale_all = p.get("mscale"), p.get("mscale_all_dim")
    both = scale and scale_all
    attention = grown(scale) / grown(scale_all) if both else grown(1.0)
    if p.get("attention_factor") is not None:
      attention = p["attention_factor"]
    scaling |= dict(
      original_len=length,
      low=float(p.get("beta_slow") or 1),
      high=float(p.get("beta_fast") or 32),
      attention_factor=float(attention),
      truncate=bool(p.get("truncate", True)),
    )
  return {"rope_scaling": scaling}


def _write_scaling(c: transformer.Config) -> dict[str, Any]:
  s = c.rope_scaling
  p: dict[str, Any] = {"rope_theta": c.rope_theta, "rope_type": "default"}
  if s is not None:
    p |= {"rope_type": s.kind, "factor": s.factor}
    if s.kind != "linear":
      p["original_max_position_embeddings"] = s.original_len
    if s.kind == "llama3":
      p |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    if s.kind == "yarn":
      p |= {"beta_slow": s.low, "beta_fast": s.high, "truncate": s.truncate}
      p["attention_factor"] = s.attention_factor
  return p


def _read_llama(c: Any) -> dict[str, Any]:
  base.require(c.hidden_act, "hidden_act", "silu", "swish")
  kinds = set(getattr(c, "layer_types", None) or ())
  for kind in sorted(kinds):
    base.require(kind, "layer_types", "full_attention", "sliding_attention")
  window = getattr(c, "sliding_window", None)
  if kinds == {"full_attention"}:
    window = None
  bias = getattr(c, "attention_bias", False)
  heads = c.num_attention_heads
  return dict(
    vocab_size=c.vocab_size,
    num_layers=c.num_hidden_layers,
    width=c.hidden_size,
    num_heads=heads,
    num_kv_heads=c.num_key_value_heads,
    head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
    mlp_dim=c.intermediate_size,
    rope_theta=float(c.rope_parameters["rope_theta"]),
    norm_eps=float(c.rms_norm_eps),
    qkv_bias=bias or c.model_type == "qwen2",
    qk_norm=c.model_type == "qwen3",
    tie_embeddings=c.tie_word_embeddings,
    o_bias=bias,
    mlp_bias=getattr(c, "mlp_bias", False),
    max_row_len=window or 0,
    **_read_scaling(c),
  )


def _write_llama(c: transformer.Config) -> dict[str, Any]:
  return dict(
    vocab_size=c.vocab_size,
    num_hidden_layers=c.num_layers,
    hidden_size=c.width,
    num_attention_heads=c.num_heads,
    num_key_value_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    intermediate_size=c.mlp_dim,
    rope_parameters=_write_scaling(c),
    rms_norm_eps=c.norm_eps,
    tie_word_embeddings=c.tie_embeddings,
  )


def _llama(name: str, **kwargs: Any) -> base.Family:
  defaults = dict(prefix="model.", rows=_LLAMA_ROWS, head="lm_head.weight")
  kwargs = {"read": _read_llama, "write": _write_llama} | kwargs
  return base.Family(
    name, f"{name}ForCausalLM", "transformer", **defaults, **kwargs
  )


FAMILIES: dict[str, base.Family] = {
  "llama": _llama(
    "Llama",
    write=lambda c: (
      _write_llama(c) | {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}
    ),
    fits=lambda c: (
      not c.qk_norm and c.qkv_bias == c.o_bias and not c.max_row_len
    ),
  ),
  "mistral": _llama(
    "Mistral",
    write=lambda c: _write_llama(c) | {"sliding_window": c.max_row_len or None},
    fits=lambda c: not (c.qk_norm or c.qkv_bias or c.o_bias or c.mlp_bias),
  ),
  "qwen2": _llama(
    "Qwen2",
    fits=lambda c: (
      c.qkv_bias and not (c.qk_norm or c.o_bias or c.mlp_bias or c.max_row_len)
    ),
  ),
  "qwen3": _llama(
    "Qwen3",
    write=lambda c: _write_llama(c) | {"attention_bias": c.qkv_bias},
    fits=lambda c: (
      c.qk_norm and c.qkv_bias == c.o_bias and not (c.mlp_bias or c.max_row_len)
    ),
  ),
}
