"""The settings of a plan as another trainer is given them: taken one after the other, so that what is left has no word
there and is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from transformers import AutoConfig, TrainingArguments

from lowtide.compat.peft import own_targets
from lowtide.methods import METHODS
from lowtide.option_values import Option, options_of
from lowtide.planner.answers.known_models import known_config
from lowtide.planner.answers.row_lengths import BATCH
from lowtide.planner.answers.translated import Translated
from lowtide.planner.devices import Device, device_named
from lowtide.planner.plan import Plan
from lowtide.run.options.configs import config_class

STEPS, LENGTH = "gradient_accumulation_steps", "max_length"
WRITTEN = (
    *(BATCH, STEPS, LENGTH, "gradient_checkpointing", "optim", "learning_rate", "packing", "padding_free"),
    *("max_completion_length", "num_generations"),
)
"""Options that are written in any case, since the defaults of other trainers are others."""
OURS = {
    "tokens_per_microbatch": "micro-batches are counted in rows, so a few long rows take more than predicted",
    "chain_storage": "rows are not run in pieces",
    "optimizer_in_backward": "gradients of all weights are there at once",
    "optimizer_states_on_host": "the optimizer's states stay on the device",
    "checkpointing_every": "layers are checkpointed all or none",
    "checkpointing_policy": "a checkpointed layer keeps nothing",
    "ref_model_storage": "the reference stays in the precision of the policy, on the device",
    "precompute_ref_log_probs": "the reference stays on the device, and is computed in each step",
    "activation_offloading": "what backward needs stays on the device",
    "activation_memory_budget": "compiled graphs choose what they keep",
    "mlp_tile_tokens": "an MLP sees all tokens of a micro-batch at once",
    "attention_head_chunks": "attention computes all heads at once",
    "fused_layers": "layers run operation by operation, and keep more",
    "base_weights": "weights that are not trained are on the device, all at once",
    "base_dtype": "weights that are not trained stay in the precision that they are loaded in",
    "float8_products": "products are in the precision of the run",
    "trained_weights": "all weights and the optimizer's states are on the device at once",
    "fsdp_split_vocabulary": "head and embedding are gathered whole",
    "pipeline_parallel_size": "each device has all layers",
}
"""Memory techniques that other trainers lack, or some, with what follows."""
SPREAD = {
    "num_processes": "it runs on one device, and nothing is shared with others",
    "fsdp": "each device holds all weights, gradients and states",
    "fsdp_config": "weights stay on the devices, and are let go after forward",
    "parallelism_config": "no devices share a row or a layer, and shards are over all devices",
}
"""How a run is spread, with what follows where a trainer lacks it."""
EVALUATION = ("eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model")
"""Options that have a run evaluated, and need rows for it."""
PAIRED = ("dpo", "orpo", "cpo", "kto", "bco", "reward")
TWO_SIDES = ("dpo", "orpo", "reward")
"""Methods whose rows other trainers run as two sequences, each with the prompt."""


@dataclass(kw_only=True)
class Given(Translated):
    """A plan's settings."""

    method: str
    model: str | None
    processes: int = 1
    nodes: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Given:
        """The settings of a plan: its own, the user's, and the defaults that matter for memory."""
        own = {**plan.requested, **plan.settings}
        options = _options(plan.method)
        values = {name: options[name].default for name in WRITTEN if name in options} | own
        if values.get("bf16") is None:
            values["bf16"] = not values.get("fp16") and _has_bf16(plan)
        device, fused = _device_of(plan), values.pop("fused_layers", None)
        if fused or (fused is None and (device is None or device.kind == "cuda")):
            values["fused_layers"] = True  # on a GPU lowtide's own are by themselves
        cluster = None if plan.spread is None else plan.spread.cluster
        given = cls(method=plan.method, model=values.get("model"), left=values)
        if cluster is not None and cluster.devices > 1:
            given.processes, given.nodes = cluster.devices, cluster.nodes
            values["num_processes"] = cluster.devices
        given.count_rows()
        return given

    def count_rows(self) -> None:
        """Has a token budget be rows of a micro-batch, and as many micro-batches as make the same batch."""
        tokens = self.left.get("tokens_per_microbatch")
        if not tokens:
            return
        rows, length = self.left[BATCH], self.left.get(LENGTH) or 1024
        row = length * (2 if self.method in TWO_SIDES else 1)
        batch, fits = rows * self.left[STEPS], max(1, min(rows, int(tokens) // row))
        self.left |= {BATCH: fits, STEPS: math.ceil(batch / fits)}
        more = "" if int(tokens) >= row else ", and rows are not run in pieces"
        self.lacks["tokens_per_microbatch"] = OURS["tokens_per_microbatch"] + more

    def drop_evaluation(self, why: str) -> None:
        """Leaves out that a run is evaluated, where the other trainer would not find the rows for it."""
        asked = self.left.get("eval_strategy", "no")
        for name in EVALUATION:
            self.left.pop(name, None)
        if asked != "no":
            self.lacks["eval_strategy"] = f"{why}, so that nothing is evaluated"

    def take_adapted_layers(self) -> list[str] | str | None:
        """The layers that get adapters: their names, `all-linear`, or None where PEFT's choice is not known here."""
        asked = self.take("lora_target_modules")
        if asked is not None:
            return [asked] if isinstance(asked, str) and asked.isidentifier() else asked
        found = _chosen_by_peft(self.model)
        if found is None:
            self.lacks["lora_target_modules"] = (
                "PEFT chooses the layers, and its choice for this model is not known here"
            )
        return found

    def take_optimizer(self, name: str, translated: Callable[[str], str | None]) -> None:
        """Writes the optimizer under a name; one that only lowtide has leaves the default."""
        optimizer = self.take("optim")
        found = None if optimizer is None else translated(optimizer)
        if found is not None:
            self.written[name] = found
        elif optimizer is not None:
            self.lacks["optim"] = f"{optimizer} is lowtide's: AdamW with float32 states stands in its place"

    def lacking(self) -> dict[str, str]:
        """By our option with its value, what follows from its lack: of all that was not translated."""
        options, found = _options(self.method), {}
        for name, value in self.left.items():
            option = options.get(name)
            default = None if option is None else option.default
            off = value == default if name in OURS else not value and (option is None or value == default)
            if name not in self.lacks and not off:
                help = "" if option is None else option.help.split(". ")[0].rstrip(".")
                why = {**OURS, **SPREAD}.get(name) or help or "no word for it"
                found[f"{name} ({_text(value)})"] = why
        return {**found, **self.lacks}


def _options(method: str) -> Mapping[str, Option]:
    return options_of(config_class(METHODS[method]))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _has_bf16(plan: Plan) -> bool:
    """Whether lowtide's run would compute in bfloat16, where nobody says so."""
    device = _device_of(plan)
    return device is None or device.has_bf16


def _device_of(plan: Plan) -> Device | None:
    """None: a GPU of this machine that is in no table."""
    if plan.spread is not None:
        return plan.spread.cluster.device
    try:
        return device_named(plan.device)
    except ValueError:
        return None


def _chosen_by_peft(model: str | None) -> list[str] | str | None:
    """The layers that PEFT adapts where nobody names any; None where the model is not known here."""
    config = None if model is None else known_config(model)
    if config is None and model is not None:
        try:
            config = AutoConfig.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError):
            return None
    if config is None:
        return None
    found = own_targets(LoraConfig(), config.model_type)
    return found if found is None or isinstance(found, str) else sorted(found)


INHERITED = frozenset(options_of(TrainingArguments))
"""Options of `transformers.TrainingArguments`, which TRL and LLaMA-Factory have as well."""
