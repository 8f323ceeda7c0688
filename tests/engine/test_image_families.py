"""Every family that transformers lists as taking images and text: its numbers with images are those of its own forward,
or it is refused by name."""

from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from lowtide.engine.forward import install, score
from lowtide.engine.heads import head_of
from lowtide.engine.image_proof import BOTH_WAYS, ImageProof, ShownRow
from lowtide.engine.images import blank_image, running_tower
from lowtide.engine.probe import probe
from lowtide.engine.vision import encodes_images, position_rule, tower_parameters
from lowtide.ragged import RaggedBatch, Shown
from lowtide.run.engine import check_causal
from lowtide.run.inputs.images import check_takes_images
from lowtide.score_rules import IGNORE
from tests.support.marks import slow_but
from tests.support.models.vision_families import (
    FAMILIES,
    IMAGE,
    LISTED,
    NOT_BUILT,
    TEXT,
    TOWER,
    TYPE_OF,
    family_model,
    segment_image,
    shown_row,
)

BOTH_DIRECTIONS = {"gemma3", "gemma4_vision", "shieldgemma2"}
"""Families whose image tokens attend to each other in both directions: they run padded."""
OWN_MASK = {"dots3_note", "inkling2", "mistral_large4", "qwen4_exp"}
"""Families whose layers read a mask of their own, or biases for each two tokens: they run padded too."""
UNKNOWN_TOWER = {"blip", "fuyu", "gemma4_unified", "kosmos-2", "mllama", "pix2struct", "pp_formulanet", "video_llava"}
"""Families whose forward takes images in another way, or has no tower of a name that is known."""
UNKNOWN = {
    "blip-2": "has no head",
    "granite4_vision": "encodes images in a way that lowtide does not know",
    "hunyuan_vl": "counts the positions of images in a way that lowtide does not know",
    "minicpm_ocr": "does not know how model type minicpm_ocr reads them",
    "minicpmv4_6": "does not know how model type minicpmv4_6 reads them",
    "minicpmv4_7": "counts the positions of images in a way that lowtide does not know",
    "qwen2_5_omni_thinker": "counts the positions of images in a way that lowtide does not know",
    "qwen3_omni_moe_thinker": "counts the positions of images in a way that lowtide does not know",
    "molmo2": "does not know how model type molmo2 reads them",
}
"""Families that are refused, and what the message says."""
BROKEN = {("5.24.0", "llama4")}
"""Versions of transformers in which a family's own forward raises."""
TRAINED = [name for name in FAMILIES if name not in UNKNOWN_TOWER | {*UNKNOWN}]
FAST = [name for name in TRAINED if name != "glm5_next"]


BLANK = {
    *("cohere_compass", "cosmos3_omni", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "idefics3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "smolvlm"),
}
"""Families whose smallest image is known."""


def rows_of(model: Any, name: str) -> list[ShownRow]:
    """Rows with one image, with another, and with two, of which another row shows one."""
    images = [segment_image(model, name, number) for number in range(3)]
    shown = [[images[0]], [images[1]], [images[0], images[2]]]
    return [shown_row(model, each, seed) for seed, each in enumerate(shown)]


def own_logprobs(model: Any, rows: list[ShownRow]) -> Tensor:
    """[scores]: of all tokens but those of images, by the model's own forward, row by row."""
    found = []
    for row in rows:
        logprobs, target = (
            model(**row.inputs, use_cache=False).logits[0, :-1].log_softmax(-1),
            torch.tensor(row.token_ids[1:]),
        )
        found.append(logprobs.gather(-1, target[:, None])[:, 0][target != IMAGE])
    return torch.cat(found)


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (-logprobs.mean()).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def laid(model: Any, rows: list[ShownRow]) -> RaggedBatch:
    labels = [[IGNORE if token == IMAGE else token for token in row.token_ids] for row in rows]
    shown = Shown([row.images for row in rows], position_rule(model))
    return RaggedBatch.from_segments([row.token_ids for row in rows], labels, shown=shown)


@pytest.mark.parametrize("name", slow_but(FAST, TRAINED, swept=["glm5_next"]))
def test_a_family_has_the_numbers_of_its_own_forward(name: str) -> None:
    if (transformers.__version__, name) in BROKEN:
        pytest.skip(f"its own forward raises in transformers {transformers.__version__}")
    model = family_model(name)
    rows = rows_of(model, name)
    expected = own_logprobs(model, rows)
    wanted = gradients(model, expected)
    proof = ImageProof(model, rows)
    install(model)
    reason = proof.why_not_ragged(model)
    assert (reason is None) == (name not in BOTH_DIRECTIONS | OWN_MASK), reason
    assert (reason == BOTH_WAYS) == (name in BOTH_DIRECTIONS)
    for padding_free in [True, False] if reason is None else [False]:
        install(model, padding_free=padding_free)
        if not padding_free:
            model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
            proof.check_padded(model)
        found = score(model, laid(model, rows), padding_free=padding_free).scored
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for parameter, gradient in gradients(model, found).items():
            torch.testing.assert_close(
                gradient, wanted[parameter], rtol=1e-4, atol=1e-6, msg=lambda m, n=parameter: f"{n}: {m}"
            )


@pytest.mark.parametrize("name", FAST)
def test_a_blank_image_changes_nothing_or_its_size_is_not_known(name: str) -> None:
    """Ranks that share weights run the tower where no row shows an image."""
    model = family_model(name)
    if name not in BLANK:
        with pytest.raises(ValueError, match="does not know how small an image the vision tower of model type"):
            blank_image(model, torch.device("cpu"))
        return
    install(model, padding_free=False)
    batch = RaggedBatch.from_segments([[5, 6, 7, 8], [9, 10, 11]])
    expected = score(model, batch, padding_free=False).scored
    wanted = gradients(model, expected)
    with running_tower(model, True):
        found = score(model, batch, padding_free=False).scored
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        for parameter, gradient in gradients(model, found).items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-5, atol=1e-7)
    assert any(p.grad is not None for p in tower_parameters(model)), "backward has not reached the tower"


@pytest.mark.parametrize("name", sorted(BOTH_DIRECTIONS))
def test_a_family_that_sees_both_ways_would_have_other_numbers_without_what_its_processor_says(name: str) -> None:
    """So a run that drops it is not equal by chance."""
    model = family_model(name)
    rows = rows_of(model, name)
    kinds = {"token_type_ids", "mm_token_type_ids"}
    causal = [row._replace(inputs={n: v for n, v in row.inputs.items() if n not in kinds}) for row in rows]
    difference = (own_logprobs(model, rows) - own_logprobs(model, causal)).abs().max()
    assert difference > 1e-3


@pytest.mark.parametrize("name", sorted(UNKNOWN_TOWER))
def test_a_family_that_takes_images_in_another_way_is_refused(name: str) -> None:
    model = family_model(name)
    assert not encodes_images(model)
    rows = Dataset.from_list([{"images": ["a.png"], "messages": [{"role": "user", "content": "Look."}]}])
    with pytest.raises(
        ValueError, match=f"the rows has images, and model type {name} takes them in a way that lowtide"
    ):
        check_takes_images(rows, "the rows", model, None, method="SFT", takes=True)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_family_that_is_not_known_is_refused(name: str) -> None:
    model = family_model(name)

    def proved() -> None:
        head_of(model)
        proof = ImageProof(model, rows_of(model, name))
        install(model, padding_free=False)
        proof.check_padded(model)

    with pytest.raises(ValueError, match=UNKNOWN[name]):
        proved()


def test_a_prefix_language_model_is_refused() -> None:
    """Its processor marks the prompt, in which it attends in both directions; also where rows show no images."""
    config = AutoConfig.for_model("paligemma", text_config=TEXT, vision_config=TOWER, image_token_id=IMAGE)
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config)
        text: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("hrm_text"))
    with pytest.raises(ValueError, match="model type paligemma attends in both directions within a prompt"):
        check_causal(model)
    with pytest.raises(ValueError, match="set prefix_lm=False in its config to train it so"):
        check_causal(text)
    text.config.prefix_lm = False
    check_causal(text)


def test_every_family_is_tried_or_it_is_said_why_not() -> None:
    tried = {TYPE_OF.get(name, name) for name in FAMILIES} | {"paligemma"}
    assert {*LISTED} <= tried | {*NOT_BUILT}, "transformers lists other families"
    assert not tried & {*NOT_BUILT}


@pytest.mark.parametrize("name", ["gemma3", "gemma4_vision", "gemma4", "qwen3_vl"])
def test_rows_of_text_alone_run_without_padding(name: str) -> None:
    """Also of families whose image tokens see each other."""
    assert probe(family_model(name)).isolated
