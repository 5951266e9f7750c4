"""Registers the built-in components, through the same hook as any plugin."""

from __future__ import annotations

from hardkv.hookspecs import hookimpl
from hardkv.interfaces import Component


@hookimpl
def hardkv_components() -> list[type[Component]]:
    """Give every built-in component; imported here, so that `import hardkv` stays fast."""
    from hardkv.calibration.exact import Exact
    from hardkv.calibration.softmax import Softmax
    from hardkv.calibration.temperature import Temperature
    from hardkv.policies.budgets.ada import Ada
    from hardkv.policies.budgets.bytes import Bytes
    from hardkv.policies.budgets.pyramid import Pyramid
    from hardkv.policies.budgets.static_heads import StaticHeads
    from hardkv.policies.budgets.threshold import Threshold
    from hardkv.policies.budgets.top_k import TopK
    from hardkv.policies.budgets.top_p import TopP
    from hardkv.policies.scorers.attention import Attention
    from hardkv.policies.scorers.attention_power import AttentionPower
    from hardkv.policies.scorers.expected_attention import ExpectedAttention
    from hardkv.policies.scorers.h2o import H2O
    from hardkv.policies.scorers.key_norm import KeyNorm
    from hardkv.policies.scorers.keydiff import KeyDiff
    from hardkv.policies.scorers.kvpress import KVPress
    from hardkv.policies.scorers.kvzap import KVzap
    from hardkv.policies.scorers.lagkv import LagKV
    from hardkv.policies.scorers.output_drop import OutputDrop
    from hardkv.policies.scorers.quest import Quest
    from hardkv.policies.scorers.random import Random
    from hardkv.policies.scorers.rkv import RKV
    from hardkv.policies.scorers.scissorhands import Scissorhands
    from hardkv.policies.scorers.snapkv import SnapKV
    from hardkv.policies.scorers.streaming import Streaming
    from hardkv.policies.scorers.tova import Tova
    from hardkv.policies.scorers.value_aware import ValueAware
    from hardkv.policies.scorers.window_max import WindowMax
    from hardkv.regularize.auto import Auto
    from hardkv.regularize.flatten_max import FlattenMax
    from hardkv.regularize.flatten_sum import FlattenSum
    from hardkv.regularize.rewrite import Rewrite
    from hardkv.regularize.sparse_load import SparseLoad
    from hardkv.tiers.evict import Evict
    from hardkv.tiers.merge import Merge
    from hardkv.tiers.nearest_merge import NearestMerge

    scorers: list[type[Component]] = [
        AttentionPower, Attention, WindowMax, OutputDrop, ExpectedAttention, SnapKV, RKV, ValueAware, H2O, Scissorhands,
        Tova, Quest, KeyDiff, LagKV, KeyNorm, Streaming, Random, KVzap, KVPress,
    ]  # fmt: skip
    return [
        *scorers,
        Exact, Temperature, Softmax,
        Threshold, TopP, TopK, Ada, Pyramid, StaticHeads, Bytes,
        Auto, SparseLoad, Rewrite, FlattenMax, FlattenSum,
        Evict, Merge, NearestMerge,
    ]  # fmt: skip
