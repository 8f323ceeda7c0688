"""What is traced shares nothing with the run: all that estimate, plan, memory_budget and reports are given stays."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

import lowtide
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.planning import estimate, plan
from lowtide.step.rank_sync import OutOfMemory
from lowtide.trainers.budget import fit_budget
from tests.support.runs.sabotage import out_of_memory

TEXTS = [{"text": "17 + 5 = 22 " * count} for count in (4, 8, 16, 30)] * 2
PAIRS = [{"prompt": "17 + 5 = ", "chosen": "22", "rejected": "3 4"}] * 8
FEW = {
    "gradient_checkpointing": True,
    "checkpointing_policy": "full",
    "checkpointing_every": 1,
    "activation_offloading": False,
    "mlp_tile_tokens": None,
    "optimizer_in_backward": False,
}
"""With all of them set there is little to choose, and to trace."""


class Given:
    """What a user has: a method's config, a model, its adapters, tokenizer and rows."""

    def __init__(self, folder: Path, method: str = "SFT", **options: Any) -> None:
        always = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 1}
        kind = getattr(lowtide, f"{method}Config")
        self.trainer_class = getattr(lowtide, f"{method}Trainer")
        self.config = kind(**{**always, "save_strategy": "no", "lr_scheduler_kwargs": {}, **FEW, **options})
        self.processing_class = make_tokenizer()
        self.model = make_model(self.processing_class, seed=0)
        self.peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", modules_to_save=[])
        self.dataset = Dataset.from_list(TEXTS if method == "SFT" else PAIRS)

    def inputs(self) -> dict[str, Any]:
        return {"processing_class": self.processing_class, "peft_config": self.peft_config}

    def state(self) -> dict[str, Any]:
        """All that could be written to, as values."""
        tokenizer, rows = self.processing_class, self.dataset
        return copy.deepcopy(
            {
                "config": {each.name: getattr(self.config, each.name) for each in fields(self.config)},
                "requested": self.config.requested,
                "model config": self.model.config.to_dict(),
                "adapters": self.peft_config.to_dict(),
                "tokenizer": tokenizer_state(tokenizer),
                "rows": (rows._fingerprint, rows.format, rows.features, rows.to_list(), rows.cache_files),
                "weights": sorted(name for name, _ in self.model.named_parameters()),
            }
        )


def tokenizer_state(tokenizer: PreTrainedTokenizerFast) -> Any:
    return (
        json.loads(tokenizer.backend_tokenizer.to_str()),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        {name: str(value) for name, value in sorted(tokenizer.init_kwargs.items())},
        (tokenizer.padding_side, tokenizer.truncation_side, tokenizer.model_max_length),
    )


def trained(trainer: Any) -> list[str]:
    return sorted(name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad)


WRITING: Mapping[str, dict[str, Any]] = {"SFT": {"eos_token": "<|unknown|>"}, "Reward": {}}
"""By method, options with which its trainer writes into tokenizer and model config."""


@pytest.mark.slow
@pytest.mark.parametrize("method", WRITING)
def test_estimate_leaves_all_as_it_was(method, tmp_path):
    given = Given(tmp_path, method, **WRITING[method])
    given.processing_class.pad_token = None
    before = given.state()
    found = estimate(given.config, given.model.config, dataset=given.dataset, **given.inputs())
    assert found.peak_bytes > 0
    assert given.state() == before


@pytest.mark.slow
def test_plan_leaves_all_as_it_was(tmp_path):
    given = Given(tmp_path)
    before = given.state()
    found = plan(
        "sft", given.model.config, given.dataset, "64GiB", config=given.config, explain=False, **given.inputs()
    )
    assert found.traces
    assert given.state() == before


@pytest.mark.slow
def test_a_budget_changes_options_alone_and_trains_the_same(tmp_path):
    given = Given(tmp_path, memory_budget="64GiB")
    before = given.state()
    fitted = fit_budget(
        given.trainer_class.method, given.config, given.model, given.dataset, quantization_config=None, **given.inputs()
    )
    after = given.state()
    assert after.pop("config") == before.pop("config") | fitted.settings
    assert after == before
    made = given.trainer_class(given.model, given.config, train_dataset=given.dataset, **given.inputs())
    plain = Given(tmp_path)
    wanted = plain.trainer_class(plain.model, plain.config, train_dataset=plain.dataset, **plain.inputs())
    assert trained(made) == trained(wanted) != []
    assert {name.split(".layers.")[1][0] for name in trained(made)} == {"0", "1"}


@pytest.mark.slow
def test_a_report_of_exhausted_memory_leaves_all_as_it_was(tmp_path):
    given = Given(tmp_path, per_device_train_batch_size=1)
    made = given.trainer_class(given.model, given.config, train_dataset=given.dataset, **given.inputs())
    given.peft_config, given.dataset = made.model.peft_config["default"], made.train_dataset
    for module in made.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1  # with which a row is not run in pieces
    before, names = given.state(), trained(made)
    with out_of_memory(made.model, "backward", 0), pytest.raises(OutOfMemory, match="predicted peak") as caught:
        made.train()
    assert caught.value.failure is not None
    assert given.state() == before
    assert trained(made) == names
