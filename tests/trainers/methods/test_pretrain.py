"""Pretraining: what a new model is made from, documents that do not see each other, and steps that tokens make."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, get_wsd_schedule

from lowtide import MaskedLMConfig, MaskedLMTrainer, PretrainConfig, PretrainTrainer
from lowtide.cli.main import main
from lowtide.data.byte_pairs import END, learn_tokenizer
from lowtide.data.sources.load import load_rows

WORDS = [*("the", "cat", "dog", "sat", "on", "a", "mat", "and"), *("ran", "to", "see", "one", "two", "three", "red")]
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "initializer_range": 0.2},
}
NEW = {"model_type": "llama", "config_overrides": SIZES, "train_tokenizer": 300}


def documents(count: int = 40, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) + "." for _ in range(count)]


def rows(count: int = 40, seed: int = 0) -> Dataset:
    return Dataset.from_dict({"text": documents(count, seed)})


def trainer(folder: Path, train: Any = None, arguments: dict | None = None, **options: Any) -> Any:
    settings = {
        **{"output_dir": str(folder), "max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 32},
        **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        **{"rehearsal": False, "per_device_train_batch_size": 4},
        **({} if (arguments or {}).get("model") is not None else NEW),
        **options,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    given = {"model": None, "train_dataset": rows() if train is None else train, **(arguments or {})}
    return PretrainTrainer(args=PretrainConfig(**settings), **given)


# -- documents ---------------------------------------------------------------------------------------------------------


def test_documents_are_packed_whole_each_with_its_end(tmp_path: Path):
    made = trainer(tmp_path, shuffle_dataset=False)
    tokens = [token for row in made.train_dataset for token in row["input_ids"]]
    expected = [token for each in documents() for token in made.tokenizer(each + END)["input_ids"]]
    assert sorted(tokens) == sorted(expected)
    assert tokens.count(made.tokenizer.eos_token_id) == 40
    lengths = [len(row["input_ids"]) for row in made.train_dataset]
    assert set(lengths[:-1]) == {32}  # end to end, so that all rows but the last are full


def test_the_loss_is_that_of_documents_that_do_not_see_each_other(tmp_path: Path):
    made = trainer(tmp_path, max_steps=1, shuffle_dataset=False)
    batch = next(iter(made.get_train_dataloader()))
    pieces = [batch.token_ids[part.start : part.stop] for part in batch.segments]
    assert len(pieces) > batch.rows  # several documents share rows
    with torch.no_grad():
        logits = [made.model(input_ids=piece[None]).logits[0, :-1] for piece in pieces]
    targets = torch.cat([piece[1:] for piece in pieces])
    expected = torch.nn.functional.cross_entropy(torch.cat(logits), targets)
    assert made.runner.gradients(batch).item() == pytest.approx(expected.item(), rel=1e-5)


def test_texts_are_taken_apart_at_a_separator(tmp_path: Path):
    joined = Dataset.from_dict({"text": ["\n\n".join(documents()[:20]), "\n\n".join([*documents()[20:], "", " "])]})
    apart, plain = (
        trainer(tmp_path / name, each, document_separator=separator, shuffle_dataset=False)
        for name, each, separator in (("apart", joined, "\n\n"), ("plain", rows(), None))
    )
    assert apart.ledger.rows == 40
    assert [row["seq_lengths"] for row in apart.train_dataset] == [row["seq_lengths"] for row in plain.train_dataset]


def test_other_columns_are_not_read(tmp_path: Path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    both = rows().add_column("messages", [talk] * 40)
    assert trainer(tmp_path, both).ledger.tokens == trainer(tmp_path).ledger.tokens


def test_a_stream_is_trained_on(tmp_path: Path):
    stream = IterableDataset.from_generator(lambda: ({"text": each} for each in documents(80)))
    made = trainer(tmp_path, stream, document_separator=".")
    made.train()
    assert made.state.global_step == 3


def test_a_column_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has the columns 'body', and none of texts: name it by dataset_text_field"):
        trainer(tmp_path, Dataset.from_dict({"body": ["a"]}))


# -- where it begins ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_learned_that_gives_texts_back():
    texts = documents()
    made = learn_tokenizer(texts, 300)
    assert len(made) == 300
    for text in (texts[0], "Ünïcode \n and 日本語, not seen before"):
        assert made.decode(made(text)["input_ids"]) == text
    plain = learn_tokenizer(["x"], 300)
    assert len(made(texts[0])["input_ids"]) < len(plain(texts[0])["input_ids"]) / 2
    assert made.eos_token == END


def test_a_new_model_has_the_tokenizers_vocabulary(tmp_path: Path):
    made = trainer(tmp_path)
    config = made.model.config
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", len(made.tokenizer), 32)
    assert config.eos_token_id == made.tokenizer.eos_token_id
    made.train()
    made.save_model()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(saved.lm_head.weight, made.model.lm_head.weight)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 300


def test_the_seed_decides_the_weights(tmp_path: Path):
    one, same, other = (trainer(tmp_path / str(n), seed=seed).model.lm_head.weight for n, seed in enumerate((1, 1, 2)))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_config_file_is_taken_with_another_tokenizer(tmp_path: Path):
    learn_tokenizer(documents(), 280).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "sizes.json").write_text(LlamaConfig(**SIZES, vocab_size=7).to_json_string())
    options = {"model_type": None, "train_tokenizer": None, "config_name": str(tmp_path / "sizes.json")}
    options |= {"config_overrides": {"num_hidden_layers": 1}, "tokenizer_name": str(tmp_path / "tokenizer")}
    config = trainer(tmp_path / "run", **options).model.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (280, 32, 1)


@pytest.mark.parametrize("model_type", ["modernbert", "roberta"])
def test_an_encoder_begins_too(model_type: str, tmp_path: Path):
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "initializer_range")}
    options = {"config_overrides": sizes, "train_tokenizer": 300, "max_length": 512, "max_steps": 2, "logging_steps": 1}

    def begun(folder: str, kind: str) -> Any:
        of_run = {"use_cpu": True, "bf16": False, "report_to": "none", "model_type": kind, **options}
        return MaskedLMTrainer(model=None, args=MaskedLMConfig(str(tmp_path / folder), **of_run), train_dataset=rows())

    made = begun("run", model_type)
    assert made.model.config.vocab_size == len(made.tokenizer) == 300
    first = made.train_dataset[0]["input_ids"]
    assert made.tokenizer.convert_ids_to_tokens([first[0], first[-1]]) == ["<|start|>", END]
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(math.log(300), rel=0.1)
    with pytest.raises(ValueError, match=r"model type llama does not begin .*: `lowtide pretrain` does"):
        begun("other", "llama")


def test_what_was_begun_is_taken_again_unless_it_is_another(tmp_path: Path):
    folder = tmp_path / "beginning"
    trainer(tmp_path)
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    trainer(tmp_path)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before
    assert len(trainer(tmp_path, train_tokenizer=290).tokenizer) == 290
    assert json.loads((folder / "beginning.json").read_text())["train_tokenizer"] == 290
    assert not [each for each in tmp_path.iterdir() if each.name.startswith("tmp")]


@pytest.mark.slow
def test_pretraining_goes_on_from_a_model(tmp_path: Path):
    made = trainer(tmp_path / "first", arguments={"eval_dataset": rows(10, seed=1)}, max_steps=10)
    made.train()
    made.save_model(str(tmp_path / "model"))
    loss = made.evaluate()["eval_loss"]
    given = {"model": str(tmp_path / "model"), "eval_dataset": rows(10, seed=1)}
    more = trainer(tmp_path / "more", arguments=given)
    assert more.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_an_evaluation_says_how_perplexed_it_is(tmp_path: Path):
    found = trainer(tmp_path, arguments={"eval_dataset": rows(10, seed=1)}).evaluate()
    assert found["eval_perplexity"] == pytest.approx(math.exp(found["eval_loss"]))


@pytest.mark.slow
def test_a_run_goes_on_bit_by_bit(tmp_path: Path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    again = trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for (name, mine), other in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


# -- steps -------------------------------------------------------------------------------------------------------------


def config(folder: Path, **options: Any) -> Any:
    return PretrainConfig(str(folder), use_cpu=True, bf16=False, report_to="none", max_length=32, **options)


def test_tokens_make_steps(tmp_path: Path):
    made = config(tmp_path, tokens_per_step=32 * 12, max_tokens=10_000)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (4, 3)
    assert made.max_steps == math.ceil(10_000 / (32 * 12))
    made = config(tmp_path, tokens_per_step=32 * 12, per_device_train_batch_size=2)
    assert (made.gradient_accumulation_steps, made.max_steps) == (6, -1)
    assert config(tmp_path, max_tokens=512, per_device_train_batch_size=4).max_steps == 4


def test_a_step_sees_its_tokens(tmp_path: Path):
    options = {"tokens_per_step": 32 * 6, "max_tokens": 32 * 6 * 2, "max_steps": None}
    made = trainer(tmp_path, per_device_train_batch_size=None, **options)
    made.train()
    assert made.state.global_step == 2
    logged = [entry["num_tokens"] for entry in made.state.log_history if "num_tokens" in entry]
    assert logged == [32 * 6, 32 * 12]


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.25, 5])
def test_the_rate_rises_stays_and_falls(decay: float, tmp_path: Path):
    made = trainer(tmp_path, max_steps=20, warmup_steps=4, decay_steps=decay, learning_rate=1e-2)
    made.train()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    expected, schedule = [], get_wsd_schedule(optimizer, num_warmup_steps=4, num_decay_steps=5, num_training_steps=20)
    for _ in range(20):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = [entry["learning_rate"] for entry in made.state.log_history if "learning_rate" in entry]
    assert found == pytest.approx(expected)
    assert made.args.lr_scheduler_kwargs is None


def test_phases_that_are_longer_than_the_run_are_refused(tmp_path: Path):
    made = trainer(tmp_path, max_steps=4, warmup_steps=3, decay_steps=2)
    with pytest.raises(ValueError, match="decay_steps=2 and warmup_steps=3 are 2 and 3 of the run's 4 steps"):
        made.train()


BAD: dict[str, tuple[dict, str]] = {
    "two configs": ({"config_name": "a", "model_type": "llama"}, "both say which model begins: keep one"),
    "two tokenizers": ({**NEW, "tokenizer_name": "a"}, "both say which tokenizer there is: keep one"),
    "no model": ({"train_tokenizer": 300}, "train_tokenizer=300 is of a model that begins with random weights"),
    "few tokens": ({**NEW, "train_tokenizer": 200}, "train_tokenizer=200 must be at least 260"),
    "no multiple": ({"tokens_per_step": 1000}, r"is no multiple of max_length x ranks = 32: take 992 or 1024"),
    "not divided": (
        {"tokens_per_step": 96, "per_device_train_batch_size": 2},
        "is 3 rows of 32 tokens on each rank, which per_device_train_batch_size=2 does not divide",
    ),
    "two numbers": ({"max_tokens": 2560, "max_steps": 3}, "max_tokens=2560 makes max_steps 10, and max_steps=3: keep"),
    "not packed": ({"max_tokens": 100, "packing": False}, "max_tokens=100 counts full rows, and packing=False"),
    "no separator": ({"document_separator": ""}, "separates nothing: leave it out"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_cannot_work_are_refused(case: str, tmp_path: Path):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


BAD_BEGINNINGS: dict[str, tuple[dict, str]] = {
    "encoder": (
        {"model_type": "modernbert", "config_overrides": None},
        "model type modernbert does not begin .*: `lowtide masked-lm` does",
    ),
    "neither": ({"model_type": "t5", "config_overrides": None}, "model type t5 does not begin .*: take another type"),
    "type": ({"model_type": "lama"}, "model_type='lama' is none that transformers knows; did you mean 'llama'"),
    "value": (
        {"config_overrides": {"hiden_size": 3}},
        "names 'hiden_size', which a config of model type llama does",
    ),
    "values that do not go together": (
        {"config_overrides": {**SIZES, "hidden_size": 33}},
        "config_overrides=.* makes no config of model type llama: .*not a multiple of the number of attention heads",
    ),
    "no number": ({"config_overrides": {"hidden_size": "big"}}, "makes no config of model type llama: .*expected int"),
    "vocabulary": ({"config_overrides": {"vocab_size": 9}}, "says vocab_size=9, and the tokenizer has 300 tokens"),
    "tokenizer": ({"train_tokenizer": None}, "needs a tokenizer: name one by tokenizer_name, learn one by train_tok"),
    "config": ({"model_type": None, "config_name": "nowhere/at-all.json"}, "has no config that can be read"),
}


@pytest.mark.parametrize("case", BAD_BEGINNINGS)
def test_beginnings_that_there_are_not_are_refused(case: str, tmp_path: Path):
    options, message = BAD_BEGINNINGS[case]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


def test_a_model_and_a_config_are_one_too_many(tmp_path: Path):
    with pytest.raises(ValueError, match="a model came with config_name or model_type"):
        trainer(tmp_path, arguments={"model": "anything"}, **NEW)
    with pytest.raises(ValueError, match="model must be a model's name or folder"):
        trainer(tmp_path, model_type=None, config_overrides=None, train_tokenizer=None)


# -- files and the command ---------------------------------------------------------------------------------------------


def test_text_files_are_documents(tmp_path: Path):
    for number, text in enumerate(documents(3)):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    assert load_rows(tmp_path)["text"][:] == documents(3)
    assert load_rows(tmp_path / "1.txt")["text"][:] == [documents(3)[1]]
    assert [row["text"] for row in load_rows(tmp_path, streaming=True)] == documents(3)


@pytest.mark.slow
def test_the_command_begins_with_a_config_and_text_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "texts.txt").write_text("\n".join(documents(60)), encoding="utf-8")
    (tmp_path / "held-out.txt").write_text("\n".join(documents(5, seed=1)), encoding="utf-8")
    sizes = ",".join(f"{name}={value}" for name, value in SIZES.items())
    words = [
        "--model_type",
        "llama",
        "--config_overrides",
        sizes,
        "--train_tokenizer",
        "300",
        "--document_separator",
        "\n",
    ]
    words += ["--dataset", str(tmp_path / "texts.txt"), "--eval_dataset", str(tmp_path / "held-out.txt")]
    words += ["--output_dir", str(tmp_path / "run"), "--tokens_per_step", "256", "--max_tokens", "1000"]
    words += ["--max_length", "64", "--use_cpu", "true", "--report_to", "none", "--save_strategy", "no"]
    assert main(["pretrain", "--traceback", *words]) == 0
    assert "eval_perplexity" in capsys.readouterr().out
    assert main(["pretrain", "--traceback", "--config", str(tmp_path / "run" / "run.yaml")]) == 0
    assert main(["estimate", "pretrain", *words, "--json"]) == 0
