"""Accuracy by depth and context as heat maps, one for each task and method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_INCHES = 2.6


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a result of `hardkv eval retrieval`: a row of maps for each task, the full cache's first."""
    from matplotlib.figure import Figure

    plan = found["plan"]
    methods = [row["method"] for row in found["summary"]]
    width, height = _INCHES * len(methods) + 1.2, _INCHES * len(plan["tasks"]) + 0.8
    figure = Figure(figsize=(max(width, 6.0), height), layout="constrained")
    panels = figure.subplots(len(plan["tasks"]), len(methods), squeeze=False, sharex=True, sharey=True)
    image = None
    for task, line in zip(plan["tasks"], panels, strict=True):
        for method, panel in zip(methods, line, strict=True):
            image = _panel(panel, found, task, method)
        line[0].set_ylabel(f"{task}\ndepth")
    for method, panel in zip(methods, panels[0], strict=True):
        panel.set_title(method, fontsize="medium")
    for panel in panels[-1]:
        panel.set_xlabel("tokens of the prompt")
    if image is not None:
        figure.colorbar(image, ax=panels, label="accuracy", shrink=0.8)
    after = f"compressed before the {plan['compress_before']}".replace("the last", "the last token")
    figure.suptitle(f"{found['model']}, {found['dtype']}, {plan['difficulty']}, {after}", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _panel(panel: Any, found: Mapping[str, Any], task: str, method: str) -> Any:
    """One map; a cell that was not run is blank."""
    contexts, depths = found["plan"]["contexts"], found["plan"]["depths"]
    cells = {
        (cell["depth"], cell["context_tokens"]): cell["accuracy"]
        for cell in found["cells"]
        if (cell["task"], cell["method"]) == (task, method)
    }
    grid = [[cells.get((depth, tokens), float("nan")) for tokens in contexts] for depth in depths]
    image = panel.imshow(grid, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    for (depth, tokens), accuracy in cells.items():
        colour = "white" if abs(accuracy - 0.5) > 0.35 else "black"
        style = {"ha": "center", "va": "center", "fontsize": "small", "color": colour}
        panel.text(contexts.index(tokens), depths.index(depth), f"{accuracy:.2f}", **style)
    panel.set_xticks(range(len(contexts)), [f"{tokens:,}" for tokens in contexts])
    panel.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    return image
