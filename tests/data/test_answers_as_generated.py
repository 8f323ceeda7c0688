"""Answers of preferences as they are generated: pairs, labelled completions, and sides that a reward model reads."""

import itertools
import logging
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from lowtide import DPOConfig, DPOTrainer, KTOConfig, RewardConfig, RewardTrainer
from lowtide.data.batches.shared_rounds import whole_rounds
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.data.prompts import PromptEncoder, prepare_prompts
from tests.support.texts.chatml import CHATML, MARKED_CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")

OPENING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}").replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}",
)
"""Its prompt opens a thought; without one in the answer, the template never writes what the prompt has opened."""


def said(content, thought=None):
    return {"role": "assistant", "content": content, **({} if thought is None else {"reasoning_content": thought})}


def asked(content):
    return {"role": "user", "content": content}


def pair(question, chosen, rejected):
    return {"prompt": [asked(question)], "chosen": [chosen], "rejected": [rejected]}


PAIRS = [
    pair("Half of 48?", said("24", "I halve it"), said("42, says the ledger", "I guess")),
    pair("And of that?", said("12 clips in May", "again"), said("13", "again, and one more")),
]


def prepared(rows, tokenizer, whole=False, stream=False, **options):
    dataset = Dataset.from_list(rows)
    options = PreferenceOptions(vocab_size=1000, **options)
    given = dataset.to_iterable_dataset() if stream else dataset
    return list(prepare_pairs(given, tokenizer, options, batch_size=2, whole=whole)[0])


def texts(tokenizer, row):
    return {name.removesuffix("_ids"): tokenizer.decode(ids) for name, ids in row.items() if name.endswith("_ids")}


def test_an_answer_ends_with_its_stop_token(tokenizer):
    [row] = prepared([pair("How many?", said("72"), said("7"))], tokenizer)
    context = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert texts(tokenizer, row) == {"prompt": context, "chosen": "72<|im_end|>", "rejected": "7<|im_end|>"}
    [row] = prepared([pair("How many?", said("72"), said("7"))], tokenizer, turns="whole")
    assert texts(tokenizer, row) == {"prompt": context, "chosen": "72<|im_end|>\n", "rejected": "7<|im_end|>\n"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_the_prompt_opens_is_in_the_context(tokenizer, stream):
    tokenizer.chat_template = OPENING
    for row, given in zip(prepared(PAIRS, tokenizer, stream=stream), PAIRS, strict=True):
        found = texts(tokenizer, row)
        assert found["prompt"].endswith("<|im_start|>assistant\n<think>\n")
        for side in ("chosen", "rejected"):
            [message] = given[side]
            assert found[side] == f"{message['reasoning_content']}\n</think>\n\n{message['content']}<|im_end|>"


def test_an_answer_without_the_thought_that_its_prompt_opens_needs_its_end(tokenizer):
    tokenizer.chat_template = OPENING
    rows = [*PAIRS, pair("How many?", said("72"), said("7", "I guess"))]
    with pytest.raises(ValueError, match=r"row 2 .*message 1 can't be trained as it is generated"):
        prepared(rows, tokenizer)
    *_, last = prepared(rows, tokenizer, thought_end="</think>")
    assert texts(tokenizer, last)["chosen"] == "</think>72<|im_end|>"


def test_the_end_of_a_thought_needs_conversations(tokenizer):
    with pytest.raises(ValueError, match="thought_end='</think>' requires conversations"):
        prepared([{"prompt": "How many?", "chosen": "72", "rejected": "7"}], tokenizer, thought_end="</think>")
    with pytest.raises(ValueError, match="thought_end='</think>' requires turns='as_generated'"):
        KTOConfig("here", thought_end="</think>", turns="whole")


def test_marks_of_the_template_do_not_say_what_is_scored(tokenizer):
    plain = prepared(PAIRS, tokenizer)
    tokenizer.chat_template = MARKED_CHATML
    assert prepared(PAIRS, tokenizer) == plain


def test_labelled_completions_are_those_of_pairs(tokenizer):
    rows = [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in PAIRS]
    options = PreferenceOptions(vocab_size=1000)
    found, _ = prepare_unpaired(Dataset.from_list(rows), tokenizer, options, batch_size=2)
    assert found["completion_ids"][:] == [row["rejected_ids"] for row in prepared(PAIRS, tokenizer)]


def test_implicit_prompts_are_those_that_a_row_gives(tokenizer):
    rows = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in PAIRS]
    assert prepared(rows, tokenizer) == prepared(PAIRS, tokenizer)


def test_a_reward_model_reads_a_side_at_its_stop_token(tokenizer):
    longer = {**PAIRS[0], "rejected": [said("42"), asked("Really?"), said("Yes")]}
    for row in prepared([longer, PAIRS[1]], tokenizer, whole=True):
        for side in ("chosen_ids", "rejected_ids"):
            assert row[side][-1] == tokenizer.eos_token_id
    [row] = prepared(PAIRS[:1], tokenizer, whole=True, turns="whole")
    assert texts(tokenizer, row)["chosen"].endswith("<|im_end|>\n")


