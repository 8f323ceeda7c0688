"""Prepared preferences: the token columns that TRL's trainers prepare from the same rows.

Their `_prepare_dataset` is called as it is, on an object that has what it reads of a trainer.
"""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset

from lowtide.data.preference import PreferenceOptions, prepare_pairs, prepare_unpaired
from tests.support.marks import slow_but

trl = pytest.importorskip("trl", reason="the comparison needs the bench extra (trl)")

pytestmark = pytest.mark.usefixtures("datasets_cache")

GSM8K = Path(__file__).parents[3] / "shared" / "data"
EOS = "<|im_end|>"
TOOLED = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if brief %}Briefly: {% endif %}{% endif %}"
)
TOOLS = [{"name": "add"}]


def message(role, content):
    return {"role": role, "content": content}


def pair(*prompt, chosen, rejected):
    return {
        "prompt": list(prompt),
        "chosen": [message("assistant", chosen)],
        "rejected": [message("assistant", rejected)],
    }


TALKS = [
    pair(message("user", "How many clips?"), chosen="72 clips in May.", rejected="She sold 7 clips, in May " * 4),
    pair(
        message("system", "Be brief."),
        message("user", "Half of 48?"),
        message("assistant", "24"),
        message("user", "And half of that? " * 5),
        chosen="12, says the ledger " * 4,
        rejected="12",
    ),
    pair(message("user", "long " * 30), chosen="short", rejected="no"),
]
TEXTS = [
    {"prompt": "How many? ", "chosen": "72 clips.", "rejected": "7 clips." + EOS},
    {"prompt": "Ends inside a wo", "chosen": "rd, Natalia", "rejected": " xyz"},
    {"prompt": "", "chosen": "no prompt", "rejected": "at all"},
    {"prompt": "a" * 60, "chosen": " b" + EOS, "rejected": " friends"},
]
IMPLICIT_TALKS = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in TALKS]
PAIRS = {
    "texts": TEXTS,
    "conversations": TALKS,
    "implicit conversations": IMPLICIT_TALKS,
    "tools": [row | {"tools": json.dumps(TOOLS)} for row in TALKS],
    "keywords of the template": [row | {"chat_template_kwargs": {"brief": True}} for row in TALKS],
    "keywords by row": [row | {"chat_template_kwargs": {"brief": n % 2 == 0}} for n, row in enumerate(TALKS * 2)],
}
IDS = [([5, 6, 7, 8], [5, 6, 9]), ([7], [8, 9]), ([5] * 99, [6]), ([5, 6], [5, 6, 7])]
TOKEN_PAIRS = {
    pattern: [{pattern.format("chosen"): one, pattern.format("rejected"): other} for one, other in IDS]
    for pattern in ("{}_ids", "{}_input_ids")
}
LABELLED = {
    "texts": [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(TEXTS)],
    "conversations": [{"prompt": r["prompt"], "completion": r["rejected"], "label": r is TALKS[0]} for r in TALKS * 2],
    "pairs of texts": TEXTS,
    "pairs of conversations": TALKS,
    "implicit pairs": IMPLICIT_TALKS,
    "many pairs": TEXTS * 260,
}


def by_trl(trainer_class, rows, tokenizer, max_length, **more):
    trainer = SimpleNamespace(_tokenizer=tokenizer, **more)
    args = SimpleNamespace(
        dataset_num_proc=None, max_length=max_length, truncation_mode="keep_start", per_device_train_batch_size=3
    )
    return list(trainer_class._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, "train"))


def cut(prompt, completion, max_length):
    """What TRL's collators leave of a completion."""
    return completion if max_length is None else completion[: max(max_length - len(prompt), 0)]


@pytest.fixture
def template_tokenizer(tokenizer):
    tokenizer.chat_template = TOOLED
    return tokenizer


def assert_same_pairs(rows, tokenizer, max_length):
    expected = [
        {"prompt_ids": row["prompt_ids"]}
        | {name: cut(row["prompt_ids"], row[name], max_length) for name in ("chosen_ids", "rejected_ids")}
        for row in by_trl(trl.DPOTrainer, rows, tokenizer, max_length)
    ]
    dataset, _ = prepare_pairs(
        Dataset.from_list(rows), tokenizer, PreferenceOptions(max_length=max_length, turns="whole"), batch_size=2
    )
    assert list(dataset) == expected


@pytest.mark.parametrize("max_length", [None, 64])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_those_of_dpo_trainer(name, max_length, template_tokenizer):
    assert_same_pairs(PAIRS[name], template_tokenizer, max_length)


