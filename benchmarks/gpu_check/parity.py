"""Part a: every operator on the device against a float64 oracle, or bit by bit where it only counts and moves.

The cases and oracles are those of the tests, which run them on a CPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import hardkv_kernels
from benchmarks.gpu_check.plan import ParityPlan
from benchmarks.gpu_check.reporting import ROOT, Part

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN = float("nan")
OPERATORS = {
    "append",
    "merge_states",
    "open_slots",
    "ragged_decode",
    "rewrite",
    "score_update",
    "threshold_budget",
    "topp_threshold",
    "window_scores",
}
"""Every operator that has a kernel."""
_RUNS, _NOT_A_NUMBER = 3, 1234.5


@dataclass(frozen=True)
class Found:
    """The largest error of a case, and the share of its tolerance that it takes, at most 1."""

    error: float
    share: float
    tolerance: str


@dataclass(frozen=True)
class Check:
    """One case of one operator."""

    operator: str
    case: str
    dtype: torch.dtype | None
    run: Callable[[], Found]


def run(part: Part, plan: ParityPlan, device: torch.device) -> None:
    """Run every check; a case that is beyond its tolerance, or raises, is a failure."""
    use_own_tests()
    skipped: list[str] = []
    for check in checks(plan, device):
        name = f"{check.operator} {check.case} {_name(check.dtype)}".strip()
        if part.left < 0:
            skipped.append(name)
            continue
        row: dict[str, Any] = {"operator": check.operator, "case": check.case, "dtype": _name(check.dtype)}
        try:
            found = check.run()
        except Exception as error:
            part.row(**row, error=None, tolerance=None, ok=False)
            text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            part.fail(f"{name}: {text}")
            continue
        part.row(**row, error=found.error, tolerance=found.tolerance, share=found.share, ok=found.share <= 1.0)
        if not found.share <= 1.0:
            part.fail(f"{name}: largest error {found.error:.3g}, tolerance {found.tolerance}")
    covered = {row["operator"] for row in part.rows}
    missing = sorted(OPERATORS - covered)
    if missing:
        part.fail(f"never run: {', '.join(missing)}")
    if skipped:
        part.note(f"no time for {len(skipped)} cases: {', '.join(skipped)}")


def use_own_tests() -> None:
    """Let `tests` be this checkout's folder: another package of that name may be installed."""
    if "tests" not in sys.modules:
        package = ModuleType("tests")
        package.__path__ = [str(ROOT / "tests")]
        sys.modules["tests"] = package


def on_device(operator: Any, device: torch.device) -> Callable[..., Any]:
    """`operator` for tensors on the CPU: it runs on `device`, and what it changes is changed here too.

    A device runs it several times from the same state: where two runs differ by a bit, threads race.
    """
    arguments_of = operator._opoverload._schema.arguments
    changes = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments_of]

    def call(*arguments: Any) -> Any:
        before: list[Tensor] | None = None
        for _ in range(_RUNS if device.type == "cuda" else 1):
            moved = [_moved(argument, device) for argument in arguments]
            answer = operator(*moved)
            answers = answer if isinstance(answer, tuple) else () if answer is None else (answer,)
            changed = [
                (mine, theirs)
                for mine, theirs, is_changed in zip(arguments, moved, changes, strict=True)
                if is_changed and isinstance(mine, Tensor)
            ]
            after = [*answers, *(theirs for _, theirs in changed)]
            for place, (one, other) in enumerate(zip(before or (), after, strict=False)):
                assert torch.equal(one.nan_to_num(_NOT_A_NUMBER), other.nan_to_num(_NOT_A_NUMBER)), (
                    f"two runs from the same state differ in result {place}: threads race"
                )
            before = after
        for mine, theirs in changed:
            mine.copy_(theirs)
        back = tuple(each.cpu() for each in answers)
        return back if isinstance(answer, tuple) else back[0] if back else None

    return call


def _moved(argument: Any, device: torch.device) -> Any:
    """A tensor on the device, with the gaps that it has in memory."""
    if not isinstance(argument, Tensor):
        return argument
    base = argument._base
    if base is None or argument.is_contiguous() or device.type == "cpu":
        return argument.to(device)
    return base.to(device).as_strided(argument.size(), argument.stride(), argument.storage_offset())


def within(found: Tensor, expected: Tensor, rtol: float, atol: float) -> Found:
    """Compare with an oracle; equal infinities are equal, and NaN is never right."""
    found, expected = found.double(), expected.double()
    error = torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(nan=float("inf"))
    allowed = atol + rtol * expected.abs().nan_to_num(posinf=0.0, neginf=0.0)
    words = " + ".join(text for text in (f"{atol:.2g}", f"{rtol:.2g} rel" if rtol else "") if text)
    if not error.numel():
        return Found(0.0, 0.0, words)
    return Found(float(error.max()), float((error / allowed).max()), words)


def worst(parts: list[Found]) -> Found:
    """The one that takes most of its tolerance."""
    return max(parts, key=lambda part: part.share)


