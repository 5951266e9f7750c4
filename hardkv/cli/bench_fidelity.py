"""`hardkv bench decode --fidelity`: what each way that compresses does to the predictions."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hardkv.cli.bench_run import Request

if TYPE_CHECKING:
    from hardkv.evaluation.speed import Crew
    from hardkv.evaluation.speed.prompts import Saved

_INTERVALS = 2


def measured_fidelity(saved: Saved, crew: Crew, request: Request, prompt_tokens: int, mean_tokens: int) -> Any:
    """Rows and their settings for JSON; in float32, so that rounding is no part of the difference."""
    from hardkv.evaluation import Schedule, bundled_texts, read_workload
    from hardkv.evaluation.speed import Crew, measure_peers
    from hardkv.evaluation.speed.ways import with_budget

    interval = request.plan.interval
    times = Schedule(prompt_tokens, _INTERVALS * interval, _INTERVALS, interval)
    workload = read_workload(saved.tokenizer, bundled_texts(), times)
    config = request.config
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})})
    ways = [with_budget(way, mean_tokens) for way in request.ways if way.compresses]
    with Crew(ways, saved.folder, config, request.plan.timeout_s, crew.say) as own:
        rows = measure_peers(own, workload)
    settings = {**asdict(times), "texts": list(workload.names), "mean_budget": mean_tokens, "dtype": "float32"}
    return {"fidelity": [asdict(row) for row in rows], "fidelity_settings": settings}
