"""Completions of preferences that have several turns of the assistant: each in the context that a model is given."""

import itertools
import logging

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config

from lowtide import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, ORPOConfig
from lowtide.data.batches.collate import CompletionCollator
from lowtide.data.batches.completion_rounds import completion_rounds
from lowtide.data.batches.heaviest import longest_row, row_lengths
from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from lowtide.methods import METHODS
from lowtide.methods.shared.rows import Preparation
from tests.support.texts.chatml import CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")

DROPPING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}",
)
"""It drops the thoughts of all but the last message."""


def said(content, thought=None):
    return {"role": "assistant", "content": content, **({} if thought is None else {"reasoning_content": thought})}


def asked(content):
    return {"role": "user", "content": content}


PAIRS = [
    {
        "prompt": [asked("Half of 48?")],
        "chosen": [said("24", "I halve it"), asked("Really?"), said("Yes, 24", "It is")],
        "rejected": [said("42", "I guess")],
    },
    {
        "prompt": [asked("And of that?")],
        "chosen": [said("12 clips", "again"), asked("When?"), said("in May", "I know"), asked("So?"), said("I see")],
        "rejected": [said("13", "one more"), asked("No?"), said("Then 42", "I guess")],
    },
    {"prompt": [asked("How many?")], "chosen": [said("72")], "rejected": [said("7", "I guess")]},
]
SINGLES = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


def prepared(rows, tokenizer, stream=False, **options):
    dataset = Dataset.from_list(rows)
    options = PreferenceOptions(vocab_size=1000, **options)
    made = prepare_unpaired if "label" in rows[0] else prepare_pairs
    return list(made(dataset.to_iterable_dataset() if stream else dataset, tokenizer, options, batch_size=2)[0])


def expected(tokenizer, prompt, completion):
    """The token ids of the context and of the answer of each turn, from plain renderings."""

    def ids(messages, opened=False):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    found, whole = [], prompt + completion
    for number, message in enumerate(whole):
        if number >= len(prompt) and message["role"] == "assistant":
            (before, context), (text, _) = ids(whole[:number], True), ids(whole[: number + 1])
            answer = text[len(before) :].removesuffix("\n")
            found.append((context, tokenizer(answer, add_special_tokens=False)["input_ids"]))
    return found


def turns_of(row, side):
    """The same from a prepared row."""
    found = []
    for own in completion_rounds(row, f"{side}_ids"):
        tokens = [*row["prompt_ids"][: own.seen], *own.token_ids]
        labels = [*[-100] * own.seen, *own.labels]
        for is_scored, places in itertools.groupby(range(len(tokens)), key=lambda place, of=labels: of[place] != -100):
            span = [*places]
            if is_scored:
                found.append((tokens[: span[0]], tokens[span[0] : span[-1] + 1]))
                assert labels[span[0] : span[-1] + 1] == found[-1][1]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [CHATML, DROPPING], ids=["kept", "dropped"])
def test_each_turn_of_a_side_has_the_context_of_its_prompt(tokenizer, template, stream, caplog):
    tokenizer.chat_template = template
    with caplog.at_level(logging.WARNING):
        rows = prepared(PAIRS, tokenizer, stream=stream)
    for row, given in zip(rows, PAIRS, strict=True):
        for side in ("chosen", "rejected"):
            assert turns_of(row, side) == expected(tokenizer, given["prompt"], given[side])
    assert "not one message" not in caplog.text
    several = [len(completion_rounds(row, "chosen_ids")) for row in rows]
    assert several == ([1, 1, 1] if template == CHATML else [2, 3, 1])


def test_rows_without_such_completions_have_no_columns_of_rounds(tokenizer):
    for rows in (PAIRS[2:], [row for row in SINGLES if len(row["completion"]) == 1]):
        [row, *_] = prepared(rows, tokenizer)
        assert all(name.endswith("_ids") or name == "label" for name in row)


