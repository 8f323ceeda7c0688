"""Preparation: what is kept, dropped, cut, packed and counted, cached and streamed."""

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.data.batches.packing import pack
from lowtide.data.cache.fingerprint import function_fingerprint
from lowtide.data.prepare import PrepareOptions, prepare
from lowtide.data.sources.load import load_rows
from tests.support.texts.chatml import MARKED_CHATML

pytestmark = pytest.mark.usefixtures("datasets_cache")

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.messages.jsonl"
STRATEGIES = ["bfd", "bfd_split", "wrapped"]


def tokenized(lengths, unscored=0):
    """Rows of these lengths, each token found once, and the first `unscored` labels of each masked."""
    rows = []
    for number, length in enumerate(lengths):
        ids = list(range(40 * number, 40 * number + length))
        rows.append({"input_ids": ids, "labels": [-100] * min(unscored, length) + ids[unscored:]})
    return rows


def run(rows, tokenizer, *, packing=False, batch_size=4, name="train", **options):
    dataset = rows if isinstance(rows, Dataset | IterableDataset) else Dataset.from_list(rows)
    options.setdefault("vocab_size", 100_000)
    return prepare(dataset, tokenizer, PrepareOptions(**options), batch_size=batch_size, packing=packing, name=name)


def segments(dataset):
    """The (input_ids, labels) of every segment of packed rows."""
    found = []
    for row in dataset:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) == len(row["labels"])
        ends = np.cumsum(row["seq_lengths"])
        for start, end in zip(ends - row["seq_lengths"], ends, strict=True):
            found.append((row["input_ids"][start:end], row["labels"][start:end]))
    return found


def test_columns_and_types(tokenizer):
    rows, _ = run(tokenized([3, 4]), tokenizer)
    packed, _ = run(tokenized([3, 4]), tokenizer, packing=True, max_length=8)
    assert {name: str(feature.feature.dtype) for name, feature in rows.features.items()} == {
        "input_ids": "int32",
        "labels": "int32",
    }
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    assert packed.features["seq_lengths"].feature.dtype == "int32"


