"""Text from data reaches a terminal, a pipe or a file without the characters that control terminals."""

import io
import subprocess
import sys

import pytest
from rich.progress import track
from rich.table import Table
from rich.text import Text

from lowtide.cli.main import main
from lowtide.terminal import Console, shown

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202ereversed\r"
SAFE = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202ereversed\r"


def test_controls_are_written_as_escapes_and_text_stays():
    assert shown(HOSTILE) == SAFE
    assert shown("tab\tline\nä 中 😀") == "tab\tline\nä 中 😀"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_writes_no_control_of_its_content(terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    console.print(table)
    console.print(HOSTILE, markup=False)
    for _ in track([1], description=HOSTILE, console=console):
        pass
    written = file.getvalue()
    assert r"\x1b]0;title" in written
    for sign in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\u202e"):
        assert sign not in written
    assert ("\x1b[1m" in written) == terminal  # its own styles


def test_an_error_of_a_command_is_shown_escaped(capsys):
    assert main(["sft", "--model", HOSTILE, "--bad" + HOSTILE, "1"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert r"\x1b]0;title" in err


def test_logs_warnings_and_tracebacks_hold_no_controls():
    code = (
        "import logging, warnings; from lowtide.terminal import show_safely; show_safely(); x = '\\x1b[2J';"
        "logging.getLogger('other').warning('a %s', x); warnings.warn(x); raise TypeError(x)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "\x1b" not in done.stderr
    assert done.stderr.count(r"\x1b[2J") >= 3


def test_own_records_of_a_script_hold_no_controls_and_those_of_others_are_theirs():
    code = (
        "import logging, io; file = io.StringIO(); logging.basicConfig(stream=file); import lowtide; x = '\\x1b[2J';"
        "own = logging.getLogger('lowtide.data.some'); own.warning('a %s %d', x, 3); own.warning(x);"
        "exec('try: raise TypeError(x)\\nexcept TypeError: own.exception(x)');"
        "assert '\\x1b' not in file.getvalue(), file.getvalue(); print(file.getvalue().count(r'\\x1b[2J'));"
        "logging.getLogger('lowtide_other').warning(x); assert x in file.getvalue()"
    )
    done = subprocess.run([sys.executable, "-c", code.replace("\\\\", "\\")], capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr
