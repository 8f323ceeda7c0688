"""`lowtide export RUN --gguf bf16`: a GGUF file for llama.cpp and Ollama, with a Modelfile beside it; or with
`--quantize int8` as a folder of quantized weights for vLLM.

Adapters are merged as the file is written, with no folder between. Families that are not written here go through
llama.cpp's own script (`--converter`), which reads a folder.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Subparsers
from lowtide.parsing import read_object

KINDS = ("f32", "bf16", "f16", "q8_0")
QUANTIZED = ("int8", "int8_dynamic")
"""Kinds of quantized folders: `export_quantized.CONFIGS`."""
GENERATION = "generation_config.json"
MODELFILE = "Modelfile"
RUN_FILE = "run.yaml"
SAMPLING = ("temperature", "top_k", "top_p")
SAID = 20
"""Lines of what a converter said that are shown where it failed."""
SENTENCEPIECE = "tokenizer.model"
"""SentencePiece's own file, which llama.cpp's script reads; transformers 5 leaves it out as it saves a tokenizer."""
NEEDS = "ModuleNotFoundError: No module named '"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "export",
        help="write a model as a GGUF file for llama.cpp and Ollama, or quantized for vLLM",
        description="Write a model as a GGUF file for llama.cpp, with its tokenizer and chat template, and a Modelfile "
        "for Ollama beside it (needs the extra lowtide[gguf]). It is written tensor by tensor, and takes the memory of "
        "one; with an adapter, which is merged as it is written, that of its base. Or write a folder of quantized "
        "weights for vLLM and transformers (needs the extra lowtide[ao]).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="RUN", help="a run's output_dir, a checkpoint, an adapter, or a model's folder"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--gguf", choices=KINDS, help="the type of its matrices; vectors are float32")
    kind.add_argument(
        "--quantize",
        choices=QUANTIZED,
        help="by torchao: weights of linear layers in 8 bits; int8_dynamic multiplies in 8 bits too",
    )
    parser.add_argument("--output", type=Path, metavar="PATH", help="(default: RUN/RUN-TYPE.gguf, or RUN-TYPE)")
    parser.add_argument(
        "--tokenizer_pre",
        metavar="NAME",
        help="llama.cpp's name of how texts are cut, in place of the one that is told",
    )
    parser.add_argument(
        "--converter",
        type=Path,
        metavar="FILE",
        help="llama.cpp's convert_hf_to_gguf.py, which writes the file instead: for families that are not written here",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and say what to run next; the exit status.

    Raises:
        ValueError: the model is none that is written here, or there is nowhere to write.
    """
    _check(arguments)
    from lowtide.cli.after_training.loaded_run import folder_of

    folder = Path(folder_of(arguments.model))
    if not folder.is_dir():
        raise UsageError(f"{arguments.model!r} is no folder: `hf download {arguments.model} --local-dir DIR` makes one")
    return _quantize(arguments, folder) if arguments.quantize else _write_gguf(arguments, folder)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot work, before anything is imported."""
    converter: Path | None = arguments.converter
    if arguments.quantize:
        package, extra = "torchao", "ao"
        unread = [name for name in ("tokenizer_pre", "converter") if getattr(arguments, name) is not None]
        if unread:
            raise UsageError(
                f"--{unread[0]} goes with --gguf: --quantize writes a folder that has the tokenizer's files"
            )
    else:
        package, extra = "gguf", "gguf"
    if converter is not None:
        if not converter.is_file():
            raise UsageError(
                f"--converter: there is no file {str(converter)!r}: give llama.cpp's convert_hf_to_gguf.py"
            )
        if arguments.tokenizer_pre is not None:
            raise UsageError("--tokenizer_pre has no effect on --converter, which tells it by itself: leave one out")
    elif find_spec(package) is None:
        how = "--quantize" if arguments.quantize else "--gguf"
        raise UsageError(
            f"{how} requires the package {package}, which is not installed: pip install 'lowtide[{extra}]'"
        )


def _write_gguf(arguments: argparse.Namespace, folder: Path) -> int:
    """Writes the file and a Modelfile beside it."""
    from lowtide.engine.weights.complete_weights import base_of_adapters
    from lowtide.engine.weights.loading import load_tokenizer
    from lowtide.own_files import writing

    name = folder.resolve().name
    output: Path = arguments.output or folder / f"{name}-{arguments.gguf}.gguf"
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"--output {output}: give a file in a folder that is there")
    if output.is_file() and not output.is_symlink() and not _is_gguf(output):
        raise UsageError(f"--output {output} is a file of another kind, which would be lost: name another")
    base = base_of_adapters(str(folder))
    wishes = _wishes(folder, base)
    tokenizer = load_tokenizer(str(folder))
    with writing(output) as beside:
        if arguments.converter is not None:
            _convert(arguments.converter, folder, beside, arguments.gguf, merges=base is not None)
        else:
            _write_own(folder, beside, arguments, tokenizer, merges=base is not None)
    modelfile = output.with_name(MODELFILE)
    with writing(modelfile) as beside:
        beside.write_text(_modelfile(output, wishes, tokenizer), encoding="utf-8")
    print(
        f"Written: {output} ({output.stat().st_size / 2**20:,.1f} MiB). What next:\n"
        f"  llama-cli --model {shlex.quote(str(output))}\n"
        f"  ollama create {shlex.quote(name)} --file {shlex.quote(str(modelfile))}"
    )
    return 0


def _write_own(folder: Path, path: Path, arguments: argparse.Namespace, tokenizer: Any, *, merges: bool) -> None:
    """Writes a file by `gguf_export`."""
    from lowtide.cli.after_training.gguf_export.writing import FileWeights, MergedWeights, write_gguf

    if not merges:
        write_gguf(folder, path, arguments.gguf, tokenizer, FileWeights(folder), arguments.tokenizer_pre)
        return
    from lowtide.engine.weights.loading import load_model
    from lowtide.engine.weights.merging import MergedModel

    merged = MergedModel(load_model(str(folder), dtype="auto"))
    with tempfile.TemporaryDirectory() as made:  # of the merged model's config, and the tokenizer's files
        described = Path(made) / folder.resolve().name
        merged.save_configs(described)
        tokenizer.save_pretrained(described)
        write_gguf(described, path, arguments.gguf, tokenizer, MergedWeights(merged), arguments.tokenizer_pre)


@contextmanager
def _whole(folder: Path, *, merges: bool) -> Iterator[Path]:
    """The folder of a whole model: its own, or for as long as it is read one that adapters are merged in."""
    if not merges:
        yield folder
        return
    from lowtide.engine.weights.loading import load_model, load_tokenizer
    from lowtide.engine.weights.merging import save_merged

    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-merged-") as made:
        whole = Path(made) / folder.resolve().name
        save_merged(load_model(str(folder), dtype="auto"), whole)
        load_tokenizer(str(folder)).save_pretrained(whole)
        yield whole


def _began_with(folder: Path) -> str | None:
    """The model that a run began with, as far as its folder says so."""
    from lowtide.engine.weights.complete_weights import base_of_adapters
    from lowtide.parsing import yaml_options

    file = folder / RUN_FILE
    named = {option.key: option.value for option in yaml_options(file)} if file.is_file() else {}
    return base_of_adapters(str(folder)) or named.get("model")


@contextmanager
def _with_sentencepiece(folder: Path, began: str | None) -> Iterator[Path]:
    """The folder, for as long as it is read with the file of SentencePiece of the model that its run began with, where
    it has none of its own and the same vocabulary."""
    from transformers.utils.hub import cached_file

    from lowtide.engine.weights.loading import load_tokenizer

    file = None
    if began is not None and not (folder / SENTENCEPIECE).is_file():
        file = cached_file(began, SENTENCEPIECE, _raise_exceptions_for_missing_entries=False)
    if file is None or load_tokenizer(str(began)).get_vocab() != load_tokenizer(str(folder)).get_vocab():
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        whole = Path(made) / folder.resolve().name
        whole.mkdir()
        for each in folder.iterdir():
            (whole / each.name).symlink_to(each.resolve())
        (whole / SENTENCEPIECE).symlink_to(Path(file).resolve())
        yield whole


def _convert(converter: Path, folder: Path, path: Path, kind: str, *, merges: bool) -> None:
    """Has llama.cpp's script write a file, in a process of its own.

    Raises:
        ValueError: it ended with an error, which is shown, or wrote no GGUF file.
    """
    with _whole(folder, merges=merges) as merged, _with_sentencepiece(merged, _began_with(folder)) as whole:
        words = [sys.executable, str(converter), str(whole), "--outfile", str(path), "--outtype", kind]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-SAID:])
    if done.returncode != 0:
        hint = ""
        if (place := said.rfind(NEEDS)) >= 0:
            package = said[place + len(NEEDS) :].split("'")[0]
            hint = (
                f"\n\nInstall {package} beside lowtide (pip install {package}). Of the converter's requirements.txt "
                "leave out torch and transformers, which it pins to other versions than lowtide's"
            )
        raise ValueError(f"--converter {converter} ended with status {done.returncode}, and said:\n{said}{hint}")
    if not path.is_file() or path.stat().st_size == 0 or not _is_gguf(path):
        raise ValueError(f"--converter {converter} ended without an error and wrote no GGUF file; it said:\n{said}")


def _quantize(arguments: argparse.Namespace, folder: Path) -> int:
    """Writes a folder of quantized weights."""
    from lowtide.cli.after_training.export_quantized import write_quantized
    from lowtide.engine.weights.complete_weights import base_of_adapters
    from lowtide.own_files import folder_beside

    whole = folder.resolve()
    output: Path = arguments.output or whole.with_name(f"{whole.name}-{arguments.quantize}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"--output {output} is there already: give a new folder")
    with _whole(folder, merges=base_of_adapters(str(folder)) is not None) as source, folder_beside(output) as beside:
        write_quantized(source, beside, arguments.quantize)
        beside.replace(output)
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(
        f"Written: {output} ({size / 2**20:,.1f} MiB of weights). What next:\n  vllm serve {shlex.quote(str(output))}"
    )
    return 0


def _is_gguf(path: Path) -> bool:
    """Whether a file was written here, or is empty."""
    with path.open("rb") as file:
        return file.read(4) in (b"", b"GGUF")


def _wishes(folder: Path, base: str | None) -> dict[str, Any]:
    """What a model's generation config says of stopping and sampling; that of its base, where an adapter has none.

    Raises:
        ValueError: it is no JSON object, or says something else than numbers.
    """
    from transformers.utils.hub import cached_file

    path = folder / GENERATION
    if base is not None and not path.is_file():
        found = cached_file(base, GENERATION, _raise_exceptions_for_missing_entries=False)
        path = Path(found) if found else path
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
