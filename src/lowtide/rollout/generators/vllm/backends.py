"""The servers that a trainer can speak to: `lowtide vllm-serve`, and vLLM's own `vllm serve`.

vLLM's own takes weights where it is started with

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \\
        --worker-extension-cls lowtide.rollout.generators.vllm.worker.WeightReceiver

and adapters beside them with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank N --max-loras 4,
in an environment that lowtide is installed in too. What it cannot do is refused with what is missing.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Self

from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.vllm.facts import AdapterRoom, Facts
from lowtide.rollout.generators.vllm.http import Calls, Refused
from lowtide.rollout.generators.vllm.label import ADAPTER_NAMES, Label
from lowtide.rollout.generators.vllm.server import PROTOCOL
from lowtide.rollout.generators.vllm.turns import UNKNOWN, Turn, WrittenTurn, answer_of_json, to_json
from lowtide.rollout.generators.vllm.worker import RECEIVER

AT_A_TIME = 32
"""Completions that are asked of `vllm serve` at a time: each is a call of its own, for it has a seed of its own."""
BYTES_OF_TOKEN = 1024
"""The most that an answer has for a token: its number, its log-probability and its text."""
OWN = "lowtide vllm-serve --model MODEL"


class Spoken:
    """A server that calls are made of.

    Args:
        at_a_time: the most completions that it is asked for; None leaves it to the kind of server.
    """

    most = 1
    """The part of a bucket's bytes that it takes at a time, as a divisor."""

    def __init__(self, calls: Calls, regex: str | None, at_a_time: int | None) -> None:
        self.calls, self.regex, self.at_a_time = calls, regex, at_a_time

    @property
    def whose(self) -> str:
        """It, for messages."""
        return f"the vLLM server at {self.calls.url}"

    def by(self, calls: Calls) -> Self:
        """The same server by other calls."""
        if calls is self.calls:
            return self
        other = copy.copy(self)
        other.calls = calls
        return other


class LowtideServer(Spoken):
    """`lowtide vllm-serve`."""

    def __init__(self, calls: Calls, info: dict[str, Any], regex: str | None, at_a_time: int | None = None) -> None:
        super().__init__(calls, regex, at_a_time)
        self.info = info
        if info.get("protocol") != PROTOCOL:
            raise ValueError(
                f"the server at {calls.url} is of another version of lowtide (protocol {info.get('protocol')}, here "
                f"{PROTOCOL}): install the same one on both sides"
            )
        if regex != info.get("regex"):
            raise ValueError(
                f"vllm_structured_outputs_regex={regex!r}, but the server at {calls.url} was started with "
                f"{info.get('regex')!r}: start it with the same --structured_outputs_regex"
            )

    def facts(self) -> Facts:
        """What it serves."""
        info = self.info
        return Facts(
            info["model"], info["max_model_length"], info["shapes"], info["dtype"], AdapterRoom(**info["adapters"])
        )

    def labels(self) -> list[Any]:
        """Those of the weights that it holds, and of adapters on them."""
        return self.calls.get("/info")["labels"]

    def begin(self, label: Label) -> None:
        self.calls.post("/weights/begin", {"label": asdict(label)})

    def send(self, label: Label, bucket: bytes) -> None:
        self.calls.post_bytes("/weights/bucket", bucket, {"X-Run": label.run})

    def end(self, label: Label, buckets: int) -> None:
        self.calls.post("/weights/end", {"label": asdict(label), "buckets": buckets})

    def send_adapter(self, label: Label, adapter: bytes) -> None:
        """One more version beside those that it holds."""
        self.calls.post_bytes("/adapters/put", adapter, {})

    def drop_adapter(self, label: Label) -> None:
        """One that nothing is written by any more."""
        self.calls.post("/adapters/drop", {"label": asdict(label)})

    def write(self, turns: Sequence[Turn], sampling: Sampling, label: dict[str, Any]) -> tuple[Any, list[WrittenTurn]]:
        """The label of the weights that wrote, and what they did."""
        held: Any = label
        written: list[WrittenTurn] = []
        each = self.at_a_time or max(len(turns), 1)
        for asked in (turns[start : start + each] for start in range(0, len(turns), each)):
            try:
                most = sum(turn.most for turn in asked) * BYTES_OF_TOKEN
                found = self.calls.post("/generate", {"label": label, **to_json(asked, sampling)}, most)
            except Refused as error:
                if error.status != 409:
                    raise
                return held_of(self.labels(), label), []
            held = found.get("label") if held == label else held
            written += answer_of_json(found.get("completions"))
        return held, written


