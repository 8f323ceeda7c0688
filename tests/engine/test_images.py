"""Images in a forward: log-probs and gradients are those of the model's own padded forward, and the vision tower runs
once for each distinct image."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.data.batches.images import ImageReader
from lowtide.engine.forward import install, score
from lowtide.ops.image_positions import GridPositions
from lowtide.ragged import RaggedBatch, Shown
from lowtide.score_rules import IGNORE
from tests.support.models.vision_models import FAMILIES, padded, picture, processor, rows, stored, tower, vision_model


def reader(family: str) -> ImageReader:
    return ImageReader(processor(family), GridPositions(2) if family == "qwen2_5_vl" else None)


def tokens_of(made: Any) -> list[list[int]]:
    pairs = zip(made["input_ids"], made["attention_mask"], strict=True)
    return [line[mask.bool()].tolist() for line, mask in pairs]


def laid(own: ImageReader, lines: list[list[int]], pictures: list[list[Any]], **more: Any) -> RaggedBatch:
    known: dict[Any, Any] = {}
    images = [own.shown(line, [stored(p) for p in each], known) for line, each in zip(lines, pictures, strict=True)]
    labels = [own.unscored(line) for line in lines]
    return RaggedBatch.from_segments(lines, labels, shown=Shown(images, own.position_rule), **more)


def dense(model: Any, made: Any, labels: Tensor) -> Tensor:
    """[scores]: log-probs of the labels by the model's own forward, row by row."""
    logprobs = model(**made).logits.log_softmax(-1)[:, :-1]
    wanted = labels[:, 1:]
    found = logprobs.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return found[wanted != IGNORE]


