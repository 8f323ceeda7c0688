"""`lowtide merge`: one model of a base and its adapter (`--adapter DIR`), or of a sharded checkpoint (`--checkpoint`).

It is written file by file. With an adapter it takes the memory of the base, which may be stored in 4 or 8 bits, and of
a file; with a checkpoint that of a file and a layer.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Subparsers
from lowtide.engine.weights.places import check_config_file, named_base
from lowtide.escaping import shown
from lowtide.parsing import read_object

ADAPTER_FILE = "adapter_config.json"
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "merge",
        help="write a model and its adapter, or a sharded checkpoint, as one model",
        description="Write a model with an adapter merged into it, file by file: it takes no more memory than the "
        "model and a file. A quantized model is written dequantized. Or write one model of a checkpoint that has a "
        "file for each rank, which takes no more memory than a file and a layer.",
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--adapter", type=Path, metavar="DIR", help="the folder of a trained adapter")
    given.add_argument("--checkpoint", type=Path, metavar="DIR", help="the folder of a model in a file for each rank")
    parser.add_argument(
        "--output_dir", type=_folder, required=True, metavar="DIR", help="where to write the merged model"
    )
    parser.add_argument(
        "--model", metavar="M", help="the model that it was trained on: a folder or hub name (default: as it says)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.set_defaults(run=run)


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a folder")
    return Path(text)


def run(arguments: argparse.Namespace) -> int:
    """Merge, write, and say where; the exit status.

    Raises:
        ValueError: there is no such adapter, checkpoint or model, or nowhere to write.
    """
    output = arguments.output_dir
    if output.is_file():
        raise UsageError(f"--output_dir {output} is a file: give a folder")
    has_tokenizer = _join(arguments) if arguments.checkpoint else _merge(arguments)
    print(
        shown(
            f"The merged model is in {output}{'.' if has_tokenizer else '; no tokenizer was found to write with it.'}"
        )
    )
    return 0


def _merge(arguments: argparse.Namespace) -> bool:
    """Writes a model with its adapter merged into it; whether a tokenizer is written with it."""
    adapter, output = arguments.adapter, arguments.output_dir
    config = _adapter_config(adapter)
    name = arguments.model or named_base(config, adapter / ADAPTER_FILE)
    if not name:
        raise UsageError(f"{adapter / ADAPTER_FILE} does not say which model it was trained on: give it by --model")
    if output.resolve() in (adapter.resolve(), Path(name).resolve()):
        raise UsageError(f"--output_dir {output} is a folder that is read from: give another one")
    _check_holds_no_model(output)

    import torch

    from lowtide.engine.heads import head_of_task
    from lowtide.engine.weights.complete_weights import (
        check_no_adapters,
        check_package_of,
        labels_of_adapter,
        load_adapters,
    )
    from lowtide.engine.weights.loading import load_model, saved_config
    from lowtide.engine.weights.merging import save_merged

    check_package_of(str(adapter))
    check_no_adapters(name, "--model" if arguments.model else str(adapter / ADAPTER_FILE))
    trust = arguments.trust_remote_code
    labels = labels_of_adapter(adapter)
    init: dict[str, Any] = {} if labels is None else {"num_labels": labels}
    head = head_of_task(config.get("task_type"), saved_config(name, {"trust_remote_code": trust}))
    base = load_model(name, trust_remote_code=trust, head=head, dtype="auto", **init)
    model = load_adapters(base, str(adapter))
    save_merged(model, output, dtype=getattr(torch, arguments.dtype) if arguments.dtype else None)
    return _save_tokenizer([str(adapter), name], output, trust)


def _check_holds_no_model(output: Path) -> None:
    """Refuses a folder whose model would be written over."""
    from lowtide.engine.weights.sharded.shard_files import OF_A_MODEL
    from lowtide.own_files import check_no_links

    held = [path.name for path in output.iterdir() if OF_A_MODEL.fullmatch(path.name)] if output.is_dir() else []
    if held:
        raise UsageError(f"--output_dir {output} holds a model already ({held[0]}): give a new folder")
    check_no_links(output)


def _join(arguments: argparse.Namespace) -> bool:
    """Writes one model of a sharded checkpoint, beside and then renamed; whether a tokenizer is written with it."""
    checkpoint, output = arguments.checkpoint, arguments.output_dir
    if arguments.model:
        raise UsageError("--model goes with --adapter: a checkpoint holds all weights")
    if output.is_dir() and any(output.iterdir()):
        raise UsageError(f"--output_dir {output} is not empty: give a new folder")
    _check_sharded(checkpoint)

    import torch

    from lowtide.engine.weights.merging import save_joined
    from lowtide.own_files import folder_beside

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    with folder_beside(output) as beside:
        save_joined(checkpoint, beside, dtype=dtype, trust_remote_code=arguments.trust_remote_code)
        has_tokenizer = _save_tokenizer([str(checkpoint)], beside, arguments.trust_remote_code)
        os.replace(beside, output)
    return has_tokenizer


def _check_sharded(checkpoint: Path) -> None:
    """Refuses a folder without weights in a file for each rank, or with damaged ones."""
    if not checkpoint.is_dir():
        raise UsageError(f"--checkpoint: there is no folder {str(checkpoint)!r}")

    from lowtide.engine.weights.sharded.shard_files import SHARD, shards_in
    from lowtide.trainers.checkpoints.manifest import difference, read_manifest
    from lowtide.trainers.checkpoints.output_folder import checkpoints_of

    for name, entry in (read_manifest(checkpoint) or {}).items():
        if SHARD.fullmatch(name) and (reason := difference(checkpoint / name, entry)):
            raise ValueError(f"--checkpoint: {checkpoint / name} is damaged: {reason}. Take another checkpoint")
    if not shards_in(checkpoint):
        last = next((each for each in checkpoints_of(checkpoint) if shards_in(each)), None)
        whole = "; it holds a whole model, which loads as it is" if [*checkpoint.glob("model*.safetensors")] else ""
        hint = f": take {last}" if last else whole
        raise UsageError(f"--checkpoint: {checkpoint} has no model in a file for each rank{hint}")


def _adapter_config(adapter: Path) -> dict[str, Any]:
    if not adapter.is_dir():
        raise UsageError(f"--adapter: there is no folder {str(adapter)!r}")
    file = adapter / ADAPTER_FILE
    check_config_file(adapter)
    if not file.is_file():
        raise UsageError(f"--adapter: {adapter} has no {ADAPTER_FILE}, so it is no adapter's folder")
    return read_object(file)


def _save_tokenizer(sources: list[str], output: Path, trust: bool) -> bool:
    """Writes the tokenizer of an adapter or checkpoint, or else that of the model, which comes last; whether there is
    one."""
    from lowtide.engine.weights.loading import load_tokenizer

    for source in sources:
        if source == sources[0] and not Path(source, "tokenizer_config.json").is_file():
            continue
        try:
            load_tokenizer(source, trust_remote_code=trust).save_pretrained(output)
        except ValueError:
            continue
        return True
    return False
