"""Completions that call tools: token by token and message by message as TRL's loop makes them."""

import asyncio
import copy
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lowtide.ranks.group import RankGroup
from lowtide.rollout.conversations import ToolUse
from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.turns import Turns
from tests.rollout.chat_templates import CALLS, TEMPLATES, add, call, trl_template
from tests.support.ranks.processes import run_ranks
from tests.support.texts.byte_tokenizer import byte_tokenizer


async def look_up(word: str) -> str:
    """
    Looks a word up.

    Args:
        word: the word.
    """
    await asyncio.sleep(0.01)
    if word == "nothing":
        raise KeyError(word)
    return f"{word} is a word"


SCRIPTS = {
    "no call": ["It is 4."],
    "one call": [call("add", a=2, b=2), "It is 4."],
    "words before a call": ["Let me see.\n" + call("add", a=2, b=2), "It is 4."],
    "thoughts": ["<think>\nhm\n</think>\n\n" + call("add", a=2, b=2), "<think>so</think>\n\nIt is 4."],
    "two calls in a turn": [call("add", a=1, b=2) + "\n" + call("add", a=3, b=4), "3 and 7"],
    "an async tool that raises": [call("look_up", word="nothing"), call("look_up", word="tide"), "Found."],
    "a tool that raises": [call("add", a=1, b="x"), "Oh."],
    "wrong arguments": [call("add", c=1), "Oh."],
    "an unknown tool": [call("subtract", a=1), "Oh."],
    "a call that is no JSON": ["<tool_call>\n{'name'\n</tool_call>"],
    "a call that is not closed": ['<tool_call>\n{"name": "add"'],
    "always another call": [call("add", a=1, b=n) for n in range(9)],
    "answers that do not fit": [call("look_up", word="w" * 500), "never"],
}
MOST, ROUNDS = 900, 4


def play(tokenizer, scripts: list[list[str]], use: ToolUse, rows: list[dict]):
    """A rollout in which the policy says what is written; ends of turns are tokens."""
    conversations = use.start(rows, max_completion_length=MOST)
    requests = conversations.requests(range(100, 100 + len(rows)))
    generated, place = [], 0
    for number, request in enumerate(requests):
        generated.append([])
        for own in range(request.count):
            completion = Completion()
            for turn in scripts[place]:
                said = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
                completion.token_ids += said[: MOST - len(completion.token_ids)]
                suffix = conversations(number, own, completion)
                if suffix is None:
                    break
                completion.token_ids += suffix
            generated[-1].append(completion)
            place += 1
    return conversations, requests, conversations.finish(generated)


