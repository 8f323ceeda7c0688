"""Prepared conversations whose turns are trained as they are generated: a row of the dataset, in several segments."""

import copy
import json
import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from lowtide import SFTConfig, SFTTrainer
from lowtide.data.batches.shared_rounds import whole_rounds
from lowtide.data.encode.chat import ChatEncoder
from lowtide.data.encode.rounds import rounds_of
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.engine.forward import install, score
from lowtide.ragged import RaggedBatch
from tests.support.texts.chatml import CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier thoughts are dropped, as by Qwen3's."""


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def talk(rounds, *, thoughts=True, start=0):
    messages = []
    for number in range(start, start + rounds):
        more = {"reasoning_content": f"I add {number}"} if thoughts else {}
        messages += [said("user", f"And {number}?"), said("assistant", f"It is {number}.", **more)]
    return messages


TALKS = [talk(3), talk(1, start=7), talk(2, start=4)]


def run(talks, tokenizer, *, packing=False, stream=False, **options):
    rows = Dataset.from_list([{"messages": each} for each in talks])
    options = {"assistant_only_loss": True, "vocab_size": 1000, **options}
    given = rows.to_iterable_dataset() if stream else rows
    return prepare(given, tokenizer, PrepareOptions(**options), batch_size=2, packing=packing)


def segments(row):
    """The (input_ids, labels) of each round, up to its last label, with what it goes on from before it; sorted."""
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    ends = np.cumsum(lengths).tolist()
    assert ends[-1] == len(row["input_ids"]) == len(row["labels"])
    found = []
    for number, end in enumerate(ends):
        start = end - lengths[number]
        last = max(place for place in range(start, end) if row["labels"][place] != -100) + 1
        before = []
        if row.get("prefix", [-1] * len(lengths))[number] >= 0:
            first = ends[row["prefix"][number]] - lengths[row["prefix"][number]]
            before = row["input_ids"][first : first + row["prefix_length"][number]]
        found.append((before + row["input_ids"][start:last], [-100] * len(before) + row["labels"][start:last]))
    return sorted(found)


def scored(tokenizer, labels):
    return tokenizer.decode([label for label in labels if label != -100])


def one_a_turn(tokenizer, messages):
    """A row a turn, each from two plain renderings."""
    found = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
        assert whole.startswith(prompt)
        assert whole.endswith("<|im_end|>\n")
        texts = [prompt, whole[len(prompt) :].removesuffix("\n")]
        context, target = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        found.append((context + target, [-100] * len(context) + target))
    return sorted(found)


@pytest.fixture
def thinking(tokenizer):
    tokenizer.chat_template = THINKING
    return tokenizer


def test_a_conversation_is_one_row_with_a_segment_for_each_turn(thinking):
    dataset, ledger = run(TALKS, thinking)
    assert len(dataset) == ledger.rows == 3
    assert [segments(row) for row in dataset] == [one_a_turn(thinking, each) for each in TALKS]
    assert scored(thinking, dataset[1]["labels"]) == "<think>\nI add 7\n</think>\n\nIt is 7.<|im_end|>"
    assert ledger.tokens == sum(len(row["input_ids"]) for row in dataset)
    assert [sum(before >= 0 for before in row["prefix"]) for row in dataset] == [2, 0, 1]
    whole, of_whole = run(TALKS, thinking, prefix_sharing=False)
    assert whole.column_names == ["input_ids", "labels", "seq_lengths"]
    assert [segments(row) for row in whole] == [segments(row) for row in dataset]
    assert (of_whole.tokens, of_whole.tokens_shared) == (ledger.tokens + ledger.tokens_shared, None)
    assert ledger.tokens_shared > 0


def test_turns_that_the_past_keeps_are_one_row_of_the_same_tokens_as_the_whole(tokenizer):
    talks = [talk(3, thoughts=False), [said("system", "Be brief."), *talk(2, thoughts=False), said("user", "Thanks")]]
    own, _ = run(talks, tokenizer)
    whole, _ = run(talks, tokenizer, turns="whole")
    assert own.column_names == ["input_ids", "labels"]
    assert own["input_ids"][:] == whole["input_ids"][:]
    assert [scored(tokenizer, row["labels"]) for row in own] == [
        "It is 0.<|im_end|>It is 1.<|im_end|>It is 2.<|im_end|>",
        "It is 0.<|im_end|>It is 1.<|im_end|>",
    ]
    for mine, all_of_it in zip(own, whole, strict=True):  # the line break behind an end is never written
        pairs = [(a, b) for a, b in zip(mine["labels"], all_of_it["labels"], strict=True) if a != b]
        assert {(a, tokenizer.decode([b])) for a, b in pairs} == {(-100, "\n")}


