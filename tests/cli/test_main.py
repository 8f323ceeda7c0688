"""The command: what it prints, and its exit status."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from lowtide.cli import main as cli
from lowtide.cli.commands import commands
from lowtide.cli.main import main
from lowtide.users_functions import called_for_user


def command(monkeypatch, run) -> None:
    """Puts a function in the place of `lowtide lengths`."""
    module = SimpleNamespace(add_parser=lambda subparsers: subparsers.add_parser("lengths").set_defaults(run=run))
    monkeypatch.setattr(cli, "import_module", lambda name: module)


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in commands())


def test_no_command_is_help_and_an_error(capsys):
    assert main([]) == 2
    assert "usage: lowtide" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("lowtide 0.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sfft"], "there is no command 'sfft'; did you mean 'sft'? (see lowtide --help)"),
        (["lengths", "x", "--tokeniser", "t"], "no option --tokeniser; did you mean '--tokenizer'?"),
        (["lengths", "x", "--max-lenght=3"], "no option --max_lenght; did you mean '--max_length'?"),
        (["lengths", "x"], "the following arguments are required: --tokenizer (see lowtide lengths --help)"),
        (["demo", "again"], "unrecognized arguments: again"),
        (["--verbose"], "there is no option --verbose"),
    ],
)
def test_what_means_nothing_is_named_with_the_nearest(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "t", "--tokenizer=u"], "--tokenizer comes after --tokenizer, which it replaces"),
        (["--max-length", "3", "--max_length", "4"], "--max_length comes after --max_length, which it replaces"),
        (["--tokenizer", "t", "--max_length", "4"], ""),
    ],
)
def test_an_option_that_is_given_twice_is_told(words, message, capsys):
    assert main(["lengths", "nowhere.jsonl", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("warning: ") == bool(message)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("row 3 of [bold]x.jsonl[/bold] is empty"), "error: row 3 of [bold]x.jsonl[/bold] is empty"),
        (FileNotFoundError(2, "No such file or directory", "x.jsonl"), "error: x.jsonl: No such file or directory"),
        (OSError(28, "No space left on device"), "error: No space left on device"),
        (PermissionError("not yours"), "error: not yours"),
    ],
)
def test_what_a_user_can_mend_is_one_message(error, message, monkeypatch, capsys):
    def run(arguments):
        raise error

    command(monkeypatch, run)
    assert main(["lengths"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{message}  (--traceback shows where this comes from)\n")
    with pytest.raises(type(error)):
        main(["--traceback", "lengths"])


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch):
    command(monkeypatch, lambda arguments: {}["missing"])
    with pytest.raises(KeyError):
        main(["lengths"])


def test_an_interrupt_is_no_error(monkeypatch, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    command(monkeypatch, run)
    assert main(["lengths"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_what_a_users_function_raises_is_one_sentence(monkeypatch, capsys):
    def run(arguments):
        with called_for_user("rollout_func", len):
            raise KeyError("nothing")

    command(monkeypatch, run)
    assert main(["lengths"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: KeyError: 'nothing'. This was raised by rollout_func, a function that was passed")
    with pytest.raises(KeyError):
        main(["lengths", "--traceback"])


def test_the_status_of_a_command_is_that_of_the_process(monkeypatch):
    command(monkeypatch, lambda arguments: 7)
    assert main(["lengths"]) == 7


def test_as_a_process():
    words = [sys.executable, "-m", "lowtide", "merge", "--adaptor", "x"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (said,) = done.stderr.splitlines()
    assert said == "error: there is no option --adaptor; did you mean '--adapter'? (see lowtide merge --help)"


def test_libraries_do_not_warn_of_their_future_and_lowtide_does():
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        cli._without_noise()
        for module in ("transformers.trainer", "lowtide.methods.shared.rows"):
            warnings.warn_explicit("gone in the next version", FutureWarning, module, 1, module=module)
    assert [warning.filename for warning in said] == ["lowtide.methods.shared.rows"]