def test_the_ledger_counts_what_became_of_every_token(tokenizer):
    rows = tokenized([5, 9, 3, 12], unscored=1)
    rows[2]["labels"] = [-100] * 3  # nothing scored
    rows[3]["labels"] = [-100] * 8 + rows[3]["labels"][8:]  # nothing scored is left of it
    rows.append({"input_ids": [], "labels": []})
    dataset, ledger = run(rows, tokenizer, max_length=6, batch_size=2)

    assert [row["input_ids"] for row in dataset] == [rows[0]["input_ids"], rows[1]["input_ids"][:6]]
    assert ledger.to_dict() == {
        "name": "train",
        "rows": 2,
        "tokens": 11,
        "scored_tokens": 9,
        "tokens_cut": 3,
        "rows_cut": 1,
        "rows_dropped": {"no tokens": 1, "no scored token": 1, "no scored token left after truncation": 1},
        "tokens_dropped": 15,
        "longest_row": 6,
        "batch_size": 2,
        "padding_avoided": pytest.approx(1 - 11 / 12),
        "packed_rows": None,
        "packing_fill": None,
        "read_as": "input_ids (input_ids, labels)",
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(1, 12),
    st.integers(0, 3),
    st.sampled_from([None, *STRATEGIES]),
    st.sampled_from(["keep_start", "keep_end"]),
    st.booleans(),
)
def test_every_token_is_kept_cut_or_dropped_once(tokenizer, lengths, max_length, unscored, strategy, mode, shuffle):
    rows = tokenized([*lengths, 5], unscored)
    options = {"max_length": max_length, "truncation_mode": mode, "shuffle": shuffle}
    if strategy is not None:
        options["packing_strategy"] = strategy
    try:
        dataset, ledger = run(rows, tokenizer, packing=strategy is not None, **options)
    except ValueError as error:
        assert "nothing to train on" in str(error)  # noqa: PT017
        return
    total = sum(len(row["input_ids"]) for row in rows)
    assert ledger.tokens + ledger.tokens_cut + ledger.tokens_dropped == total
    parts = [(row["input_ids"], row["labels"]) for row in dataset] if strategy is None else segments(dataset)
    tokens = [token for ids, _ in parts for token in ids]
    assert len(tokens) == len(set(tokens)) == ledger.tokens
    assert ledger.scored_tokens == sum(label != -100 for _, labels in parts for label in labels[1:])
    assert all(len(row["input_ids"]) <= max_length for row in dataset)
    for ids, labels in parts:
        assert all(label in (token, -100) for token, label in zip(ids, labels, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_packed_rows_are_the_bins_that_pack_plans(tokenizer, strategy):
    lengths = [3, 9, 5, 17, 2, 2, 8, 1, 30, 7]
    rows = tokenized(lengths)
    dataset, ledger = run(rows, tokenizer, packing=True, max_length=8, packing_strategy=strategy)
    # A row of one token has nothing to score, and a row too long for a bin is cut before it is planned.
    kept = [row["input_ids"] for row in rows if len(row["input_ids"]) > 1]
    if strategy == "bfd":
        kept = [ids[:8] for ids in kept]
    plan = pack(np.array([len(ids) for ids in kept]), 8, strategy)
    pieces = [kept[r][a:b] for r, a, b in zip(plan.row, plan.start, plan.stop, strict=True)]
    bins = [
        list(chain.from_iterable(pieces[first:last]))
        for first, last in zip(plan.bin_offsets[:-1], plan.bin_offsets[1:], strict=True)
    ]
    assert [row["input_ids"] for row in dataset] == [ids for ids in bins if len(ids) > 1]
    assert ledger.packed_rows == len(dataset)
    assert ledger.packing_fill == pytest.approx(ledger.tokens / (8 * len(dataset)))


def test_the_first_label_of_a_segment_is_never_scored(tokenizer):
    dataset, _ = run(tokenized([3, 9, 5]), tokenizer, packing=True, max_length=8, packing_strategy="wrapped")
    assert all(labels[0] == -100 and labels[1:] == ids[1:] for ids, labels in segments(dataset))


def test_a_packed_row_without_a_scored_token_is_dropped_and_counted(tokenizer):
    rows = tokenized([12], unscored=8)
    dataset, ledger = run(rows, tokenizer, packing=True, max_length=4, packing_strategy="bfd_split")
    assert [row["input_ids"] for row in dataset] == [rows[0]["input_ids"][8:]]
    assert ledger.rows_dropped == {"no scored token in a packed row": 2}
    assert (ledger.tokens, ledger.tokens_dropped, ledger.scored_tokens) == (4, 8, 3)


def test_packing_is_the_same_each_time_and_shuffling_follows_the_seed(tokenizer):
    rows = tokenized([3, 9, 5, 7, 2, 2, 8, 4])

    def packed(seed):
        options = {"max_length": 10, "packing_strategy": "wrapped", "shuffle": True, "seed": seed}
        return run(rows, tokenizer, packing=True, **options)[0][:]

    assert packed(1) == packed(1)
    assert packed(1) != packed(2)


def test_prompts_keep_their_end_and_completions_their_start(tokenizer):
    row = {"prompt": "the answer is ", "completion": "42 clips in May"}
    whole, _ = run([row], tokenizer)
    cut, ledger = run([row], tokenizer, max_prompt_length=2, max_completion_length=3)
    ids, prompt = whole[0]["input_ids"], whole[0]["labels"].count(-100)
    assert cut[0]["input_ids"] == ids[prompt - 2 : prompt + 3]
    assert cut[0]["labels"] == [-100] * 2 + ids[prompt : prompt + 3]
    assert ledger.tokens_cut == len(ids) - 5


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([{"text": "a"}, {"text": None}], {}, "d.jsonl, row 1 (the first is 0): 'text' is null"),
        (
            [{"input_ids": [3]}, {"input_ids": [3, 999]}],
            {"vocab_size": 400},
            "row 1 (the first is 0): input_ids holds 999",
        ),
        ([{"input_ids": [3, -1]}], {}, "row 0 (the first is 0): input_ids holds -1: a token id is 0 or above"),
        ([{"input_ids": [3, 4], "labels": [-100, -7]}], {}, "labels holds -7"),
        ([{"question": "a"}], {}, "d.jsonl has the columns 'question'"),
        ([{"text": "a"}], {"assistant_only_loss": True}, "assistant_only_loss=True needs conversations"),
        ([{"text": "a"}], {"completion_only_loss": True}, "completion_only_loss=True needs 'prompt' and 'completion'"),
        ([{"text": "a"}], {"max_prompt_length": 3}, "max_prompt_length and max_completion_length need 'prompt'"),
        ([{"text": "a"}], {"eos_token": "<|none|>"}, "eos_token '<|none|>' is not in the tokenizer's vocabulary"),
        ([{"input_ids": [1, 2], "seq_lengths": [1, 1]}], {}, "d.jsonl is packed already"),
        (
            [{"prompt": "many words " * 9, "completion": "b"}],
            {"max_length": 4},
            "nothing to train on: every row was dropped (no scored token left after truncation: 1). Raise max_length",
        ),
        (
            [{"input_ids": [1, 2], "labels": [-100, -100]}],
            {},
            "every row was dropped (no scored token: 1). Look at the labels or masks",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(tokenizer, rows, options, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        run(rows, tokenizer, source="d.jsonl", **options)


def test_an_empty_dataset_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the eval dataset has no rows"):
        run(Dataset.from_dict({"text": []}), tokenizer, name="eval")


def test_packing_without_a_capacity_is_refused(tokenizer):
    with pytest.raises(ValueError, match="packing needs max_length"):
        run(tokenized([3]), tokenizer, packing=True, max_length=None)


def test_a_dataset_with_a_transform_is_refused(tokenizer):
    dataset = Dataset.from_list(tokenized([3])).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match="the train dataset has a transform"):
        run(dataset, tokenizer)


def test_a_token_of_more_than_63_bits_is_refused_by_its_row(tokenizer):
    rows = Dataset(pa.table({"input_ids": pa.array([[1, 2], [1, 2**63]], pa.list_(pa.uint64()))}))
    with pytest.raises(ValueError, match=r"row 1 .*: 'input_ids' has a number of more than 63 bits"):
        run(rows, tokenizer)


def test_texts_need_an_end_token(tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"the tokenizer has no end token.*\. Set eos_token"):
        run([{"text": "a"}], tokenizer)
    dataset, _ = run([{"text": "a"}], tokenizer, eos_token="<|endoftext|>")
    assert dataset[0]["input_ids"][-1] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token is None


def test_rows_of_two_kinds_are_refused(tokenizer):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    made = {0: "text", 1: talk}
    with pytest.raises(ValueError, match=r"row 1 .* this is a conversation, and the dataset's first row a text"):
        run([{"n": 0}, {"n": 1}], tokenizer, formatting_func=lambda row: made[row["n"]])


def test_text_that_is_not_utf8_is_refused(tokenizer, tmp_path):
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="holds text that is not UTF-8"):
        run(load_rows(tmp_path / "latin.jsonl"), tokenizer)


def test_prompts_that_merge_with_completions_are_counted(tokenizer, caplog):
    row = {"prompt": "Natalia sold cl", "completion": "ips in May"}
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        run([row, {"prompt": "a ", "completion": "b"}], tokenizer, source="d.jsonl")
        assert "d.jsonl: in 1 of 2 rows the prompt's last tokens merge" in caplog.text


@pytest.mark.parametrize("ends", [True, False])
def test_marks_that_leave_the_end_of_a_turn_out_are_warned_of(ends, tokenizer, caplog):
    tokenizer.chat_template = (
        MARKED_CHATML
        if ends
        else MARKED_CHATML.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    )
    said = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is"}]
    run([{"messages": said}], tokenizer, assistant_only_loss=True)
    assert ("leave out the token that ends the assistant's turn" in caplog.text) != ends


# --- cache, processes and streams ----------------------------------------------------------------------------


def counted(monkeypatch):
    """The sizes of the batches that are encoded from now on."""
    from lowtide.data.encode.rows import RowEncoder

    sizes, call = [], RowEncoder.__call__

    def spy(self, batch, numbers):
        sizes.append(len(numbers))
        return call(self, batch, numbers)

    monkeypatch.setattr(RowEncoder, "__call__", spy)
    return sizes


def test_a_second_start_reuses_the_cache_and_has_the_same_ledger(tokenizer, monkeypatch):
    sizes = counted(monkeypatch)
    rows = [{"text": f"clip {n}"} for n in range(5)] + [{"text": ""}]
    first, first_ledger = run(rows, tokenizer)
    tokenizer("a call that leaves its mark", truncation=True, max_length=3, padding="max_length")
    second, second_ledger = run(rows, tokenizer)
    assert sizes == [6]
    assert second[:] == first[:]
    assert second_ledger == first_ledger
    assert first_ledger.rows_dropped == {"no scored token": 1}


def test_options_that_change_nothing_reuse_the_cache(tokenizer, monkeypatch):
    sizes = counted(monkeypatch)
    rows = tokenized([3, 4, 5])
    for options in ({}, {"source": "else"}, {"shuffle": True}, {"seed": 7}, {"packing": True, "max_length": 1024}):
        run(rows, tokenizer, **options)
    assert sizes == [3]


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 9},
        {"truncation_mode": "keep_end"},
        {"max_prompt_length": 2},
        {"completion_only_loss": False},
        {"eos_token": "<|endoftext|>"},
        {"vocab_size": 500},
        {"formatting_func": lambda row: "one"},
        {"fingerprint": "more"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_changes_the_numbers_misses_the_cache(tokenizer, monkeypatch, options):
    sizes = counted(monkeypatch)
    rows = [{"prompt": "How many?", "completion": " 72 clips in May"}]
    run(rows, tokenizer)
    run(rows, tokenizer, **options)
    assert sizes == [1, 1]


def test_another_tokenizer_template_or_row_misses_the_cache(tokenizer, marked_tokenizer, monkeypatch):
    sizes = counted(monkeypatch)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": talk}]
    run(rows, tokenizer)
    run(rows, tokenizer, chat_template=tokenizer.chat_template + " ")
    run([*rows, *rows], tokenizer)
    tokenizer.chat_template += "\n"
    run(rows, tokenizer)
    tokenizer.add_tokens(["clips"])
    run(rows, tokenizer)
    assert sizes == [1, 1, 2, 1, 1]


def test_a_file_that_was_edited_is_prepared_anew(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    for text in ("April", "Mayor"):
        path.write_text(json.dumps({"text": text}) + "\n")
        dataset, _ = run(load_rows(path), tokenizer)
        assert tokenizer.decode(dataset[0]["input_ids"], skip_special_tokens=True) == text


def test_tokenized_rows_say_that_they_are_not_formatted(tokenizer, caplog):
    run(tokenized([3]), tokenizer, formatting_func=lambda row: "a", source="d.jsonl")
    assert "d.jsonl is tokenized already, so formatting_func is not called" in caplog.text


def test_without_caching_everything_is_done_again(tokenizer, monkeypatch):
    sizes = counted(monkeypatch)
    monkeypatch.setattr(datasets.fingerprint, "_CACHING_ENABLED", False)
    for _ in range(2):
        run(tokenized([3, 4]), tokenizer)
    assert sizes == [2, 2]


def test_packed_rows_are_cached_too(tokenizer, monkeypatch):
    rows, options = tokenized([3, 9, 5, 7]), {"packing": True, "max_length": 10, "batch_size": 2}
    first, first_ledger = run(rows, tokenizer, **options)
    monkeypatch.setattr("lowtide.data.prepare.write_packed", None)
    second, second_ledger = run(rows, tokenizer, **options)
    assert second[:] == first[:]
    assert second_ledger == first_ledger
    with pytest.raises(TypeError):
        run(rows, tokenizer, packing=True, max_length=10, packing_strategy="wrapped")


def test_the_prepared_rows_lie_in_a_file(tokenizer, datasets_cache):
    for packing in (False, True):
        dataset, _ = run(tokenized([3, 4]), tokenizer, packing=packing)
        assert [Path(file["filename"]).parent for file in dataset.cache_files] == [datasets_cache / "lowtide"]


@pytest.mark.slow
def test_another_process_finds_the_cache(tokenizer, tmp_path, datasets_cache, monkeypatch):
    (tmp_path / "formatting.py").write_text("def spoken(row):\n    return row['q'] + '!'\n")
    monkeypatch.syspath_prepend(tmp_path)
    from formatting import spoken

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    here, _ = run([{"q": "a"}], tokenizer, formatting_func=spoken)
    code = """if True:
        import sys
        from datasets import Dataset
        from formatting import spoken
        from transformers import AutoTokenizer
        from lowtide.data.prepare import PrepareOptions, prepare
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        options = PrepareOptions(formatting_func=spoken, vocab_size=100_000)
        dataset, _ = prepare(Dataset.from_list([{"q": "a"}]), tokenizer, options, batch_size=1, packing=False)
        print(dataset.cache_files[0]["filename"])
    """
    environment = {"HF_DATASETS_CACHE": str(datasets_cache), "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "1"}
    there = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tokenizer")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here.cache_files[0]["filename"]


def test_a_function_is_known_by_its_code_wherever_it_is_defined(tmp_path, monkeypatch):
    module = tmp_path / "styles.py"
    module.write_text("def plain(row):\n    return row['q']\n")
    monkeypatch.syspath_prepend(tmp_path)
    from styles import plain

    fingerprints = [function_fingerprint(plain), function_fingerprint(plain)]
    module.write_text("def plain(row):\n    return row['q'] + '!'\n")
    fingerprints.append(function_fingerprint(plain))
    fingerprints += [function_fingerprint(lambda row, end=end: row["q"] + end) for end in ("a", "b")]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 4


def test_processes_prepare_the_same_rows_and_name_the_same_row(tokenizer):
    rows = [{"text": f"clip {n} in May"} for n in range(50)]
    alone, alone_ledger = run(rows, tokenizer)
    together, together_ledger = run(rows, tokenizer, num_proc=2, fingerprint="anew")
    assert together[:] == alone[:]
    assert together_ledger == alone_ledger
    rows[40]["text"] = None
    with pytest.raises(ValueError, match="row 40 "):
        run(rows, tokenizer, num_proc=2)


@pytest.mark.parametrize("options", [{}, {"max_length": 5}, {"max_length": 5, "truncation_mode": "keep_end"}])
def test_a_stream_gives_the_rows_of_the_dataset(tokenizer, options):
    rows = [{"text": "clip " * n} for n in range(12)]
    dataset, _ = run(rows, tokenizer, **options)
    stream, ledger = run(Dataset.from_list(rows).to_iterable_dataset(), tokenizer, **options)
    assert isinstance(stream, IterableDataset)
    assert ledger is None
    assert list(stream) == list(dataset)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stream_is_packed_by_buffers(tokenizer, strategy, monkeypatch):
    monkeypatch.setattr("lowtide.data.sources.stream.STREAM_BUFFER", 4)
    rows = tokenized([3, 9, 5, 7, 2, 2, 8, 4])
    options = {"packing": True, "max_length": 10, "packing_strategy": strategy}
    stream, _ = run(Dataset.from_list(rows).to_iterable_dataset(), tokenizer, **options)
    halves = [run(rows[:4], tokenizer, **options)[0], run(rows[4:], tokenizer, **options)[0]]
    assert list(stream) == [row for half in halves for row in half]


def test_a_stream_without_known_columns_is_read(tokenizer):
    stream = IterableDataset.from_generator(lambda: iter([{"text": "a b"}, {"text": "c"}]))
    assert len(list(run(stream, tokenizer)[0])) == 2
    with pytest.raises(ValueError, match=r"row 1 .*'text' is the number 3\.5"):
        list(run(IterableDataset.from_generator(lambda: iter([{"text": "a"}, {"text": 3.5}])), tokenizer)[0])


def test_a_formatted_dataset_is_read_as_plain_values(tokenizer):
    dataset = Dataset.from_list(tokenized([3, 4])).with_format("numpy")
    assert run(dataset, tokenizer)[0][:] == run(tokenized([3, 4]), tokenizer)[0][:]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"no {os.path.relpath(GSM8K)}")
def test_gsm8k_from_its_file(marked_tokenizer, tmp_path):
    with GSM8K.open(encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(1000), strict=False)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(lines), encoding="utf-8")
    rows = load_rows(tmp_path / "gsm8k.jsonl")
    dataset, ledger = run(rows, marked_tokenizer, assistant_only_loss=True, packing=True, max_length=4096)
    talks = [json.loads(line)["messages"] for line in lines]
    # What is scored, as text, is what the assistants said.
    said = sorted(talk[-1]["content"] + "<|im_end|>\n" for talk in talks)
    scored = marked_tokenizer.batch_decode(
        [[label for label in labels if label != -100] for _, labels in segments(dataset)]
    )
    assert sorted(scored) == said
    assert ledger.rows == len(talks)
    assert ledger.packing_fill > 0.98


@pytest.mark.parametrize("packing", [False, True])
def test_no_process_beside_this_one_is_as_none_are_asked_for(tokenizer, packing, monkeypatch):
    asked = []
    plain = Dataset.map
    monkeypatch.setattr(
        Dataset, "map", lambda *args, **more: asked.append(more.get("num_proc")) or plain(*args, **more)
    )
    rows = [{"text": "a b c"}, {"text": "d e"}]
    found, _ = run(rows, tokenizer, packing=packing, max_length=16, num_proc=0)
    expected, _ = run(rows, tokenizer, packing=packing, max_length=16)
    assert list(found) == list(expected)
    assert set(asked) == {None}
