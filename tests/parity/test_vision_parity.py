"""lowtide's SFTTrainer, DPOTrainer, GRPOTrainer and RLOOTrainer against TRL 1.16's on rows with images: steps from the
same weights.

TRL pads rows, and runs the vision tower for each side of a pair and for each completion of a prompt. It scores the
places of images where it scores whole rows, which is left out here: prompts are not scored.
"""

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from lowtide.rollout.generators.generator import Completion
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.marks import slow_but
from tests.support.models.vision_models import FAMILIES, processor, rows, vision_model
from tests.support.references.parity_world import (
    ACCUMULATED,
    COMMON,
    EXTREMES,
    FIRST_STEPS,
    STEPS,
    assert_metrics_agree,
    train,
)

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS = COMMON | {"learning_rate": 1e-3, "max_length": None}
UNLIKE = ("logits/chosen", "logits/rejected", "step_time")
QUICK = "qwen2_5_vl"
LORA = ["q_proj", "v_proj", "down_proj", "qkv", "fc1"]
"""In the language model, and in the tower of each family."""


def as_messages(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in made]


def as_completions(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"]} for row in made]


def one_image(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Texts in place of parts; the one image is shown before the first."""
    return [
        {
            "image": row["images"][0],
            "prompt": [{"role": "user", "content": f"What is {number}?"}],
            "completion": [{"role": "assistant", "content": row["chosen"][0]["content"][0]["text"]}],
        }
        for number, row in enumerate(made)
    ]


FORMATS: dict[str, Any] = {
    "messages": (as_messages, {"assistant_only_loss": True}),
    "completions": (as_completions, {}),
    "one image": (one_image, {}),
}


def losses(library: Any, name: str, family: str, made: list[dict[str, Any]], folder: Path, lora: bool, **flags: Any):
    config, trainer = getattr(library, f"{name}Config"), getattr(library, f"{name}Trainer")
    adapters = {"peft_config": LoraConfig(r=4, target_modules=LORA)} if lora else {}
    if name == "DPO" and not lora:
        adapters = {"ref_model": vision_model(family)}
    torch.manual_seed(0)  # adapters are drawn
    return train(
        trainer(
            model=vision_model(family),
            args=config(output_dir=str(folder / library.__name__), **SETTINGS, **flags),
            train_dataset=Dataset.from_list(made),
            processing_class=processor(family),
            **adapters,
        )
    )


def assert_agree(name: str, family: str, made: list[dict[str, Any]], folder: Path, *, lora: bool = False, **flags: Any):
    expected, found = (losses(each, name, family, made, folder, lora, **flags) for each in (trl, lowtide))
    assert len(found["loss"]) == flags["max_steps"]
    for metric in ("loss", "grad_norm"):
        torch.testing.assert_close(found[metric], expected[metric], rtol=1e-4, atol=1e-5)
    assert_metrics_agree(found, expected, unlike=UNLIKE)


@pytest.mark.parametrize("format", slow_but(["messages"], FORMATS))
@pytest.mark.parametrize("family", slow_but([QUICK], FAMILIES))
def test_sft_follows_trl(family: str, format: str, tmp_path: Path) -> None:
    shaped, flags = FORMATS[format]
    steps = STEPS if format == "completions" else FIRST_STEPS
    assert_agree("SFT", family, shaped(rows(40)), tmp_path, max_steps=steps, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sft_of_adapters_on_tower_and_language_model_follows_trl(family: str, tmp_path: Path) -> None:
    made = as_completions(rows(24))
    assert_agree("SFT", family, made, tmp_path, max_steps=FIRST_STEPS, lora=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_dpo_follows_trl(family: str, tmp_path: Path) -> None:
    assert_agree("DPO", family, rows(40), tmp_path, max_steps=STEPS)


@pytest.mark.parametrize("family", slow_but([QUICK], FAMILIES))
def test_dpo_of_adapters_follows_trl(family: str, tmp_path: Path) -> None:
    assert_agree("DPO", family, rows(24), tmp_path, max_steps=FIRST_STEPS, lora=True)


class Written:
    """Completions of random tokens, some of which end; the same again from a new one, whoever asks."""

    def __init__(self) -> None:
        self.asked: dict[tuple[int, ...], int] = {}

    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        made = []
        for prompt in map(tuple, prompts):
            times = self.asked[prompt] = self.asked.get(prompt, 0) + 1
            rng = random.Random(f"{prompt} {times}")
            made.append([*[rng.randrange(1, 259) for _ in range(rng.randint(2, 9))], *[0] * (rng.random() < 0.6)])
        return made


class GivenCompletions(RaggedGenerator):
    """A generator whose completions are `Written`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Written()

    def generate(self, model: Any, requests: Any, sampling: Any, reply: Any = None) -> list[list[Completion]]:
        return [[completion(ids)] for ids in self.written([list(request.prompt_ids) for request in requests])]


def completion(ids: list[int]) -> Completion:
    """Of tokens whose log-probabilities nobody said."""
    unknown = [float("nan")] * len(ids)
    return Completion(ids, unknown, unknown, [True] * len(ids), "stop" if ids[-1] == 0 else "length")


def brief(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs within a group."""
    return [-len(ids) / 10 for ids in completion_ids]


def online_metrics(library: Any, method: str, family: str, folder: Path, lora: bool, **flags: Any) -> Any:
    settings = {name: each for name, each in COMMON.items() if name != "train_sampling_strategy"}
    settings |= {"learning_rate": 1e-3, "max_steps": FIRST_STEPS}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 10}
    torch.manual_seed(0)  # adapters are drawn
    vision_model(family).save_pretrained(str(folder / "model"))  # TRL loads its reference from there
    own = processor(family)
    own.tokenizer.padding_side = "left"  # TRL pads prompts there, and takes it that the processor does
    made = getattr(library, f"{method}Trainer")(
        model=type(vision_model(family)).from_pretrained(str(folder / "model")),
        reward_funcs=brief,
        args=getattr(library, f"{method}Config")(output_dir=str(folder / library.__name__), **settings | flags),
        train_dataset=Dataset.from_list([{"images": row["images"], "prompt": row["prompt"]} for row in rows(12)]),
        processing_class=own,
        **({"peft_config": LoraConfig(r=4, target_modules=LORA)} if lora else {}),
    )
    if library is lowtide:
        made.maker.generator = GivenCompletions()
    else:
        written = Written()

        def generate(prompt_ids: Any, *rest: Any, **more: Any) -> Any:
            ids = written([*map(list, prompt_ids)])
            return ids if method == "RLOO" else (ids, None)

        made._generate_single_turn = generate
    return train(made)


ONLINE = {
    "GRPO": ("GRPO", False, {}),
    "GRPO, reference": ("GRPO", False, {"beta": 0.1}),
    "GRPO, several iterations": (
        *("GRPO", False),
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2},
    ),
    "GRPO, adapters": ("GRPO", True, {"beta": 0.1, "learning_rate": 5e-3}),
    "RLOO": ("RLOO", False, {}),
}


@pytest.mark.parametrize("case", slow_but(["GRPO"], ONLINE, swept=["GRPO, reference"]))
@pytest.mark.parametrize("family", slow_but([QUICK], FAMILIES))
def test_what_is_written_after_images_is_learned_from_as_by_trl(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, lora, flags = ONLINE[case]
    for name in ("grpo_trainer", "rloo_trainer"):  # groups stay together here; TRL deals a window's completions out
        module = importlib.import_module(f"trl.trainer.{name}")
        monkeypatch.setattr(module, "shuffle_sequence_dict", lambda batch: batch)
    expected, found = (online_metrics(each, method, family, tmp_path, lora, **flags) for each in (trl, lowtide))
    assert len(found["loss"]) == FIRST_STEPS
    torch.testing.assert_close(found["grad_norm"], expected["grad_norm"], rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-4, atol=1e-5)
    assert expected["grad_norm"].max() > 0
    accumulated = "gradient_accumulation_steps" in flags
    unlike = (*UNLIKE, *EXTREMES * accumulated)
    assert_metrics_agree(found, expected, unlike=unlike, near=ACCUMULATED if accumulated else {})