def of_trl(tokenizer, scripts: list[list[str]], rows: list[dict], template: str | None):
    """The same by TRL: completions as messages and tokens, masks, and counts of calls and failures."""
    from trl.chat_template_utils import add_response_schema, parse_response
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import start_event_loop_in_daemon

    tokenizer = add_response_schema(copy.deepcopy(tokenizer))
    tools = [add, look_up]
    prompts = [copy.deepcopy(row["prompt"]) for row in rows]
    encoded = tokenizer.apply_chat_template(prompts, tools=tools, add_generation_prompt=True, chat_template=template)
    prompt_ids = encoded["input_ids"]
    said = [[[*tokenizer(turn)["input_ids"], tokenizer.eos_token_id] for turn in script] for script in scripts]
    turns = {tuple(ids): iter(said[n][1:]) for n, ids in enumerate(prompt_ids)}

    def generate(prompt_completion_ids, *_, **__):
        owners = [next(own for own in turns if tuple(ids[: len(own)]) == own) for ids in prompt_completion_ids]
        ids = [next(turns[own], []) for own in owners]
        return ids, None

    _, loop, ready = start_event_loop_in_daemon()
    ready.wait()
    trainer = SimpleNamespace(
        max_tool_calling_iterations=ROUNDS,
        _sync_tool_dicts=[{"add": add}] * len(rows),
        _async_tool_dicts=[{"look_up": look_up}] * len(rows),
        async_loop=loop,
        use_vllm=False,
        _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100_000)),
        max_completion_length=MOST,
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=template,
        chat_template_kwargs={},
        tools=tools,
        environment_factories=None,
        _generate_single_turn=generate,
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    ids = [own[0] for own in said]
    messages = [
        [parse_response(tokenizer, own, prefix=before, tools=tools)]
        for own, before in zip(ids, prompt_ids, strict=True)
    ]
    mask, messages, ids, _, calls, failures, _ = GRPOTrainer._tool_call_loop(
        trainer, prompts, prompt_ids, ids, messages, None, None, {}
    )
    loop.call_soon_threadsafe(loop.stop)
    return messages, ids, mask, calls, failures


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3"])
def test_rollouts_are_trl_s(template):
    pytest.importorskip("trl")
    tokenizer = byte_tokenizer(trl_template(template), eos="<|im_end|>")
    training = trl_template(f"{template}_training") if template == "qwen3" else None
    rows = [{"prompt": [{"role": "user", "content": f"Question {n}?"}]} for n in range(len(SCRIPTS))]
    use = ToolUse(Turns(tokenizer), tools=[add, look_up], max_tool_calling_iterations=ROUNDS)
    scripts = list(SCRIPTS.values())
    ours, requests, completions = play(tokenizer, scripts, use, rows)
    messages, ids, _, calls, failures = of_trl(tokenizer, scripts, rows, training)
    assert len(requests) == len(rows)
    for title, mine, theirs in zip(SCRIPTS, ours.all, messages, strict=True):
        assert mine.messages == theirs, title
    for title, mine, theirs in zip(SCRIPTS, completions, ids, strict=True):
        assert tokenizer.decode(mine.token_ids) == tokenizer.decode(theirs), title
        assert mine.token_ids == theirs, title
    assert sum(each.calls for each in ours.all) == calls
    assert sum(each.failures for each in ours.all) == failures
    assert failures == 4


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_form_of_calls_is_read_and_answered(template):
    pytest.importorskip("trl")
    from trl.chat_template_utils import add_response_schema

    end, form = CALLS[template]
    tokenizer = add_response_schema(byte_tokenizer(trl_template(template), eos=end, more=TEMPLATES[template]))
    use = ToolUse(Turns(tokenizer), tools=[add])
    rows = [{"prompt": [{"role": "user", "content": "2 + 2?"}]}]
    ours, _, [completion] = play(tokenizer, [[form, "It is 4."]], use, rows)
    called, answer, said = ours.all[0].messages
    function = called["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("add", {"a": 2, "b": 2})
    assert answer == {"role": "tool", "name": "add", "content": "4"}
    assert said["content"] == "It is 4."
    assert ours.all[0].failures == 0
    rest = tokenizer.decode(completion.token_ids).removeprefix(form)
    assert rest.count(end) >= 2
    assert rest.startswith(end)
    assert rest.endswith(f"It is 4.{end}")


def whoever(word: str) -> str:
    """Says which rank is asked.

    Args:
        word: anything.
    """
    return f"{word} of rank {dist.get_rank()}"


def ask_on_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    tokenizer = byte_tokenizer(trl_template("qwen2_5"), eos="<|im_end|>")
    use = ToolUse(Turns(tokenizer), tools=[whoever], ranks=RankGroup())
    rows = [{"prompt": [{"role": "user", "content": "Who?"}]}]
    ours, _, _ = play(tokenizer, [[call("whoever", word="tool"), "I see."]], use, rows)
    _, answer, said = ours.all[0].messages
    assert answer["content"] == "tool of rank 0"
    assert said["content"] == "I see."
    dist.destroy_process_group()


def test_ranks_that_write_together_read_what_the_first_was_answered(tmp_path):
    pytest.importorskip("trl")
    run_ranks(ask_on_ranks, str(tmp_path))
