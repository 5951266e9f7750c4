"""Kernels compile for both generations of GPU without spills, within shared memory, and move K and V in wide pieces."""

from __future__ import annotations

import json

import pytest

from tests.aot.cases import CASES, TARGETS, kernels, registered
from tests.aot.conftest import Results
from tests.aot.harness import SHARED_LIMITS, WIDE_BYTES, Access, Compiled, global_accesses
from tests.aot.table import RESULT, rows

pytestmark = pytest.mark.aot

each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target}")


def of(compiled: Results, case: int, target: int) -> list[Compiled]:
    found = compiled[case, target]
    if isinstance(found, Exception):
        raise found
    assert found, "launches nothing"
    return found


@each_target
@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_fits(compiled: Results, case: int, target: int) -> None:
    for kernel in of(compiled, case, target):
        row = kernel.row
        assert (row.kernel, row.stack_bytes, row.spills) == (row.kernel, 0, 0)
        assert row.shared_bytes <= SHARED_LIMITS[target], row.kernel
        assert 0 < row.registers <= 255, row.kernel


@each_target
@pytest.mark.parametrize(
    "case", [index for index, case in enumerate(CASES) if case.wide], ids=[str(case) for case in CASES if case.wide]
)
def test_moves_keys_and_values_in_wide_pieces(compiled: Results, case: int, target: int) -> None:
    accesses = [access for kernel in of(compiled, case, target) for access in kernel.accesses]
    for argument in CASES[case].wide:
        widths = {access.width_bytes for access in accesses if argument in access.arguments}
        assert widths == {WIDE_BYTES}, argument


@each_target
@pytest.mark.parametrize(
    ("op", "arguments"),
    [("rewrite", ("p_pool_keys", "p_pool_values", "p_stamps")), ("open_slots", ("p_lengths", "p_seen"))],
)
def test_no_thread_stores_before_all_have_loaded(
    compiled: Results, op: str, arguments: tuple[str, ...], target: int
) -> None:
    """What is written in place: a barrier stands between the loads and the stores, in the text of the kernel."""
    for case in [index for index, case in enumerate(CASES) if case.op == op]:
        for argument in arguments:
            accesses = [access for kernel in of(compiled, case, target) for access in kernel.accesses]
            loads = [access.barriers for access in accesses if argument in access.arguments and not access.stores]
            stores = [access.barriers for access in accesses if argument in access.arguments and access.stores]
            assert max(loads) < min(stores), argument


def test_every_launch_has_a_case() -> None:
    assert registered() == {case.op for case in CASES}


def test_every_kernel_is_compiled(compiled: Results) -> None:
    assert {row.kernel for row in rows(compiled.values())} == kernels()


def test_documentation_has_the_rows_that_are_compiled(compiled: Results) -> None:
    """Registers may differ from one version of the compiler to the next; which kernels there are may not."""
    written = json.loads(RESULT.read_text(encoding="utf-8"))
    assert [tuple(row.values())[:8] for row in written["rows"]] == [row.key for row in rows(compiled.values())], (
        f"run {written['command']}"
    )


def test_narrow_accesses_are_told_from_wide_ones() -> None:
    text = """
    ld.param.b64 %rd1, [some_kernel_param_0];
    ld.param.b64 %rd2, [some_kernel_param_1];
    ld.param.b32 %r1, [some_kernel_param_2];
    mad.wide.s32 %rd3, %r1, 2, %rd1;
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd3 + 0 ];
    add.s64 %rd4, %rd3, 64;
    ld.global.L1::evict_last.b64 { %rd5 }, [ %rd4 + 0 ];
    add.s64 %rd6, %rd2, %rd5;
    cp.async.ca.shared.global [ %r6 + 0 ], [ %rd6 + 0 ], 0x8, %r7;
    bar.sync 0;
    @%p2 st.global.v2.b64 [ %rd6 + 16 ], { %rd7, %rd8 };
    """
    found = global_accesses(text, {"p_keys": "*bf16", "CONSTANT": "constexpr", "p_values": "*bf16", "s_row": "i32"})
    assert list(found) == [
        Access(16, frozenset({"p_keys"}), False, 0),
        Access(8, frozenset({"p_keys"}), False, 0),
        Access(8, frozenset({"p_values"}), False, 0),
        Access(16, frozenset({"p_values"}), True, 1),
    ]
