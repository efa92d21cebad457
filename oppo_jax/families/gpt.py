# SPDX-License-Identifier: Apache-2.0
"""GPT-NeoX (Pythia) and GPT-2."""

from typing import Any

from oppo_jax.families import base
from oppo_jax.families.llama import dense
from oppo_jax.models import gpt

_ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_new": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
}


def _norm(theirs: str, ours: str) -> tuple[base.Row, base.Row]:
  return (
    base.Row(f"{theirs}.weight", f"{ours}.scale"),
    base.Row(f"{theirs}.bias", f"{ours}.bias"),
  )


_NEOX_ROWS = (
  base.Row("embed_in.weight", "embedding"),
  *_norm("final_layer_norm", "norm"),
  *_norm("layers.{i}.input_layernorm", "attention_norm"),
  *_norm("layers.{i}.post_attention_layernorm", "mlp_norm"),
  *(
    base.Row(
      f"layers.{{i}}.attention.query_key_value.{a}", f"attention.qkv.{b}", how
    )
    for a, b, how in (
      ("weight", "kernel", "by_head"),
      ("bias", "bias", "by_head"),
    )
  ),
  *dense("attention.dense", "attention.o"),
  *dense("mlp.dense_h_to_4h", "up"),
  *dense("mlp.dense_4h_to_h", "down"),
)


def _conv1d(theirs: str, ours: str) -> tuple[base.Row, base.Row]:
  """[in, out] there too."""
  return (
    base.Row(f"h.{{i}}.{theirs}.weight", f"{ours}.kernel"),
    base.Row(f"h.{{i}}.{theirs}.bias", f"{ours}.bias"),
  )


_GPT2_ROWS = (
  base.Row("wte.weight", "embedding"),
  base.Row("wpe.weight", "position_embedding"),
  *_norm("ln_f", "norm"),
  *_norm("h.{i}.ln_1", "attention_norm"),
  *_norm("h.{i}.ln_2", "mlp_norm"),
  *_conv1d("attn.c_attn", "attention.qkv"),
  *_conv1d("attn.c_proj", "attention.o"),
  *_conv1d("mlp.c_fc", "up"),
  *_conv1d("mlp.c_proj", "down"),
)


def _read_neox(c: Any) -> dict[str, Any]:
  base.require(c.hidden_act, "hidden_act", *_ACTIVATIONS)
  p = c.rope_parameters
  base.require(p.get("rope_type", "default"), "rope_type", "default")
  head_dim = c.hidden_size // c.num_attention_heads
  return dict(
    vocab_size=c.vocab_size,
    num_layers=c.num_hidden_layers,
    width=c.hidden_size,
    num_heads=c.num_attention_heads,
    mlp_dim=c.intermediate_size,
    num_positions=0,
    rotary_dim=int(head_dim * p["partial_rotary_factor"]),
    rope_theta=float(p["rope_theta"]),
    norm_eps=float(c.layer_norm_eps),
    parallel_residual=c.use_parallel_residual,
    activation=_ACTIVATIONS[c.hidden_act],
    attention_bias=c.attention_bias,
    tie_embeddings=c.tie_word_embeddings,
  )


def _read_gpt2(c: Any) -> dict[str, Any]:
  base.require(c.activation_function, "activation_function", *_ACTIVATIONS)
  base.require(c.scale_attn_weights, "scale_attn_weights", True)
  by_layer = c.scale_attn_by_inverse_layer_idx
  base.require(by_layer, "scale_attn_by_inverse_layer_idx", False)
  base.require(c.add_cross_attention, "add_cross_attention", False)
  return dict(
    vocab_size=c.vocab_size,
    num_layers=c.n_layer,
    width=c.n_embd,
    num_heads=c.n_head,
    mlp_dim=4 * c.n_embd if c.n_inner is None else c.n_inner,
    num_positions=c.n_positions,
    rotary_dim=0,
    rope_theta=10_000.0,
    norm_eps=float(c.layer_norm_epsilon),
    parallel_residual=False,
    activation=_ACTIVATIONS[c.activation_function],
    attention_bias=True,
    tie_embeddings=c.tie_word_embeddings,
  )


_THEIR_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _write_neox(c: gpt.Config) -> dict[str, Any]:
  return dict(
    vocab_size=c.vocab_size,
    num_hidden_layers=c.num_layers,
    hidden_size=c.width,
    num_attention_heads=c.num_heads,
    intermediate_size=c.mlp_dim,
    rope_parameters={
      "rope_type": "default",
      "rope_theta": c.rope_theta,
      "partial_rotary_factor": c.rotary_dim / c.head_dim,
    },
    layer_norm_eps=c.norm_eps,
    use_parallel_residual=c.parallel_residual,
    hidden_act=_THEIR_ACTIVATION[c.activation],
    attention_bias=c.attention_bias,
    tie_word_embeddings=c.tie_embeddings,
  )


def _write_gpt2(c: gpt.Config) -> dict[str, Any]:
  return dict(
    vocab_size=c.vocab_size,
    n_layer=c.num_layers,
    n_embd=c.width,
    n_head=c.num_heads,
    n_inner=c.mlp_dim,
    n_positions=c.num_positions,
    layer_norm_epsilon=c.norm_eps,
    activation_function=_THEIR_ACTIVATION[c.activation],
    tie_word_embeddings=c.tie_embeddings,
  )


FAMILIES: dict[str, base.Family] = {
  "gpt_neox": base.Family(
    name="GPTNeoX",
    lm="GPTNeoXForCausalLM",
    model="gpt",
    prefix="gpt_neox.",
    rows=_NEOX_ROWS,
    head="embed_out.weight",
    read=_read_neox,
    write=_write_neox,
    fits=lambda c: not c.num_positions,
  ),
  "gpt2": base.Family(
    name="GPT2",
    lm="GPT2LMHeadModel",
    model="gpt",
    prefix="transformer.",
    rows=_GPT2_ROWS,
    head="lm_head.weight",
    read=_read_gpt2,
    write=_write_gpt2,
    fits=lambda c: (
      c.num_positions
      and not c.rotary_dim
      and not c.parallel_residual
      and c.attention_bias
    ),
  ),
}
