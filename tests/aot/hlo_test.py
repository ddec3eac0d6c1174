"""The reader of compiled text: trip counts, FLOPs and collectives of snippets as compilers write
them, and of a real program.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mint_jax.aot import hlo

LOOP = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[4,64,32])) -> (s32[], bf16[4,64,32]) {
  %p = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[4,64,32]{2,1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %all = bf16[8,64,32]{2,1,0:T(8,128)(2,1)} all-gather(%x), channel_id=1, replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, dimensions={0}
  %both = (f32[256]{0}, f32[256]{0}) all-reduce-start(%y, %z), replica_groups={{0,1,2,3}}, to_apply=%add
  %y = f32[256]{0:T(256)} parameter(1)
  %z = f32[256]{0:T(256)} parameter(2)
  %done = (f32[256]{0}, f32[256]{0}) all-reduce-done(%both)
  %s = f32[64]{0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.3
  %m = (bf16[4,64,32]{2,1,0:T(8,128)(2,1)}, bf16[4,64,32]{2,1,0}, u32[]{:S(2)}) collective-permute-start(%x), source_target_pairs={{0,1}}
  ROOT %out = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}) tuple(%i, %x)
}

%all-reduce-scatter.3 (q: f32[256]) -> f32[64] {
  %q = f32[256]{0} parameter(0)
  %r = f32[256]{0} all-reduce(%q), replica_groups=[1,4]<=[4], to_apply=%add
  ROOT %slice = f32[64]{0} dynamic-slice(%r), dynamic_slice_sizes={64}
}

CONDITION
ENTRY %main (x: bf16[4,64,32]) -> bf16[4,64,32] {
  %x0 = bf16[4,64,32]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[4,64,32]{2,1,0}) tuple(%zero, %x0)
  %loop = (s32[], bf16[4,64,32]{2,1,0}) while(%start), condition=%test, body=%body, metadata={op_name="jit(f)/while"}NOTED
  ROOT %got = bf16[4,64,32]{2,1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
PLAIN = """%test (c: (s32[], bf16[4,64,32])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5)
  %c = (s32[]{:T(128)}, bf16[4,64,32]{2,1,0}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%n, %limit), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
}
"""  # noqa: E501
DATA = """%test (c: (s32[], bf16[4,64,32])) -> pred[] {
  %yes = pred[] constant(true)
  %c = (s32[], bf16[4,64,32]{2,1,0}) parameter(0)
  ROOT %and = pred[] and(%yes, %yes)
}
"""


@pytest.mark.parametrize(
    ("condition", "noted", "trips", "unknown"),
    [
        (PLAIN, "", 5, 0),
        (DATA, "", 1, 1),
        (DATA, ', backend_config={"known_trip_count":{"n":"7"}}', 7, 0),
    ],
    ids=["constant", "data", "noted"],
)
def test_collectives_count_as_often_as_their_loop_runs(condition, noted, trips, unknown):
    text = LOOP.replace("CONDITION", condition).replace("NOTED", noted)
    cost, step = hlo.Module(text).cost(), hlo.Module(text, steps=True).cost()
    assert cost.unknown_loops == unknown
    assert cost.least == (frozenset(cost.counts) if unknown else frozenset())
    assert (step.counts, step.unknown_loops, step.least) == (cost.counts, 0, frozenset())
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    assert cost.counts == dict.fromkeys(kinds, trips)
    shard = 4 * 64 * 32 * 2
    assert cost.bytes == {
        "all-gather": trips * shard,  # groups of 2
        "all-reduce": trips * 2 * (2 * 256 * 4) * 3 / 4,  # two operands, groups of 4
        "reduce-scatter": trips * 256 * 4 * 3 / 4,
        "collective-permute": trips * shard,
    }


MATRIX = """HloModule jit_g

ENTRY %main (a: bf16[8], b: bf16[8]) -> f32[8] {
  %a = bf16[LHS]{2,1,0} parameter(0)
  %b = bf16[RHS]{2,1,0} parameter(1)
  ROOT %c = f32[OUT]{2,1,0:T(8,128)} OP
}
"""


DOT = "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"
BATCH = "convolution(%a, %b), window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf"
PADDED = "convolution(%a, %b), window={size=2 pad=1_1}, dim_labels=bf0_0oi->bf0"


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "op", "products"),
    [
        ("6,50,30", "6,30,70", "6,50,70", DOT, 6 * 50 * 30 * 70),
        ("4,50,30", "4,30,70", "4,50,70", BATCH, 4 * 50 * 30 * 70),
        ("2,3,9", "2,4,3", "2,4,10", PADDED, 2 * 3 * 4 * 18),
    ],
    ids=["dot", "batch", "padded"],
)
def test_flops_of_dots_and_of_the_convolutions_that_stand_for_them(lhs, rhs, out, op, products):
    text = MATRIX.replace("LHS", lhs).replace("RHS", rhs).replace("OUT", out).replace("OP", op)
    assert hlo.Module(text).cost().flops == 2 * products


def test_a_scan_over_sharded_layers(mesh8):
    L, B, D, F = 6, 32, 64, 128

    def fn(x, up, down):
        def layer(x, w):
            return jnp.tanh(x @ w[0]) @ w[1], None

        return jax.lax.scan(layer, x, (up, down))[0]

    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh8, P(*axes)))

    rows = ("data", "fsdp")
    args = (
        array((B, D), rows),
        array((L, D, F), None, None, "tensor"),
        array((L, F, D), None, "tensor"),
    )
    compiled = jax.jit(fn, out_shardings=args[0].sharding).lower(*args).compile()
    cost = hlo.Module(compiled.as_text()).cost()
    assert cost.unknown_loops == 0
    assert cost.flops == 2 * 2 * L * B * D * F / 8
    assert cost.counts == {"all-reduce": L}
    assert cost.bytes["all-reduce"] == L * (B // 4) * D * 4  # 2 o (n - 1) / n with n = 2
