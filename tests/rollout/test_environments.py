"""Environments: begun for each completion, used again, called as tools, and a source of rewards."""

import math

import pytest

from lowtide.rollout.calls import Caller
from lowtide.rollout.conversations import ToolUse
from lowtide.rollout.environments import Environments
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.rewards.completed import Completed
from lowtide.rollout.rewards.rewards import Rewards
from lowtide.rollout.tools import answer_calls
from lowtide.rollout.turns import Turns
from tests.rollout.chat_templates import HERMES_TEMPLATE, add, call
from tests.support.texts.byte_tokenizer import byte_tokenizer
from tests.support.texts.chatml import CHATML


class Counter:
    """Counts from where a row says."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, start, **row):
        self.value = start
        return f" It stands at {start}."

    def count(self, steps: int) -> int:
        """
        Counts on.

        Args:
            steps: how far.
        """
        self.value += steps
        return self.value

    def get_reward(self):
        return float(self.value)

    def _hidden(self):
        raise AssertionError


class Silent:
    def reset(self, **row):
        self.row = row

    @property
    def broken(self):
        raise AssertionError("no property is read")


class Later(Silent):
    async def get_reward(self):
        return 0.5


def use(factory, **more) -> ToolUse:
    turns = Turns(byte_tokenizer(HERMES_TEMPLATE, eos="<|im_end|>"))
    return ToolUse(turns, environment_factory=factory, **more)


def rows(*starts: int) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": "Go."}], "start": start} for start in starts]


def test_a_rollout_in_environments():
    Counter.made = 0
    tools = use(Counter, tools=[add])
    tokenizer = tools.turns.tokenizer
    given = rows(3, 3, 5)
    conversations = tools.start(given, max_completion_length=500)
    assert given == rows(3, 3, 5)
    assert conversations.all[0].prompt == [{"role": "user", "content": "Go. It stands at 3."}]
    requests = conversations.requests([11, 12, 13])
    assert [(each.count, each.seed) for each in requests] == [(1, 11), (1, 12), (1, 13)]
    assert "It stands at 5." in tokenizer.decode(requests[2].prompt_ids)

    said = [[call("count", steps=2)], [call("count", steps=4), call("add", a=1, b=1)], ["no"]]
    generated = []
    for request, turns in enumerate(said):
        completion = Completion()
        for turn in [*turns, "done"]:
            completion.token_ids += [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
            suffix = conversations(request, 0, completion)
            if suffix is None:
                break
            completion.token_ids += suffix
        generated.append([completion])
    assert conversations.finish(generated) == [each for group in generated for each in group]
    messages = [each.messages for each in conversations.all]
    assert [[m["content"] for m in each if m["role"] == "tool"] for each in messages] == [["5"], ["7", "2"], []]
    assert [each.calls for each in conversations.all] == [1, 2, 0]

    rewards = Rewards(lambda environments: [each.value for each in environments])
    for name, function in tools.rewards().items():
        rewards.add(function, name)
    what = Completed([each.prompt for each in conversations.all], messages, [c.token_ids for g in generated for c in g])
    what = Completed(what.prompts, what.completions, what.completion_ids, environments=conversations.environments)
    assert rewards.names == ["<lambda>", "Counter"]
    assert rewards(what).tolist() == [[5, 5], [7, 7], [5, 5]]

    first = conversations.environments
    assert Counter.made == 3
    assert tools.start(rows(1, 2), max_completion_length=500).environments == first[:2]
    assert Counter.made == 3


def test_environments_by_name():
    environments = Environments({"count": Counter, "quiet": Silent, "later": Later}, [add])
    given = [{"environment": name, "start": 1} for name in ("quiet", "count", "quiet", "later")]
    taken = environments.take(given)
    assert [type(each) for each in taken] == [Silent, Counter, Silent, Later]
    assert taken[0] is not taken[2]
    prompt = [{"role": "user", "content": "Go."}]
    for environment, row in zip(taken, given, strict=True):
        environments.reset(environment, row, prompt)
    assert taken[0].row == {"start": 1}
    assert [each["function"]["name"] for each in environments.schemas(given[1])] == ["add", "count"]
    assert list(environments.tools_of(taken[0])) == ["add"]
    assert list(environments.rewards()) == ["Counter", "Later"]
    rewards = Rewards([*environments.rewards().values()], names=[*environments.rewards()])
    found = rewards(Completed([prompt] * 4, [[]] * 4, [[1]] * 4, environments=taken))
    nan = math.nan
    assert str(found.tolist()) == str([[nan, nan], [1.0, nan], [nan, nan], [nan, 0.5]])


def test_what_an_environment_adds_to_a_prompt():
    class Adds(Silent):
        def reset(self, adds, **row):
            return adds

    environments = Environments(Adds)
    [one] = environments.take([{}])
    part, text = {"type": "text", "text": "b"}, {"type": "text", "text": "a"}
    for before, adds, after in (("a", "b", "ab"), ("a", [part], [text, part]), ([text], "b", [text, part])):
        prompt = [{"role": "user", "content": before}]
        assert environments.reset(one, {"adds": adds}, prompt) == [{"role": "user", "content": after}]
        assert prompt == [{"role": "user", "content": before}]
    assert environments.reset(one, {"adds": None}, prompt) is prompt
    with pytest.raises(ValueError, match="returned a int"):
        environments.reset(one, {"adds": 3}, prompt)


def test_an_environment_may_write_the_whole_prompt():
    begun = use(Counter).start([{"start": 3}], max_completion_length=10)
    assert begun.all[0].prompt == [{"role": "user", "content": " It stands at 3."}]


def test_what_goes_wrong():
    with pytest.raises(ValueError, match="the environment object has no method reset"):
        Environments(object)
    with pytest.raises(ValueError, match="empty dict"):
        Environments({})
    with pytest.raises(ValueError, match="must make an environment"):
        Environments({"a": 3})
    with pytest.raises(ValueError, match=r"'cuont'.*count, quiet; did you mean 'count'"):
        Environments({"count": Counter, "quiet": Silent}).take([{"environment": "cuont"}])
    with pytest.raises(ValueError, match=r"row 0 .*reset of the environment Counter raised TypeError"):
        use(Counter).start([{"prompt": [{"role": "user", "content": "x"}]}], max_completion_length=9)
    with pytest.raises(ValueError, match=r"row 0 .*need conversations"):
        use(Counter).start([{"prompt": "x", "start": 1}], max_completion_length=9)
    with pytest.raises(ValueError, match="max_tool_calling_iterations=-1"):
        use(Counter, max_tool_calling_iterations=-1)
    with pytest.raises(ValueError, match="two tools are called 'count'"):
        use(Counter, tools=[Counter.count])


def test_a_template_without_tools_is_refused_only_where_there_are_tools():
    turns = Turns(byte_tokenizer(CHATML))
    assert ToolUse(turns, environment_factory=Silent).start(rows(1), max_completion_length=9).environments
    for more in ({"tools": [add]}, {"environment_factory": Counter}):
        with pytest.raises(ValueError, match="leaves out the name and arguments of tool calls"):
            ToolUse(turns, **more)


class Raises:
    """An environment whose methods raise what they are told to."""

    error: BaseException = SystemExit(1)

    def reset(self, **row):
        pass

    def act(self) -> str:
        """
        Acts.
        """
        raise self.error

    def get_reward(self):
        raise self.error


class NeverBegins(Raises):
    def reset(self, **row):
        raise self.error


class NeverThere(Raises):
    def __init__(self):
        raise self.error


ERRORS = (SystemExit(1), KeyboardInterrupt(), GeneratorExit(), RecursionError(), KeyError("board"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_a_method_raises_is_a_failed_call(error, monkeypatch):
    monkeypatch.setattr(Raises, "error", error)
    tools = Environments(Raises).tools_of(Raises())
    [answer] = answer_calls([{"type": "function", "function": {"name": "act", "arguments": {}}}], tools, Caller(None))
    assert answer.failed


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_environment_that_cannot_be_made_begun_or_asked_is_named(error, monkeypatch):
    monkeypatch.setattr(Raises, "error", error)
    name = type(error).__name__
    with pytest.raises(ValueError, match=r"environment_factory raised .*as it made NeverThere"):
        Environments(NeverThere)
    with pytest.raises(ValueError, match=rf"reset of the environment NeverBegins raised .*{name}"):
        Environments(NeverBegins).reset(NeverBegins(), {}, [{"role": "user", "content": "x"}])
    own = Environments(Raises).rewards()
    completed = Completed(["x"], ["y"], environments=[Raises()])
    rewards = Rewards([*own.values()], names=[*own])
    with pytest.raises(ValueError, match=f"reward function 'Raises' raised .*{name}"):
        rewards(completed)


def test_halves_of_surrogate_pairs_that_an_environment_says_are_question_marks():
    class Says(Silent):
        def reset(self, **row):
            return "a\ud800b"

        def act(self) -> str:
            """
            Acts.
            """
            return "c\udfff"

    made = Environments(Says)
    assert made.reset(Says(), {}, [{"role": "user", "content": "x"}])[0]["content"] == "xa?b"
    call = {"type": "function", "function": {"name": "act", "arguments": {}}}
    [answer] = answer_calls([call], made.tools_of(Says()), Caller(None))
    assert answer.content == "c?"