def test_stop_tokens_of_the_model_end_answers_too(tokenizer):
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|endoftext|>\n")
    [row] = prepared(PAIRS[:1], tokenizer)
    assert texts(tokenizer, row)["chosen"] == "24<|endoftext|>\n\n"
    [row] = prepared(PAIRS[:1], tokenizer, stop_ids=(0,))
    assert texts(tokenizer, row)["chosen"] == "24<|endoftext|>"


def learned(rows, tokenizer, **options):
    """The context and what is scored of rows that supervised fine-tuning or distillation learns from."""
    options = PrepareOptions(vocab_size=1000, **options)
    dataset, _ = prepare(Dataset.from_list(rows), tokenizer, options, batch_size=2, packing=False)
    assert dataset.column_names == ["input_ids", "labels"]
    found = []
    for row in dataset:
        places = [place for place, label in enumerate(row["labels"]) if label != -100]
        assert places == [*range(places[0], len(row["labels"]))]
        found.append(
            tuple(tokenizer.decode(ids) for ids in (row["input_ids"][: places[0]], row["input_ids"][places[0] :]))
        )
    return found


@pytest.mark.parametrize("marks", [False, True])
def test_completions_of_prompts_are_those_of_pairs(tokenizer, marks):
    tokenizer.chat_template = MARKED_CHATML if marks else OPENING
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    expected = [(each["prompt"], each["chosen"]) for each in map(texts, [tokenizer] * 2, prepared(PAIRS, tokenizer))]
    assert learned(rows, tokenizer) == expected
    talks = [{"messages": row["prompt"] + row["chosen"]} for row in PAIRS]
    assert learned(talks, tokenizer, last_turn_only=True) == expected
    assert learned(rows, tokenizer, turns="whole") != expected
    if not marks:
        assert all(context.endswith("<think>\n") for context, _ in expected)


def test_what_a_policy_is_given_is_the_context_of_answers(tokenizer):
    tokenizer.chat_template = OPENING
    rows = Dataset.from_list([{"prompt": row["prompt"]} for row in PAIRS])
    given = prepare_prompts(rows, PromptEncoder(tokenizer))
    assert [row["prompt_ids"] for row in given] == [row["prompt_ids"] for row in prepared(PAIRS, tokenizer)]