@pytest.mark.filterwarnings("ignore:Detected legacy dataset columns:FutureWarning")
@pytest.mark.parametrize("name", [*PAIRS, *TOKEN_PAIRS])
def test_whole_pairs_are_those_of_reward_trainer(name, template_tokenizer):
    rows = (PAIRS | TOKEN_PAIRS)[name]
    expected = by_trl(trl.RewardTrainer, rows, template_tokenizer, 90)
    dataset, ledger = prepare_pairs(
        Dataset.from_list(rows),
        template_tokenizer,
        PreferenceOptions(max_length=90, turns="whole"),
        batch_size=2,
        whole=True,
    )
    prepared = [{name: row["prompt_ids"] + row[name] for name in ("chosen_ids", "rejected_ids")} for row in dataset]
    assert prepared == [{name: row[name] for name in ("chosen_ids", "rejected_ids")} for row in expected]
    assert sum(ledger.rows_dropped.values()) == len(rows) - len(expected)
    for row in dataset:
        assert row["chosen_ids"]
        assert row["rejected_ids"]
        alike = row["chosen_ids"][0] == row["rejected_ids"][0]
        assert not alike or 1 in (len(row["chosen_ids"]), len(row["rejected_ids"]))


def warnings_of(call):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [each for each in seen if each.category is FutureWarning and "chosen_input_ids" in str(each.message)]


@pytest.mark.parametrize("name", ["texts", *TOKEN_PAIRS])
def test_older_names_of_token_columns_are_warned_of_as_by_reward_trainer(name, template_tokenizer):
    rows, options = (PAIRS | TOKEN_PAIRS)[name], PreferenceOptions(max_length=90, turns="whole")
    by_theirs = warnings_of(lambda: by_trl(trl.RewardTrainer, rows, template_tokenizer, 90))
    ours = warnings_of(
        lambda: prepare_pairs(Dataset.from_list(rows), template_tokenizer, options, batch_size=2, whole=True)
    )
    assert len(by_theirs) == len(ours) == (name == "{}_input_ids")
    assert all("'chosen_ids' and 'rejected_ids'" in str(each.message) for each in ours)


@pytest.mark.slow
@pytest.mark.parametrize("max_length", slow_but([64], [None, 64]))
@pytest.mark.parametrize("name", LABELLED)
def test_labelled_completions_are_those_of_kto_trainer(name, max_length, template_tokenizer):
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    expected = [
        {
            "prompt_ids": row["prompt_ids"],
            "completion_ids": cut(row["prompt_ids"], row["completion_ids"], max_length),
            "label": row["label"],
            "kl_completion_ids": cut(row["prompt_ids"], row["KL_completion_ids"], max_length),
        }
        for row in by_trl(trl.KTOTrainer, LABELLED[name], template_tokenizer, max_length, calculate_KL=True, **weights)
    ]
    if len(expected) % 3 == 1:  # a block of its own: it gets its own completion from TRL, the one before it from us
        last, before = expected[-1], expected[-2]
        if max_length is None:
            last["kl_completion_ids"] = before["completion_ids"]
    dataset, _ = prepare_unpaired(
        Dataset.from_list(LABELLED[name]),
        template_tokenizer,
        PreferenceOptions(max_length=max_length, turns="whole"),
        batch_size=2,
        kl_block=3,
    )
    prepared = list(dataset)
    if len(expected) % 3 == 1 and max_length is not None:
        del prepared[-1]["kl_completion_ids"], expected[-1]["kl_completion_ids"]
    assert prepared == expected


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the real data is not here")
def test_real_pairs_are_those_of_dpo_trainer(tokenizer):
    with open(GSM8K / "gsm8k_solutions.preference.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(60), strict=False)]
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert_same_pairs(rows, tokenizer, 512)
    assert_same_pairs(
        [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows], tokenizer, 512
    )


def test_the_implicit_prompt_of_texts_ends_on_a_token(tokenizer):
    """TRL's ends where the characters differ, here inside the word that both sides tokenize as one."""
    rows = [{"chosen": "She sold clips in April", "rejected": "She sold clips in May"}]
    (by_them,) = by_trl(trl.DPOTrainer, rows, tokenizer, None)
    dataset, _ = prepare_pairs(Dataset.from_list(rows), tokenizer, PreferenceOptions(), batch_size=1)
    (here,) = dataset
    for side in ("chosen", "rejected"):
        ids = tokenizer(rows[0][side] + EOS)["input_ids"]
        assert here["prompt_ids"] + here[f"{side}_ids"] == ids
        assert by_them["prompt_ids"] + by_them[f"{side}_ids"] == ids
    assert here["chosen_ids"][0] != here["rejected_ids"][0]
    assert len(here["prompt_ids"]) >= len(by_them["prompt_ids"])
