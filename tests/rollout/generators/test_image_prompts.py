"""Completions of prompts that show images: what transformers' `generate` writes, and the tower runs once an image."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.data.batches.images import ImageReader
from lowtide.engine.forward import install, score
from lowtide.engine.vision import position_rule
from lowtide.ragged import RaggedBatch, Shown
from lowtide.rollout.generators.generator import Completion, Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.transformers import TransformersGenerator
from lowtide.score_rules import IGNORE
from tests.support.marks import slow_but
from tests.support.models.vision_models import (
    FAMILIES,
    padded,
    picture,
    processor,
    rows,
    stored,
    tower,
    user,
    vision_model,
)
from tests.support.models.vision_processors import PROCESSORS, processed_family
from tests.support.runs.generating import token_ids, written_logprobs

MOST = 8
MORE = (*FAMILIES, "qwen3_vl", "llava_next", "gemma4")
"""Also those whose features have traits of their own."""


class World:
    """A model that is prepared to generate, and prompts: two images of unlike sizes each, and one without."""

    def __init__(self, family: str, seed: int = 0) -> None:
        if family in PROCESSORS:
            (self.plain, made), (self.model, _) = processed_family(family), processed_family(family)
        else:
            self.plain, self.model, made = vision_model(family, seed), vision_model(family, seed), processor(family)
        for model in (self.plain, self.model):
            model.eval()
        self.reader = ImageReader(made, position_rule(self.plain))
        self.asked = [([user("No image: ", "what is it?")], [])]
        for number, row in enumerate(rows(3, seed=seed)):
            shown = [row["images"][0], picture(77 + number, 24, 8)]
            self.asked.insert(number, (row["prompt"], shown))
        install(self.model)

    def inputs(self, number: int) -> Any:
        """What the processor makes of a prompt."""
        messages, pictures = self.asked[number]
        if pictures:
            return padded(self.reader.processor, [messages], [pictures])
        own = self.reader.processor.tokenizer
        return own.apply_chat_template([messages], return_dict=True, return_tensors="pt")

    def requests(self, count: int = 1) -> list[Request]:
        made, known = [], {}
        for number, (_, pictures) in enumerate(self.asked):
            ids = self.inputs(number)["input_ids"][0].tolist()
            shown = self.reader.shown(ids, [stored(each) for each in pictures], known)
            made.append(Request(ids, count, seed=number, images=shown))
        return made

    def sampling(self, most: int = MOST, **more: Any) -> Sampling:
        return Sampling(most, never_ids=(self.reader.mark,), **more)

    def scored(self, requests: list[Request], completions: list[list[Completion]]) -> torch.Tensor:
        """The log-probabilities of written tokens by the engine's scorer."""
        segments, labels, prefix, row, images = [], [], [], [], []
        for number, (request, group) in enumerate(zip(requests, completions, strict=True)):
            own = len(segments)
            segments += [list(request.prompt_ids), *(each.token_ids for each in group)]
            labels.append([IGNORE] * len(request.prompt_ids))
            labels += [
                [token if written else IGNORE for token, written in zip(each.token_ids, each.written, strict=True)]
                for each in group
            ]
            prefix += [-1, *[own] * len(group)]
            row += [number] * (1 + len(group))
            images += [request.images, *[()] * len(group)]
        shown = Shown(images, self.reader.position_rule)
        batch = RaggedBatch.from_segments(segments, labels, prefix=prefix, row=row, shown=shown)
        with torch.no_grad():
            return score(self.model, batch).scored


@pytest.mark.parametrize("seed", slow_but([0], [0, 3]))
@pytest.mark.parametrize("family", MORE)
def test_the_likeliest_tokens_are_those_of_generate(family: str, seed: int) -> None:
    world = World(family, seed)
    how = {"max_new_tokens": MOST, "do_sample": False, "repetition_penalty": 1.3}
    how |= {"eos_token_id": None, "pad_token_id": 259}
    expected = [
        world.plain.generate(**world.inputs(number), suppress_tokens=[world.reader.mark], **how)[0].tolist()
        for number in range(len(world.asked))
    ]
    requests = world.requests()
    sampling = world.sampling(temperature=0, repetition_penalty=1.3)
    found = RaggedGenerator().generate(world.model, requests, sampling)
    whole = [[*request.prompt_ids, *one.token_ids] for request, [one] in zip(requests, found, strict=True)]
    assert whole == expected
    assert len({token for [one] in found for token in one.token_ids}) > MOST