def test_messages_of_prompts_come_in_the_form_that_the_template_takes(tokenizer):
    tokenizer.chat_template = CALLS
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "find", "arguments": {"city": "Rome"}}]
    rows = Dataset.from_list(  # in which each call has the arguments of both
        [{"prompt": [asked("?"), said("", "Well") | {"tool_calls": [{"function": call}]}]} for call in calls]
    )
    assert rows[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    given = prepare_prompts(rows, PromptEncoder(tokenizer))
    assert tokenizer.batch_decode(list(given["prompt_ids"])) == [
        '?Well[{"a": 1, "b": 2}]assistant:',
        '?Well[{"city": "Rome"}]assistant:',
    ]
    assert given["prompt"] == rows["prompt"]  # which is what reward functions see


CALLS = (
    "{% for message in messages %}{{ message.thinking }}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "[{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_scored_prompts_are_whole(tokenizer):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    [(_, whole), *_] = learned(rows, tokenizer, completion_only_loss=False)
    assert whole.startswith("<|im_start|>user")
    assert whole.endswith("24<|im_end|>\n")


def taken(rows, tokenizer):
    """Prepared rows of prompts and completions, each round whole."""
    options = PrepareOptions(vocab_size=1000)
    dataset: Any = prepare(Dataset.from_list(rows), tokenizer, options, batch_size=2, packing=False)[0]
    return [whole_rounds(row) for row in dataset]


def scored_spans(row):
    """The (first, last) places of each run of scored tokens."""
    places = [place for place, label in enumerate(row["labels"]) if label != -100]
    runs = [list(run) for _, run in itertools.groupby(places, key=lambda place: place - places.index(place))]
    return [(run[0], run[-1] + 1) for run in runs]


def test_turns_of_a_completion_after_a_prompt_are_each_taken_as_generated(tokenizer):
    """The first row of the past keeps what was written; the second one's template drops earlier thoughts."""
    turns = [said("42", "I guess"), asked("Really?"), said("Yes", "It is")]
    rows = [{"prompt": PAIRS[0]["prompt"], "completion": turns}]
    [row] = taken(rows, tokenizer)
    found = [tokenizer.decode(row["input_ids"][a:b]) for a, b in scored_spans(row)]
    assert found == ["42<|im_end|>", "Yes<|im_end|>"]
    assert tokenizer.decode(row["input_ids"]).endswith("Yes<|im_end|>")
    tokenizer.chat_template = DROPPING
    [row] = taken(rows, tokenizer)
    assert len(row["seq_lengths"]) == 2
    found = [tokenizer.decode(row["input_ids"][a:b]) for a, b in scored_spans(row)]
    assert sorted(found) == ["<think>I guess</think>42<|im_end|>", "<think>It is</think>Yes<|im_end|>"]
    assert "I guess</think>42<|im_end|>\n<|im_start|>user\nReally?" not in tokenizer.decode(row["input_ids"])


DROPPING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}",
)


def test_weights_of_messages_count_in_completions_of_prompts(tokenizer, caplog):
    turns = [said("42") | {"weight": 0}, asked("Really?"), said("Yes") | {"weight": 1}]
    with caplog.at_level(logging.WARNING):
        [row] = taken([{"prompt": [asked("?")], "completion": turns}], tokenizer)
    assert [tokenizer.decode(row["input_ids"][a:b]) for a, b in scored_spans(row)] == ["Yes<|im_end|>"]
    assert "whether they are trained" not in caplog.text


def test_a_completion_without_an_answer_is_taken_as_it_stands_and_told(tokenizer, caplog):
    rows = [
        {"prompt": [*PAIRS[0]["prompt"], said("42")], "completion": [asked("Really?")]},
        {"prompt": PAIRS[1]["prompt"], "completion": [said("12")]},
    ]
    with caplog.at_level(logging.WARNING):
        (_, other), (_, short) = learned(rows, tokenizer)
    assert other.endswith("Really?<|im_end|>\n")
    assert short == "12<|im_end|>"
    assert caplog.text.count("in 1 of 2 rows (the first is row 0) a completion is not one message") == 1


def test_the_end_of_a_thought_needs_completions_of_conversations(tokenizer):
    for rows in ([{"text": "How?"}], [{"messages": PAIRS[0]["prompt"] + PAIRS[0]["chosen"]}]):
        with pytest.raises(ValueError, match="thought_end='</think>' requires turns='as_generated'"):
            learned(rows, tokenizer, thought_end="</think>")


def tiny(kind, tokenizer, **more):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.2, **more,
    )  # fmt: skip
    return kind.from_config(config)


RUN = {
    **{"per_device_train_batch_size": 2, "max_steps": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
    **{"use_cpu": True, "bf16": False, "learning_rate": 0.0},
}


def sides_of(row):
    """The texts of a pair's context and answers under `OPENING`."""
    context = f"<|im_start|>user\n{row['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    answers = [row[side][0] for side in ("chosen", "rejected")]
    return context, [f"{each['reasoning_content']}\n</think>\n\n{each['content']}<|im_end|>" for each in answers]


def test_the_loss_of_pairs_is_that_of_plain_forwards(tokenizer, tmp_path):
    tokenizer.chat_template = OPENING
    policy, reference = tiny(AutoModelForCausalLM, tokenizer), tiny(AutoModelForCausalLM, tokenizer)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.2)

    def logprob(model, context, answer):
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, answer))
        logprobs = model(torch.tensor([before + after])).logits[0, :-1].log_softmax(-1)
        return logprobs[len(before) - 1 :].gather(1, torch.tensor(after)[:, None]).sum()

    losses = []
    for row in PAIRS:
        context, answers = sides_of(row)
        with torch.no_grad():
            ratios = [logprob(policy, context, each) - logprob(reference, context, each) for each in answers]
        losses.append(-torch.nn.functional.logsigmoid(0.1 * (ratios[0] - ratios[1])).item())
    trainer = DPOTrainer(
        *(policy, reference),
        args=DPOConfig(tmp_path, **RUN),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    trainer.train()
    assert abs(losses[0] - losses[1]) > 1e-3
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses) / 2, abs=1e-4)


def test_rewards_are_those_at_the_stop_tokens(tokenizer, tmp_path):
    tokenizer.chat_template = OPENING
    model = tiny(AutoModelForSequenceClassification, tokenizer, num_labels=1, pad_token_id=0)
    rewards = []
    for row in PAIRS:
        context, answers = sides_of(row)
        ids = [tokenizer(context + each, add_special_tokens=False)["input_ids"] for each in answers]
        with torch.no_grad():
            rewards.append([model(torch.tensor([each])).logits.item() for each in ids])
    losses = [-torch.nn.functional.logsigmoid(torch.tensor(one - other)).item() for one, other in rewards]
    trainer = RewardTrainer(
        model, RewardConfig(tmp_path, **RUN), train_dataset=Dataset.from_list(PAIRS), processing_class=tokenizer
    )
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(sum(losses) / 2, abs=1e-4)
    assert logged["mean_reward"] == pytest.approx(sum(map(sum, rewards)) / 4, abs=1e-4)
