"""input that means nothing ends in one clear message"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from lowtide.cli.main import main

from .case import Case
from .tiny_world import METHODS, TRAIN, world

COMMAND_LINES = {
    "no model": ("sft --dataset x.jsonl", "--model is missing"),
    "no dataset": ("sft --model {model}", "--dataset is missing"),
    "an unknown method": ("stf", "there is no command 'stf'; did you mean 'sft'?"),
    "an unknown option": ("sft --learing_rate 1", "there is no option --learing_rate; did you mean '--learning_rate'?"),
    "an option of another method": ("sft --beta 0.1", "it is of dpo"),
    "an option without its value": ("sft --learning_rate", "expected"),
    "a word that is no option": (f"sft {TRAIN} more", "unrecognized arguments: more"),
    "a model that is not there": (f"sft {TRAIN} --model nowhere/at/all", "nowhere/at/all"),
    "a dataset that is not there": (
        f"sft {TRAIN} --dataset nowhere.jsonl",
        "there is no file or folder 'nowhere.jsonl'",
    ),
    "a model that is a file": (f"sft {TRAIN} --model {{rows}}", "sft.jsonl"),
    "a model in an empty folder": (f"sft {TRAIN} --model .", "'.'"),
    "a dataset that is a folder of a model": (f"sft {TRAIN} --dataset {{model}}", "model"),
    "an output folder that is a file": (f"sft {TRAIN} --output_dir {{rows}}", "is a file: name a folder"),
    "an output folder that is the model": (f"sft {TRAIN} --output_dir {{model}}", "is the folder of model too"),
    "an output folder without a name": (f"sft {TRAIN} --output_dir=", "output_dir is empty"),
    "the best of no evaluations": (f"sft {TRAIN} --save_strategy best", "save_strategy='best' compares evaluations"),
    "the best model of no evaluations": (
        f"sft {TRAIN} --load_best_model_at_end --save_strategy no",
        "load_best_model_at_end=True compares evaluations",
    ),
    "an output folder below a file": (f"sft {TRAIN} --output_dir {{rows}}/out", "cannot be written"),
    "a run file that is not there": ("sft --config nowhere.yaml", "there is no file 'nowhere.yaml'"),
    "a run file that is a folder": ("sft --config .", "there is no file '.'"),
    "a checkpoint that is not there": (f"sft {TRAIN} --resume_from_checkpoint nowhere", "'nowhere' is no checkpoint"),
    "a split that is not there": (f"sft {TRAIN} --dataset_split tarin", 'Unknown split "tarin"'),
    "a split to evaluate on that is not there": (f"sft {TRAIN} --eval_strategy steps", 'Unknown split "test"'),
    "an adapter's option without one": (f"sft {TRAIN} --lora_r 4", "lora_r has no effect without use_peft"),
    "two quantizations": (f"sft {TRAIN} --use_peft --load_in_4bit --load_in_8bit", "exclude each other"),
    "quantization without an adapter": (f"sft {TRAIN} --load_in_4bit", "add --use_peft"),
    "modules that are not there": (f"sft {TRAIN} --use_peft --lora_target_modules nowhere", "nowhere"),
    "a task that is not there": (f"sft {TRAIN} --use_peft --lora_task_type CASUAL", "CASUAL"),
    "a template that is not there": (f"sft {TRAIN} --chat_template_path nowhere.jinja", "nowhere.jinja"),
    "a reference that is not there": (f"dpo {TRAIN} --ref_model ./nowhere", "./nowhere"),
    "a reference for a method without one": (f"orpo {TRAIN} --ref_model {{model}}", "--ref_model"),
    "rows of another method": (f"dpo {TRAIN} --dataset {{folder}}/kto.jsonl", "kto.jsonl"),
    "a text column that is not there": (f"sft {TRAIN} --dataset_text_field body", "'body'"),
    "packing without a length": (f"sft {TRAIN} --packing --max_length none", "packing=True needs max_length"),
    "a budget below the longest row": (f"sft {TRAIN} --tokens_per_microbatch 1", "longest row of"),
    "a memory budget of no amount": (f"sft {TRAIN} --memory_budget lots", "'lots'"),
    "a memory budget that nothing fits": (f"sft {TRAIN} --memory_budget 1KiB", "budget"),
    "a report that is a folder": (f"sft {TRAIN} --memory_report .", "memory_report='.' is a folder"),
    "a plan that is a folder": ("plan sft --model {model} --dataset {rows} --output .", "--output . is a folder"),
    "a slice of a split that is none": (f"sft {TRAIN} --dataset_split train[:200%]", "split 'train[:200%]', can't be"),
    "more to evaluate on than there is": (
        'sft --model {model} --use_cpu --test_split_size 500 --datasets {{"path":"{rows}"}}',
        "test_split_size=500 cannot be taken from 4 rows",
    ),
    "modules to train whole that are not there": (
        f"sft {TRAIN} --use_peft --lora_modules_to_save nowhere",
        "modules_to_save names 'nowhere'",
    ),
    "a compiler that there is not": (f"sft {TRAIN} --torch_compile_backend inductr", "did you mean 'inductor'?"),
    "a tracker that is not installed": (f"sft {TRAIN} --report_to comet_ml", "pip install comet-ml"),
    "a tracker that there is not": (f"sft {TRAIN} --report_to wandbb", "did you mean 'wandb'?"),
    "FlashAttention without its package": (
        f"sft {TRAIN} --padding_free false --attn_implementation flash_attention_2",
        "attn_implementation='flash_attention_2' needs a GPU",
    ),
    "an unknown attention": (f"sft {TRAIN} --padding_free false --attn_implementation foo", "foo"),
    "an unknown argument of the model": (
        f'sft {TRAIN} --model_init_kwargs {{{{"attn_implementatio":"eager"}}}}',
        "did you mean 'attn_implementation'",
    ),
    "an argument of the model that is no JSON": (
        f"sft {TRAIN} --model_init_kwargs {{{{dtype}}}}",
        "model_init_kwargs=",
    ),
    "a wrong value in the model's config": (
        f'sft {TRAIN} --model_init_kwargs {{{{"hidden_size":"x"}}}}',
        "hidden_size",
    ),
    "weights of another size": (f'sft {TRAIN} --model_init_kwargs {{{{"hidden_size":48}}}}', "does not fit"),
    "an unknown dtype": (f"sft {TRAIN} --dtype float23", "did you mean 'float32'"),
    "an unknown argument of the schedule": (
        f'sft {TRAIN} --lr_scheduler_type cosine --lr_scheduler_kwargs {{{{"num_cycle":1}}}}',
        "did you mean 'num_cycles'?",
    ),
    "a schedule without what it needs": (f"sft {TRAIN} --lr_scheduler_type warmup_stable_decay", "num_decay_steps"),
    "deepspeed": (f"sft {TRAIN} --deepspeed zero3.json", "deepspeed"),
    "fp16 on a CPU": (f"sft {TRAIN} --fp16", "fp16=True needs a GPU"),
    "a plan without a method": ("plan", "a method is missing"),
    "a plan of an unknown method": ("plan sfd", "there is no method 'sfd'"),
    "a plan of no budget": ("plan sft --model {model} --dataset {rows} --budget lots", "'lots'"),
    "a plan of an unknown device": ("plan sft --model {model} --dataset {rows} --device H1000", "H1000"),
    "an estimate with an option out of range": (
        "estimate sft --model {model} --dataset {rows} --max_length=-1",
        "--max_length=-1",
    ),
    "an estimate of rows that are not there": ("estimate sft --model {model} --dataset nowhere.jsonl", "nowhere.jsonl"),
    "a profile of no steps": (f"profile sft {TRAIN} --steps 0", "--steps"),
    "lengths without a tokenizer": ("lengths {rows}", "--tokenizer"),
    "lengths of no tokenizer": ("lengths {rows} --tokenizer ./nowhere --out out", "./nowhere"),
    "lengths of nothing": ("lengths nowhere.jsonl --tokenizer {model} --out out", "nowhere.jsonl"),
    "lengths of no rows at a time": ("lengths {rows} --tokenizer {model} --batch_size 0", "--batch_size"),
    "an unknown strategy of packing": ("lengths {rows} --tokenizer {model} --packing_strategy best", "best"),
    "an adapter that is not there": ("merge --adapter nowhere --output_dir out", "there is no folder 'nowhere'"),
    "an adapter that is a model": ("merge --adapter {model} --output_dir out", "no adapter's folder"),
    "a merge without an output": ("merge --adapter {model}", "--output_dir"),
    "a demo of an unknown method": ("demo --method orpo", "orpo"),
    "a demo of no seed": ("demo --seed x", "--seed"),
}
"""By name: a command line, and what its message has to contain."""

OPTIONS = {
    "sft": {
        "learning_rate": ("fast", "-1", "nan", "inf", "true"),
        "max_steps": ("0", "-5", "2.5", "many"),
        "per_device_train_batch_size": ("0", "-1"),
        "gradient_accumulation_steps": ("0", "-1"),
        "max_grad_norm": ("-1", "nan"),
        "num_train_epochs": ("0", "-1"),
        "weight_decay": ("-100",),
        "adam_beta1": ("1", "-0.1"),
        "warmup_steps": ("-1",),
        "save_steps": ("0", "-1", "2.5"),
        "logging_steps": ("0", "-1"),
        "save_total_limit": ("-1", "0"),
        "seed": ("-1", "99999999999"),
        "dataloader_num_workers": ("-1", "9999999"),
        "max_length": ("0", "-1", "long", "9" * 30),
        "tokens_per_microbatch": ("0",),
        "checkpointing_every": ("0",),
        "mlp_tile_tokens": ("-3",),
        "label_smoothing_factor": ("1.5", "-0.1"),
        "packing": ("maybe",),
        "packing_strategy": ("bdf",),
        "optim": ("adamw_troch", "lomo"),
        "lr_scheduler_type": ("cosin",),
        "loss_type": ("nil",),
        "save_strategy": ("never",),
        "optim_args": ("x",),
        "optimizer_in_backward": ("sometimes", "two_pases"),
        "accelerator_config": ('{"split":1}', "nowhere.json"),
        "include_num_input_tokens_seen": ("some",),
        "dataset_num_proc": ("-1",),
    },
    "dpo": {
        "beta": ("-1", "nan", "high"),
        "loss_type": ("sigmoidal",),
        "loss_weights": ("-1", "x"),
        "label_smoothing": ("2",),
        "ld_alpha": ("1.5",),
        "discopop_tau": ("0",),
        "ref_model_sync_steps": ("0",),
        "ref_model_mixup_alpha": ("-1", "2"),
        "precompute_ref_batch_size": ("0",),
        "f_divergence_type": ("forward",),
        "ref_model_storage": ("disk",),
    },
    "kto": {"desirable_weight": ("-1",), "undesirable_weight": ("nan",), "beta": ("-0.1",), "loss_type": ("kot",)},
    "reward": {"center_rewards_coefficient": ("-1",), "pad_token": ("<nowhere>",), "max_length": ("0",)},
    "orpo": {"beta": ("-1",), "router_aux_loss_coef": ("-1", "0.1")},
    "cpo": {"simpo_gamma": ("nan", "-1"), "cpo_alpha": ("-1",), "alpha": ("inf",), "loss_type": ("simp",)},
    "bco": {"beta": ("inf",), "loss_type": ("bco",)},
}
"""By method and option: values that it does not take. The message names the option."""

RUN_FILES = {
    "not YAML": ("seed: [1\nmax_length: 3\n", "run.yaml, line 2 is not YAML"),
    "a list": ("- seed\n", "run.yaml, line 1: expected `option: value` lines"),
    "an unknown option": ("seed: 1\nlearing_rate: 3\n", "line 2: there is no option 'learing_rate'"),
    "an option given twice": ("seed: 1\nseed: 2\n", "line 2: seed is given twice"),
    "an option under two names": ("model: m\nmodel_name_or_path: n\n", "line 2: model is given twice"),
    "a number as text": ("learning_rate: fast\n", "line 1: learning_rate='fast' must be a number"),
    "a number out of range": ("seed: 1\nmax_steps: 0\n", "line 2: max_steps=0 must be at least 1"),
    "a number that is a boolean": ("max_steps: yes\n", "line 1: max_steps=True must be a whole number"),
    "a mapping for a number": ("max_steps: {a: 1}\n", "line 1: max_steps="),
    "a list for text": ("model: [a, b]\n", "line 1: model="),
    "NaN": ("max_grad_norm: .nan\n", "line 1: max_grad_norm=nan"),
    "a date": ("seed: 2024-01-01\n", "line 1: seed='2024-01-01' must be a whole number"),
    "minutes for a number": ("max_steps: 1:30\n", "line 1: max_steps='1:30' must be a whole number"),
    "Python's objects": ("seed: !!python/object/apply:os.getpid []\n", "is not YAML"),
    "a tag that its text contradicts": ("max_steps: !!int many\n", "run.yaml, line 1 is not YAML"),
    "an endless alias": ("a: &a [*a]\n", "line 1"),
    "no text": (b"\xff\xfe\x00", "is not text"),
}
"""By name: what a run file holds, and what the message has to contain."""

LINE = b'{"text": "1 + 1 = 2"}\n'
DATASETS = {
    "an empty file": ("sft", "rows.jsonl", b"", "rows.jsonl is empty"),
    "no rows": ("sft", "rows.json", b"[]", "rows.json has no rows"),
    "a broken line": ("sft", "rows.jsonl", LINE + b'{"text": "1\n', "rows.jsonl, line 2"),
    "numbers for rows": ("sft", "rows.jsonl", b"3\n4\n", "rows.jsonl, line 1"),
    "two kinds in a column": ("sft", "rows.jsonl", LINE + b'{"text": 3}\n', "rows.jsonl, row 1"),
    "text that is a number": ("sft", "rows.jsonl", b'{"text": 3}\n', "'text'"),
    "text that is null": ("sft", "rows.jsonl", LINE + b'{"text": null}\n', "row 1"),
    "no UTF-8": ("sft", "rows.jsonl", b"\xff\xfe" + LINE, "not UTF-8"),
    "zero bytes": ("sft", "rows.jsonl", b"\0" * 100, "rows.jsonl, line 1"),
    "unknown columns": ("sft", "rows.jsonl", b'{"body": "a"}\n', "rows.jsonl"),
    "a truncated archive": ("sft", "rows.jsonl.gz", gzip.compress(LINE * 20)[:-9], "cannot be decompressed"),
    "a broken archive": ("sft", "rows.jsonl.gz", b"hello", "rows.jsonl.gz, line 1: cannot be decompressed"),
    "an archive with another sum": (
        "sft",
        "rows.jsonl.gz",
        gzip.compress(LINE)[:-8] + b"\0" * 8,
        "rows.jsonl.gz, line",
    ),
    "a broken xz archive": ("sft", "rows.jsonl.xz", b"hello", "rows.jsonl.xz, line 1"),
    "a broken bz2 archive": ("sft", "rows.jsonl.bz2", b"hello", "rows.jsonl.bz2, line 1"),
    "a broken Parquet file": ("sft", "rows.parquet", b"PAR1 hello", "rows.parquet can't be read"),
    "a broken CSV file": ("sft", "rows.csv", b'a,b\n1,2\n"', "rows.csv can't be read"),
    "a file of another kind": ("sft", "rows.rtf", b"hello", "rows.rtf"),
    "an unknown role": ("sft", "rows.jsonl", b'{"messages": [{"role": "bot", "content": "a"}]}\n', "rows.jsonl, row 0"),
    "a message without content": ("sft", "rows.jsonl", b'{"messages": [{"role": "user"}]}\n', "rows.jsonl, row 0"),
    "messages that are text": ("sft", "rows.jsonl", b'{"messages": "hello"}\n', "'messages'"),
    "token ids beyond the vocabulary": ("sft", "rows.jsonl", b'{"input_ids": [99999]}\n', "rows.jsonl, row 0"),
    "token ids below zero": ("sft", "rows.jsonl", b'{"input_ids": [-1, 2]}\n', "rows.jsonl, row 0"),
    "true and false for token ids": ("sft", "rows.jsonl", b'{"input_ids": [true, false]}\n', "rows.jsonl, row 0"),
    "a hole in a mask": (
        "sft",
        "rows.jsonl",
        b'{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}\n',
        "rows.jsonl, row 0 (the first is 0): attention_mask[1] is 0",
    ),
    "a margin that is no number": (
        "reward",
        "rows.jsonl",
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}\n',
        "rows.jsonl, row 0 (the first is 0): 'margin' is nan",
    ),
    "one row and a baseline": (
        "kto",
        "rows.jsonl",
        b'{"prompt": "1 + 1", "completion": " = 2", "label": true}\n',
        "rows.jsonl has one row",
    ),
    "labels of another length": ("sft", "rows.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', "rows.jsonl, row 0"),
    "no rejected side": ("dpo", "rows.jsonl", b'{"prompt": "a", "chosen": "b"}\n', "rows.jsonl"),
    "a side that is null": ("dpo", "rows.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": null}\n', "'rejected'"),
    "a margin that is text": (
        "reward",
        "rows.jsonl",
        b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"}\n',
        "'margin'",
    ),
    "a label that is text": ("kto", "rows.jsonl", b'{"prompt": "a", "completion": "b", "label": "good"}\n', "'label'"),
    "no label": ("bco", "rows.jsonl", b'{"prompt": "a", "completion": "b"}\n', "rows.jsonl"),
    "texts for pairs": ("orpo", "rows.jsonl", LINE, "rows.jsonl"),
    "pairs for texts": ("cpo", "rows.jsonl", LINE, "rows.jsonl"),
}
"""By name: the method, the file, what it holds, and what the message has to contain."""

PAIR = b'{"prompt": "1 + 1", "chosen": " = 2", "rejected": " = 3"}\n'
DOUBTFUL = {
    "a text beside messages": (
        "sft",
        b'{"text": "1", "messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n',
        "not used: 'text'",
    ),
    "a completion that is empty": (
        "sft",
        b'{"prompt": "1", "completion": ""}\n{"prompt": "1", "completion": " = 2"}\n',
        "in 1 of 2 rows (the first is row 0) the text, the completion or a message of the assistant is empty",
    ),
    "an answer that is empty": (
        "sft",
        b'{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]}\n',
        "in 1 of 1 rows (the first is row 0) the text, the completion or a message of the assistant is empty",
    ),
    "a rejected side that is empty": (
        "dpo",
        PAIR + b'{"prompt": "1", "chosen": " = 2", "rejected": " "}\n',
        "in 1 of 2 rows (the first is row 1) the text, the completion or a message of the assistant is empty",
    ),
    "a prompt that is empty": (
        "orpo",
        b'{"prompt": "", "chosen": " = 2", "rejected": " = 3"}\n',
        "in 1 of 1 rows (the first is row 0) the prompt or a message of the user is empty",
    ),
    "labels that are shifted": (
        "sft",
        b'{"input_ids": [5, 6, 7, 3], "labels": [6, 7, 3, -100]}\n',
        "in 1 of 1 rows (the first is row 0) 'labels' has other tokens than 'input_ids'",
    ),
    "a mask that the labels contradict": (
        "sft",
        b'{"input_ids": [5, 6, 7, 3], "labels": [5, 6, 7, 3], "completion_mask": [0, 1, 1, 1]}\n',
        "in 1 of 1 rows (the first is row 0) 'labels' scores other tokens than 'completion_mask'",
    ),
    "token ids without an end": (
        "sft",
        b'{"input_ids": [5, 6, 7]}\n',
        "in 1 of 1 rows (the first is row 0) no token ends the completion or the text",
    ),
    "rows without a scored token": (
        "sft",
        b'{"input_ids": [5, 6, 3], "completion_mask": [0, 1, 1]}\n'
        b'{"input_ids": [5, 6, 3], "completion_mask": [0, 0, 0]}\n',
        "1 of 2 rows are not trained on (no scored token: 1)",
    ),
    "log-probs of a reference that are no numbers": (
        "dpo",
        PAIR.replace(b"}", b', "ref_chosen_logps": NaN, "ref_rejected_logps": null}'),
        "not used: 'ref_chosen_logps', 'ref_rejected_logps'",
    ),
    "undesirable completions alone": (
        "kto",
        b'{"prompt": "1 + 1", "completion": " = 3", "label": false}\n' * 2,
        "every row has the label False",
    ),
}
"""By name: the method, and rows that it trains on, with one warning that has to contain this."""

UNWISE = {
    "a learning rate of 0": (f"sft {TRAIN} --learning_rate 0", "nothing is learned with learning_rate=0.0:"),
    "DPO without a slope": (f"dpo {TRAIN} --beta 0", "nothing is learned with beta=0.0:"),
    "KTO without a slope": (f"kto {TRAIN} --beta 0", "nothing is learned with beta=0.0:"),
    "a configuration of a file": (f"sft {TRAIN} --dataset_config english", "which has no configuration 'english'"),
    "losses without weight": (f"dpo {TRAIN} --loss_weights 0", "nothing is learned with loss_weights=[0.0]:"),
    "a warmup beyond the run": (f"sft {TRAIN} --warmup_steps 9", "learning_rate=2e-05 is never reached"),
    "more processes than cores": (f"sft {TRAIN} --dataset_num_proc 9999", "dataset_num_proc=9999 is set to"),
    "checkpointing beyond the layers": (f"sft {TRAIN} --checkpointing_every 99", "is beyond the model's 2 layers"),
}
"""By name: a command line that trains, with one warning that has to contain this."""

MODELS = {
    "a config that is no JSON": ({"config.json": b"{"}, "config.json"),
    "a config of an unknown type": ({"config.json": b'{"model_type": "nothing"}'}, "nothing"),
    "a config without a type": ({"config.json": b"{}"}, "model_type"),
    "no config": ({"config.json": None}, "config.json"),
    "no tokenizer": ({"tokenizer.json": None, "tokenizer_config.json": None}, "no tokenizer at"),
    "a tokenizer that is no JSON": ({"tokenizer.json": b"{"}, "tokenizer"),
}
"""By name: files of the model's folder that are written over or left out, and what the message has to contain."""


