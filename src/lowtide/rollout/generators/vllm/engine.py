"""vLLM in this process: what the server and the colocated generator share.

The engine is told tokens, and answers with tokens and the log-probabilities of the distribution that they were drawn
from. Each completion is a request of its own with a seed of its own; vLLM's prefix cache computes their prompt once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.compat.vllm import check_version, part_of_vllm
from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.vllm.adapters import AdapterFolders
from lowtide.rollout.generators.vllm.facts import Facts, adapter_room, dtype_of, shapes_of
from lowtide.rollout.generators.vllm.turns import UNKNOWN, Job, Turn, WrittenTurn
from lowtide.rollout.generators.vllm.worker import RECEIVER

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM is started with."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How vLLM is started; None leaves it to vLLM."""

    model: str
    """A folder or hub name."""
    dtype: str = "auto"
    max_model_length: int | None = None
    """The most tokens of a prompt with its completion."""
    gpu_memory_utilization: float | None = None
    """The share of a GPU's memory, or of a CPU's, that weights and cache may take."""
    kv_cache_bytes: int | None = None
    """Of the cache, in place of that share."""
    tensor_parallel_size: int = 1
    model_impl: str = "auto"
    structured_outputs_regex: str | None = None
    """What completions must match."""
    enable_sleep_mode: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    max_lora_rank: int = 0
    """The most of adapters that it takes beside its weights; 0: none."""
    max_loras: int = 4
    """Versions of the adapter that it holds at a time."""
    empty: bool = False
    """There are no weights to read: they will be copied."""


class Engine:
    """A `vllm.LLM` whose weights can be replaced.

    Raises:
        ValueError: vLLM is missing or of another version, or it cannot start; says why.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.vllm = check_version()
        self.options = options
        if options.enable_sleep_mode and not torch.cuda.is_available():
            raise ValueError(
                "vllm_enable_sleep_mode=True needs CUDA, whose memory vLLM can give back and map again: this machine "
                "has none. Leave it out"
            )
        if options.tensor_parallel_size == 1:
            # The engine in this process: weights reach it without a copy.
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:  # its workers are processes, and tensors travel to them
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        try:
            self.llm: Any = part_of_vllm("vllm").LLM(**self._arguments())
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"vLLM cannot start with {options.model}: {error}") from error
        self._adapters: dict[str, Any] = {}
        self._folders, self._numbers = AdapterFolders(), itertools.count(1)

    def _arguments(self) -> dict[str, Any]:
        options = self.options
        given = {
            "max_model_len": options.max_model_length,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "kv_cache_memory_bytes": options.kv_cache_bytes,
        }
        return {
            "model": options.model,
            "dtype": options.dtype,
            "tensor_parallel_size": options.tensor_parallel_size,
            "model_impl": options.model_impl,
            "enable_sleep_mode": options.enable_sleep_mode,
            "trust_remote_code": options.trust_remote_code,
            "seed": options.seed,
            "load_format": "dummy" if options.empty else "auto",
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": RECEIVER,
            "enforce_eager": not torch.cuda.is_available(),
            "disable_log_stats": True,
            **self._room_for_adapters(),
            **{name: value for name, value in given.items() if value is not None},
        }

    def _room_for_adapters(self) -> dict[str, Any]:
        asked, count = self.options.max_lora_rank, self.options.max_loras
        if not asked:
            return {}
        rank = next((each for each in LORA_RANKS if each >= asked), asked)
        return {"enable_lora": True, "max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        """vLLM's own of the model."""
        return self.llm.llm_engine.model_config

    @property
    def facts(self) -> Facts:
        """What tells its model from others."""
        room = adapter_room(self.llm.llm_engine.vllm_config)
        return Facts(self.options.model, self.max_model_length, shapes_of(self.config), dtype_of(self.config), room)

    @property
    def max_model_length(self) -> int:
        return int(self.config.max_model_len)

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, jobs: Sequence[Job]) -> list[list[WrittenTurn]]:
        """One completion of each turn of each job, all of which are written together."""
        asked = [(turn, sampling, adapter) for turns, sampling, adapter in jobs for turn in turns]
        prompts = [{"prompt_token_ids": turn.token_ids} for turn, *_ in asked]
        how = [self._params(turn, sampling) for turn, sampling, _ in asked]
        given: dict[str, Any] = {}
        if self._adapters:
            given["lora_request"] = [None if adapter is None else self._adapters[adapter] for *_, adapter in asked]
        found = iter(self.llm.generate(prompts, sampling_params=how, use_tqdm=False, **given))
        return [[self._written(next(found).outputs[0], sampling) for _ in turns] for turns, sampling, _ in jobs]

    def _params(self, turn: Turn, sampling: Sampling) -> Any:
        more: dict[str, Any] = {}
        if sampling.stop_strings:
            more = {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True}
        if self.options.structured_outputs_regex is not None and not sampling.unconstrained:
            constrained = part_of_vllm("vllm.sampling_params").StructuredOutputsParams
            more["structured_outputs"] = constrained(regex=self.options.structured_outputs_regex)
        return part_of_vllm("vllm").SamplingParams(
            max_tokens=turn.most,
            seed=turn.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,  # the stop tokens above are all that end a completion
            detokenize=bool(sampling.stop_strings),
            logprobs=0,
            **more,
        )

    @staticmethod
    def _written(output: Any, sampling: Sampling) -> WrittenTurn:
        ids = list(output.token_ids)
        logprobs = [
            float(each[token].logprob) if token in each else UNKNOWN
            for token, each in zip(ids, output.logprobs, strict=True)
        ]
        stopped = output.finish_reason == "stop" or (bool(ids) and ids[-1] in sampling.stop_ids)
        return WrittenTurn(ids, logprobs, "stop" if stopped else "length")

    # -- weights -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Weights follow, of some blocks or of all, which are another base than that of the adapters."""
        for name in [*self._adapters]:
            self.drop_adapter(name)
        self.llm.collective_rpc("lowtide_begin")

    def load(self, weights: dict[str, Tensor]) -> None:
        """Some weights, under the names of checkpoints."""
        self.llm.collective_rpc("lowtide_load", args=(weights,))

    def end(self) -> None:
        """These were all: what is cached of the old ones is forgotten."""
        self.llm.collective_rpc("lowtide_end")
        self.llm.reset_prefix_cache()

    def put_adapter(self, name: str, data: bytes) -> None:
        """An adapter beside the weights, as `adapter_file` has it.

        Raises:
            ValueError: vLLM does not take it; says why.
        """
        number = next(self._numbers)
        request = part_of_vllm("vllm.lora.request").LoRARequest(name, number, self._folders.put(name, data))
        try:
            self.llm.llm_engine.add_lora(request)
        except Exception as error:
            self._folders.drop(name)
            raise ValueError(f"vLLM does not take the adapter: {error}") from error
        self._adapters[name] = request

    def drop_adapter(self, name: str) -> None:
        """Nothing is written by it any more."""
        if (request := self._adapters.pop(name, None)) is not None:
            self.llm.llm_engine.remove_lora(request.lora_int_id)
        self._folders.drop(name)

    def sleep(self) -> None:
        """Gives the memory of weights and cache back; the weights are lost."""
        self.llm.sleep(level=2)

    def wake(self, what: str) -> None:
        """Takes the memory of "weights" or of the "kv_cache" again."""
        self.llm.wake_up(tags=[what])
