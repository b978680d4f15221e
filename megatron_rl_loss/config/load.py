"""A config: the schema's defaults, then YAML files, then key=value pairs; later ones win.

A YAML file may name others that come before it, relative to itself:

    base: [base.yaml, loss/dapo.yaml]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError
from .keys import field_types, leaf_paths, leaves, raise_problems
from .schema import Config

_YAML_SUFFIXES = (".yaml", ".yml")
# The second belongs to the first: a layer that sets the first starts with an empty second.
_OWNED = {"loss.name": "loss.settings", "task.name": "task.params"}


class Setting(NamedTuple):
    """One value with where it comes from, for messages."""

    origin: str
    path: str
    value: Any


Layer = list[Setting]


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, checked: bool = True
) -> Config:
    """Returns the config as plain dataclass objects, complete and checked.

    Args:
        path: a YAML file; None: the defaults.
        overrides: "section.key=value" with the value in YAML's spelling; or more YAML files, which
            come after `path` and before all key=value pairs.
        checked: keys and types always are; False: the settings need not make a whole run.

    Raises:
        ConfigError: one line per problem, with the key's full path.
    """
    files = [item for item in overrides if "=" not in item and item.endswith(_YAML_SUFFIXES)]
    pairs = [item for item in overrides if item not in files]
    problems: list[str] = []
    layers = [
        layer
        for file in [*([] if path is None else [path]), *files]
        for layer in _file_layers(Path(file), problems)
    ]
    layers.append(_override_layer(pairs, problems))
    config = OmegaConf.structured(Config)
    for layer in layers:
        _merge(config, layer, problems)
    raise_problems(problems)
    plain = _plain(config)
    if checked:
        from .validate import check_config  # needs torch, which takes longer than all the rest

        check_config(plain)
    return plain


def to_yaml(config: Config) -> str:
    """Returns the config as YAML that `load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def save_config(config: Config, path: str | Path) -> None:
    """Writes `to_yaml(config)` in one piece or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(to_yaml(config), encoding="utf-8")
    os.replace(unfinished, path)


def _file_layers(path: Path, problems: list[str], stack: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yields the layers of a file's bases and its own."""
    if path.resolve() in stack:
        chain = " -> ".join(p.name for p in [*stack, path])
        raise ConfigError(f"{path}: 'base' leads back to the file itself: {chain}.")
    values = _read_yaml(path)
    base = values.pop("base", None) or []
    bases = [base] if isinstance(base, str) else base
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in bases):
        raise ConfigError(f"{path}: 'base' is a YAML file or a list of them, got {base!r}.")
    for name in bases:
        yield from _file_layers(path.parent / name, problems, (*stack, path.resolve()))
    yield _layer(values, str(path), problems)


def _layer(values: dict[Any, Any], origin: str, problems: list[str]) -> Layer:
    here: list[str] = []
    settings = [Setting(origin, path, value) for path, value in leaves(values, here)]
    problems.extend(f"{origin}: {problem}" for problem in here)
    return settings


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_yaml_problem(error)}") from None
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {_first_line(error)}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected sections with keys, got a {type(loaded).__name__}.")
    return loaded


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = "" if mark is None else f", line {mark.line + 1}"
    return f"{line}: {getattr(error, 'problem', None) or _first_line(error)}."


def _override_layer(pairs: Iterable[str], problems: list[str]) -> Layer:
    layer = []
    for pair in pairs:
        problem = _pair_problem(pair)
        if problem:
            problems.append(f"{pair}: {problem}")
            continue
        try:
            values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([pair]), resolve=False)
        except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
            problems.append(f"{pair}: the value is not valid YAML: {_first_line(error)}")
            continue
        layer.extend(_layer(values, "command line", problems))
    return layer


def _pair_problem(pair: str) -> str | None:
    key, equals, _ = pair.partition("=")
    if not equals:
        return "expected section.key=value."
    if not key or key[0] in "-+~":
        return f"write it without {key[:2]!r}: section.key=value." if key else "the key is missing."
    if "[" in key:
        name = key.partition("[")[0]
        return f"entries of a list cannot be set alone; give all of it: {name}=[a,b]."
    return None


def _merge(config: Any, layer: Layer, problems: list[str]) -> None:
    for setting in layer:
        if setting.path in _OWNED:
            OmegaConf.update(config, _OWNED[setting.path], {}, merge=False)
    for origin, path, value in layer:
        if isinstance(value, bool) and _type_of(path) in ("float", "int"):
            problems.append(f"{origin}: {path}: expected {_type_of(path)}, got {value!r} (bool).")
            continue
        try:
            OmegaConf.update(config, path, value, merge=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            problems.append(f"{origin}: {path}: {_type_problem(path, value, error)}")


def _type_problem(path: str, value: Any, error: Exception) -> str:
    if isinstance(value, str) and "${" in value:
        return f"cannot be read as an interpolation: {_first_line(error)}"
    return f"expected {_type_of(path)}, got {value!r} ({type(value).__name__})."


def _type_of(path: str) -> str:
    """Returns the type of a setting as users know it, such as "float" or "int or null"."""
    kind: Any = Config
    for name in path.split("."):
        kind = field_types(kind)[name]
    text = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return text.replace(" | None", " or null").replace("dict[str, Any]", "key: value pairs")


def _plain(config: Any) -> Config:
    """Resolves interpolations and converts to dataclass objects; nothing may be missing."""
    problems = []
    for path in leaf_paths():
        section, _, name = path.rpartition(".")
        try:
            if OmegaConf.is_missing(OmegaConf.select(config, section), name):
                problems.append(f"{path}: is missing ('???'); give it a value.")
                continue
            value = OmegaConf.select(config, path)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            problems.append(f"{path}: {_first_line(error)}")
    raise_problems(problems)
    plain = OmegaConf.to_object(config)
    assert isinstance(plain, Config), "to_object returns the schema's class"
    return plain


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