@pytest.mark.parametrize("how", ["marks", "whole"])
def test_thoughts_that_a_whole_conversation_has_not_are_told(how, thinking, caplog):
    if how == "marks":
        thinking.chat_template = THINKING.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}").replace(
            "{% endfor %}", "{% endgeneration %}{% endfor %}", 1
        )
    with caplog.at_level(logging.WARNING):
        run([talk(1, start=7), talk(2)], thinking, turns="as_generated" if how == "marks" else "whole")
    assert "in 1 of 2 rows (the first is row 1) the chat template leaves something out" in caplog.text


def test_several_processes_prepare_the_same_rows(thinking):
    alone, _ = run(TALKS, thinking)
    together, _ = run(TALKS, thinking, num_proc=2, seed=1, fingerprint="another")
    assert [segments(row) for row in together] == [segments(row) for row in alone]


def test_a_stream_has_the_same_rows(thinking):
    dataset, _ = run(TALKS, thinking)
    stream, _ = run(TALKS, thinking, stream=True)
    assert [segments(row) for row in stream] == [segments(row) for row in dataset]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packed_bins_hold_the_segments(thinking, stream, strategy):
    expected = [each for messages in TALKS for each in one_a_turn(thinking, messages)]
    longest = max(len(ids) for ids, _ in expected) + 1  # the line break behind a conversation of one turn
    packed, _ = run(
        TALKS, thinking, packing=True, stream=stream, packing_strategy=strategy, max_length=longest, shuffle=not stream
    )
    bins = [segments(row) for row in packed]
    assert max(len(row["input_ids"]) for row in packed) <= longest
    assert sorted(pair for each in bins for pair in each) == sorted(expected)


@pytest.mark.parametrize("stream", [False, True])
def test_rounds_that_go_on_from_one_another_share_a_bin(thinking, stream):
    expected = [each for messages in TALKS for each in one_a_turn(thinking, messages)]
    alone, _ = run(TALKS, thinking)
    most = sum(len(row["input_ids"]) for row in alone)
    packed, _ = run(TALKS, thinking, packing=True, stream=stream, max_length=most)
    [row] = list(packed)
    assert (segments(row), len(row["input_ids"])) == (sorted(expected), most)
    wide = max(len(row["input_ids"]) for row in alone)
    packed, _ = run(TALKS, thinking, packing=True, stream=stream, max_length=wide)
    rows = list(packed)
    assert (sorted(pair for each in rows for pair in segments(each)), len(rows)) == (sorted(expected), 2)
    assert sum(len(row["input_ids"]) for row in rows) == most
    assert all({*row["prefix"]} >= {-1, 0} for row in rows)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_rounds_that_share_tokens_have_the_weights_of_their_turns(thinking, packing, stream):
    talks = [[dict(message) for message in messages] for messages in TALKS]
    for messages in talks:
        for number, message in enumerate(messages):
            message["weight"] = None if number != 1 else 0.5
    rows, _ = run(talks, thinking, packing=packing, stream=stream, max_length=2000)
    found = {}
    for row in map(whole_rounds, rows):
        weights = row.get("loss_weights") or [1.0] * len(row["input_ids"])
        assert len(weights) == len(row["labels"])
        for label, weight in zip(row["labels"], weights, strict=True):
            found.setdefault(1.0 if label == -100 else weight, []).append(label)
    halves = thinking.decode(found[0.5])
    assert sorted(found) == [0.5, 1.0]
    assert sorted(halves.split("<|im_end|>")[:-1]) == [
        f"<think>\nI add {number}\n</think>\n\nIt is {number}." for number in (0, 4, 7)
    ]
    assert "It is 1." in thinking.decode([label for label in found[1.0] if label != -100])


def test_a_segment_that_loses_its_turn_to_a_limit_is_left_out(thinking):
    expected = one_a_turn(thinking, TALKS[0])
    most = sum(label == -100 for label in expected[2][1])  # the last turn's context, and nothing of what it says
    dataset, ledger = run(TALKS[:1], thinking, max_length=most)
    assert segments(dataset[0]) == [tuple(each[:most] for each in pair) for pair in expected[:2]]
    whole = len(dataset[0]["input_ids"]) + ledger.tokens_shared
    assert ledger.tokens_cut == sum(len(ids) for ids, _ in expected) - whole
    short, ledger = run(TALKS[:1], thinking, max_length=len(expected[0][0]))
    assert segments(short[0])[0] == expected[0]
    assert ledger.tokens + ledger.tokens_shared + ledger.tokens_cut == sum(len(ids) for ids, _ in expected)


def test_prompts_and_completions_score_turns_of_the_completion(thinking):
    rows = Dataset.from_list([{"prompt": each[:-1], "completion": each[-1:]} for each in TALKS])
    options = PrepareOptions(assistant_only_loss=True, vocab_size=1000)
    dataset, _ = prepare(rows, thinking, options, batch_size=2, packing=False)
    assert [segments(row) for row in dataset] == [one_a_turn(thinking, each)[-1:] for each in TALKS]


