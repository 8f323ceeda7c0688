"""From options to the generator that has vLLM write."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from lowtide.compat.vllm import check_version
from lowtide.engine.forward import causal_model, embedding_weight
from lowtide.engine.weights.loading import has_adapters
from lowtide.methods.online.rollouts import RolloutOptions
from lowtide.ranks.world import launched
from lowtide.rollout.generators.generator import Generator
from lowtide.rollout.generators.vllm.colocated import VLLMColocatedGenerator
from lowtide.rollout.generators.vllm.engine import Engine, EngineOptions
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator, check_model


def make_vllm_generator(
    options: RolloutOptions, model: nn.Module, tokenizer: Any, padding_free: bool = True
) -> tuple[Generator, str]:
    """The generator that options ask for, and what it is in words.

    Raises:
        ConnectionError: the server does not answer.
        ValueError: it serves another model, vLLM is missing or of another version, or an option cannot work.
    """
    if options.vllm_mode == "server":
        return _remote(options, model, padding_free)
    if launched() > 1:
        raise ValueError(
            f"vllm_mode='colocate' runs on one rank, and {launched()} are started: start a server beside them "
            "(lowtide vllm-serve), and set vllm_mode='server'"
        )
    return _colocated(options, model, tokenizer, padding_free)


def _remote(options: RolloutOptions, model: nn.Module, padding_free: bool) -> tuple[Generator, str]:
    if options.vllm_enable_sleep_mode:
        raise ValueError(
            "vllm_enable_sleep_mode=True is for vllm_mode='colocate': a server has memory of its own. Leave it out"
        )
    url = options.vllm_server_base_url or f"http://{options.vllm_server_host}:{options.vllm_server_port}"
    made = VLLMServerGenerator(
        url,
        model,
        timeout=options.vllm_server_timeout,
        regex=options.vllm_structured_outputs_regex,
        limits=options.server_limits,
        padding_free=padding_free,
        computes_in=_dtype(options, model),
    )
    if made.copied.merged is None:
        return made, f"vLLM at {url}, which gets the weights of the base once, and then the adapters alone"
    adapters = f": {made.copied.merged}" if has_adapters(model) else ""
    return made, f"vLLM at {url}, which gets the weights in buckets{adapters}"


def _colocated(options: RolloutOptions, model: nn.Module, tokenizer: Any, padding_free: bool) -> tuple[Generator, str]:
    check_version()
    inner = causal_model(model)
    name = inner.config.name_or_path
    with tempfile.TemporaryDirectory() as folder:
        if not name:  # made in code: its shape is all that vLLM needs, for the weights are copied
            _describe(inner, tokenizer, Path(folder))
        engine = Engine(
            EngineOptions(
                model=name or folder,
                dtype=_dtype(options, model),
                max_model_length=options.vllm_max_model_length,
                gpu_memory_utilization=options.vllm_gpu_memory_utilization,
                tensor_parallel_size=options.vllm_tensor_parallel_size,
                model_impl=options.vllm_model_impl,
                structured_outputs_regex=options.vllm_structured_outputs_regex,
                enable_sleep_mode=options.vllm_enable_sleep_mode,
                trust_remote_code=bool(getattr(options, "trust_remote_code", False)),
                empty=not name,
            )
        )
    check_model(engine.facts, model, "in this process")
    sleeps = ", and sleeps while the policy is trained" if options.vllm_enable_sleep_mode else ""
    made = VLLMColocatedGenerator(
        engine,
        sleeps=options.vllm_enable_sleep_mode,
        checked_every=options.vllm_weight_check_interval,
        padding_free=padding_free,
        computes_in=_dtype(options, model),
    )
    return made, f"vLLM in this process{sleeps}"


def _dtype(options: Any, model: nn.Module) -> str:
    """What the policy computes in."""
    if getattr(options, "bf16", False):
        return "bfloat16"
    if getattr(options, "fp16", False):
        return "float16"
    return str(embedding_weight(model).dtype).removeprefix("torch.")


def _describe(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes all of a model but its weights."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config.pop("quantization_config", None)
    type(model.config).from_dict(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
