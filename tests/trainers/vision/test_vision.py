"""Trainers on rows with images: what is trained, what fits into a micro-batch, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    PretrainConfig,
    PretrainTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from lowtide.data.formats.images import stored_form, take_images
from tests.support.marks import slow_but
from tests.support.models.vision_models import (
    FAMILIES,
    conversations,
    padded,
    picture,
    processor,
    rows,
    tower,
    vision_model,
)

TRAINERS: dict[str, Any] = {
    "SFT": (SFTTrainer, SFTConfig),
    "DPO": (DPOTrainer, DPOConfig),
    "KTO": (KTOTrainer, KTOConfig),
    "Pretrain": (PretrainTrainer, PretrainConfig),
    "Reward": (RewardTrainer, RewardConfig),
}


def trainer(folder: Path, made: Any, name: str = "SFT", given: dict[str, Any] | None = None, **options: Any) -> Any:
    kind, config = TRAINERS[name]
    settings = {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_length": None,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "rehearsal": False,
        **options,
    }
    arguments = {"model": None, "processing_class": processor(), **(given or {})}
    model = arguments.pop("model")
    dataset = made if isinstance(made, Dataset) else Dataset.from_list(made)
    model = vision_model() if model is None else model
    return kind(model, args=config(**settings), train_dataset=dataset, **arguments)


def losses(run: Any) -> list[float]:
    run.train()
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_every_way_to_cut_a_batch_gives_the_same_losses(tmp_path: Path) -> None:
    made = conversations(8)
    ways: list[dict[str, Any]] = [
        {},
        {"padding_free": False},
        {"tokens_per_microbatch": 90},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": False},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "dataloader_num_workers": 1},
    ]
    found = [losses(trainer(tmp_path, made, **way)) for way in ways]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_places_of_images_count_towards_the_budget(tmp_path: Path) -> None:
    run = trainer(tmp_path, conversations(8), tokens_per_microbatch=90)
    lengths = run.row_lengths()
    expected = [
        int(padded(processor(), [row["messages"]], [row["images"]])["attention_mask"].sum()) for row in conversations(8)
    ]
    assert lengths.tolist() == expected
    seen: list[int] = []
    run.model.model.language_model.register_forward_hook(
        lambda _, __, kwargs, ___: seen.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    run.train()
    assert max(seen) <= 90
    with pytest.raises(
        ValueError, match=f"tokens_per_microbatch=40 is below the longest row of .* {max(expected)} tokens"
    ):
        trainer(tmp_path, conversations(8), tokens_per_microbatch=40)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_stays_and_its_projector_learns(family: str, tmp_path: Path) -> None:
    model = vision_model(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    kept: list[bool] = []
    last = next(module for name, module in tower(model).named_modules() if name.endswith(("blocks.1", "layers.1")))
    last.register_forward_hook(lambda _, __, out: kept.append(out.requires_grad))
    given = {"model": model, "processing_class": processor(family)}
    trainer(tmp_path, conversations(4), given=given, freeze_vision_tower=True).train()
    assert kept
    assert not any(kept), "autograd follows the tower"
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert not {name for name in changed if "vision_model" in name or "visual.blocks" in name or "patch_embed" in name}
    assert any("merger" in name or "connector" in name for name in changed)


def test_adapters_of_the_language_model_leave_the_tower_out_of_backward(tmp_path: Path) -> None:
    model, kept = vision_model(), []
    tower(model).merger.register_forward_hook(lambda _, __, out: kept.append(out.requires_grad))
    given = {"model": model, "peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])}
    run = trainer(tmp_path, conversations(4), given=given)
    assert losses(run)
    assert kept
    assert not any(kept)
    assert {"language_model" in name for name, p in run.model.named_parameters() if p.requires_grad} == {True}


def test_the_tower_runs_once_for_both_sides_of_a_pair(tmp_path: Path) -> None:
    model, patches = vision_model(), []
    run = trainer(
        tmp_path,
        rows(4),
        "DPO",
        {"model": model, "peft_config": LoraConfig(target_modules=["q_proj"])},
        max_steps=1,
    )
    model.model.visual.patch_embed.register_forward_hook(lambda _, args, __: patches.append(len(args[0])))
    run.train()
    once = sum(len(padded(processor(), [r["prompt"]], [r["images"]])["pixel_values"]) for r in rows(4))
    assert patches == [once, once], "of the reference and of the policy"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_model_reads_images(family: str, tmp_path: Path) -> None:
    vision_model(family).save_pretrained(tmp_path / "base")
    processor(family).tokenizer.save_pretrained(tmp_path / "base")
    made, own = rows(4), processor(family)
    given = {"model": str(tmp_path / "base"), "processing_class": own}
    run = trainer(tmp_path, made, "Reward", given, learning_rate=0.0, max_steps=1)
    model = run.model
    values = [
        model(**padded(own, [row["prompt"] + row[side] for row in made], [row["images"] for row in made])).logits[:, 0]
        for side in ("chosen", "rejected")
    ]
    expected = -torch.nn.functional.logsigmoid(values[0] - values[1]).mean().item()
    assert losses(run) == pytest.approx([expected], abs=1e-5)
    run.save_model(str(tmp_path / "saved"))
    again = trainer(
        tmp_path, made, "Reward", {**given, "model": str(tmp_path / "saved")}, learning_rate=0.0, max_steps=1
    )
    assert losses(again) == pytest.approx([expected], abs=1e-5)


def test_a_model_and_its_processor_are_loaded_by_name_and_saved_together(tmp_path: Path) -> None:
    vision_model("idefics3").save_pretrained(tmp_path / "base")
    processor("idefics3").save_pretrained(tmp_path / "base")
    run = trainer(tmp_path, conversations(4), given={"model": str(tmp_path / "base"), "processing_class": None})
    assert type(run.processing_class).__name__ == "Idefics3Processor"
    found = losses(run)
    given = {"model": vision_model("idefics3"), "processing_class": processor("idefics3")}
    assert found == pytest.approx(losses(trainer(tmp_path, conversations(4), given=given)), abs=1e-5)
    run.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "processor_config.json").is_file()


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_a_run_that_resumes_has_the_bits_of_one_that_was_not_stopped(family: str, tmp_path: Path) -> None:
    found, saving = [], {"save_strategy": "steps", "save_steps": 1}
    for folder in ("whole", "parts"):
        given = {"model": vision_model(family), "processing_class": processor(family)}
        run = trainer(tmp_path / folder, conversations(8), given=given, **saving)
        run.args.max_steps = 2 if folder == "whole" else 1
        run.train()
        found.append(run)
    given = {"model": vision_model(family), "processing_class": processor(family)}
    again = trainer(tmp_path / "parts", conversations(8), given=given, **saving)
    again.train(resume_from_checkpoint=True)
    expected = found[0].model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


@pytest.mark.slow
def test_images_by_path_and_within_messages_are_those_of_the_column(tmp_path: Path) -> None:
    made = conversations(4)
    expected = losses(trainer(tmp_path, made))
    paths = []
    for number, row in enumerate(made):
        for place, image in enumerate(row["images"]):
            image.save(tmp_path / f"{number}-{place}.png")
        paths.append([str(tmp_path / f"{number}-{place}.png") for place in range(len(row["images"]))])
    by_path = [{"images": own, "messages": row["messages"]} for own, row in zip(paths, made, strict=True)]
    assert losses(trainer(tmp_path, by_path)) == pytest.approx(expected, abs=1e-6)
    within = []
    for own, row in zip(paths, made, strict=True):
        left = iter(own)
        talk = [
            {
                **message,
                "content": [
                    {"type": "image", "path": next(left)} if part["type"] == "image" else part
                    for part in message["content"]
                ],
            }
            for message in row["messages"]
        ]
        within.append({"messages": talk})
    assert losses(trainer(tmp_path, within)) == pytest.approx(expected, abs=1e-6)


def test_rows_without_images_go_among_those_with_them(tmp_path: Path) -> None:
    made = conversations(3)
    talk = [{"role": "user", "content": [{"type": "text", "text": "Hm?"}]}, made[0]["messages"][1]]
    run = trainer(tmp_path, [*made, {"images": [], "messages": talk}], per_device_eval_batch_size=2)
    run.evaluate(Dataset.from_list([{"messages": talk}, {"messages": talk}]))
    assert len(losses(run)) == 2


def test_a_text_data_set_trains_a_vision_language_model(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Yes."}]
    assert len(losses(trainer(tmp_path, [{"messages": talk}] * 4))) == 2


# -- what is refused -------------------------------------------------------------------------------------------------


def broken(row: int, **value: Any) -> list[dict[str, Any]]:
    """Rows by path, one of which is another."""
    made = [{"images": ["good.png"], "messages": conversations(1, images=1)[0]["messages"]} for _ in range(3)]
    made[row] |= value
    return made


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"images": ["bad.png"]}, r"train dataset, row 1 .*'bad.png' cannot be read as an image"),
        ({"images": ["nowhere.png"]}, r"row 1 .*'nowhere.png' cannot be read as an image .*No such file"),
        ({"images": ["https://a.b/c.png"]}, r"row 1 .*'https://a.b/c.png' is on the web: download it"),
        ({"images": ["good.png"] * 2}, r"row 1 .*has 2 images, of which 'messages' shows 1"),
        ({"images": []}, r"row 1 .*'messages' shows more images than the row has \(0\)"),
    ],
)
def test_a_broken_image_names_its_row(value: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    picture(0).save("good.png")
    Path("bad.png").write_bytes(Path("good.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, broken(1, **value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "an image is .*; it must be a picture, a path, or the bytes of a file"),
        ({"bytes": None, "path": None}, "an image has neither 'bytes' nor a 'path'"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stored_form(value)


def test_images_in_two_columns_are_refused() -> None:
    row = {**conversations(1, images=1)[0], "images": ["one.png"], "image": "two.png"}
    with pytest.raises(ValueError, match="both 'images' and 'image': put all of its images into 'images'"):
        take_images(row)


def test_a_text_model_given_images_says_so(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    given = {"model": model, "processing_class": processor().tokenizer}
    with pytest.raises(ValueError, match="has the column 'images', and text models are trained here"):
        trainer(tmp_path, conversations(2), given=given)


REFUSED: dict[str, Any] = {
    "a tokenizer": (
        {"given": {"processing_class": processor().tokenizer}},
        "has images, and processing_class is a tokenizer, which reads none: save the model's processor",
    ),
    "packing": ({"packing": True, "max_length": 500}, "packing=True puts rows end to end .*: set packing=False"),
    "cut": ({"max_length": 15}, r"row 0 .* of its \d+ tokens those to \d+ are of images .*: raise max_length"),
    "prepared": (
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        "rows with images are prepared by lowtide: leave out skip_prepare_dataset",
    ),
    "a loss": (
        {"given": {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.sum()}},
        "compute_loss_func .* rows with images",
    ),
    "another processor": ({"given": {"processing_class": processor("idefics3")}}, "they do not belong together"),
}


@pytest.mark.parametrize("case", [*REFUSED])
def test_what_cannot_go_with_images_is_refused(case: str, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, conversations(4), **options)


def test_a_processor_that_reads_rows_in_another_way_is_refused(tmp_path: Path) -> None:
    """One whose images, in a row, stand behind a mark of their own."""
    own = processor()
    plain = type(own).get_text_with_replacements

    class Marking(type(own)):
        def get_text_with_replacements(self, text: list[str], *args: Any) -> Any:
            return plain(self, [each if each == self.image_token else f"!{each}" for each in text], *args)

    own.__class__ = Marking
    with pytest.raises(ValueError, match="Marking makes other tokens of the first row as a whole"):
        trainer(tmp_path, conversations(2), given={"processing_class": own})


def labelled(count: int) -> list[dict[str, Any]]:
    return [
        {"images": row["images"], "prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
        for number, row in enumerate(rows(count))
    ]


def completion_logprobs(family: str, model: Any, made: list[dict[str, Any]], lengths: list[int]) -> torch.Tensor:
    """[rows]: of each answer, of so many tokens at the end of its row, by the model's own padded forward."""
    talks = [row["prompt"] + row["completion"] for row in made]
    batch = padded(processor(family), talks, [row["images"] for row in made])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(**batch).logits[:, :-1].float(), -1)
    own = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    ends = batch["attention_mask"].sum(1).tolist()
    spans = zip(own, ends, lengths, strict=True)
    return torch.stack([row[end - 1 - length : end - 1].sum() for row, end, length in spans])


