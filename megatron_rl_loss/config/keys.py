"""The schema's keys by full path, and the nearest one to a wrong key."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_type_hints

from ..errors import ConfigError
from .schema import Config


def field_types(section: type) -> dict[str, Any]:
    """Returns the type of each field of a section."""
    return get_type_hints(section)


def is_section(kind: Any) -> bool:
    """Tells a section's type from a setting's."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def leaf_paths(section: type = Config, prefix: str = "") -> Iterator[str]:
    """Yields the full path of every setting.

    >>> next(leaf_paths())
    'run.dir'
    """
    for name, kind in field_types(section).items():
        if is_section(kind):
            yield from leaf_paths(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def leaves(
    values: Mapping[Any, Any], problems: list[str], section: type = Config, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields (full path, value) of the settings in nested `values`; reports keys that are none."""
    types = field_types(section)
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in types:
            problems.append(unknown_key(path))
        elif not is_section(types[key]):
            yield path, value
        elif isinstance(value, Mapping):
            yield from leaves(value, problems, types[key], f"{path}.")
        elif value is not None:  # an empty section changes nothing
            problems.append(f"{path}: is a section with keys of its own, got {value!r}.")


def unknown_key(path: str) -> str:
    """Says that there is no such key, and which one is nearest.

    >>> unknown_key("lr")
    "lr: unknown key; did you mean 'optimizer.lr'?"
    """
    section, _, name = path.rpartition(".")
    paths = list(leaf_paths())
    inside = [p for p in paths if p.rpartition(".")[0] == section]
    same_name = [p for p in paths if p.rpartition(".")[2] == name]
    sections = [f.name for f in dataclasses.fields(Config)]
    for candidates in (
        difflib.get_close_matches(path, inside if section else sections, n=1, cutoff=0.75),
        same_name,
        difflib.get_close_matches(path, paths, n=1, cutoff=0.75),
    ):
        if candidates:
            return f"{path}: unknown key; did you mean {candidates[0]!r}?"
    names = [p.rpartition(".")[2] for p in inside] or sections
    where = f"the keys of {section}" if inside else "the sections"
    return f"{path}: unknown key; {where}: {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean ...? " for a near name, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}? " if near else ""


def raise_problems(problems: list[str]) -> None:
    """Raises one `ConfigError` with a line for each problem, if there are any."""
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
