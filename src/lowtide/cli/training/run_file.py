"""Run files: the options of a run as YAML, read by `--config` and written beside a run's checkpoints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lowtide.cli.endings import UsageError
from lowtide.cli.options import words_of
from lowtide.cli.training.launch import OF_LAUNCHER
from lowtide.option_values import Option
from lowtide.parsing import yaml_options
from lowtide.renamed import is_off, replaced
from lowtide.run.options.secrets import SECRET, without_secrets
from lowtide.spelling import nearest
from lowtide.trainers.checkpoints.durable import write_text

READ_OTHERWISE = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float")}
"""What YAML takes words without quotes for."""
OF_ANOTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""`017` and `1:30`, which are 15 and 90 in YAML."""


def read_run_file(path: Path, options: Mapping[str, Option]) -> dict[str, Any]:
    """The options that a YAML file gives.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it is not a YAML mapping, or a key or value means nothing; names the file and the line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--config: there is no file {str(path)!r}")
    values: dict[str, Any] = {}
    names = {alias: option.name for option in options.values() for alias in (option.name, *option.aliases)}
    try:
        entries = yaml_options(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for key, node, value, line in entries:
        where = f"{path}, line {line}"
        if key in OF_LAUNCHER:
            continue
        name = names.get(str(key).replace("-", "_"))
        if name is None and replaced(str(key)) and is_off(value):
            continue
        if name is None:
            raise UsageError(f"{where}: there is no option {key!r}{replaced(str(key)) or nearest(str(key), names)}")
        if name in values:
            raise UsageError(f"{where}: {name} is given twice")
        try:
            values[name] = options[name].convert(_as_written(node, value, options[name]))
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
    return values


def command_of(values: Mapping[str, Any], options: Mapping[str, Option], *, method: str) -> list[str]:
    """The words of a command line with the options that are given, without access tokens."""
    given = without_secrets({name: value for name, value in values.items() if name not in SECRET})
    return ["lowtide", method, *shlex.split(" ".join(words_of(given, options)))]


def write_run_file(path: Path, values: Mapping[str, Any], options: Mapping[str, Option], *, method: str) -> None:
    """Write all options of a method's run: the values given, and below them the defaults of the others. Access tokens
    are left out, those in mappings too; a failure leaves the file that was there."""
    given = without_secrets({name: value for name, value in values.items() if name not in SECRET})
    defaults = {name: option.default for name, option in options.items() if name not in {*given, *SECRET}}
    parts = [
        f"# All options of this run: `lowtide {method} --config` on this file repeats it.\n",
        yaml.safe_dump(given, sort_keys=False, allow_unicode=True),
        "\n# The rest are defaults.\n",
        yaml.safe_dump(defaults, sort_keys=False, allow_unicode=True),
    ]
    write_text(path, "".join(parts))


def _as_written(node: yaml.Node, value: Any, option: Option) -> Any:
    """A value as a command line would have it, where YAML reads another than is written: `yes`, `1:30` or `007` for an
    option that takes text, the items of its list too, and numbers to other bases than 10."""
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list) and list in option.kinds:
        takes_text = str in option.items
        return [_written(*each, takes_text=takes_text) for each in zip(node.value, value, strict=True)]
    return _written(node, value, takes_text=str in option.kinds or (list in option.kinds and str in option.items))


def _written(node: yaml.Node, value: Any, *, takes_text: bool) -> Any:
    if not isinstance(node, yaml.ScalarNode) or node.tag not in READ_OTHERWISE:
        return value
    return node.value if takes_text or OF_ANOTHER_BASE.fullmatch(node.value) else value
