"""Bundles of the compiler's static schedule: how a dump is read, and that the counts of real
kernels are what shapes say.
"""

import pytest

from benchmarks import bundles, launch
from mint_jax.errors import UserError

DUMP = """
= control target key start
LB: loop body

     0   :  { %s1 = smov 1 } /* Start region 1 */
   0x1 LB: > { %s2 = sphi %s1  ;;  %v3 = vld [vmem:[#a]] } /* Start region 2 */
   0x2   : > { %4 = sbr.rel (%p1) target = $region5 }
   0x3   : > {} /* behind a branch, before it is taken */
   0x4   : > { %v5 = vld [vmem:[#b_spill]]  ;;  %6 = vmatmul.bf16 %v5 /* a comment
over two lines */ }
   0x5 PF: > { %7 = vst [vmem:[#c]] } /* Start/End empty region 5 */
   0x6   : > { %8 = sbr.rel (!%p2) target = $region2 }
   0x7   :  {}
   0x8 PF:  { %9 = sbr.rel (%p3) target = $region4 }
   0x9   :  {}
   0xa   :  { %10 = vst [vmem:[#d]] }
   0xb PF:  {}
"""


def test_loops_and_branches_of_a_dump():
    kernel = bundles.parse(DUMP)
    assert [(part.kind, part.first, part.behind) for part in kernel.walk()] == [
        ("kernel", 0, 12),
        ("loop", 1, 8),
        ("branch", 4, 5),
        ("branch", 10, 12),  # to a region that is never begun: the exit
    ]
    loop, last = kernel.parts
    assert [len(part.lines) for part in kernel.walk()] == [3, 6, 1, 2]
    assert loop.has("vmatmul")
    assert not last.has("vmatmul")
    ran = kernel.run(lambda part: {"loop": 10, "branch": 1}[part.kind])
    assert ran == {"bundles": 3 + 10 * 7 + 2, "vmatmul": 10, "vmatpush": 0, "spills": 10}
    assert kernel.run(lambda part: part.kind == "loop")["vmatmul"] == 0


@pytest.mark.long
def test_counts_of_real_kernels_are_what_shapes_say(tmp_path):
    config = launch.load("configs/bench/schedule.py:ci")
    try:
        result = launch.run(config, tmp_path)
    except UserError as reason:
        pytest.skip(str(reason))  # no compiler, or one that does not know the undocumented flags
    chip = result["chips"]["v5e:2x2"]
    # An instruction of v5e multiplies 16 rows by a square of 128. Backward all products are of both
    # projections: first ones, one of the rows' gradient, outer ones, whose rows are the columns of
    # the first.
    base, add = chip["base"], chip["add"]
    assert base["vmatmul"] == 2 * (2048 // 128) * (768 // 128) * 128 // 16
    for n, squares in (("1", 16), ("4", 16), ("8", 32)):
        products = squares + 2 * 6
        assert add[n]["vmatmul"] == products * 128 // 16
        assert add[n]["lanes_over_base"] == pytest.approx(products / (2 * 96), abs=1e-4)
        assert chip["one_pass"][n]["vmatmul"] == base["vmatmul"] + products * 128 // 16
        assert chip["one_pass"][n]["bundles"] <= 1.01 * (base["bundles"] + add[n]["bundles"]), (
            "one pass is the default, for the bytes that it saves"
        )
    an_adapter = add["2"]["bundles"] - add["1"]["bundles"]
    assert add["4"]["bundles"] == add["1"]["bundles"] + 3 * an_adapter
    assert an_adapter >= 8, "four copies are started and waited for"
    assert add["4"]["bundles"] > add["4"]["lanes_over_base"] * base["bundles"]
    assert add["4"]["over_base"] <= 0.3, "a kernel that costs more than it did"
    for n, chunk in ((1, 1), (8, 2)):  # in 128 columns
        squares = chunk * 16 + 2 * 6 + chunk * 16
        backward = chip["backward"][str(n)]
        assert backward["vmatmul"] == (squares + chunk * (16 + 6)) * 128 // 16
        assert add["1"]["bundles"] < backward["bundles"]
        assert backward["over_base"] < 0.8, "a kernel that costs more than it did"
