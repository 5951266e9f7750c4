from hardkv_recency.recency import Recency

from hardkv.testing import ScorerContract


class TestRecency(ScorerContract):
    component = Recency(Recency.Config())