def check_command_line(words: list[str], wanted: str, folder: Path) -> None:
    """A command line ends with exit status 2 and one message, and changes no file."""
    before = snapshot(folder)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(words)
    message = errors.getvalue()
    assert status == 2, f"exit status {status}: {message}"
    assert wanted in " ".join(message.split()), f"{wanted!r} is not in {message!r}"
    assert "Traceback" not in message, message
    assert len(re.findall("^error: ", message, re.MULTILINE)) == 1, f"not one message: {message}"
    assert snapshot(folder) == before, f"it left {sorted(snapshot(folder).keys() ^ before.keys())}"


def snapshot(folder: Path) -> Mapping[str, bytes]:
    """All files below a folder; the output folder itself may be made."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_words(line: str, wanted: str, folder: Path) -> None:
    """A command line in which the tiny world is named."""
    there = world(folder)
    method = next((word for word in line.split()[:2] if word in METHODS), "sft")
    names = {"model": there / "model", "rows": there / f"{method}.jsonl", "folder": there}
    check_command_line([word.format(**names) for word in line.split()], wanted, folder)


def check_option(method: str, option: str, value: str, folder: Path) -> None:
    """A value that an option does not take."""
    there = world(folder)
    words = TRAIN.format(model=there / "model", rows=there / f"{method}.jsonl").split()
    if option == "max_steps":
        words = words[:-2]
    check_command_line([method, *words, f"--{option}={value}"], option, folder)


def check_run_file(content: str | bytes, wanted: str, folder: Path) -> None:
    """A run file that means nothing."""
    (folder / "run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    check_command_line(["sft", "--config", "run.yaml"], wanted, folder)


def check_dataset(method: str, name: str, content: bytes, wanted: str, folder: Path) -> None:
    """A dataset that cannot be read, or rows that cannot be trained on."""
    (folder / name).write_bytes(content)
    words = TRAIN.format(model=world(folder) / "model", rows=name).split()
    check_command_line([method, *words], wanted, folder)


def check_doubtful(method: str, content: bytes, wanted: str, folder: Path) -> None:
    """Rows that are trained on, with one warning of what is doubtful in them."""
    (folder / "rows.jsonl").write_bytes(content)
    words = TRAIN.format(model=world(folder) / "model", rows="rows.jsonl").split()
    check_warned([method, *words], wanted)


def check_unwise(line: str, wanted: str, folder: Path) -> None:
    """Options that a run is trained with, with one warning of them."""
    there = world(folder)
    check_warned(line.format(model=there / "model", rows=there / f"{line.split()[0]}.jsonl").split(), wanted)


def check_warned(words: list[str], wanted: str) -> None:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(words)
    message = " ".join(errors.getvalue().split())
    assert status == 0, f"exit status {status}: {message}"
    assert message.count(wanted) == 1, f"{wanted!r} is not once in {message!r}"


def check_model(files: Mapping[str, bytes | None], wanted: str, folder: Path) -> None:
    """A model's folder with something wrong in it."""
    there = world(folder)
    shutil.copytree(there / "model", folder / "model")
    for name, content in files.items():
        (folder / "model" / name).unlink()
        if content is not None:
            (folder / "model" / name).write_bytes(content)
    check_command_line(["sft", *TRAIN.format(model="./model", rows=there / "sft.jsonl").split()], wanted, folder)


def cases(seed: int) -> Iterator[Case]:
    """Command lines, options, run files, datasets and models."""
    for name, (line, wanted) in COMMAND_LINES.items():
        yield Case(name, partial(check_words, line, wanted))
    for method, options in OPTIONS.items():
        for option, values in options.items():
            for value in values:
                yield Case(f"{method} --{option}={value}", partial(check_option, method, option, value))
    for name, (content, wanted) in RUN_FILES.items():
        yield Case(f"a run file with {name}", partial(check_run_file, content, wanted))
    for name, (method, file, content, wanted) in DATASETS.items():
        yield Case(f"rows of {method}: {name}", partial(check_dataset, method, file, content, wanted))
    for name, (method, content, wanted) in DOUBTFUL.items():
        yield Case(f"doubtful rows of {method}: {name}", partial(check_doubtful, method, content, wanted))
    for name, (line, wanted) in UNWISE.items():
        yield Case(f"unwise: {name}", partial(check_unwise, line, wanted))
    for name, (files, wanted) in MODELS.items():
        yield Case(f"a model's folder: {name}", partial(check_model, files, wanted))
