# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.hlo` counts, on modules small enough to count by hand."""

import jax
import jax.numpy as jnp

from benchmarks import hlo

MODULE = """HloModule m

%in_place (p0: f32[64,8], p1: f32[1,8], p2: s32[]) -> f32[64,8] {
  %p0 = f32[64,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %u = f32[64,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%turned (q0: f32[64,8]) -> f32[8,64] {
  %q0 = f32[64,8]{1,0} parameter(0)
  ROOT %t = f32[8,64]{1,0} transpose(%q0), dimensions={1,0}
}

%body (c: (s32[], f32[64,8], f32[1,8])) -> (s32[], f32[64,8], f32[1,8]) {
  %c = (s32[], f32[64,8]{1,0}, /*index=2*/f32[1,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[64,8]{1,0} get-tuple-element(%c), index=1
  %row = f32[1,8]{1,0} get-tuple-element(%c), index=2
  %written = f32[64,8]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%in_place
  %flip = f32[8,64]{1,0} fusion(%written), kind=kInput, calls=%turned
  %d = f32[1,64]{1,0} dot(%row, %flip), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = (s32[], f32[64,8]{1,0}, f32[1,8]{1,0}) tuple(%i, %written, %row)
}

%condition (k: (s32[], f32[64,8], f32[1,8])) -> pred[] {
  %k = (s32[], f32[64,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: (s32[], f32[64,8], f32[1,8])) -> (s32[], f32[64,8], f32[1,8]) {
  %a = (s32[], f32[64,8]{1,0}, f32[1,8]{1,0}) parameter(0)
  %known = (s32[], f32[64,8]{1,0}, f32[1,8]{1,0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %more = (s32[], f32[64,8]{1,0}, f32[1,8]{1,0}) while(%known), condition=%condition, body=%body
}
"""  # noqa: E501

THUNKS = """000: kCommandBuffer [source | next=014 (1)]
    001: kCopy         [source        | next=003 (2)] kCopy
    002: kCustomKernel [source        | next=009 (1)] tile
    003: kCustomKernel [prev=001 (2)  | next=005 (1)] start
    004: kCustomKernel [source        | sink        ] tile
    005: kWhile        [prev=003 (2)  | next=010 (5)]
condition:
        006: kCustomKernel [source | sink] compare
      body:
        007: kCustomKernel [source | sink] step
        008: kCustomKernel [prev=007 (1) | sink] step
    009: kCustomKernel [prev=002 (7)  | sink        ] tile
    010: kCustomKernel [prev=005 (5)  | sink        ] report
014: kWhile        [prev=000 (14) | sink]
condition:
    015: kCustomKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | sink]
        016: kCustomKernel [source | sink] step
"""


def test_a_loop_counts_as_often_as_it_runs():
  module = hlo.Module(MODULE, large=64 * 8 * 4)
  total = module.total()
  # Five trips that are known, one of the loop that is not: 6 bodies.
  assert total.kernels == 6 * 3
  assert total.flops == 6 * 2 * 64 * 8
  assert total.unknown == 1
  assert {x[1] for x in module.loops()} == {5, None}


def test_an_update_in_place_is_not_a_copy_and_a_transpose_is():
  total = hlo.Module(MODULE, large=64 * 8 * 4).total()
  array, row, index = 64 * 8 * 4, 8 * 4, 4
  assert total.writes == {("flip", "transpose", "f32[8, 64]"): 6 * array}
  update = 2 * (row + index)
  assert total.traffic == 6 * (update + 2 * array + row + array + 64 * 4)


def test_what_a_compiler_made_is_read():
  def chain(x):
    return jax.lax.fori_loop(0, 7, lambda i, x: x @ x, x)

  text = jax.jit(chain).lower(jnp.ones((16, 16))).compile().as_text()
  module = hlo.Module(text, large=1)
  assert module.total().flops == 7 * 2 * 16**3
  assert [x[1] for x in module.loops()] == [7]


def test_a_loop_in_a_graph_is_not_driven_by_the_host():
  seen = hlo.thunks(THUNKS)
  assert seen["graphs"] == 2
  assert seen["graph_loops"] == 1
  assert seen["host_loops"] == 1
  assert seen["beside_loop"] == 2  # 004 before it, 009 behind it
  assert seen["kernels"] == 11