def assert_gradients_agree(model: Any, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def backward(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (-logprobs.mean()).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_images_have_the_numbers_of_the_padded_model(family: str, padding_free: bool) -> None:
    model, own, made = vision_model(family), reader(family), rows(3)
    pictures = [row["images"] for row in made]
    pictures[2] = [pictures[0][1], pictures[2][0]]  # one that another row shows too
    inputs = padded(own.processor, [row["prompt"] + row["chosen"] for row in made], pictures)
    labels = inputs["input_ids"].masked_fill(
        (inputs["attention_mask"] == 0) | (inputs["input_ids"] == own.mark), IGNORE
    )
    expected = dense(model, inputs, labels)
    gradients = backward(model, expected)
    batch = laid(own, tokens_of(inputs), pictures)
    install(model, padding_free=padding_free)
    seen: list[int] = []
    tower(model).register_forward_hook(lambda *_: seen.append(1))
    found = score(model, batch, padding_free=padding_free).scored
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    model.zero_grad()
    (-found.mean()).backward()
    assert_gradients_agree(model, gradients)
    assert seen == [1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_runs_once_for_an_image_that_several_segments_show(family: str) -> None:
    model, own = vision_model(family), reader(family)
    [row] = rows(1)
    shown = row["images"][0]
    inputs = padded(own.processor, [row["prompt"]] * 2, [[shown, shown]] * 2)
    batch = laid(own, tokens_of(inputs), [[shown, shown]] * 2)
    install(model)
    patches: list[Tensor] = []
    tower(model).register_forward_hook(
        lambda _, args, kwargs, out: patches.append((args or tuple(kwargs.values()))[0]), with_kwargs=True
    )
    found = score(model, batch).scored
    [given] = patches
    assert (
        given.shape[0] == batch.images[0][0].inputs["pixel_values"].flatten(0, -4 if given.ndim == 4 else -2).shape[0]
    )
    half = len(found) // 2
    torch.testing.assert_close(found[:half], found[half:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shared_prompt_with_images_is_computed_once(family: str) -> None:
    model, own = vision_model(family), reader(family)
    [row] = rows(1, images=1)
    talks = [row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]]
    inputs = padded(own.processor, talks, [row["images"]] * 2)
    whole = tokens_of(inputs)
    start = len(tokens_of(padded(own.processor, [row["prompt"]], [row["images"]]))[0])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORE)
    labels[:, :start] = IGNORE
    expected = dense(model, inputs, labels)
    gradients = backward(model, expected)
    lines = [whole[0][:start], whole[0][start:], whole[1][start:]]
    known: dict[Any, Any] = {}
    images = [own.shown(line, [stored(row["images"][0])], known) for line in lines]
    assert [len(each) for each in images] == [1, 0, 0]
    batch = RaggedBatch.from_segments(
        lines,
        [[IGNORE] * start, *lines[1:]],
        prefix=[-1, 0, 0],
        row=[0, 0, 0],
        shown=Shown(images, own.position_rule),
    )
    install(model)
    found = score(model, batch).scored
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    model.zero_grad()
    (-found.mean()).backward()
    assert_gradients_agree(model, gradients)


def test_positions_on_three_axes_are_those_of_the_model() -> None:
    model, own = vision_model(), reader("qwen2_5_vl")
    made = rows(4, images=3)
    pictures = [row["images"] for row in made]
    inputs = padded(own.processor, [row["prompt"] for row in made], pictures)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    expected, _ = model.model.get_rope_index(**{name: inputs[name] for name in names})
    batch = laid(own, tokens_of(inputs), pictures)
    kept = inputs["attention_mask"].bool()
    assert batch.axis_positions is not None
    assert torch.equal(batch.axis_positions, expected[:, kept])


def test_prompts_of_equal_tokens_and_other_images_are_not_shared() -> None:
    own = reader("qwen2_5_vl")
    line = [5, own.mark, own.mark, own.mark, own.mark, 6]
    rows_of = [
        RaggedBatch.from_segments(
            [line, [7], [8]],
            prefix=[-1, 0, 0],
            row=[0, 0, 0],
            shown=Shown([own.shown(line, [stored(picture(seed))], {}), (), ()], own.position_rule),
        ).select_scores(torch.tensor([False] * 5 + [True] * 2))
        for seed in (1, 2, 1)
    ]
    joined = RaggedBatch.concat(rows_of).share_prefixes()
    assert [part.prefix for part in joined.segments] == [-1, 0, 0, -1, 3, 3, 0, 0]
    assert [len(each) for each in joined.segment_images] == [1, 0, 0, 1, 0, 0, 0, 0]


def test_rows_keep_their_images_and_positions_when_a_batch_is_cut() -> None:
    own = reader("qwen2_5_vl")
    lines = [[5, *[own.mark] * count, 6] for count in (4, 1, 4)]
    sizes = [(16, 16), (8, 8), (16, 16)]
    pictures = [[picture(seed, *size)] for seed, size in enumerate(sizes)]
    whole = laid(own, lines, pictures)
    parts = [whole.select_rows([row]) for row in range(3)]
    for part, line, each in zip(parts, lines, pictures, strict=True):
        alone = laid(own, [line], [each])
        assert part.images[0][0].key == alone.images[0][0].key
        assert part.axis_positions is not None
        assert alone.axis_positions is not None
        assert torch.equal(part.axis_positions, alone.axis_positions)
    again = RaggedBatch.concat(parts)
    assert again.axis_positions is not None
    assert torch.equal(again.axis_positions, whole.axis_positions)
    assert [each[0].key for each in again.images] == [each[0].key for each in whole.images]


def test_an_image_that_is_not_what_its_row_was_prepared_with_is_named() -> None:
    own = reader("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"4 tokens of images, and its images .* fill 1: they have changed"):
        own.shown([5, *[own.mark] * 4], [stored(picture(0, 8, 8))], {})


def test_a_broken_image_is_named() -> None:
    own = reader("qwen2_5_vl")
    with pytest.raises(ValueError, match=r"'/nowhere/cat.png' cannot be read as an image .*No such file"):
        own.ready({"path": "/nowhere/cat.png", "bytes": None})
    with pytest.raises(ValueError, match="an image of 5 bytes cannot be read as an image"):
        own.ready({"path": None, "bytes": b"12345"})


def test_an_image_of_more_pixels_than_pil_reads_is_named(monkeypatch) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ValueError, match=r"an image of .* cannot be read as an image .*exceeds limit"):
        reader("qwen2_5_vl").ready(stored(picture(0, 8, 8)))
