"""Finds and imports plugin modules: local files, installed entry points, importable names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from hardkv.errors import PluginError, did_you_mean

GROUP = "hardkv"


@dataclass(frozen=True)
class Plugin:
    """An imported plugin and how to speak of it in a message."""

    name: str
    target: object
    """What holds the hook: a module, or the object that an entry point names."""
    origin: str
    """File or distribution it came from."""

    @property
    def key(self) -> str:
        """The same for one plugin reached in two ways."""
        file = getattr(self.target, "__file__", None)
        return str(Path(file).resolve()) if file else f"{id(self.target)}"


def installed_plugins() -> list[Plugin]:
    """Import every installed plugin that declares an entry point in the group `hardkv`."""
    return [_from_entry_point(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]


def named_plugin(name: str, folders: Sequence[Path]) -> Plugin:
    """Import the plugin that a configuration names: a file in one of `folders`, an entry point, or a module."""
    file = _local_file(name, folders)
    if file is not None:
        return _from_file(name, file)
    if name.endswith(".py"):
        tried = ", ".join(str(folder / name) for folder in folders)
        raise PluginError(f"plugin '{name}': no such file; looked for {tried}. Correct the path under `plugins:`")
    for point in entry_points(group=GROUP, name=name):
        return _from_entry_point(point)
    return _from_import(name, folders)


def _local_file(name: str, folders: Sequence[Path]) -> Path | None:
    relative = Path(name).expanduser() if name.endswith(".py") else Path(*name.split("."))
    for folder in folders:
        places = [folder / relative]
        if not name.endswith(".py"):
            places = [folder / relative.with_suffix(".py"), folder / relative / "__init__.py"]
        for place in places:
            if place.is_file():
                return place.resolve()
    return None


def _from_file(name: str, file: Path) -> Plugin:
    package = file.name == "__init__.py"
    stem = file.parent.name if package else file.stem
    # a name of its own, so that a plugin can neither shadow nor be mistaken for an installed module
    module_name = f"hardkv_local_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{stem}"
    spec = importlib.util.spec_from_file_location(
        module_name, file, submodule_search_locations=[str(file.parent)] if package else None
    )
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin '{name}' ({file}): not a Python file; name a .py file under `plugins:`")
    module = importlib.util.module_from_spec(spec)
    # pydantic and dataclasses look annotations up in sys.modules
    sys.modules[module_name] = module
    try:
        with _also_importable_from(file.parent.parent if package else file.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise _import_failed(name, str(file), error) from error
    return Plugin(name=name, target=module, origin=str(file))


def _from_entry_point(point: EntryPoint) -> Plugin:
    distribution = point.dist.name if point.dist else "unknown distribution"
    origin = f"entry point {point.value} of {distribution}"
    try:
        target = point.load()
    except Exception as error:
        cure = f"repair it or `pip uninstall {distribution}`"
        raise PluginError(f"plugin '{point.name}' ({origin}): {_reason(error)}; {cure}") from error
    return Plugin(name=point.name, target=target, origin=origin)


def _from_import(name: str, folders: Sequence[Path]) -> Plugin:
    try:
        module: ModuleType = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _import_failed(name, "installed module", error) from error
        known = [point.name for point in entry_points(group=GROUP)]
        known += [file.stem for folder in folders if folder.is_dir() for file in folder.glob("*.py")]
        places = " or ".join(dict.fromkeys(str(folder) for folder in folders))
        raise PluginError(
            f"plugin '{name}': no file {name}.py in {places}, and no installed module or entry point of that name."
            f"{did_you_mean(name, known)} Correct `plugins:` or install it"
        ) from error
    except Exception as error:
        raise _import_failed(name, "installed module", error) from error
    return Plugin(name=name, target=module, origin=module.__file__ or "installed module")


def _import_failed(name: str, origin: str, error: Exception) -> PluginError:
    cure = "install what it imports" if isinstance(error, ImportError) else "repair the file"
    return PluginError(f"plugin '{name}' ({origin}): {_reason(error)}; {cure}, or take it out of `plugins:`")


def _reason(error: Exception) -> str:
    """Give what went wrong, with the line of the plugin it went wrong in."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    line = f" (line {where.tb_lineno} of {where.tb_frame.f_code.co_filename})" if where is not None else ""
    if isinstance(error, SyntaxError):
        line = ""
    return f"import failed with {type(error).__name__}: {error}{line}"


@contextmanager
def _also_importable_from(folder: Path) -> Iterator[None]:
    """Let a plugin import its neighbours; last in the path, so that they shadow nothing that is installed."""
    entry = str(folder)
    sys.path.append(entry)
    try:
        yield
    finally:
        # a plugin may have changed the path itself: take out our own entry, the last one equal to it
        for index in range(len(sys.path) - 1, -1, -1):
            if sys.path[index] == entry:
                del sys.path[index]
                break
