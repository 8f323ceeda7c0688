"""JSON and YAML that somebody else may have written: what would end in Python's limits is an error of the text."""

from __future__ import annotations

import json
from typing import Any

import yaml

MOST_VALUES = 1_000_000
"""Values that a YAML file may have once its aliases are written out."""


class TextDates(yaml.SafeLoader):
    """As `yaml.SafeLoader`, but for what YAML takes for a date: `2024-01-01` stays text."""


TextDates.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_json(text: str | bytes | bytearray) -> Any:
    """As `json.loads`.

    Raises:
        json.JSONDecodeError: it is no JSON, or nested more deeply than Python reads.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


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