@pytest.mark.parametrize("family", slow_but(["qwen2_5_vl"], FAMILIES))
def test_single_answers_to_images_are_scored_as_by_the_padded_forward(family: str, tmp_path: Path) -> None:
    made, reference = labelled(4), vision_model(family, seed=1)
    given = {"model": vision_model(family), "ref_model": reference, "processing_class": processor(family)}
    options: dict[str, Any] = {"loss_type": "apo_zero_unpaired", "learning_rate": 0.0, "max_steps": 1}
    run = trainer(tmp_path, made, "KTO", given, train_sampling_strategy="sequential", **options)
    lengths = [len(ids) for ids in run.train_dataset["completion_ids"]]
    policy, referred = (completion_logprobs(family, each.eval(), made, lengths) for each in (run.model, reference))
    share = torch.sigmoid(0.1 * (policy - referred))
    expected = torch.where(torch.tensor([row["label"] for row in made]), 1 - share, share).mean().item()
    assert losses(run) == pytest.approx([expected], abs=1e-5)


@pytest.mark.slow
def test_pairs_taken_apart_keep_their_images_and_their_mismatched_answers(tmp_path: Path) -> None:
    pairs = rows(4)
    apart = [
        {"images": row["images"], "prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for side in ("chosen", "rejected")
        for row in pairs
    ]
    ways = [(pairs, {}), (apart, {}), (pairs, {"padding_free": False}), (pairs, {"tokens_per_microbatch": 120})]
    found = [losses(trainer(tmp_path, made, "KTO", **options)) for made, options in ways]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5)


def test_methods_of_text_alone_refuse_images(tmp_path: Path) -> None:
    made = [{"text": "A cat.", "images": [picture(0)]}] * 4
    with pytest.raises(ValueError, match="has images, and pretraining takes text alone"):
        trainer(tmp_path, made, "Pretrain", max_length=32)


def test_an_image_in_an_answer_is_refused(tmp_path: Path) -> None:
    [row] = rows(1, images=1)
    row["chosen"][0]["content"].append({"type": "image", "text": None})
    with pytest.raises(ValueError, match=r"row 0 .*'chosen' shows more images than the row has"):
        trainer(tmp_path, [row], "DPO")


def test_an_older_transformers_shows_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"with transformers 5\.17\.0 vision-language .* install transformers 5\.23"):
        trainer(tmp_path, conversations(4))


def test_freezing_needs_a_tower(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    given = {"model": AutoModelForCausalLM.from_config(config), "processing_class": processor().tokenizer}
    with pytest.raises(ValueError, match="freeze_vision_tower=True needs a vision-language model"):
        trainer(tmp_path, [{"text": "a b c"}] * 4, given=given, freeze_vision_tower=True)
