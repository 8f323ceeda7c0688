"""What `lowtide.compat.templates.jinja` overrides of jinja2 and of transformers is there, with the names and arguments
it has."""

from __future__ import annotations

import inspect

import pytest
from jinja2 import Environment, Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from transformers.utils import chat_template_utils

from lowtide.compat.templates.jinja import LimitedEnvironment, LimitedTemplate, limit_templates

OVERRIDDEN = {
    CodeGenerator: ("visit_Concat", "visit_List", "visit_Tuple", "visit_Dict"),
    Template: ("render", "generate"),
    Environment: ("from_string",),
    SandboxedEnvironment: ("call_binop", "call", "wrap_str_format"),
}
ARGUMENTS = {
    CodeGenerator.visit_Concat: ["self", "node", "frame"],
    CodeGenerator.visit_List: ["self", "node", "frame"],
    CodeGenerator.visit_Tuple: ["self", "node", "frame"],
    CodeGenerator.visit_Dict: ["self", "node", "frame"],
    CodeGenerator.write: ["self", "x"],
    SandboxedEnvironment.call_binop: ["self", "context", "operator", "left", "right"],
    SandboxedEnvironment.wrap_str_format: ["self", "value"],
}


@pytest.mark.parametrize("kind", OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_what_is_overridden_is_there(kind):
    for name in OVERRIDDEN[kind]:
        assert name in vars(kind), f"{kind.__name__}.{name} is not defined by jinja2 any more: nothing calls ours"


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__qualname__)
def test_what_is_overridden_is_called_alike(function):
    found = list(inspect.signature(function).parameters)
    assert found == ARGUMENTS[function], f"jinja2's {function.__qualname__} takes other arguments"


def test_a_call_passes_the_context_and_the_function_first():
    names = list(inspect.signature(SandboxedEnvironment.call).parameters)
    assert [name.split("__")[-1] for name in names] == ["self", "context", "obj", "args", "kwargs"]


def test_the_parts_of_an_environment_that_are_replaced_are_looked_up_in_it():
    plain = ImmutableSandboxedEnvironment()
    assert plain.code_generator_class is CodeGenerator, "the class that compiles is no attribute of environments"
    assert plain.template_class is Template, "the class of templates is no attribute of environments"
    assert plain.concat(["a", "b"]) == "ab", "environments do not join what a template writes by `concat`"
    assert {"*", "**", "%", "+"} <= plain.default_binop_table.keys(), "an operator is not intercepted any more"
    assert callable(plain.globals["lipsum"])
    assert plain.finalize is None, "`finalize` has a value of jinja2's own, which ours would replace"
    assert str_join(["a", 1]) == markup_join(["a", 1]) == "a1", "`~` joins values in another way"


def test_tuples_are_told_apart_by_what_is_done_with_them():
    assert nodes.Tuple.fields == ("items", "ctx"), "a tuple's `ctx` no longer says whether it is read or assigned to"
    assert LimitedEnvironment().from_string("{% set a, b = 1, 2 %}{{ (a, b) }}").render() == "(1, 2)"


def test_what_is_compiled_asks_the_environment():
    """Each override is reached by a template that has no other reason to reach it."""
    said: list[str] = []

    class Heard(LimitedEnvironment):
        def joined(self, pieces):
            said.append("~")
            return super().joined(pieces)

        def checked(self, value):
            said.append(type(value).__name__)
            return super().checked(value)

        def call_binop(self, context, operator, left, right):
            said.append(operator)
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value):
            wrapped = super().wrap_str_format(value)
            said.extend([] if wrapped is None else ["format"])
            return wrapped

    written = ("'a' ~ x", "[x]", "(x,)", "{x: x}", "x * 2", "x ** 2", "x + 1", "'%d' % x", "'{}'.format(x)")
    text = "".join(f"{{{{ {each} }}}}" for each in written)
    made = Heard().from_string(text)
    assert isinstance(made, LimitedTemplate), "an environment makes templates of another class than `template_class`"
    assert made.render(x=3) == "a3[3](3,){3: 3}69433"
    for each in ("~", "list", "tuple", "dict", "*", "**", "+", "%", "format"):
        assert each in said, f"a template with {each} no longer reaches the environment"


def test_a_pass_is_marked_by_an_attribute_of_its_function():
    plain = Environment()
    assert hasattr(plain.filters["map"], "jinja_pass_arg"), "filters that take the context are marked in another way"
    assert not hasattr(plain.filters["upper"], "jinja_pass_arg")


def test_transformers_looks_the_environment_up_and_keeps_what_it_compiled():
    limit_templates()
    assert chat_template_utils.ImmutableSandboxedEnvironment is LimitedEnvironment
    compiled = chat_template_utils._compile_jinja_template("{{ messages }}")
    assert isinstance(compiled, LimitedTemplate), "transformers does not look its environment up where it was replaced"
    assert callable(chat_template_utils._compile_jinja_template.cache_clear), "compiled templates are kept elsewhere"


def test_half_a_character_ends_in_a_sentence():
    made = LimitedEnvironment().from_string('{{ "\\ud800" }}{{ "whole" }}')
    for render in (made.render, lambda: list(made.generate())):
        with pytest.raises(ValueError, match=r"half a character, .*ud800.*, which no tokenizer can read"):
            render()
