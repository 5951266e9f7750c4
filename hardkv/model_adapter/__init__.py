"""The only package that imports transformers: loads models, reads their geometry, and routes their attention to us."""

from __future__ import annotations

from hardkv.model_adapter.attention import AttentionServer, serving
from hardkv.model_adapter.bridge import BridgeCache, bridge
from hardkv.model_adapter.decoder import Decoder
from hardkv.model_adapter.geometry import read_geometry
from hardkv.model_adapter.loading import LoadedModel, load_model

__all__ = [
    "AttentionServer",
    "BridgeCache",
    "Decoder",
    "LoadedModel",
    "bridge",
    "load_model",
    "read_geometry",
    "serving",
]
