"""What `lowtide.compat.argparse` takes from the inside of argparse is there."""

import argparse

from lowtide.compat.argparse import actions_of, options_of, parsers_beneath


def test_a_parser_knows_its_options_and_those_beneath():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate")
    below = parser.add_subparsers().add_parser("below")
    assert "--rate" in options_of(parser), "ArgumentParser._option_string_actions does not list options by word"
    names = [action.dest for action in actions_of(parser)]
    assert "rate" in names, "ArgumentParser._actions does not list a parser's arguments"
    found = [each for action in actions_of(parser) for each in parsers_beneath(action)]
    assert found == [below], "add_subparsers makes no _SubParsersAction any more"
