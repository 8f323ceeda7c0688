"""Who writes completions in `bench.generation`, of which prompts and lengths."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.inputs.shapes import Shape, build_model

PROMPTS, COUNT, MOST, FEWEST = 8, 4, 128, 8
PROMPT_LENGTHS = (40, 300)
SHAPE = Shape(
    {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    device="cpu",
    dtype="float32",
)
"""22 million parameters, with heads of 64."""
Write = Callable[[float], int]
"""Writes all completions at a temperature; returns how many tokens they have."""


def asked(vocabulary: int = 32_000) -> tuple[list[list[int]], list[int]]:
    """Returns the prompts, and the tokens of each completion, a prompt's one after the other."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    prompts = [draw(3, vocabulary, length) for length in draw(*PROMPT_LENGTHS, PROMPTS)]
    return prompts, [*draw(FEWEST, MOST, PROMPTS * COUNT - 1), MOST]


def ours(prompts: list[list[int]], lengths: list[int], shape: Shape = SHAPE) -> Write:
    """lowtide's own generator, by a copy of the weights as a run that trains all of them makes."""
    from lowtide.engine.forward import install
    from lowtide.engine.weights.generation_copy import GenerationCopy
    from lowtide.rollout.generators.generator import Request, Sampling
    from lowtide.rollout.generators.ragged import RaggedGenerator

    model = build_model(shape)
    install(model)
    generator = RaggedGenerator(
        lengths=lambda request, number: lengths[request * COUNT + number], copy=GenerationCopy()
    )
    requests = [Request(prompt, COUNT) for prompt in prompts]

    def write_all(temperature: float) -> int:
        found = generator.generate(model, requests, Sampling(MOST, temperature=temperature))
        return sum(len(each.token_ids) for group in found for each in group)

    return write_all


def generate(prompts: list[list[int]], lengths: list[int], shape: Shape = SHAPE) -> Write:
    """transformers' `generate`, all rows at once, padded on the left."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    model = build_model(shape).eval()
    width, ends = max(len(prompt) for prompt in prompts), torch.tensor(lengths)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]).repeat_interleave(COUNT, 0)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    class Lengths(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return ends <= input_ids.shape[1] - width

    def write_all(temperature: float) -> int:
        config = GenerationConfig(max_new_tokens=MOST, pad_token_id=0, eos_token_id=None, **drawing(temperature))
        found = model.generate(
            input_ids=input_ids,
            attention_mask=mask.repeat_interleave(COUNT, 0),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([Lengths()]),
        )
        return sum(min(length, found.shape[1] - width) for length in lengths)

    model.generation_config = GenerationConfig()
    return write_all


def drawing(temperature: float) -> dict[str, Any]:
    """Returns the options under which `generate` draws from the whole distribution, or takes the likeliest."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def continuous(prompts: list[list[int]], lengths: Sequence[int]) -> Write:
    """transformers' continuous batching."""
    from transformers import GenerationConfig

    model = build_model(SHAPE).eval()
    model.generation_config = GenerationConfig()

    def write_all(temperature: float) -> int:
        config = GenerationConfig(max_new_tokens=MOST, pad_token_id=0, eos_token_id=-1, **drawing(temperature))
        tokens = 0
        with model.continuous_batching_context_manager(generation_config=config, block=True) as manager:
            for number, length in enumerate(lengths):
                manager.add_request(prompts[number // COUNT], max_new_tokens=length)
            for _ in lengths:
                found = manager.get_result(timeout=300)
                assert found is not None, "continuous batching gave no result within 300 seconds"
                tokens += len(found.generated_tokens)
        return tokens

    return write_all