class VLLMServe(Spoken):
    """vLLM's own server.

    Raises:
        ValueError: it cannot take weights, or says other log-probabilities than those that it draws by.
    """

    most = 2  # a bucket is text there

    def __init__(self, calls: Calls, regex: str | None, at_a_time: int | None = None) -> None:
        super().__init__(calls, regex, at_a_time)
        self.card = calls.get("/v1/models")["data"][0]
        try:
            config = calls.get("/server_info?config_format=json")["vllm_config"]["model_config"]
        except Refused as error:
            raise ValueError(
                f"the server at {calls.url} is a `vllm serve` that takes no weights: start it with "
                f"VLLM_SERVER_DEV_MODE=1 in its environment, --worker-extension-cls {RECEIVER} and --logprobs-mode "
                f"processed_logprobs, or start `{OWN}` in its place"
            ) from error
        if config.get("logprobs_mode") != "processed_logprobs":
            raise ValueError(
                f"the server at {calls.url} says log-probabilities of another distribution than it draws from "
                f"(--logprobs-mode {config.get('logprobs_mode')}): start it with processed_logprobs, or start "
                f"`{OWN}` in its place"
            )
        try:
            self.labels()
        except Refused as error:
            raise ValueError(
                f"the server at {calls.url} is a `vllm serve` without lowtide in its workers: start it with "
                f"--worker-extension-cls {RECEIVER}, or start `{OWN}` in its place"
            ) from error

    def facts(self) -> Facts:
        told = self._rpc("lowtide_facts")
        room = AdapterRoom(**told["adapters"])
        return Facts(self.card["id"], self.card.get("max_model_len"), told["shapes"], told["dtype"], room)

    def _rpc(self, method: str, *args: str) -> Any:
        found = self.calls.post("/collective_rpc", {"method": method, "args": list(args)})
        return None if found is None else found["results"][0]

    def labels(self) -> list[Any]:
        return self._rpc("lowtide_labels")

    def begin(self, label: Label) -> None:
        for each in self.calls.get("/v1/models")["data"]:  # those of a run that ended, too
            if each["id"].startswith(ADAPTER_NAMES):
                self.calls.tell("/v1/unload_lora_adapter", {"lora_name": each["id"]})
        self._rpc("lowtide_begin")

    def send(self, label: Label, bucket: bytes) -> None:
        self._rpc("lowtide_load_text", base64.b64encode(bucket).decode())

    def end(self, label: Label, buckets: int) -> None:
        self._rpc("lowtide_end", json.dumps(asdict(label)))
        self.calls.post("/reset_prefix_cache")

    def send_adapter(self, label: Label, adapter: bytes) -> None:
        path = self._rpc("lowtide_put_adapter", label.name, base64.b64encode(adapter).decode())
        self.calls.tell("/v1/load_lora_adapter", {"lora_name": label.name, "lora_path": path})

    def drop_adapter(self, label: Label) -> None:
        self.calls.tell("/v1/unload_lora_adapter", {"lora_name": label.name})
        self._rpc("lowtide_drop_adapter", label.name, json.dumps(asdict(label)))

    def write(self, turns: Sequence[Turn], sampling: Sampling, label: dict[str, Any]) -> tuple[Any, list[WrittenTurn]]:
        who = Label(**label).name if label["adapter"] else self.card["id"]
        try:
            with ThreadPoolExecutor(self.at_a_time or AT_A_TIME) as pool:
                found = list(pool.map(lambda turn: self._one(turn, sampling, who), turns))
        except Refused as error:
            if error.status != 404:
                raise
            found = []  # there is no such adapter any more
        return held_of(self.labels(), label), found

    def _one(self, turn: Turn, sampling: Sampling, who: str) -> WrittenTurn:
        free = self.regex is None or sampling.unconstrained
        more = {} if free else {"structured_outputs": {"regex": self.regex}}
        asked = {
            "model": who,
            "prompt": turn.token_ids,
            "max_tokens": turn.most,
            "seed": turn.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": True,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            **more,
        }
        try:
            choice = self.calls.post("/v1/completions", asked, turn.most * BYTES_OF_TOKEN)["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            numbers = [UNKNOWN if each is None else float(each) for each in choice["logprobs"]["token_logprobs"]]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the server at {self.calls.url} answered /v1/completions without {error}") from error
        stopped = choice.get("finish_reason") == "stop" or (bool(ids) and ids[-1] in sampling.stop_ids)
        return WrittenTurn(ids, numbers, "stop" if stopped else "length")


def held_of(labels: Sequence[Any], label: dict[str, Any]) -> Any:
    """Of the labels of what a server holds the one that is asked for, or else its newest; None where there is none."""
    return label if label in labels else labels[-1] if labels else None


def backend_at(calls: Calls, regex: str | None, at_a_time: int | None = None) -> LowtideServer | VLLMServe:
    """The interface of the server at an address.

    Args:
        at_a_time: as of `Spoken`.

    Raises:
        ServerError: there is none.
        ValueError: it cannot be trained with; says why.
    """
    try:
        info = calls.get("/info")
    except Refused:
        info = None
    if isinstance(info, dict) and info.get("server") == "lowtide":
        return LowtideServer(calls, info, regex, at_a_time)
    try:
        return VLLMServe(calls, regex, at_a_time)
    except Refused as error:
        raise ValueError(f"what answers at {calls.url} is no vLLM server: start `{OWN}`") from error