def exact(action: Callable[[], object]) -> Callable[[], Found]:
    """A check that compares bit by bit, and raises."""

    def check() -> Found:
        action()
        return Found(0.0, 0.0, "exact")

    return check


def checks(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    """All of them, those that matter most first."""
    yield from _decoding(plan, device)
    yield from _merging(plan, device)
    yield from _statistic(plan, device)
    yield from _writing(plan, device)
    yield from _windows(plan, device)
    yield from _selection(plan, device)


def _decoding(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_ragged_decode import decode_case, rounding_of

    cuda = device.type == "cuda"
    decode = on_device(hardkv_kernels.ragged_decode, device)
    # The plain form, which a CPU runs, multiplies by zero what nobody may read.
    dirt = NAN if cuda else 7.0

    def check(
        label: str, dtype: torch.dtype, *case_of: Any, with_logits: bool = False, sharp: int = 1, **options: Any
    ) -> Check:
        def compare() -> Found:
            case = decode_case(*case_of, **{"dtype": dtype, "dirt": dirt, **options})
            # Attention over thousands of slots is all but flat, and its answer near zero, unless logits are larger.
            case = replace(case, query=case.query * sharp)
            pages, slots = case.bias.shape
            logits = torch.full((pages, case.query.shape[2], slots), NAN)
            out, lse, _ = decode(*case.arguments(logits if with_logits else None))
            expected_out, expected_lse, expected_logits = case.expected()
            rounding = sharp * (2.0**-20 if cuda else rounding_of(dtype))
            eps = max(torch.finfo(dtype).eps, 2.0**-20)
            found = [
                within(out, expected_out, 0.0, 4 * eps + 8 * rounding),
                within(lse, expected_lse, 0.0, 8 * rounding),
            ]
            if with_logits:
                ours = ~torch.isnan(expected_logits)
                found.append(within(logits[ours], expected_logits[ours], rounding, 4 * rounding))
                assert logits[~ours].isnan().all(), "logits were written to pages of others"
            return worst(found)

        return Check("ragged_decode", label, dtype, compare)

    ragged = [[3, 41, 0], [17, 1, 60]]
    long, some = plan.pages, max(2, plan.pages // 9)
    realistic = [[long, some, 1, 5, long // 2, some, 2, long // 3]] * 2 + [[some, long, 7, 1, 3, long, some, 0]] * 2
    for dtype in DTYPES:
        for dim in plan.head_dims:
            yield check(f"D {dim}, group 4", dtype, dim, ragged, 4, dim, 16)
        for group in plan.groups:
            yield check(f"D 64, group {group}, logits", dtype, group, ragged, group, 64, 16, with_logits=True)
        options: dict[str, Any] = {"softcap": 2.0, "sinks": True, "padded_rows": 1}
        yield check("softcap, sinks, logits, a padded row", dtype, 3, ragged, 4, 128, 16, with_logits=True, **options)
        yield check("all dropped, sinks", dtype, 4, ragged, 4, 64, 16, dropped=1.0, sinks=True)
        yield check("no pages at all", dtype, 5, [[0, 0]], 4, 64, 16, padded_rows=1)
        yield check("pages of 32", dtype, 6, ragged, 4, 128, 32)
        label = f"4 x 8 heads, up to {long * 16} slots, logits"
        yield check(label, dtype, 7, realistic, 4, 128, 16, with_logits=True, sharp=3)


def _merging(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_merge_states import expected, parts_case

    merge = on_device(hardkv_kernels.merge_states, device)

    def compare(dtype: torch.dtype, parts: int, rows: int, dim: int) -> Found:
        outs, lses = parts_case(parts, parts, rows, dim, dtype)
        out, lse = merge(outs, lses)
        expected_out, expected_lse = expected(outs, lses)
        return worst([within(out, expected_out, 1e-5, 1e-5), within(lse, expected_lse, 1e-6, 1e-6)])

    for dtype in DTYPES:
        for parts, rows, dim in ((3, 6, 80), (9, 8 * plan.rows, 128)):
            yield Check(
                "merge_states", f"{parts} parts, {rows} rows, D {dim}", dtype, partial(compare, dtype, parts, rows, dim)
            )


def _statistic(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_score_update import update_case

    update = on_device(hardkv_kernels.score_update, device)

    def compare(reduction: str, floor: float, pages: int, group: int) -> Found:
        case = update_case(group, pages, 6, group, 16, (3, pages - 5))
        if device.type != "cuda":
            case.logits.nan_to_num_(1.0)
        statistic = case.statistic.clone()
        update(*case.arguments(statistic, reduction, 4.0, 0.98, floor))
        return within(statistic, case.expected(reduction, 4.0, 0.98, floor), 1e-4, 1e-25)

    for reduction in ("power", "max"):
        for floor, pages, group in ((0.0, 60, 3), (1e-8, 8 * plan.pages, 4), (0.01, 60, 16)):
            yield Check(
                "score_update",
                f"{reduction}, floor {floor}, {pages} pages, group {group}",
                None,
                partial(compare, reduction, floor, pages, group),
            )


def _writing(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_append import check_opening, check_writing, opening, writing
    from tests.test_rewrite import check as check_moves
    from tests.test_rewrite import rewrite_case

    opens, appends, moves = (
        on_device(operator, device)
        for operator in (hardkv_kernels.open_slots, hardkv_kernels.append, hardkv_kernels.rewrite)
    )

    def opened(sizes: Any) -> None:
        arguments: Any = (1, *sizes, True)
        check_opening(opening(*arguments), opens)

    def written(sizes: Any) -> None:
        arguments: Any = (2, *sizes, True)
        check_writing(writing(*arguments), appends)

    def moved(sizes: Any) -> None:
        check_moves(rewrite_case(3, *sizes), moves)

    for rows, layers, heads, width in ((7, 3, 2, 4), (plan.rows, 36, 8, plan.pages)):
        yield Check(
            "open_slots",
            f"{rows} rows, {layers} layers, {heads} heads",
            None,
            exact(partial(opened, (rows, layers, heads, 16, width))),
        )
    for dtype in DTYPES:
        for rows, heads, group, dim in ((7, 3, 3, 80), (plan.rows, 8, 4, 128), (5, 2, 16, 256)):
            yield Check(
                "append",
                f"{rows} rows, {heads} heads, group {group}, D {dim}, ring",
                dtype,
                exact(partial(written, (rows, heads, group, 16, dim, dtype))),
            )
        for rows, entries, dim in ((3, 70, 80), (6, 300, 128), (3, plan.tokens // 4, 64)):
            yield Check(
                "rewrite",
                f"{rows} heads of {entries} entries, D {dim}",
                dtype,
                exact(partial(moved, (rows, entries, 16, dim, dtype, 0.6))),
            )


def _windows(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_window_scores import REDUCTIONS, clean, window_case

    scores_of = on_device(hardkv_kernels.window_scores, device)

    def compare(reduction: str, dtype: torch.dtype, shape: Any, options: dict[str, Any]) -> Found:
        case = window_case(1, shape, dtype, dirty=True, **options)
        cleaned = clean(case)
        settings = (reduction, 4.0, 0.98, 1e-8, cleaned.thresholds_between())
        scores = scores_of(*case.arguments(*settings))
        assert not scores[~case.valid].any(), "a slot that is not valid has a score"
        return within(scores, cleaned.expected(*settings), 1e-4, 1e-7)

    cases: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("2 x 2 heads of 150, D 40", (2, 2, 2, 19, 150, 40), {}),
        ("softcap, sinks, D 128", (1, 2, 4, 70, 200, 128), {"softcap": 2.0, "sinks": True}),
        (f"8 heads of {plan.tokens}, D 128", (1, 8, 4, plan.rows, plan.tokens, 128), {}),
    ]
    for dtype in DTYPES:
        for reduction in REDUCTIONS:
            for label, shape, options in cases:
                yield Check(
                    "window_scores", f"{reduction}, {label}", dtype, partial(compare, reduction, dtype, shape, options)
                )


def _selection(plan: ParityPlan, device: torch.device) -> Iterator[Check]:
    from tests.test_threshold_budget import arguments
    from tests.test_threshold_budget import check as check_counts
    from tests.test_topp_threshold import check as check_pivots
    from tests.test_topp_threshold import rows

    budget = on_device(hardkv_kernels.threshold_budget, device)
    pivot = on_device(hardkv_kernels.topp_threshold, device)

    def counted(groups: int, heads: int, tokens: int, levels: int, fill: float, searched: bool) -> None:
        given = arguments(heads, groups, heads, tokens, levels, fill)
        counts = budget(*given)
        if searched:
            check_counts(counts, *given)
        else:  # the search among exact fractions would take minutes
            wanted = hardkv_kernels.threshold_budget(*given)
            assert torch.equal(counts, wanted), f"{int((counts != wanted).sum())} of {counts.numel()} counts differ"

    for sizes in (
        (2, 5, 33, 5, 0.37, True),
        (1, 65, 9, 3, 0.62, True),
        (2, 5, 33, 100_000, 0.8, True),
        (1, 288, plan.tokens, 100_000, 0.4, False),
        (2, 288, plan.tokens // 2, 50, 0.6, False),
    ):
        label = f"{sizes[0]} x {sizes[1]} heads of {sizes[2]}, {sizes[3]} levels"
        yield Check("threshold_budget", label, None, exact(partial(counted, *sizes)))

    def pivots(tokens: int, sharpness: float, p: float) -> None:
        x = rows(tokens, plan.rows, tokens, sharpness, 10_000, 0.3)
        check_pivots(x, p, *pivot(x, p))

    for tokens, sharpness, p in (
        (37, 3.0, 0.5),
        (600, 0.5, 0.95),
        (plan.tokens, 1.0, 0.9),
        (2 * plan.tokens, 2.0, 1.0),
    ):
        label = f"{plan.rows} rows of {tokens}, p {p}"
        yield Check("topp_threshold", label, None, exact(partial(pivots, tokens, sharpness, p)))


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
