"""Packages that wait until they are used, against the same packages as they are imported otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.marks import slow_but

NEEDED = "import sys; from lowtide.process.deferred_imports import defer_imports; defer_imports()\n"


def said(code: str) -> str:
    """What a Python process of its own prints."""
    done = subprocess.run([sys.executable, "-c", NEEDED + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WAYS = [
    "import bitsandbytes\nfrom bitsandbytes import nn\nassert bitsandbytes.nn is nn\nprint(nn.Linear4bit.__name__)",
    "import bitsandbytes.nn.modules as parts; print(parts.Linear4bit.__name__)",
    "import bitsandbytes as bnb; print(bnb.nn.Linear4bit.__name__)",
    "from bitsandbytes.nn import Linear4bit; print(Linear4bit.__name__)",
]


@pytest.mark.parametrize("code", slow_but((), WAYS, swept=WAYS[1:]))
def test_a_package_is_whole_once_it_is_used(code):
    pytest.importorskip("bitsandbytes")
    assert said(code) == "Linear4bit"


@pytest.mark.slow
def test_peft_loads_none_of_it():
    pytest.importorskip("bitsandbytes")
    code = "import peft; from peft.import_utils import is_bnb_available as there; "
    assert said(code + "print('bitsandbytes.nn' in sys.modules, there())") == "False True"


@pytest.mark.slow
def test_what_is_imported_already_stays_as_it_is():
    pytest.importorskip("bitsandbytes")
    code = "import bitsandbytes as before; before.nn; defer_imports(); import bitsandbytes as b; print(b is before)"
    assert said(code) == "True"


def test_what_is_not_installed_is_not_there():
    hidden = "sys.modules.pop('bitsandbytes', None)\nimport lowtide.process.deferred_imports as d\n"
    hidden += "d.DEFERRED = ('no_such',)\n"
    assert said(hidden + "d.defer_imports(); print('no_such' in sys.modules)") == "False"
