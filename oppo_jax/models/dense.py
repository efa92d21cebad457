# SPDX-License-Identifier: Apache-2.0
"""A dense layer whose weight gradient is xᵀ dy.

JAX transposes x @ W with respect to W into (dyᵀ x)ᵀ, and XLA:CPU then computes
in layouts that cost copies; and a product that reads x turned takes up to half
as long again as turning x first, hence the barrier.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def product(x, kernel):
  """x [..., K] @ kernel [K, N]."""
  return jnp.matmul(x, kernel)


def _forward(x, kernel):
  return product(x, kernel), (x, kernel)


def _turned(x):
  """[N, K] of x [K, N]; on a CPU not left to the product that reads it."""
  apart = lambda x: lax.optimization_barrier(x.T)
  return lax.platform_dependent(x, cpu=apart, default=lambda x: x.T)


def _backward(saved, dy):
  x, kernel = saved
  flat = lambda y: y.reshape(-1, y.shape[-1])
  dx = lax.dot_general(dy, kernel, (((dy.ndim - 1,), (1,)), ((), ())))
  dkernel = jnp.matmul(_turned(flat(x)), flat(dy))
  return dx, dkernel


product.defvjp(_forward, _backward)


def _dot_general(x, kernel, dimension_numbers, precision=None, **kwargs):
  del dimension_numbers, precision, kwargs  # `nn.Dense` asks for one form
  return product(x, kernel)


Dense = functools.partial(nn.Dense, dot_general=_dot_general)
