"""The reference: the public names of lowtide, from their signatures and docstrings.

Configs are made of the table of methods when they are first used, so that a tool which reads sources does not see them.
These pages are read off the classes themselves: an option's default, range and sentence are those of `--help`.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import lowtide
from docs_site.docstrings import markdown_of
from lowtide.methods import METHODS
from lowtide.option import Group
from lowtide.option_values import Option, options_of


@dataclass(frozen=True)
class Page:
    """A page of the reference."""

    title: str
    path: str
    markdown: str


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Planning": ("lowtide.planning",),
    "Data": (
        *("lowtide.data", "lowtide.ragged", "lowtide.scripts.collators", "lowtide.scripts.datasets"),
        *("lowtide.scripts.rows", "lowtide.scripts.templates", "lowtide.scripts.chats"),
    ),
    "Rewards and judges": ("lowtide.rollout",),
    "Callbacks": ("lowtide.trainers.callbacks",),
    "Asynchronous GRPO": ("lowtide.trainers.online.async_grpo",),
    "Scripts": ("lowtide.scripts",),
}
"""The modules whose public names a page has; a name is on the first that takes it."""
OPENING = "Written from the code of lowtide {version}; the sentences are those of docstrings and of `--help`."


@functools.cache
def api_pages() -> tuple[Page, ...]:
    """Returns all pages of the reference."""
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in lowtide.__all__:
        if METHODS.public(name) is None:
            groups[group_of(name)].append(name)
    pages = [Page("Trainers", "reference/trainers.md", trainers_page()), options_page()]
    for title, names in groups.items():
        text = "\n\n".join([f"# {title}", opening(), *(entry(name) for name in names)])
        pages.append(Page(title, f"reference/{title.lower().replace(' ', '-')}.md", text + "\n"))
    return tuple(pages)


def group_of(name: str) -> str:
    """Returns the page that a public name is on.

    Raises:
        ValueError: its module is on none.
    """
    module = getattr(lowtide, name).__module__
    for title, prefixes in GROUPS.items():
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return title
    raise ValueError(f"lowtide.{name}: no page of the reference has {module}; name it in GROUPS")


def opening() -> str:
    return OPENING.format(version=lowtide.__version__)


def entry(name: str) -> str:
    """Returns the heading, signature and documentation of a name; of a class, its fields or public methods too."""
    it = getattr(lowtide, name)
    parts = [f"## {name}", f"```python\n{signature(name, it)}\n```", markdown_of(inspect.getdoc(it) or "")]
    options = options_of(it) if isinstance(it, type) and hasattr(it, "__dataclass_fields__") else {}
    documented = [each for each in options.values() if each.help]
    if documented:
        parts.append(options_table(documented))
    return "\n\n".join(part for part in parts if part)


def signature(name: str, it: Any) -> str:
    """Returns how a name is called, a line for each parameter where one line is too long."""
    if isinstance(it, type) and hasattr(it, "__dataclass_fields__"):
        return f"class lowtide.{name}(...)"
    kind = "class " if isinstance(it, type) else ""
    parameters = [each for each in inspect.signature(it).parameters.values() if each.name != "self"]
    words = [_without_modules(str(each)) for each in parameters]
    line = f"{kind}lowtide.{name}({', '.join(words)})"
    return line if len(line) <= 100 else f"{kind}lowtide.{name}(\n    " + ",\n    ".join(words) + ",\n)"


def _without_modules(text: str) -> str:
    """Returns a parameter with the last part of dotted types alone."""
    head, colon, kind = text.partition(": ")
    words = "".join(char if char.isalnum() or char in "._" else f"\0{char}\0" for char in kind).split("\0")
    return head + colon + "".join(word.rsplit(".", 1)[-1] if "." in word.strip(".") else word for word in words)


def trainers_page() -> str:
    """Returns the page of trainers and configs: what all trainers take, and the options that each method adds."""
    from lowtide.trainers.method import MethodTrainer

    parts = [
        "# Trainers",
        opening(),
        "Every trainer is a `transformers.Trainer`. What its constructor takes:",
        markdown_of(inspect.getdoc(MethodTrainer) or ""),
        "Each config has the options below, [those of all trainers](options.md), and those of "
        "`transformers.TrainingArguments`.",
    ]
    common = {option.name for option in common_options()}
    for command, row in METHODS.rows.items():
        config, name = getattr(lowtide, f"{row.public}Config"), METHODS[command].name
        own = [each for each in options_of(config).values() if each.name in _declared(command) - common and each.help]
        parts += [
            f"## {row.public}Config, {row.public}Trainer",
            f"{row.summary[0].upper()}{row.summary[1:]}. [The guide](../{_guide(name)}), and the command "
            f"`lowtide {command}`.",
            f"```python\n{signature(f'{row.public}Trainer', getattr(lowtide, f'{row.public}Trainer'))}\n```",
        ]
        parts += [options_table(own)] if own else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _guide(method: str) -> str:
    return f"{method.replace('_', '-')}.md"


def _declared(command: str) -> set[str]:
    """Returns the options that a method's own class has."""
    return {field.name for field in fields(METHODS[command].options)}


@functools.cache
def common_options() -> tuple[Option, ...]:
    """Returns the documented options that the configs of all methods have, without those of transformers."""
    from transformers import TrainingArguments

    inherited = {field.name for field in fields(TrainingArguments)}
    of_configs = [options_of(getattr(lowtide, f"{row.public}Config")) for row in METHODS.rows.values()]
    everywhere = set.intersection(*(set(options) for options in of_configs))
    first = of_configs[0]
    return tuple(each for name, each in first.items() if name in everywhere - inherited and each.help)


def options_page() -> Page:
    """Returns the page of the options that all configs have, in the groups of `--help`."""
    parts = ["# Options of all trainers", opening()]
    for group in (*Group, None):
        listed = [each for each in common_options() if each.group is group]
        title = "others" if group is None else group.value
        if listed:
            parts += [f"## {title[0].upper()}{title[1:]}", options_table(listed)]
    return Page("Options of all trainers", "reference/options.md", "\n\n".join(parts) + "\n")


def options_table(options: Iterable[Option]) -> str:
    """Returns a table of options: name, default, range or choices, and the sentence that documents each."""
    lines = ["| option | default | takes | |", "|---|---|---|---|"]
    for each in options:
        lines.append(f"| `{each.name}` | `{each.default!r}` | {_takes(each)} | {_cell(each.help)} |")
    return "\n".join(lines)


def _takes(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = " or ".join(sorted(kind.__name__ for kind in option.kinds if kind is not type(None)))
    return kinds if option.range is None else f"{kinds}, {option.range}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
