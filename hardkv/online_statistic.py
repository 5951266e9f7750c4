"""The number that an online scorer keeps for every cached token, folded from each step's attention."""

from __future__ import annotations

import torch
from torch import Tensor

from hardkv.errors import HardKVError
from hardkv.interfaces import OnlineScorer
from hardkv.memory import PagePool
from hardkv.pipeline import blaming
from hardkv.types import FusedUpdate
from hardkv_kernels import score_update

_NEGLIGIBLE = -60.0
"""Log-probabilities below this count as 0: their exponentials would end as slow denormals."""


class OnlineStatistic:
    """Lets a scorer fold the attention of one decode step into `pool.statistic`.

    Where a layer's pages lie together, on a CPU, layer by layer, while the probabilities are in its caches. Elsewhere
    each layer leaves its logits in a buffer of the pool's size, and all are folded at the end of the step in one launch
    of constant shape.
    """

    def __init__(self, pool: PagePool, scorer: OnlineScorer | None, group: int, rows: int) -> None:
        device = pool.bias.device
        self.pool, self.scorer, self.group = pool, scorer, group
        self.at_once = scorer is not None and pool.layer_regions
        later = scorer is not None and not self.at_once
        self.logits = torch.zeros(pool.manager.pages + 1, group, pool.page_slots, device=device) if later else None
        self.all_lse = torch.zeros(pool.layers * rows * pool.heads * group if later else 0, device=device)

    @property
    def spares_others(self) -> bool:
        """Whether a step writes nothing to sequences that take no part; a plugin's own `update` runs over all pages."""
        return self.scorer is None or self.at_once or self.scorer.fused is not None

    @property
    def allocated_bytes(self) -> int:
        return self.all_lse.nbytes + (0 if self.logits is None else self.logits.nbytes)

    def bind(self, page_owner: Tensor, owners: int, complete: bool) -> None:
        """Let `page_owner [n]` say who owns what; `owners` in each layer.

        `complete`: whether no page in a layer's slice is another's, of a sequence or a layer, and must be left alone.
        """
        self._page_owner, self._owners, self._complete = page_owner, owners, complete
        if self.logits is not None:
            size = self.pool.layers * owners * self.group
            self._lse = self.all_lse[:size].view(self.pool.layers, owners, self.group)

    def take(
        self, layer: int, first_page: int, last_page: int, lse: Tensor, probabilities: Tensor, share: Tensor | None
    ) -> dict[int, HardKVError]:
        """Take in one layer's attention; gives the rows for which the scorer failed.

        `lse [R, H, G]`; `probabilities [last_page - first_page, G, S]`, where they are folded at once; `share
        [R, H, G]`: how much of the attention they are of, where some went to tiers outside the pages.
        """
        if self.scorer is None:
            return {}
        if not self.at_once:
            self._lse[layer].copy_(lse.view(self._owners, self.group))
            return {}
        statistic = self.pool.statistic[first_page:last_page]
        # In place, which only an update that has a fused form as well is trusted with: it cannot fail midway.
        if self._complete and share is None and self.scorer.fused is not None:
            with blaming("scorer", self.scorer):
                self.scorer.update(statistic, probabilities)
            return {}
        owner = self._page_owner[first_page:last_page] - layer * self._owners
        ours = (owner >= 0) & (owner < self._owners)
        if share is not None:
            rows = share.view(self._owners, self.group).index_select(0, owner.clamp(0, self._owners - 1))
            probabilities.mul_(rows[:, :, None])
        return self._update(statistic, probabilities, owner, ours)

    def close(self) -> dict[int, HardKVError]:
        """Fold the step, where that was not done layer by layer; gives the rows for which the scorer failed."""
        if self.logits is None or self.scorer is None:
            return {}
        fused, pages = self.scorer.fused, self.pool.manager.pages
        if fused is not None:
            self._update_fused(fused, pages)
            return {}
        lse = self._lse.flatten(0, 1)
        owner = self._page_owner[:pages]
        ours = owner < lse.shape[0]
        total = lse.index_select(0, owner.clamp(max=lse.shape[0] - 1))[:, :, None]
        seen = ours[:, None, None] & (total > float("-inf"))
        log_probabilities = torch.where(seen, self.logits[:pages] - total, float("-inf"))
        probabilities = torch.threshold(log_probabilities, _NEGLIGIBLE, float("-inf")).exp_()
        return self._update(self.pool.statistic[:pages], probabilities, owner % self._owners, ours)

    def _update(self, statistic: Tensor, probabilities: Tensor, owner: Tensor, ours: Tensor) -> dict[int, HardKVError]:
        """Let the scorer update the pages `ours [m]` says, and leave the others as they are.

        If it fails, it is tried again for each row by itself, whose pages `owner [m]` tells.
        """
        assert self.scorer is not None
        updated, given = statistic.clone(), probabilities.clone()
        try:
            with blaming("scorer", self.scorer):
                self.scorer.update(updated, given)
            statistic.copy_(torch.where(ours[:, None], updated, statistic))
            return {}
        except HardKVError as error:
            if statistic.is_cuda and torch.cuda.is_current_stream_capturing():
                return dict.fromkeys(range(self._owners // self.pool.heads), error)
        failures: dict[int, HardKVError] = {}
        for row in range(self._owners // self.pool.heads):
            mine = ours & (owner // self.pool.heads == row)
            updated = statistic[mine]
            try:
                with blaming("scorer", self.scorer):
                    self.scorer.update(updated, probabilities[mine])
                statistic[mine] = updated
            except HardKVError as error:
                failures[row] = error
        return failures

    def _update_fused(self, fused: FusedUpdate, pages: int) -> None:
        score_update(
            self.pool.statistic,
            self.logits,
            self._page_owner,
            self._lse.flatten(0, 1),
            0,
            0,
            pages,
            fused.reduction,
            fused.power,
            fused.decay,
            fused.floor,
        )
