"""YAML files as plain mappings, with every fault a ConfigError that names the place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hardkv.errors import ConfigError, did_you_mean


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, and reads `1e-5` as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ConfigError(
                        f"duplicate key '{key.value}' in lines {seen[key.value]} and {line}: remove one of them"
                    )
                seen[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Give the mapping that the YAML file at `path` holds."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; give the YAML file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: could not be read: {error}") from error
    try:
        content = yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML{_place(error)}") from error
    if content is None:
        raise ConfigError(f"{path}: is empty; `hardkv config init` writes a commented default")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected keys such as `model:` and `cache:` at the top (got a {type(content).__name__})"
        )
    return content


def _place(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": {error}"
    context = f"{error.context}, " if error.context else ""
    return f" in line {error.problem_mark.line + 1}: {context}{error.problem}"


def _missing(path: Path) -> str:
    folder = path.parent
    others = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    hint = did_you_mean(path.name, others) if folder.is_dir() else f" The folder {folder} does not exist either."
    return f"{path}: no such file.{hint} `hardkv config init` writes a commented default"
