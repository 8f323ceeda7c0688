"""A new method is one file and one row of the table: no other source file learns its name.

What names methods all the same is listed here with its reason, and the list only becomes shorter. `sft` and `reward`
are left out: the first is what commands show by default, the second is also a word for what completions get.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lowtide
from lowtide.methods import METHODS

SOURCE = Path(lowtide.__file__).parent
HOMES = ("methods", "objectives", "rollout", "demo")
"""Where methods are declared, computed and shown."""
ALIKE = ("method", "online.learning", "online.policy", "online.rollouts")
"""Of `lowtide.methods`, the modules beside `shared` that are of no single method."""
NAMED = {
    "__init__.py": "the public names, which are listed once",
    "cli/training/first_rows.py": "which columns suggest which methods",
    "planner/answers/elsewhere.py": "commands and settings of other libraries",
    "planner/answers/given_settings.py": "settings of other libraries",
    "planner/answers/page.py": "the method that the page begins with",
    "planner/answers/translations.py": "settings of other libraries",
    "cli/converting/axolotl.py": "settings of other libraries",
    "cli/converting/llama_factory.py": "settings of other libraries",
    "planner/answers/unsloth_script.py": "classes of another library",
    "engine/heads/classes.py": "the task that a model's card names",
    "data/formats/likely.py": "words for a right answer",
    "cli/show.py": "its own options are those of SFT rows",
    "planning.py": "an example in its docstrings",
    "trainers/online/async_grpo.py": "GRPO under the names of another trainer of TRL's",
    "trainers/taught.py": "a teacher's options are GKD's",
}


NAMES = "|".join(map(re.escape, sorted(METHODS.rows.keys() - {"sft", "reward"})))
PUBLIC = "|".join(row.public for row in METHODS.rows.values())
AS_STRING = re.compile(rf"[\"']({NAMES}|(?:{PUBLIC})(?:Config|Trainer))[\"']")
AS_OPTIONS = re.compile(rf"\b(?:{PUBLIC})Options\b")
AS_MODULE = re.compile(r"(?:from|import) lowtide\.methods\.([\w.]+)")


def names(text: str) -> set[str]:
    """What a file's text names of methods: as a whole string, by their options, or by importing a declaration."""
    modules = {name for name in AS_MODULE.findall(text) if not name.startswith("shared") and name not in ALIKE}
    return {*AS_STRING.findall(text), *AS_OPTIONS.findall(text), *modules}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('if method == "dpo":\n', {"dpo"}),
        ("from lowtide.methods.online.grpo import ROWS\n", {"online.grpo"}),
        ("isinstance(options, KTOOptions)\n", {"KTOOptions"}),
        ("from lowtide.methods.shared.rows import Pairs\nfrom lowtide.methods.method import Method\n", set()),
        ('stats["reward"], "an odpo"\n', set()),
    ],
)
def test_a_name_is_seen(text, found):
    assert names(text) == found


def test_nothing_but_what_is_listed_names_a_method():
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    naming = {
        name: sorted(found)
        for name, path in files.items()
        if name.split("/")[0] not in HOMES and (found := names(path.read_text(encoding="utf-8")))
    }
    assert {name: found for name, found in naming.items() if name not in NAMED} == {}
    assert sorted(NAMED.keys() - naming.keys()) == [], "these name no method any more: take them off the list"
