"""The command lines of the pages do what they say: each that trains, plans or estimates is run on stand-ins.

Models, data and run files that a page names lie in a folder of the test under those names: tiny models, and a few rows
as the command's method reads them.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.cli.main import main
from lowtide.cli.recipes import recipes
from lowtide.demo.data import make_questions
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.demo.preferences import labelled_rows, pair_rows
from tests.support.models import classifying, masked_texts, pairs_of_texts, replaced_tokens, tagging, vision_models
from tests.support.models.classifiers import classifier, step_classifier
from tests.support.pages.pages import DOCS, PAGES, command_lines, write_my_module

QUESTIONS = make_questions(10, seed=0)[0][:16]
MODELS = (
    *("M", "T", "model", "my-model", "tiny/base", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"),
    *("meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct"),
)
"""Folders of models that the pages and the recipes name."""
DATA = ("D", "train.jsonl", "chats.jsonl", "pairs.jsonl", "rows.jsonl", "gsm8k.jsonl", "texts", "tiny/train.jsonl")
RUN_FILES = ("run.yaml", "chat.yaml", "plan.yaml", "demo-output/sft.yaml", "run/run.yaml")
SMALL = {
    **{"max_steps": 2, "use_cpu": "true", "disable_tqdm": "true", "per_device_train_batch_size": 8},
    **{"report_to": "none", "save_strategy": "no"},
}
ELSEWHERE = {  # by a word of the command, what runs it, or why nothing here can
    "check": "tests/cli/test_check.py",
    "merge": "tests/cli/test_merge.py",
    "chat": "tests/cli/after_training/test_chat_command.py",
    "export": "tests/cli/after_training/test_export.py",
    "evaluate": "tests/cli/after_training/test_evaluate.py, test_ragged_lm.py",
    "generate": "tests/cli/after_training/test_generate.py",
    "demo": "tests/demo",
    "gpus": "tests/cli/planning/test_gpus.py",
    "page": "tests/docs_site",
    "convert": "tests/cli/test_convert.py",
    "recipes": "tests/cli/test_recipes_command.py",
    "vllm-serve": "tests/with_vllm",
    "--use_vllm": "tests/with_vllm",
    "--teacher_model_server_url": "tests/trainers/methods/test_asked_teacher.py, with a server of its own",
    "--push_to_hub": "needs the hub",
    "--deepspeed": "tests/trainers/sharded/test_deepspeed.py",
    "--fsdp": "tests/trainers/sharded/test_fully_shard.py",
    "--devices": "tests/planner/sharding",
    "llama-8b-8-gpus.yaml": "needs 8 processes",
    "million-tokens.yaml": "needs 8 processes",
    "hidden_size=512,num_hidden_layers=8": "tests/trainers/methods/test_pretrain.py, with fewer weights",
    "--torch_compile": "tests/memory",
    "--use_liger_kernel": "needs a GPU",
    "--report_to": "tests/with_others",
    "--help": "tests/cli/test_options.py",
}


def _dialogues() -> list[dict[str, Any]]:
    return [{"messages": each.messages} for each in QUESTIONS]


def _prompts() -> list[dict[str, Any]]:
    return [{"prompt": each.messages[:1], "answer": f"#### {each.left + each.right}"} for each in QUESTIONS]


def _looked_at() -> list[dict[str, Any]]:
    """With images in files."""
    rows = vision_models.conversations(8)
    for number, row in enumerate(rows):
        for place, image in enumerate(row["images"]):
            image.save(f"{number}-{place}.png")
        row["images"] = [f"{number}-{place}.png" for place in range(len(row["images"]))]
    return rows


def _causal() -> list[Any]:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 1024
    return [model, tokenizer]


ROWS: dict[str, Callable[[], Iterable[Any]]] = {
    **dict.fromkeys(("sft", "gkd", "gold"), _dialogues),
    "vision": _looked_at,
    **dict.fromkeys(("dpo", "orpo", "cpo", "reward"), lambda: [row for each in QUESTIONS for row in pair_rows(each)]),
    "a2po": lambda: [{**row, "optimal_value": 0.5} for row in _prompts()],
    "prm": lambda: [
        {"prompt": row["prompt"][0]["content"], "completions": [row["answer"]], "labels": [True]} for row in _prompts()
    ],
    "tpo": lambda: [{**row, "reference": row["chosen"]} for each in QUESTIONS for row in pair_rows(each)],
    **dict.fromkeys(("kto", "bco"), lambda: [row for each in QUESTIONS for row in labelled_rows(each)]),
    **dict.fromkeys(("grpo", "gmpo", "rloo", "online-dpo", "ppo", "distillation", "iw-opd", "sdpo"), _prompts),
    "sdft": lambda: [{**row, "privileged_context": "Add the digits from the right."} for row in _prompts()],
    **dict.fromkeys(("masked-lm", "replaced-token-detection", "pretrain"), lambda: masked_texts.texts(64)),
    "seq2seq": lambda: pairs_of_texts.rows(16),
    "sequence-classification": lambda: classifying.dataset(16, kind="name"),
    "token-classification": lambda: tagging.dataset(16, names=None),
}
"""By method, rows as its page describes them."""
PARTS: dict[str, Callable[[], list[Any]]] = {
    "vision": lambda: [vision_models.vision_model("idefics3"), vision_models.processor("idefics3")],
    "masked-lm": lambda: [masked_texts.build("modernbert"), masked_texts.tokenizer()],
    "replaced-token-detection": lambda: [replaced_tokens.build(), masked_texts.tokenizer()],
    "seq2seq": lambda: [pairs_of_texts.build("t5"), pairs_of_texts.tokenizer()],
    "sequence-classification": lambda: [classifying.classifier(), classifying.tokenizer()],
    "token-classification": lambda: [tagging.tagger(), tagging.tokenizer()],
}
"""By method, a model and a tokenizer, where it is no causal model."""


def lay_out(words: list[str], method: str) -> None:
    """Puts a model, rows and a run file of a method where a command line looks for them."""
    parts = PARTS.get(method, _causal)()
    if any("bfloat16" in word for word in words):
        parts[0].bfloat16()
    shutil.rmtree(MODELS[0], ignore_errors=True)
    for part in parts:
        part.save_pretrained(MODELS[0])
    for name in map(Path, MODELS[1:]):
        if not name.exists():
            name.parent.mkdir(exist_ok=True)
            name.symlink_to(Path(MODELS[0]).resolve())
    written = "".join(json.dumps(row) + "\n" for row in ROWS[method]())
    for name in DATA:
        file = Path(name) if name.endswith(".jsonl") else Path(name, "train.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(written, encoding="utf-8")
    run = {"model": "M", "dataset": "D", "output_dir": "run", "memory_report": "run/memory.json", **SMALL}
    for name in RUN_FILES:
        Path(name).parent.mkdir(exist_ok=True)
        if not Path(name).exists():
            Path(name).write_text(yaml.safe_dump(run), encoding="utf-8")
    write_my_module()
    if not Path("org").exists():
        for name, build in (("reward-model", classifier), ("process-model", step_classifier)):
            build(vocab_size=len(make_tokenizer())).save_pretrained(f"org/{name}")
            make_tokenizer().save_pretrained(f"org/{name}")


def to_run(page: str) -> list[list[str]]:
    """The commands of a page that can be run here, and are by no other test."""
    found = command_lines((DOCS / page).read_text(encoding="utf-8"))
    return [words for words in found if not {*words} & ELSEWHERE.keys()]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in (*PAGES, "../README.md") if to_run(page)])
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(DOCS.parent / "examples", "examples")
    for recipe in recipes().values():
        shutil.copy(recipe, recipe.name)
    for words in to_run(page):
        method = next((word for word in words if word in ROWS), "sft")
        lay_out(words, "vision" if page == "vision-language.md" else method)
        given = ["exact_answer" if word == "R" else word.replace("/mnt/scratch", ".") for word in words]
        if words[0] in (*ROWS, "measure", "profile", "my_module.MY_METHOD"):
            given += [f"--{name}={value}" for name, value in SMALL.items() if f"--{name}" not in words]
        assert main(given) == 0, f"lowtide {' '.join(given)}\n{capsys.readouterr().err}"