def test_labelled_completions_are_those_of_pairs(tokenizer):
    tokenizer.chat_template = DROPPING
    for row, given in zip(prepared(SINGLES, tokenizer), SINGLES, strict=True):
        assert turns_of(row, "completion") == expected(tokenizer, given["prompt"], given["completion"])
    apart = prepare_unpaired(Dataset.from_list(PAIRS), tokenizer, PreferenceOptions(vocab_size=1000), batch_size=2)[0]
    found = [turns_of(row, "completion") for row in apart]
    pairs = prepared(PAIRS, tokenizer)
    assert found == [turns_of(row, side) for side in ("chosen", "rejected") for row in pairs]


def test_ktos_baseline_takes_the_first_turn_of_another_completion(tokenizer):
    tokenizer.chat_template = DROPPING
    dataset = Dataset.from_list(SINGLES)
    rows, _ = prepare_unpaired(dataset, tokenizer, PreferenceOptions(vocab_size=1000), batch_size=6, kl_block=6)
    firsts = [turns_of(row, "completion")[0][1] for row in rows]
    assert [row["kl_completion_ids"] for row in rows] == [firsts[-1], *firsts[:-1]]


def test_each_round_is_cut_for_itself_and_left_out_without_anything_scored(tokenizer):
    tokenizer.chat_template = DROPPING
    whole = prepared(PAIRS[1:2], tokenizer)[0]
    turns = turns_of(whole, "chosen")
    lengths = [len(context) + len(answer) for context, answer in turns]
    assert lengths == sorted(lengths)
    shortest = len(turns[0][0]) + len("<think>a")
    for most in (shortest, lengths[0], len(turns[1][0]), len(turns[1][0]) + 1, lengths[1] + 1, lengths[2]):
        [row] = prepared(PAIRS[1:2], tokenizer, max_length=most)
        wanted = [(context, answer[: most - len(context)]) for context, answer in turns if len(context) < most]
        assert turns_of(row, "chosen") == wanted
        assert row["prompt_ids"] == whole["prompt_ids"]


def cut(context, answer, least, most=None, prompt=None, completion=None, mode="keep_start"):
    """A turn within limits, written apart; `least` is where what its row keeps of the prompt begins."""
    start = max(len(context) - (prompt or len(context)), 0)
    stop = len(context) + min(completion or len(answer), len(answer))
    if most is not None and mode == "keep_start":
        stop = min(stop, start + most)
    elif most is not None:
        start = max(start, stop - most)
    start = max(start, least)
    if start >= len(context):  # what comes first is not predicted
        return context[:0] + answer[start - len(context) :][:1], answer[start - len(context) + 1 : stop - len(context)]
    return context[start:], answer[: stop - len(context)]


@pytest.mark.parametrize(
    ("most", "prompt", "completion", "mode"),
    [
        *((most, None, None, "keep_end") for most in (3, 14, 30, 60, 90, 200)),
        *((None, prompt, completion, "keep_start") for prompt in (1, 12, 40) for completion in (None, 5)),
        (20, 12, None, "keep_start"),
        (20, 15, 6, "keep_end"),
    ],
)
def test_the_beginning_and_the_parts_of_each_round_are_cut_as_those_of_a_row(tokenizer, most, prompt, completion, mode):
    tokenizer.chat_template = DROPPING
    limits = {"max_length": most, "max_prompt_length": prompt, "max_completion_length": completion}
    whole = [{side: turns_of(row, side) for side in ("chosen", "rejected")} for row in prepared(PAIRS, tokenizer)]
    rows = prepared(PAIRS, tokenizer, truncation_mode=mode, **limits)
    for row, sides in zip(rows, whole, strict=True):
        opened = sides["chosen"][0][0]
        firsts = [len(opened) - len(cut(*side[0], 0, most, prompt, completion, mode)[0]) for side in sides.values()]
        over = [len(opened) + len(side[0][1]) - (most or 10**9) for side in sides.values()]
        least = min(max(*firsts, *(over if mode == "keep_end" and completion is None else [0])), len(opened))
        assert row["prompt_ids"] == opened[least:]
        for name, turns in sides.items():
            wanted = [cut(*turn, least, most, prompt, completion, mode) for turn in turns]
            if max(map(len, sides.values())) == 1 and least == len(opened):
                wanted = [([], [*context, *answer]) for context, answer in wanted]  # a collator leaves the first out
            assert turns_of(row, name) == [turn for turn in wanted if turn[1]]


