import torch
from pydantic import Field
from torch import Tensor

import hardkv


class Recency(hardkv.ImportanceScorer):
    """Newer tokens score higher: the score halves with every `half_life` tokens of age."""

    name = "recency"

    class Config(hardkv.Options):
        half_life: int = Field(default=256, gt=0, description="Tokens after which a score has halved.")

    def score(self, view: hardkv.ScoreView) -> Tensor:
        newest = view.positions.masked_fill(~view.valid, 0).amax(-1, keepdim=True)
        scores = torch.exp2(-(newest - view.positions) / self.config.half_life)
        return scores.masked_fill(~view.valid, 0.0)[:, :, None]  # [B, H, R=1, N]


@hardkv.hookimpl
def hardkv_components():
    return [Recency]
