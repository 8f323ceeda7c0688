"""Two ranks of gloo against one on rows with images, of which one rank has none and the other has them in some of its
micro-batches: whole copies, and weights or gradients that ranks share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import lowtide
from lowtide.ranks.shards import is_fully_sharded, whole_of
from tests.support.models.vision_models import FAMILIES, assistant, processor, rows, user, vision_model
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.runs.online_runs import even_tokens

BOTH = ["q_proj", "v_proj", "down_proj", "qkv", "fc1"]
"""Modules that adapters are on, in the language model and in the tower of each family."""
ZERO: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto"}
ONLINE: dict[str, Any] = {"kind": "GRPO", "num_generations": 4, "max_completion_length": 6, "beta": 0.1}
SMALL: dict[str, Any] = {"tokens_per_microbatch": 130}
"""Several micro-batches a step, some of which show no image on the rank that has images."""


def cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        each = {
            "copies": {"kind": "SFT"},
            "SFT": {"kind": "SFT", "fsdp": True, **SMALL},
            "DPO": {"kind": "DPO", "fsdp": True, **SMALL},
            "frozen": {"kind": "SFT", "fsdp": True, "freeze_vision_tower": True, **SMALL},
            "adapters": {"kind": "SFT", "fsdp": True, "lora": BOTH, **SMALL},
            "adapters of the language model": {"kind": "DPO", "fsdp": True, "lora": ["q_proj", "v_proj"], **SMALL},
            "nothing checkpointed": {"kind": "SFT", "fsdp": True, "gradient_checkpointing": False},
            "GRPO": {"fsdp": True, **ONLINE},
            "GRPO, layer by layer": {"fsdp": True, "ds3_gather_for_generation": False, **ONLINE},
        }
        found |= {f"{name}, {family}": {"family": family, **case} for name, case in each.items()}
    found |= {
        "padded": {"kind": "DPO", "fsdp": True, "padding_free": False},
        "by sizes": {"kind": "SFT", "parallelism_config": {"dp_shard_size": 2}},
        "vocabulary in rows": {"kind": "SFT", "fsdp": True, "fsdp_split_vocabulary": True},
        "reference computed before": {"kind": "DPO", "fsdp": True, "precompute_ref_log_probs": True},
        "KTO": {"kind": "KTO", "fsdp": True},
    }
    if find_spec("deepspeed"):
        for stage in (2, 3):
            zero = {"deepspeed": {**ZERO, "zero_optimization": {"stage": stage}}}
            found[f"ZeRO-{stage}"] = {"kind": "SFT", **zero, **SMALL}
            found[f"ZeRO-{stage}, idefics3"] = {"kind": "DPO", "family": "idefics3", **zero, **SMALL}
            adapters = {"kind": "SFT", "lora": BOTH, "gradient_checkpointing": stage == 2}
            found[f"ZeRO-{stage}, adapters"] = {**adapters, **zero, **SMALL}
            found[f"ZeRO-{stage}, GRPO"] = {**zero, **ONLINE}
        del found["ZeRO-3, GRPO"]  # refused
    return found


CASES = cases()
SPREAD = ("fsdp", "parallelism_config", "fsdp_split_vocabulary", "deepspeed", "ds3_gather_for_generation")


def data(kind: str) -> list[dict[str, Any]]:
    """Rows of two steps: of each the first rank has four, two of which show images, then one; the other rank's show
    none."""
    made: list[dict[str, Any]] = []
    with_images = iter(rows(3))
    for place in range(16):
        row = {"images": [], "prompt": [user(f"Hm, {place}" + "?" * place)]}
        row = next(with_images) if place in (1, 3, 10) else row
        row |= {"chosen": [assistant("Yes" + "s" * (place % 5))], "rejected": [assistant("No" + "o" * (place % 4))]}
        made.append(row)
    if kind == "SFT":
        return [{"images": row["images"], "messages": row["prompt"] + row["chosen"]} for row in made]
    if kind == "KTO":
        shown = [{"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"]} for row in made]
        return [{**row, "label": number % 2 == 0} for number, row in enumerate(shown)]
    if kind == "GRPO":
        chosen = [made[1], made[0], made[3], made[2]]
        return [{"images": row["images"], "prompt": row["prompt"]} for row in chosen]
    return made


def run(
    folder: Path, ranks: int, kind: str, *, family: str = "qwen2_5_vl", lora: list[str] | None = None, **options: Any
) -> Any:
    """(losses, weights by name, evaluation) after two steps."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8 // ranks,
        "per_device_eval_batch_size": 4 // ranks,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "use_cpu": True,
        "bf16": False,
        "rehearsal": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **({"shuffle_dataset": False} if kind == "GRPO" else {"max_length": None}),
        **options,
    }
    if kind != "GRPO":
        settings["train_sampling_strategy"] = "sequential"
    given: dict[str, Any] = {"reward_funcs": even_tokens} if kind == "GRPO" else {}
    if lora is not None:
        given["peft_config"] = LoraConfig(r=4, target_modules=lora)
    torch.manual_seed(0)
    trainer = getattr(lowtide, f"{kind}Trainer")(
        vision_model(family),
        args=getattr(lowtide, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_list(data(kind)),
        processing_class=processor(family),
        **given,
    )
    sharded = settings.get("fsdp") or "parallelism_config" in settings
    assert is_fully_sharded(trainer.model) is bool(sharded)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    alone = kind == "GRPO" or settings.get("precompute_ref_log_probs")
    evaluated = {} if alone else trainer.evaluate(Dataset.from_list(data(kind)[8:13]))
    weights = {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}
    return losses, weights, evaluated.get("eval_loss", 0.0)


def rank_main(rank: int, folder: str, names: list[str]) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name in names:
            found = run(place / f"run-{name}", 2, **CASES[name])
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


def on_two_ranks(folder: Path, names: list[str]) -> Path:
    run_ranks(rank_main, str(meeting_place(folder)), names)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What came of every case."""
    return on_two_ranks(tmp_path_factory.mktemp("shared"), [*CASES])


def assert_as_one_rank(folder: Path, name: str, alone: Path) -> None:
    losses, weights, evaluated = torch.load(folder / f"{name}.pt")
    case = {option: value for option, value in CASES[name].items() if option not in SPREAD}
    torch.manual_seed(0)
    started = dict(vision_model(case.get("family", "qwen2_5_vl")).named_parameters())
    expected_losses, expected, expected_evaluated = run(alone, 1, **case)
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert evaluated == pytest.approx(expected_evaluated, rel=1e-5)
    assert weights.keys() == expected.keys()
    learned = set()
    for key, value in expected.items():
        if key.endswith("k_proj.bias"):  # a softmax does not see it: its gradient is rounding alone
            continue
        distance = (weights[key] - value).norm()
        assert distance <= 1e-5 * value.norm(), f"{key}: {distance / value.norm():.1e}"
        start = started.get(key.removeprefix("base_model.model.").replace(".base_layer", ""), torch.zeros(()))
        change = (value - start).norm()
        if change > 1e-3 * value.norm():
            learned.add(key)
            assert distance <= 2e-3 * change, f"{key}: {distance / change:.1e} of what it learned"
    tower = {key for key in learned if "visual" in key or "vision_model" in key}
    assert learned
    frozen = case.get("freeze_vision_tower") or case.get("lora") == ["q_proj", "v_proj"]
    assert frozen or tower, "nothing was learned in the tower"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_does(name: str, shared: Path, tmp_path: Path) -> None:
    assert_as_one_rank(shared, name, tmp_path)


@pytest.mark.slow
def test_a_rank_without_images_runs_the_tower_of_shards(tmp_path: Path) -> None:
    """The quick one of them."""
    name = "SFT, qwen2_5_vl"
    assert_as_one_rank(on_two_ranks(tmp_path, [name]), name, tmp_path / "alone")