def test_rows_taken_whole_are_told(tokenizer, caplog):
    tokenizer.chat_template = DROPPING
    with caplog.at_level(logging.WARNING):
        rows = prepared(PAIRS, tokenizer, turns="whole")
    assert tokenizer.decode(rows[0]["chosen_ids"]).endswith("Yes, 24<|im_end|>\n")
    assert "chosen_labels" not in rows[0]
    assert "a completion is not one" not in caplog.text


def test_a_side_without_an_answer_has_its_row_taken_whole(tokenizer, caplog):
    silent = {"prompt": [asked("?"), said("24")], "chosen": [asked("No?"), said("Yes")], "rejected": [asked("Really?")]}
    with caplog.at_level(logging.WARNING):
        first, *_ = prepared([silent, PAIRS[1]], tokenizer)
    assert tokenizer.decode(first["rejected_ids"]).endswith("Really?<|im_end|>\n")
    assert caplog.text.count("in 1 of 2 rows (the first is row 0) a completion is not one message") == 1


def tiny(tokenizer, seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


RUN = {
    **{"per_device_train_batch_size": 3, "max_steps": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no"},
    **{"use_cpu": True, "bf16": False, "learning_rate": 0.0, "train_sampling_strategy": "sequential"},
}


def score(model, turns):
    """The log-probability of a completion: one plain forward a turn."""
    sums = []
    with torch.no_grad():
        for context, answer in turns:
            logprobs = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].log_softmax(-1)
            sums.append(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
    return torch.stack(sums).sum()


LIMITS = [{"max_length": 26, "truncation_mode": "keep_end"}, {"max_prompt_length": 14, "max_completion_length": 6}]


@pytest.mark.parametrize("more", [{}, {"precompute_ref_log_probs": True}, {"prefix_sharing": False}, *LIMITS], ids=str)
def test_the_loss_of_pairs_is_that_of_one_plain_forward_a_turn(tokenizer, tmp_path, more):
    tokenizer.chat_template = DROPPING
    policy, reference = tiny(tokenizer, 0), tiny(tokenizer, 1)
    rows = prepared(PAIRS, tokenizer, **(more if more in LIMITS else {}))
    sides = [turns_of(row, side) for row in rows for side in ("chosen", "rejected")]
    ratios = torch.tensor([[score(m, turns) for m in (policy, reference)] for turns in sides])
    ratios = (ratios[:, 0] - ratios[:, 1]).view(-1, 2)
    wanted = -torch.nn.functional.logsigmoid(0.1 * (ratios[:, 0] - ratios[:, 1])).mean().item()
    trainer = DPOTrainer(
        *(policy, reference),
        args=DPOConfig(tmp_path, **RUN, **more),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, abs=1e-5)


def test_the_loss_of_kto_is_that_of_one_plain_forward_a_turn(tokenizer, tmp_path):
    tokenizer.chat_template = DROPPING
    policy, reference = tiny(tokenizer, 0), tiny(tokenizer, 1)
    turns = [expected(tokenizer, row["prompt"], row["completion"]) for row in SINGLES]
    scored = [[score(m, each) for m in (policy, reference)] for each in turns]
    ratios = torch.tensor([one - other for one, other in scored])
    signs = torch.tensor([1.0 if row["label"] else -1.0 for row in SINGLES])
    args = KTOConfig(tmp_path, loss_type="apo_zero_unpaired", **{**RUN, "per_device_train_batch_size": 6})
    trainer = KTOTrainer(
        *(policy, reference), args=args, train_dataset=Dataset.from_list(SINGLES), processing_class=tokenizer
    )
    trainer.train()
    desirable = 1 - torch.sigmoid(0.1 * ratios[signs > 0])
    undesirable = torch.sigmoid(0.1 * ratios[signs < 0])
    wanted = torch.cat([desirable, undesirable]).mean().item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, abs=1e-5)


class OwnLoss(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class OneSegment(CompletionCollator):
    """It knows of no rounds."""

    def __call__(self, rows):
        return super().__call__([{name: row[name] for name in ("prompt_ids", *self.completions)} for row in rows])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [CHATML, DROPPING], ids=["kept", "dropped"])
def test_a_loss_of_ones_own_does_not_see_several_turns(tokenizer, tmp_path, template, stream):
    tokenizer.chat_template = template
    dataset = Dataset.from_list(PAIRS)
    with pytest.raises(ValueError, match=r"have several turns, .* set turns='whole'"):
        OwnLoss(
            *(tiny(tokenizer, 0), tiny(tokenizer, 1)),
            args=DPOConfig(tmp_path, **RUN),
            train_dataset=dataset.to_iterable_dataset() if stream else dataset,
            processing_class=tokenizer,
        ).train()


def test_a_collator_that_knows_of_no_rounds_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = DROPPING
    with pytest.raises(ValueError, match=r"OneSegment.* does not keep the turns of completions .* apart"):
        DPOTrainer(
            *(tiny(tokenizer, 0), tiny(tokenizer, 1)),
            args=DPOConfig(tmp_path, **RUN),
            data_collator=OneSegment(("chosen_ids", "rejected_ids")),
            train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer,
        )


def test_rows_are_as_long_as_what_is_computed_of_them(tokenizer):
    tokenizer.chat_template = DROPPING
    rows, _ = prepare_pairs(Dataset.from_list(PAIRS), tokenizer, PreferenceOptions(vocab_size=1000), batch_size=2)
    for sharing in (True, False):
        collator = CompletionCollator(("chosen_ids", "rejected_ids"), sharing=sharing)
        assert row_lengths(rows, collator).tolist() == [collator([row]).tokens for row in rows]
    whole = [[[*context, *answer] for context, answer in turns_of(row, "chosen")] for row in rows]
    assert longest_row(rows) == max(len(each) for row in whole for each in row)


def test_the_ledger_of_scored_prompts_leaves_contexts_out(tokenizer):
    tokenizer.chat_template = DROPPING
    how = Preparation(tokenizer, ORPOConfig("here"), 1000)
    rows, ledger = METHODS["orpo"].rows.prepare(Dataset.from_list(PAIRS), how, "train")
    batch = CompletionCollator(("chosen_ids", "rejected_ids"), scores_prompt=True)(list(rows))
    assert ledger.scored_tokens == batch.scores


def test_messages_of_weight_0_are_context(tokenizer):
    tokenizer.chat_template = DROPPING
    first, *others = PAIRS[1]["chosen"]
    row = {**PAIRS[1], "chosen": [first | {"weight": 0}, *others]}
    [found] = prepared([row], tokenizer)
    assert turns_of(found, "chosen") == expected(tokenizer, row["prompt"], PAIRS[1]["chosen"])[1:]
    for weight, said_of_it in ((0.5, "message 1 has the weight 0.5; in pairs and labelled rows it is 0 or 1"),
                               (7, "weight"), ):  # fmt: skip
        with pytest.raises(ValueError, match=f"row 0 .*{said_of_it}"):
            prepared([{**row, "chosen": [first | {"weight": weight}, *others]}], tokenizer)
    with pytest.raises(ValueError, match="no message of the completion is trained"):
        prepared([{**row, "rejected": [each | {"train": False} for each in row["rejected"]]}], tokenizer)


@pytest.mark.parametrize(("weight", "said"), [(0, "each has the weight 0"), (0.5, "message 1 has the weight 0.5")])
def test_an_answer_that_is_not_wholly_trained_is_refused(weight, said, tokenizer):
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    row = {"prompt": [asked], "chosen": [answer | {"weight": weight}], "rejected": [answer | {"content": "c"}]}
    with pytest.raises(ValueError, match=f"row 0 .*{said}"):
        prepared([row], tokenizer)
    with pytest.raises(ValueError, match=f"row 0 .*{said}"):
        prepare_unpaired(
            Dataset.from_list([{"prompt": [asked], "completion": row["chosen"], "label": True}]),
            *(tokenizer, PreferenceOptions()),
            batch_size=1,
        )
