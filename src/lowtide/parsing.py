"""JSON and YAML that somebody else may have written: what would end in Python's limits is an error of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MOST_VALUES = 1_000_000
"""Values that a YAML file may have once its aliases are written out."""


class TextDates(yaml.SafeLoader):
    """As `yaml.SafeLoader`, but for what YAML takes for a date: `2024-01-01` stays text."""


TextDates.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class YamlOption(NamedTuple):
    """A line of a YAML file of options."""

    key: Any
    node: yaml.Node
    """Of the value, which says how it is written."""
    value: Any
    line: int
    """Its number, from 1."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """As `json.loads`.

    Raises:
        json.JSONDecodeError: it is no JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def read_object(path: Path, called: str | None = None) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        called: what messages call the file, in place of its path.

    Raises:
        ValueError: it holds none; names the file.
    """
    what = called or path
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{what} holds a JSON {type(found).__name__} where an object belongs")
    return found


def parse_yaml(text: str) -> Any:
    """As `yaml.safe_load`, but that dates stay text.

    Raises:
        yaml.YAMLError: it is no YAML, or aliases or its depth would make it too large.
    """
    loader = TextDates(text)
    try:
        node = yaml_node(loader)
        return None if node is None else loader.construct_document(node)
    except (RecursionError, TypeError, ValueError) as error:
        raise yaml.YAMLError(_first_line(error)) from None
    finally:
        loader.dispose()


def yaml_options(path: str | Path) -> list[YamlOption]:
    """The `option: value` lines of a YAML file, of which there may be none. `<<` takes over those of another mapping.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no text, no YAML, no mapping, or has a key that is no word or comes twice; names the line.
    """
    try:
        loader = TextDates(Path(path).read_text(encoding="utf-8"))
        node = yaml_node(loader)
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}, line {node.start_mark.line + 1}: expected `option: value` lines")
        _check_keys(node, path)
        loader.flatten_mapping(node)
        found = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            try:
                made, given = (loader.construct_object(each, deep=True) for each in (key, value))
            except (RecursionError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line} is not YAML: {_first_line(error)}") from error
            found[made] = YamlOption(made, value, given, line)
        return [*found.values()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line} is not YAML: {getattr(error, 'problem', None) or error}") from error


def _check_keys(node: yaml.MappingNode, path: str | Path) -> None:
    """Refuses a key that is no word, or comes twice."""
    seen: set[str] = set()
    for key, _ in node.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
            raise ValueError(f"{where}: a key is a {kind}: write the option's name")
        if key.value in seen:
            raise ValueError(f"{where}: {key.value} is given twice")
        seen.add(key.value)


def yaml_node(loader: yaml.SafeLoader) -> yaml.Node | None:
    """The one document of a loader, checked before it is made into values.

    Raises:
        yaml.YAMLError: see `parse_yaml`.
    """
    try:
        node = loader.get_single_node()
        if node is not None:
            _values(node, {})
    except RecursionError as error:
        raise yaml.YAMLError(_first_line(error)) from None
    return node


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values of a node, those behind aliases counted each time; a node that holds itself has no end."""
    if id(node) in known:
        count = known[id(node)]
        if count:
            return count
        raise yaml.MarkedYAMLError(problem="an alias stands in what it names", problem_mark=node.start_mark)
    known[id(node)] = 0
    children = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else ()
    count = 1
    for child in children:
        count += sum(_values(each, known) for each in (child if isinstance(child, tuple) else (child,)))
    if count > MOST_VALUES:
        raise yaml.MarkedYAMLError(
            problem=f"aliases make it more than {MOST_VALUES:,} values", problem_mark=node.start_mark
        )
    known[id(node)] = count
    return count


def _first_line(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
