"""`lowtide vllm-serve --model M`: vLLM behind HTTP, for `use_vllm=True` with `vllm_mode="server"`.

It runs where vLLM is installed, which may be another environment or machine than the training's.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from lowtide.compat.argparse import Subparsers

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "vllm-serve",
        help="start vLLM as a server that writes completions for a training",
        description="Start vLLM (0.30 to 0.32) as a server. A training with use_vllm=True and vllm_mode=server copies "
        "its weights into it, and has it write. A call has to tell the server's secret, which your trainings on this "
        "machine find by themselves. Elsewhere LOWTIDE_VLLM_TOKEN says it, on both sides.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="the model that is trained: a folder or hub name")
    add("--host", default="127.0.0.1", help="the address that it listens at [%(default)s: this machine alone]")
    add("--port", type=int, default=8000, metavar="N", help="0 takes a free one [%(default)s]")
    add("--dtype", choices=DTYPES, default="auto", help="of weights and computation [%(default)s]")
    add("--max_model_length", type=int, metavar="N", help="most tokens of a prompt with its completion")
    add("--gpu_memory_utilization", type=float, metavar="X", help="the share of memory that vLLM takes")
    add("--kv_cache_bytes", type=int, metavar="N", help="bytes of keys and values, in place of that share")
    add("--tensor_parallel_size", type=int, default=1, metavar="N", help="GPUs that it runs on [%(default)s]")
    add(
        "--max_lora_rank",
        type=int,
        default=0,
        metavar="N",
        help="take LoRA adapters of at most this rank without their base; 0: adapters come merged [%(default)s]",
    )
    add("--max_loras", type=int, default=4, metavar="N", help="versions of the adapter held at a time [%(default)s]")
    add("--model_impl", choices=("auto", "vllm", "transformers"), default="auto", help="whose model code it runs")
    add("--structured_outputs_regex", metavar="TEXT", help="what completions must match")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted; the exit status.

    Raises:
        ValueError: vLLM is missing, of another version, or cannot start.
        OSError: the port is taken.
    """
    from lowtide.rollout.generators.vllm.engine import Engine, EngineOptions
    from lowtide.rollout.generators.vllm.server import PROTOCOL, Service, serve

    regex = arguments.structured_outputs_regex
    engine = Engine(
        EngineOptions(
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_length=arguments.max_model_length,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            kv_cache_bytes=arguments.kv_cache_bytes,
            tensor_parallel_size=arguments.tensor_parallel_size,
            model_impl=arguments.model_impl,
            max_lora_rank=arguments.max_lora_rank,
            max_loras=arguments.max_loras,
            structured_outputs_regex=regex,
            trust_remote_code=arguments.trust_remote_code,
        )
    )
    facts = engine.facts
    info = {
        "server": "lowtide",
        "protocol": PROTOCOL,
        "vllm": engine.vllm,
        "model": facts.model,
        "max_model_length": facts.max_model_length,
        "shapes": facts.shapes,
        "dtype": facts.dtype,
        "adapters": asdict(facts.adapters),
        "regex": regex,
    }
    serve(Service(engine, info), arguments.host, arguments.port)
    return 0
