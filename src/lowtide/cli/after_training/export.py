"""`lowtide export RUN --gguf bf16`: a model as a GGUF file for llama.cpp and Ollama, with a Modelfile beside it."""

from __future__ import annotations

import argparse
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Subparsers
from lowtide.parsing import read_object

KINDS = ("f32", "bf16", "f16", "q8_0")
MODELFILE = "Modelfile"
SAMPLING = ("temperature", "top_k", "top_p")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "export",
        help="write a model as a GGUF file for llama.cpp and Ollama",
        description="Write a model as a GGUF file for llama.cpp, with its tokenizer and chat template, and a Modelfile "
        "for Ollama beside it. It is written tensor by tensor, and takes the memory of one. Needs the extra "
        "lowtide[gguf].",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN", help="a run's output_dir, a checkpoint, or a model's folder")
    parser.add_argument("--gguf", required=True, choices=KINDS, help="the type of its matrices; vectors are float32")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: RUN/RUN-TYPE.gguf)")
    parser.add_argument(
        "--tokenizer_pre",
        metavar="NAME",
        help="llama.cpp's name of how texts are cut, in place of the one that is told",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what to run next; the exit status.

    Raises:
        ValueError: the model is none that is written here, or there is nowhere to write.
    """
    if find_spec("gguf") is None:
        raise UsageError("--gguf requires the package gguf, which is not installed: pip install 'lowtide[gguf]'")
    from lowtide.cli.after_training.gguf_export.writing import write_gguf
    from lowtide.cli.after_training.loaded_run import folder_of
    from lowtide.engine.weights.complete_weights import ADAPTER_CONFIG, MODEL_CONFIG
    from lowtide.engine.weights.loading import load_tokenizer
    from lowtide.own_files import writing

    folder = Path(folder_of(arguments.model))
    if not folder.is_dir():
        raise UsageError(f"{arguments.model!r} is no folder: `hf download {arguments.model} --local-dir DIR` makes one")
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / MODEL_CONFIG).is_file():
        raise UsageError(
            f"{folder} is an adapter: `lowtide merge --adapter {folder} --output_dir MERGED` makes a model of it, "
            "which can be exported"
        )
    name = folder.resolve().name
    output: Path = arguments.output or folder / f"{name}-{arguments.gguf}.gguf"
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"--output {output}: give a file in a folder that is there")
    if output.is_file() and not output.is_symlink() and not _is_gguf(output):
        raise UsageError(f"--output {output} is a file of another kind, which would be lost: name another")
    wishes = _wishes(folder)
    tokenizer = load_tokenizer(str(folder))
    with writing(output) as beside:
        write_gguf(folder, beside, arguments.gguf, tokenizer, arguments.tokenizer_pre)
    modelfile = output.with_name(MODELFILE)
    with writing(modelfile) as beside:
        beside.write_text(_modelfile(output, wishes, tokenizer), encoding="utf-8")
    print(
        f"Written: {output} ({output.stat().st_size / 2**20:,.1f} MiB). What next:\n"
        f"  llama-cli --model {shlex.quote(str(output))}\n"
        f"  ollama create {shlex.quote(name)} --file {shlex.quote(str(modelfile))}"
    )
    return 0


def _is_gguf(path: Path) -> bool:
    """Whether a file was written here, or is empty."""
    with path.open("rb") as file:
        return file.read(4) in (b"", b"GGUF")


def _wishes(folder: Path) -> dict[str, Any]:
    """What a model's generation config says of stopping and sampling.

    Raises:
        ValueError: it is no JSON object, or says something else than numbers.
    """
    path = folder / "generation_config.json"
    wishes = read_object(path) if path.is_file() else {}
    known = wishes.get("eos_token_id")
    wishes["eos_token_id"] = known if isinstance(known, list) else [known]
    kinds = {"eos_token_id": int | None, **dict.fromkeys(SAMPLING, int | float | None)}
    for name, kind in kinds.items():
        values: Any = wishes.get(name)
        for each in values if name == "eos_token_id" else [values]:
            if not isinstance(each, kind):
                raise ValueError(f"{path} says {name}={each!r:.80}, which is a number: correct it")
    return wishes


def _modelfile(output: Path, wishes: dict[str, Any], tokenizer: Any) -> str:
    """How Ollama runs the file: the chat template is in it."""
    ends = [tokenizer.eos_token_id, *wishes["eos_token_id"]]
    stops = [str(tokenizer.decode([token])) for token in dict.fromkeys(ends) if token is not None]
    lines = [f"FROM ./{output.name}", *(f"PARAMETER stop {json.dumps(text)}" for text in stops)]
    if wishes.get("do_sample"):
        given = {name: wishes.get(name) for name in SAMPLING}
        lines += [f"PARAMETER {name} {value}" for name, value in given.items() if value is not None]
    return "\n".join(lines) + "\n"
