"""`lowtide merge --adapter DIR --output_dir DIR`: a base and its adapter as one model, written shard by shard.

The memory that it takes is the base's and a shard's; the base may be stored in 4 or 8 bits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lowtide.cli.endings import UsageError
from lowtide.compat.argparse import Subparsers

ADAPTER_FILE = "adapter_config.json"
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "merge",
        help="write a model and its adapter as one model",
        description="Write a model with an adapter merged into it, shard by shard: it takes no more memory than the "
        "model and a shard. A quantized model is written dequantized.",
    )
    parser.add_argument("--adapter", type=Path, required=True, metavar="DIR", help="the folder of a trained adapter")
    parser.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="where to write the merged model")
    parser.add_argument(
        "--model", metavar="M", help="the model that it was trained on: a folder or hub name (default: as it says)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Merge, write, and say where; the exit status.

    Raises:
        ValueError: there is no such adapter or model, or nowhere to write.
    """
    adapter, output = arguments.adapter, arguments.output_dir
    config = _adapter_config(adapter)
    name = arguments.model or config.get("base_model_name_or_path")
    if not name:
        raise UsageError(f"{adapter / ADAPTER_FILE} does not say which model it was trained on: give it by --model")
    if output.resolve() in (adapter.resolve(), Path(name).resolve()):
        raise UsageError(f"--output_dir {output} is a folder that is read from: give another one")
    if output.is_file():
        raise UsageError(f"--output_dir {output} is a file: give a folder")

    import torch

    from lowtide.engine.heads import head_of_task
    from lowtide.engine.weights.complete_weights import load_adapters
    from lowtide.engine.weights.loading import load_model
    from lowtide.engine.weights.merging import save_merged

    trust = arguments.trust_remote_code
    base = load_model(name, trust_remote_code=trust, head=head_of_task(config.get("task_type")), dtype="auto")
    model = load_adapters(base, str(adapter))
    save_merged(model, output, dtype=getattr(torch, arguments.dtype) if arguments.dtype else None)
    has_tokenizer = _save_tokenizer(str(adapter), name, output, trust)
    print(f"The merged model is in {output}" + ("." if has_tokenizer else "; no tokenizer was found to write with it."))
    return 0


def _adapter_config(adapter: Path) -> dict[str, Any]:
    if not adapter.is_dir():
        raise UsageError(f"--adapter: there is no folder {str(adapter)!r}")
    file = adapter / ADAPTER_FILE
    if not file.is_file():
        raise UsageError(f"--adapter: {adapter} has no {ADAPTER_FILE}, so it is no adapter's folder")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def _save_tokenizer(adapter: str, model: str, output: Path, trust: bool) -> bool:
    """Writes the adapter's tokenizer, or the model's; whether there is one."""
    from lowtide.engine.weights.loading import load_tokenizer

    for source in (adapter, model):
        if source == adapter and not Path(source, "tokenizer_config.json").is_file():
            continue
        try:
            load_tokenizer(source, trust_remote_code=trust).save_pretrained(output)
        except ValueError:
            continue
        return True
    return False
