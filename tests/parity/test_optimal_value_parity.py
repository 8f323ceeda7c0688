"""lowtide's A2POTrainer against TRL 1.16's: values that are estimated before training, and steps from the same weights,
on the same completions and rewards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.support.references.parity_world import (
    COMMON,
    FIRST_STEPS,
    Writer,
    assert_likelihoods_agree,
    build_model,
    sums,
    tokenizer,
)

trl = pytest.importorskip("trl.experimental.a2po", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")

SETTINGS: dict[str, Any] = {
    **{"learning_rate": 1e-2, "max_completion_length": 24, "max_steps": FIRST_STEPS, "temperature": 0.8},
    **{"num_value_samples": 3, "beta1": 0.7, "beta2": 0.1, "reward_weights": [1.0, 0.5]},
}
PAD, END = 0, 2


class Ending(Writer):
    """Completions that end, as those do that are shorter than they may be."""

    def completions(self, prompts: list[list[int]]) -> list[list[int]]:
        return [[*(token for token in ids[:23] if token != END), END] for ids in super().completions(prompts)]

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        """As a model's method."""
        kept = zip(input_ids, attention_mask.bool(), strict=True)
        prompts = [ids[mask].tolist() for ids, mask in kept for _ in range(generation_config.num_return_sequences)]
        repeated = input_ids.repeat_interleave(generation_config.num_return_sequences, 0)
        written = [torch.tensor(ids) for ids in self.completions(prompts)]
        return torch.cat([repeated, torch.nn.utils.rnn.pad_sequence(written, True, PAD)], 1)


def padding_on_the_left() -> Any:
    """The tokenizer as TRL loads it by itself."""
    made = copy.deepcopy(tokenizer())
    made.padding_side = "left"
    return made


def long(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) > 25) for text in completions]


def loud(completions: list[str], number: list[int], **_: Any) -> list[float]:
    return [float(text.count("4") > n % 3) for text, n in zip(completions, number, strict=True)]


@pytest.mark.slow
def test_values_and_steps_agree_with_trl(tmp_path):
    rows = Dataset.from_list([{"prompt": ask, "number": n} for n, (ask, _) in enumerate(sums(80))])
    built = []
    for library in (trl, lowtide):
        writer = Ending()
        ours = library is lowtide
        common = {name: value for name, value in COMMON.items() if not ours or name != "train_sampling_strategy"}
        # as the last of six steps magnifies what the first ones round, layers round as TRL's
        more = {"shuffle_dataset": False, "tokens_per_microbatch": 90, "fused_layers": False} if ours else {}
        trainer = library.A2POTrainer(
            model=build_model("llama"),
            reward_funcs=[long, loud],
            args=library.A2POConfig(output_dir=str(tmp_path / library.__name__), **SETTINGS, **common, **more),
            train_dataset=rows,
            processing_class=tokenizer() if ours else padding_on_the_left(),
            **({"rollout_func": writer} if ours else {}),
        )
        if not ours:
            trainer.model.generate = trainer.ref_model.generate = writer.generate
        built.append(trainer)
    theirs, ours = built
    theirs._estimate_optimal_values()
    found, expected = ours.train_dataset["optimal_value"], theirs._optimal_values
    assert ours.train_dataset["number"] == theirs.train_dataset["number"]
    assert 0 < len(found) < len(rows), "some prompts are left out"
    values = [expected[prompt] for prompt in ours.train_dataset["prompt"]]
    assert list(found) == pytest.approx(values, rel=1e-6, abs=1e-6)
    assert_likelihoods_agree(theirs, ours, FIRST_STEPS, unlike=["epoch"])  # TRL's has a last step of fewer rows