def test_the_loss_and_gradients_are_those_of_one_forward_a_turn(thinking):
    dataset, _ = run(TALKS, thinking)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(thinking), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.float64)
    plain = copy.deepcopy(model)
    total, count = 0, 0
    for messages in TALKS:
        for ids, labels in one_a_turn(thinking, messages):
            logits = plain(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            wanted = torch.tensor(labels[1:])
            places = (wanted != -100).nonzero().flatten()
            total = total - logits[places, wanted[places]].sum()
            count += len(places)
    (total / count).backward()
    install(model)
    found = score(model, RaggedBatch.from_rows(list(dataset)))
    loss = -found.scored.mean()
    loss.backward()
    assert loss.item() == pytest.approx((total / count).item(), abs=1e-9)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-5, msg=name)


def renders(tokenizer, monkeypatch, messages):
    """How often a conversation is rendered, once another of its form has been."""
    encoder = ChatEncoder(tokenizer)
    turns = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    place = RowPlace("data", [0])
    encoder.encode_rounds([ChatSample(messages)], [turns], place)
    made = []
    plain = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *args, **more: made.append(1) or plain(*args, **more)
    )
    encoder.encode_rounds([ChatSample(messages)], [turns], place)
    return len(made)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_a_turn_is_rendered_twice_whatever_the_template(tokenizer, monkeypatch, template):
    tokenizer.chat_template = template
    assert renders(tokenizer, monkeypatch, talk(10)) == 20


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_one_field_under_each_of_its_names(tokenizer, name, read):
    tokenizer.chat_template = THINKING.replace("reasoning_content", read)
    messages = [said("user", "And?"), said("assistant", "It is.", **{name: "I add"})]
    dataset, _ = run([messages], tokenizer)
    assert scored(tokenizer, dataset[0]["labels"]) == "<think>\nI add\n</think>\n\nIt is.<|im_end|>"


OPENING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def test_a_thought_that_the_prompt_opens_and_the_answer_never_has_is_refused(tokenizer):
    tokenizer.chat_template = OPENING
    problem = (
        r"row 0 .*message 1 can't be trained as it is generated: the prompt .*assistant\\n<think>\\n'.* "
        r"goes on with .*It is 0.*turns='whole'"
    )
    with pytest.raises(ValueError, match=problem):
        run([talk(1, thoughts=False)], tokenizer)