@pytest.mark.parametrize("family", MORE)
def test_what_is_written_has_the_log_probabilities_of_the_scorer(family: str) -> None:
    world, requests = World(family), World(family).requests(3)
    found = RaggedGenerator().generate(world.model, requests, world.sampling())
    torch.testing.assert_close(written_logprobs(found), world.scored(requests, found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_after_a_reply_has_the_log_probabilities_of_the_scorer(family: str) -> None:
    world, requests = World(family), World(family).requests(2)
    sampling = world.sampling(stop_ids=tuple(range(3, 150)))

    def reply(request: int, number: int, completion: Completion) -> list[int] | None:
        return [7, 8, 9] if len(completion.token_ids) < 6 else None

    found = RaggedGenerator().generate(world.model, requests, sampling, reply)
    own = [written for group in found for each in group for written in each.written]
    assert not all(own)
    torch.testing.assert_close(
        written_logprobs(found)[torch.tensor(own)], world.scored(requests, found), rtol=1e-5, atol=1e-5
    )


def patches_of(model: Any) -> list[int]:
    """Filled with the numbers of patches, or tiles, that the tower is given."""
    seen: list[int] = []

    def note(_: Any, args: tuple, kwargs: dict[str, Any], __: Any) -> None:
        seen.append(len((args or tuple(kwargs.values()))[0]))

    tower(model).register_forward_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_runs_once_an_image_for_all_completions(family: str) -> None:
    world = World(family)
    seen, [request, *_] = patches_of(world.model), world.requests(1)
    apart = [Request(request.prompt_ids, 1, seed, request.images) for seed in range(4)]  # as trainers ask
    RaggedGenerator().generate(world.model, apart, world.sampling(3))
    assert seen == [len(world.inputs(0)["pixel_values"].flatten(0, -4 if family == "idefics3" else -2))]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_depends_on_nothing_beside_it(family: str) -> None:
    world = World(family)
    requests = world.requests(2)
    sampling = world.sampling(stop_ids=tuple(range(3, 9)))
    together = token_ids(RaggedGenerator().generate(world.model, requests, sampling))
    alone = [token_ids(RaggedGenerator().generate(world.model, [each], sampling))[0] for each in requests]
    assert alone == together
    tight = max(len(each.prompt_ids) for each in requests) + 2 * MOST
    budgeted = RaggedGenerator(tokens_per_generation_batch=tight)
    assert token_ids(budgeted.generate(world.model, requests, sampling)) == together


def test_prompts_of_equal_tokens_and_other_images_are_written_apart() -> None:
    world = World("qwen2_5_vl")
    ids = world.inputs(0)["input_ids"][0].tolist()
    requests = []
    for seed in (1, 2):
        pictures = [stored(picture(seed, *image.size)) for image in world.asked[0][1]]
        requests.append(Request(ids, images=world.reader.shown(ids, pictures, {})))
    found = RaggedGenerator().generate(world.model, requests, world.sampling(temperature=0))
    assert written_logprobs(found[:1]).tolist() != written_logprobs(found[1:]).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 4}, {"repetition_penalty": 1.2}])
def test_a_token_that_is_never_drawn_keeps_its_probability(temperature: float, cuts: dict[str, Any]) -> None:
    world = World("qwen2_5_vl")
    mark, requests = world.reader.mark, world.requests(4)
    [[likely], *_] = RaggedGenerator().generate(world.model, world.requests(), Sampling(1, temperature=0))
    with torch.no_grad():
        world.model.lm_head.weight[mark] = 1.5 * world.model.lm_head.weight[likely.token_ids[0]]
    free = RaggedGenerator().generate(world.model, requests, Sampling(MOST, temperature=temperature, **cuts))
    assert any(mark in each.token_ids for group in free for each in group)
    found = RaggedGenerator().generate(world.model, requests, world.sampling(temperature=temperature, **cuts))
    assert not any(mark in each.token_ids for group in found for each in group)
    torch.testing.assert_close(written_logprobs(found), world.scored(requests, found), rtol=1e-5, atol=1e-4)


def test_generate_of_transformers_is_not_given_images() -> None:
    world = World("qwen2_5_vl")
    with pytest.raises(ValueError, match="writes after text alone: images need `RaggedGenerator`"):
        TransformersGenerator().generate(world.model, world.requests(), world.sampling())
