"""The collators: against transformers' own, a plain reading of the definitions, and on values through models."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PreTrainedTokenizerFast

from lowtide.data.batches.collate import (
    DataCollatorForCompletionOnlyLM,
    DataCollatorWithFlattening,
    RaggedCollator,
    ragged_from_collated,
)

WORDS = ["<pad>", "</s>", "Q:", "A:", *"abcdefghijklmnop"]
PAD, END, Q, A = range(4)
ROWS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [5, 5, 6, 6]]


def tokenizer_of(**options) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **{"pad_token": "<pad>", "eos_token": "</s>", **options})


def rows_of(lists):
    return [{"input_ids": tokens} for tokens in lists]


def flat(lists):
    return [token for tokens in lists for token in tokens]


# -- RaggedCollator ------------------------------------------------------------------------------------------


def test_ragged_collator_lays_prepared_rows_end_to_end():
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
        {"input_ids": [8, 9, 10], "labels": [8, 9, 10], "seq_lengths": [2, 1]},
    ]
    batch = RaggedCollator()(rows)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.lengths.tolist() == [3, 2, 1]
    assert batch.row.tolist() == [0, 1, 1]
    assert batch.score_target.tolist() == [6, 9]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("padding_free", [False, True])
def test_ragged_from_collated_finds_the_rows_again(padding_side, padding_free):
    rows = [[Q, 5, A, 6, 7], [Q, 5, 6, 7, A, 8], [A, 9]]
    collate = DataCollatorForCompletionOnlyLM(
        [A], tokenizer=tokenizer_of(padding_side=padding_side), padding_free=padding_free
    )
    batch = ragged_from_collated(collate(rows_of(rows)))
    assert batch.token_ids.tolist() == flat(rows)
    assert batch.lengths.tolist() == [5, 6, 2]
    assert batch.row.tolist() == [0, 1, 2]
    assert batch.score_target.tolist() == [6, 7, 8, 9]
    assert batch.score_index.tolist() == [2, 3, 9, 11]


# -- DataCollatorWithFlattening ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"separator_id": -1}, {"return_seq_idx": True}, {"position_ids_start": 2}])
@pytest.mark.parametrize("with_labels", [False, True])
def test_flattening_returns_what_the_class_of_transformers_returns(options, with_labels):
    rows = [{"input_ids": row, "labels": [-100, *row[1:]]} if with_labels else {"input_ids": row} for row in ROWS]
    ours = DataCollatorWithFlattening(**options)(rows)
    theirs = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)(rows)
    assert ours.pop("use_cache") is False
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(torch.as_tensor(ours[name]), torch.as_tensor(value), rtol=0, atol=0)


def test_flattening_is_the_articles_example():
    batch = DataCollatorWithFlattening()(rows_of([[10, 11, 12, 13], [20, 21], [30, 31, 32]]))
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 20, 21, 30, 31, 32]]
    assert batch["labels"].tolist() == [[-100, 11, 12, 13, -100, 21, -100, 31, 32]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 4, 6, 9]
    assert batch["max_length_q"] == batch["max_length_k"] == 4


def test_the_segments_of_a_packed_row_are_sequences_of_their_own():
    packed = {"input_ids": [10, 11, 12, 20, 21], "labels": [10, 11, 12, 20, 21], "seq_lengths": [3, 2]}
    apart = DataCollatorWithFlattening()(rows_of([[10, 11, 12], [20, 21], [30]]))
    together = DataCollatorWithFlattening()([packed, {"input_ids": [30], "labels": [30]}])
    for name in apart:
        assert torch.equal(torch.as_tensor(apart[name]), torch.as_tensor(together[name])), name


def test_rounds_are_sequences_with_what_they_go_on_from():
    row = {"input_ids": [10, 11, 12, 20], "labels": [-100, 11, 12, 20], "seq_lengths": [3, 1]}
    row |= {"prefix": [-1, 0], "prefix_length": [-1, 1]}
    apart = DataCollatorWithFlattening()(
        [{"input_ids": [10, 11, 12], "labels": [-100, 11, 12]}, {"input_ids": [10, 20], "labels": [-100, 20]}]
    )
    together = DataCollatorWithFlattening()([row])
    for name in apart:
        assert torch.equal(torch.as_tensor(apart[name]), torch.as_tensor(together[name])), name


SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": END,
    "eos_token_id": END,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral, window 3": MistralConfig(**SIZES, sliding_window=3),
    "gpt2": GPT2Config(vocab_size=len(WORDS), n_embd=32, n_layer=2, n_head=4, bos_token_id=END, eos_token_id=END),
}


def token_losses(logits, labels):
    """The loss of each token but the first, from logits [1, tokens, vocab] and labels [1, tokens]."""
    return cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_flattened_losses_are_those_of_each_sequence_alone(config, attention):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    rows = [torch.randint(4, len(WORDS), (n,)).tolist() for n in (5, 1, 9, 2, 7)]
    batch = DataCollatorWithFlattening()(rows_of(rows))
    with torch.no_grad():
        output = model(**batch)
        alone = [token_losses(model(input_ids=row).logits, row) for row in (torch.tensor([row]) for row in rows)]
    flattened = token_losses(output.logits, batch["labels"])[batch["labels"][0, 1:] != -100]
    torch.testing.assert_close(flattened, torch.cat(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss, torch.cat(alone).mean(), rtol=1e-5, atol=1e-6)


def test_a_neighbour_changes_no_gradient():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="sdpa")

    def gradient_of_last(first):
        model.zero_grad()
        batch = DataCollatorWithFlattening()(rows_of([first, [5, 6, 7, 8]]))
        batch["labels"][0, : len(first)] = -100
        model(**batch).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.testing.assert_close(gradient_of_last([9, 10, 11]), gradient_of_last([4] * 6), rtol=1e-4, atol=1e-7)


# -- DataCollatorForCompletionOnlyLM -------------------------------------------------------------------------


def scored(batch):
    """The scored tokens of each row of a padded batch."""
    return [labels[labels != -100].tolist() for labels in batch["labels"]]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("template", ["A:", [A]])
def test_what_follows_the_response_template_is_scored(template, padding_side):
    collate = DataCollatorForCompletionOnlyLM(template, tokenizer=tokenizer_of(padding_side=padding_side))
    rows = [[Q, 5, A, 6, 7, END], [Q, 5, A, 6, Q, 7, A, 8]]
    batch = collate(rows_of(rows))
    assert scored(batch) == [[6, 7, END], [8]]  # from the last template on
    kept = batch["attention_mask"].bool()
    assert batch["input_ids"][kept].tolist() == flat(rows)
    in_place = batch["labels"] != -100
    assert torch.equal(batch["labels"][in_place], batch["input_ids"][in_place])


def test_each_turn_is_scored_where_instructions_are_marked():
    collate = DataCollatorForCompletionOnlyLM("A:", "Q:", tokenizer=tokenizer_of())
    rows = [[Q, 5, A, 6, 7, Q, 8, A, 9], [5, A, 6, Q, 7, A], [Q, 5, A, 6, Q, 7], [Q, 5, A, 6, A, 7]]
    assert scored(collate(rows_of(rows))) == [[6, 7, 9], [6], [6], [6, 7]]


@given(st.lists(st.lists(st.sampled_from([Q, A, 5, 6]), min_size=1, max_size=12), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:.*lack a template")
def test_turns_are_those_of_a_token_by_token_reading(rows):
    def expected(row):
        if Q not in row or A not in row:
            return []
        tokens, on = [], False
        for token in row:
            if token in (Q, A):
                on = token == A
            elif on:
                tokens.append(token)
        return tokens

    collate = DataCollatorForCompletionOnlyLM([A], [Q], tokenizer=tokenizer_of())
    assert scored(collate(rows_of(rows))) == [expected(row) for row in rows]


def test_padding_free_is_the_flattening_of_the_same_labels():
    rows = [[Q, 5, A, 6, 7], [A, 8, 9], [Q, 5, 6, 7, A, 8]]
    batch = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of(), padding_free=True)(rows_of(rows))
    assert batch["input_ids"].tolist() == [flat(rows)]
    assert batch["labels"].tolist() == [[-100] * 3 + [6, 7] + [-100] + [8, 9] + [-100] * 5 + [8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 5, 8, 14]
    assert batch["max_length_q"] == batch["max_length_k"] == 6
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_padded_and_padding_free_have_the_same_loss():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    rows = rows_of([[Q, 5, A, 6, 7], [Q, 8, 9, A, 10], [Q, 5, 6, 7, A, 8, 11, 12]])
    padded, flat = (
        DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of(), padding_free=free)(rows)
        for free in (False, True)
    )
    with torch.no_grad():
        torch.testing.assert_close(model(**padded).loss, model(**flat).loss, rtol=1e-5, atol=1e-6)


def test_a_row_without_the_template_is_not_scored_but_counted_and_warned_of():
    collate = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of())
    rows = rows_of([[Q, 5, A, 6], [5, 6, 7], [8]])
    with pytest.warns(UserWarning, match=r"2 of this batch's 3 rows .*row 1 of the batch.*\[3\].*2 rows so far"):
        assert scored(collate(rows)) == [[6], [], []]
    with pytest.warns(UserWarning, match="4 rows so far"):
        collate(rows)
    assert collate.rows_without_response == 4


def test_an_end_token_that_is_also_the_padding_token_stays_scored():
    collate = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of(pad_token="</s>"))
    assert scored(collate(rows_of([[Q, 5, A, 6, END], [A, 7, END]]))) == [[6, END], [7, END]]


def test_rows_may_be_lists_arrays_or_already_padded():
    collate = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of())
    rows = [[A, 5], np.array([A, 6]), {"input_ids": torch.tensor([A, 7, PAD]), "attention_mask": [1, 1, 0]}]
    assert collate(rows[:2])["input_ids"].tolist() == [[A, 5], [A, 6]]
    assert collate(rows[2:])["input_ids"].tolist() == [[A, 7]]


def test_padding_goes_to_a_multiple():
    collate = DataCollatorForCompletionOnlyLM("A:", tokenizer=tokenizer_of(), pad_to_multiple_of=8)
    batch = collate(rows_of([[A, 5, 6]]))
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (1, 8)
    assert scored(batch) == [[5, 6]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "needs a tokenizer"),
        ({"mlm": True}, "mlm=True is for masked ones"),
        ({"response_template": ""}, "response_template '' holds no token"),
        ({"instruction_template": []}, r"instruction_template \[\] holds no token"),
        ({"padding_free": True, "pad_to_multiple_of": 8}, "leave one out"),
        ({"return_tensors": "np"}, "return_tensors='np'"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForCompletionOnlyLM(**{"response_template": "A:", "tokenizer": tokenizer_of(), **options})