NEXT_ENDS = (
    "{% for m in messages %}{{ '<|im_end|>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def test_an_end_that_the_next_message_begins_with_is_scored(tokenizer, caplog):
    tokenizer.chat_template = NEXT_ENDS
    dataset, _ = run([talk(2, thoughts=False)], tokenizer)
    assert dataset.column_names == ["input_ids", "labels"]
    assert scored(tokenizer, dataset[0]["labels"]) == "It is 0.<|im_end|>It is 1.<|im_end|>"
    assert tokenizer.decode(dataset[0]["input_ids"]).endswith("It is 1.<|im_end|>")
    assert "does not learn to stop" not in caplog.text


@pytest.mark.parametrize("stop_ids", [(), (2,)])
def test_a_template_without_a_stop_token_is_told_once(tokenizer, caplog, stop_ids):
    tokenizer.eos_token = "<|endoftext|>"
    with caplog.at_level(logging.WARNING):
        dataset, _ = run([talk(2, thoughts=False)] * 3, tokenizer, stop_ids=stop_ids)
    assert caplog.text.count("writes no token at which generation stops ('<|endoftext|>')") == (not stop_ids)
    assert scored(tokenizer, dataset[0]["labels"]).startswith("It is 0.<|im_end|>")


def test_what_a_message_says_does_not_end_its_turn(tokenizer):
    """The words of a stop token within an answer are not its end."""
    tokenizer.chat_template = THINKING
    messages = [said("user", "And?"), said("assistant", "Write <|im_end|> there.", reasoning_content="<|im_end|>?")]
    dataset, _ = run([messages], tokenizer)
    target = "<think>\n<|im_end|>?\n</think>\n\nWrite <|im_end|> there.<|im_end|>"
    assert scored(tokenizer, dataset[0]["labels"]) == target


def test_other_turns_are_prepared_anew(thinking):
    plain = [talk(2, thoughts=False)]
    thinking.chat_template = CHATML
    counts = [run(plain, thinking, turns=turns)[1].scored_tokens for turns in ("as_generated", "whole", "as_generated")]
    assert counts[0] == counts[2] == counts[1] - 2


def test_unknown_turns_are_refused():
    with pytest.raises(ValueError, match="turns is 'each'; it must be one of as_generated, whole"):
        PrepareOptions(turns="each")


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "rope_theta": 1e4}
MODELS = {
    "qwen3": ("qwen3", {}, {}),
    "padded": ("qwen3", {}, {"padding_free": False}),
    "packed": ("qwen3", {}, {"packing": True, "max_length": 200}),
    "in pieces": ("qwen3", {}, {"tokens_per_microbatch": 48}),
    "each round repeated": ("qwen3", {}, {"prefix_sharing": False}),
    "another table for longer rows": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 60, "pad_token_id": 0},
        {},
    ),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, {}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_step_of_the_trainer_takes_whole_conversations(thinking, tmp_path, case):
    torch.manual_seed(0)
    model_type, changes, options = MODELS[case]
    config = AutoConfig.for_model(
        model_type, vocab_size=len(thinking), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, **changes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    assert max(len(ids) for messages in TALKS for ids, _ in one_a_turn(thinking, messages)) > 60
    rows = [pair for messages in TALKS for pair in one_a_turn(thinking, messages)]
    with torch.no_grad():
        losses = [model(torch.tensor([ids]), labels=torch.tensor([labels])).loss for ids, labels in rows]
    counts = [sum(label != -100 for label in labels) for _, labels in rows]
    args = SFTConfig(
        tmp_path, assistant_only_loss=True, per_device_train_batch_size=3, num_train_epochs=1, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, learning_rate=0.0, **options,
    )  # fmt: skip
    data = Dataset.from_list([{"messages": each} for each in TALKS])
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=thinking)
    trainer.train()
    assert trainer.state.global_step == 1
    expected = sum(loss.item() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(expected, abs=2e-4)
    repeats = case in ("each round repeated", "another table for longer rows")
    laid, _ = run(TALKS, thinking, prefix_sharing=not repeats)
    assert logged["num_tokens"] == sum(len(row["input_ids"]) for row in laid)


def test_what_the_template_does_not_write_is_told(tokenizer, caplog):
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    talks = [
        talk(1, thoughts=False),
        talk(1),
        [said("user", "And?"), said("assistant", "", tool_calls=[call]), said("tool", "x"), said("assistant", "So.")],
    ]
    run(talks, tokenizer)
    assert "in 2 of 3 rows (the first is row 1) the chat template leaves something out" in caplog.text
    caplog.clear()
    tokenizer.chat_template = THINKING
    run(talks[1:2], tokenizer)
    assert "leaves something out" not in caplog.text


@pytest.mark.parametrize("thinks", [True, False])
def test_empty_thoughts_that_are_scored_are_told(tokenizer, caplog, thinks):
    """Unless the prompt has them already."""
    tokenizer.chat_template = THINKING.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    )
    rows = Dataset.from_list(
        [{"messages": talk(1, thoughts=False), "chat_template_kwargs": {"enable_thinking": thinks}}]
    )
    options = PrepareOptions(assistant_only_loss=True, vocab_size=1000)
    dataset, _ = prepare(rows, tokenizer, options, batch_size=1, packing=False)
    empty = "<think>\n\n</think>\n\n" if thinks else ""
    assert scored(tokenizer, dataset[0]["labels"]) == f"{empty}It is 0.<|im_end|>"
    assert ("a message without thoughts is scored with the empty ones" in caplog.text) == thinks


def test_turns_of_a_round_are_in_their_order():
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]), ([1, 9], [8])]
    first, last = rounds_of(turns, [1, 9, 8])
    assert (first.token_ids, first.turns) == ([1, 2, 3, 4, 5, 6, 7], [(2, 4), (5, 7)])
    assert (last.token_ids, last.turns) == ([1, 9, 8], [(2, 3)])


WITH_IDS = (
    "{% for m in messages %}{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("as_text", [False, True])
def test_ids_and_the_order_of_calls_and_arguments_survive(tokenizer, as_text):
    """Arrow gives each call the keys of all others."""
    tokenizer.chat_template = WITH_IDS
    given = [("call_9", "find", {"city": "Rome"}), ("call_1", "add", {"b": 2, "a": 1}), ("call_5", "find", {})]
    calls = [
        {"id": name, "type": "function", "function": {"name": what, "arguments": json.dumps(how) if as_text else how}}
        for name, what, how in given
    ]
    answers = [said("tool", f"of {name}", tool_call_id=name) for name, *_ in given]
    messages = [said("user", "And?"), said("assistant", "", tool_calls=calls), *answers, said("assistant", "So.")]
    dataset, _ = run([messages], tokenizer)
    [row] = [whole_rounds(each) for each in dataset]
    written = "".join(f"[{name} {what} {json.dumps(how)}]" for name, what, how in given)
    read = "".join(f"({name})of {name}" for name, *_ in given)
    assert scored(tokenizer, row["labels"]) == f"{written}<|im_end|>So.<|im_end|>"
    assert f"{written}<|im_end|>{read}So." in tokenizer.decode(row["input_ids"])
