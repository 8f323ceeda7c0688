"""The peak of a run on rows with images, as it is predicted and as tensors really hold it."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import lowtide
from lowtide import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from lowtide.planner.estimate import BESIDE_TENSORS
from lowtide.run.writing import Writer
from tests.support.marks import slow_but, slow_or_sweep
from tests.support.memory.live_bytes import LivingBytes
from tests.support.models.vision_families import family_config
from tests.support.models.vision_models import CONFIGS, FAMILIES, conversations, processor, rows, stored, vision_model
from tests.support.runs.online_runs import even_tokens


def described(family: str) -> Any:
    """Of more layers than are traced, with a tower of as many as are traced."""
    config = CONFIGS[family]()
    config.text_config.num_hidden_layers = 7
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"] * 7
    name = "depth" if family == "qwen2_5_vl" else "num_hidden_layers"
    setattr(config.vision_config, name, 5)
    return config


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 16,
        "max_steps": 2,
        "max_length": None,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "rehearsal": False,
        **options,
    }


CASES: dict[str, Any] = {
    "SFT": (SFTTrainer, SFTConfig, conversations, {}),
    "SFT, nothing checkpointed": (SFTTrainer, SFTConfig, conversations, {"gradient_checkpointing": False}),
    "SFT, frozen tower": (
        *(SFTTrainer, SFTConfig, conversations),
        {"gradient_checkpointing": False, "freeze_vision_tower": True},
    ),
    "DPO": (DPOTrainer, DPOConfig, rows, {}),
    "GRPO": (*(GRPOTrainer, GRPOConfig, rows), {"num_generations": 4, "max_completion_length": 16, "beta": 0.1}),
}

CELLS = [(family, case) for family in FAMILIES for case in CASES]


@pytest.mark.parametrize(("family", "case"), slow_or_sweep(CELLS, CELLS[::4]))
def test_the_peak_is_predicted_with_the_tower(family: str, case: str, tmp_path: Path) -> None:
    kind, config, make, options = CASES[case]
    made = Dataset.from_list(make(32))
    args = settings(tmp_path, **options)
    if config is GRPOConfig:
        del args["max_length"]
    predicted = lowtide.estimate(config(**args), described(family), dataset=made, processing_class=processor(family))
    model = vision_model(family, config=described(family))
    more = {DPOConfig: {"ref_model": None}, GRPOConfig: {"reward_funcs": even_tokens}}.get(config, {})
    run = kind(model, args=config(**args), train_dataset=made, processing_class=processor(family), **more)
    living = LivingBytes()
    with living, living.during("all"):
        run.train()
    assert predicted.tensor_bytes == pytest.approx(living.peaks["all"], rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", slow_but([False], [False, True]))
@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_what_writing_takes_is_predicted_with_the_tower(
    family: str, frozen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images of all prompts that are written for together pass through it, and nothing is kept of them. Images that
    wait in host memory are not counted."""
    made = Dataset.from_list(rows(32))
    options = {"num_generations": 4, "max_completion_length": 4, "steps_per_generation": 32, "optim": "sgd"}
    args = settings(tmp_path, per_device_train_batch_size=4, freeze_vision_tower=frozen, **options)
    args |= {"max_steps": 1}
    del args["max_length"]
    given = {"dataset": made, "processing_class": processor(family)}
    predicted = lowtide.estimate(GRPOConfig(**args), described(family), **given).phases["generate"]
    model = vision_model(family, config=described(family))
    run = GRPOTrainer(
        model,
        args=GRPOConfig(**args),
        train_dataset=made,
        processing_class=processor(family),
        reward_funcs=even_tokens,
    )
    living, write = LivingBytes(), Writer.write

    def counted(writer: Writer, *given: Any) -> Any:
        with living.during("generate"):
            return write(writer, *given)

    monkeypatch.setattr(Writer, "write", counted)
    with living:
        run.train()
    tensors = sum(size for name, size in predicted.items() if name not in BESIDE_TENSORS)
    reader: Any = run.training_run.reader
    ready = [reader.ready(stored(image)) for row in rows(32) for image in row["images"]]
    waiting = sum(value.nbytes for each in ready for value in each.shown.inputs.values())
    assert tensors == pytest.approx(living.peaks["generate"] - waiting, rel=0.06)


@pytest.mark.slow
def test_a_tower_whose_weights_are_drawn_until_they_are_in_a_range_is_described() -> None:
    """Without values there is no end to that: Siglip's."""
    predicted = lowtide.estimate(
        SFTConfig(output_dir="run", use_cpu=True, bf16=False, max_steps=2), family_config("gemma3"), lengths=[32] * 8
    )
    assert predicted.tensor_bytes > 0
