"""Which rows of the query window count, shared by scorers that average or count over them."""

from __future__ import annotations

from torch import Tensor

from hardkv.types import ScoreView


def rows_newer(view: ScoreView) -> Tensor:
    """How many rows of the window are newer than each row, `[B, W]` int64; of no meaning where never written."""
    if view.query_positions is None:
        raise ValueError("this view carries no queries: set `needs_queries = True` on the scorer")
    positions = view.query_positions
    return (positions[:, None, :] > positions[:, :, None]).sum(-1)


def newest_rows(view: ScoreView, rows: int | None) -> Tensor:
    """The newest `rows` written rows (None: all written), `[B, W]` bool."""
    if rows is None:
        return view.row_valid
    return view.row_valid & (rows_newer(view) < rows)
