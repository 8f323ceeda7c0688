"""The small world in which lowtide and TRL are compared: rows, a tokenizer and models, all built in code; and how they
are trained there.

Weights start large enough (`initializer_range`) for attention to be far from uniform: a row that saw its neighbour,
or a position off by one, would show in the loss at once.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.support.runs.on_a_cpu import ON_A_CPU

STEPS, FIRST_STEPS = 12, 6
"""Of a long run, and of one that shows what a loss, an option or a format does: from the second step on, gradients and
the optimizer take part in every loss."""
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    **ON_A_CPU,
}
"""What both libraries are told of every run."""

VOCABULARY = 320
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"model_type": "llama"},
    "tied": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SMALL
    | {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "norm_topk_prob": True},
}


def build_model(name: str) -> PreTrainedModel:
    """Returns a tiny float32 model with seeded weights."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=torch.float32)


def build_teacher() -> PreTrainedModel:
    """Returns one of another model type, wider and deeper."""
    torch.manual_seed(1)
    config = SMALL | {"model_type": "qwen2", "hidden_size": 96, "num_hidden_layers": 3}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)


def lora(**more: Any) -> LoraConfig:
    """Returns adapters on attention and on the feed-forward part."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **more)


def trained_before(model: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Returns a model with adapters that are far from new, as after an earlier training."""
    made = get_peft_model(model, config)
    torch.manual_seed(2)
    for p in made.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.05)
    return made


def same_start(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Gives our model the weights of TRL's, which may have a copy of its adapters beside them ("ref")."""
    ours.load_state_dict({name: p for name, p in theirs.state_dict().items() if ".ref." not in name})


def sums(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Returns questions and answers of very different lengths: sums of two to twelve numbers, worked out in steps."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(2, 12))]
        steps = [f"{sum(numbers[:n])} + {numbers[n]} = {sum(numbers[: n + 1])}" for n in range(1, len(numbers))]
        pairs.append((f"What is {' + '.join(map(str, numbers))}?", ". ".join(steps)))
    return pairs


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def two_turns(question: str, answer: str) -> list[dict[str, str]]:
    return [user(question), assistant(answer), user("Are you sure?"), assistant("Yes, it is " + answer[-3:])]


FORMATS = {
    "text": lambda question, answer: {"text": f"{question} {answer}"},
    "messages": lambda question, answer: {"messages": two_turns(question, answer)},
    "conversations": lambda question, answer: {
        # Not `human` and `gpt`: those become user and assistant here, and stay the role's name in TRL.
        "conversations": [{"from": "user", "value": question}, {"from": "assistant", "value": answer}]
    },
    "prompt_completion": lambda question, answer: {"prompt": question, "completion": f" {answer}"},
    "prompt_completion_messages": lambda question, answer: {
        "prompt": [user(question)],
        "completion": [assistant(answer)],
    },
}


def rows_of(format: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns `count` dataset rows in one of `FORMATS`."""
    return [FORMATS[format](question, answer) for question, answer in sums(count, seed)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with ChatML's template and generation marks: a new one, which a test may
    change."""
    bpe = Tokenizer.from_str(_trained_bpe())
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


@cache
def _trained_bpe() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(pair) for pair in sums(200)], trainer)
    return bpe.to_str()


def runs_of(cases: Collection[str], quick: Collection[str], long: Collection[str]) -> Any:
    """Gives a test each case (`name`) and how many steps are compared (`steps`): `STEPS` of the long ones and
    `FIRST_STEPS` of the others and of the quick ones, which alone are not slow."""
    first = [name for name in cases if name in quick or name not in long]
    slow = [*((name, FIRST_STEPS) for name in first if name not in quick), *((name, STEPS) for name in long)]
    found = [*((name, FIRST_STEPS) for name in first if name in quick)]
    return pytest.mark.parametrize(
        ("name", "steps"), [*found, *(pytest.param(*each, marks=pytest.mark.slow) for each in slow)]
    )


def train(trainer: Any) -> dict[str, torch.Tensor]:
    """Trains, and returns every metric that was logged at every step."""
    trainer.train()
    return numbers([entry for entry in trainer.state.log_history if "loss" in entry])


def trained_alike(theirs: Any, ours: Any, steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(metrics of TRL's trainer, of ours) of every step, from the same weights."""
    same_start(ours.model, theirs.model)  # an adapter is drawn when the trainer is built
    expected, actual = train(theirs), train(ours)
    assert len(actual["loss"]) == len(expected["loss"]) == steps
    assert expected["grad_norm"].max() > 0
    return expected, actual


def assert_likelihoods_agree(
    theirs: Any, ours: Any, steps: int, near: Mapping[str, float] = {}, unlike: Collection[str] = ()
) -> None:
    """Trains both trainers, of losses over tokens: the loss, the gradient's norm and the metrics of every step agree.

    Args:
        near: as of `assert_metrics_agree`; likewise `unlike`.
    """
    expected, actual = trained_alike(theirs, ours, steps)
    assert expected["loss"].std() > 1e-3 * expected["loss"].mean(), "nothing was learnt, so nothing was compared"
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=2e-4, atol=0.0)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=1e-3, atol=0.0)
    assert_metrics_agree(actual, expected, near=near, unlike=unlike)


def numbers(entries: list[dict[str, float]]) -> dict[str, torch.Tensor]:
    """Returns the values of each number that all entries have, in their order; what is text, such as the phase in which
    memory was highest, stands beside a new peak alone."""
    shared = set.intersection(*({key for key in entry if not isinstance(entry[key], str)} for entry in entries))
    return {key: torch.tensor([float(entry[key]) for entry in entries], dtype=torch.float64) for key in shared}


ACCUMULATED = {"entropy": 0.01, "kl": 0.1, "cispo_clip_ratio": 0.1}
ACCUMULATED |= {f"clip_ratio/{of}_mean": 0.1 for of in ("low", "high", "region")}
EXTREMES = ("clip_ratio/low_min", "clip_ratio/high_max")
"""Of online methods whose steps accumulate, TRL has means of the micro-batches' means, and of their extremes."""


def assert_metrics_agree(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    *,
    unlike: Collection[str] = (),
    near: Mapping[str, float] = {},
) -> None:
    """Compares every step's value of every metric that the other library has, up to rounding in the metric's size.

    Args:
        actual: of lowtide; may have more.
        expected: of the other library.
        unlike: metrics that are not compared, since they are left out here or mean something else.
        near: means over tokens that the other library takes of the means of micro-batches, whatever tokens these have;
            and which share of their size they may differ by.
    """
    off = {name for name in expected.keys() - actual.keys() if not expected[name].any()}  # 0 of a term that is off
    missing = expected.keys() - actual.keys() - off - {*unlike}
    assert not missing, f"metrics that are not logged: {sorted(missing)}"
    for metric in expected.keys() - off - {*unlike}:
        size = expected[metric].abs().max().item()
        rtol, atol = (0.0, near[metric] * size) if metric in near else (1e-3, 2e-4 * size + 1e-6)
        message = lambda text, metric=metric: f"{metric}: {text}"  # noqa: E731
        torch.testing.assert_close(actual[metric], expected[metric], rtol=rtol, atol=atol, msg=message)


def without_ties(found: dict[str, torch.Tensor], margins: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics, with no accuracy of rewards in steps where they differ by rounding alone, as before an update."""
    apart = margins.abs() > 1e-4
    return found | {"rewards/accuracies": found["rewards/accuracies"] * apart}


class Writer:
    """Completions of random tokens, some of which end; the same again from a new writer."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def completions(self, prompts: list[list[int]]) -> list[list[int]]:
        found = []
        for ids in prompts:
            self.asked[str(ids)] += 1
            rng = random.Random(f"{ids} {self.asked[str(ids)]}")
            written = [rng.randrange(3, 300) for _ in range(rng.randint(2, 24))]
            found.append([*written, *[tokenizer().eos_token_id] * (rng.random() < 0.6)][:24])
        return found

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """As a `rollout_func`."""
        encoded: Any = [
            tokenizer()(each)["input_ids"]
            if isinstance(each, str)
            else tokenizer().apply_chat_template(each, add_generation_prompt=True, return_dict=False)
            for each in prompts
        ]
        return {"prompt_ids": encoded, "completion_ids": self.completions(encoded), "logprobs": None}


@dataclass(frozen=True)
class WritingCase:
    """One way to train where the policy writes; `flags` go to both libraries, `ours` to lowtide alone."""

    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    chat: bool = False
    served: bool = False
    """Whether the server that writes is asked for what the teacher says."""


def writing_trainer(
    library: Any, kind: str, folder: Path, case: WritingCase, flags: dict[str, Any], **more: Any
) -> Any:
    """Returns a trainer of a library, whose policy teaches itself, and which is given the same completions as the
    other library's.

    Args:
        kind: `SDFT` of `SDFTTrainer`.
        flags: of its config, those of the case among them.
        more: arguments of the trainer.
    """
    model, writer, ours = build_model("llama"), Writer(), library.__name__ == "lowtide"
    if not ours:
        model.save_pretrained(folder / "model")  # which TRL loads as the teacher
        model.config._name_or_path = str(folder / "model")
    config = getattr(library, f"{kind}Config")(output_dir=str(folder / library.__name__), **flags)
    config.use_teacher_server = case.served and ours  # a config checks that a server writes
    trainer = getattr(library, f"{kind}Trainer")(
        model=model,
        args=config,
        processing_class=tokenizer(),
        peft_config=lora() if case.lora else None,
        **more,
    )
    if case.served and not ours:
        trainer.use_teacher_server = True
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.teacher_client = SimpleNamespace(get_sequence_logprobs=partial(said_by, model))
    if ours:
        trainer.rollout_func = writer
    else:
        trainer._generate = lambda prompt_ids: (prompt_ids, writer.completions(prompt_ids))
    return trainer


@torch.no_grad()
def said_by(
    model: Any, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
) -> dict[str, Any]:
    """What TRL's server answers of a model: of each token behind a prompt its log-probability, and the likeliest."""
    found: dict[str, list[Any]] = {"actual_logprobs": [], "logprobs": [], "logprob_token_ids": []}
    for ids, start in zip(sequences, prompt_lengths, strict=True):
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        likeliest = logprobs.topk(top_logprobs)
        found["actual_logprobs"].append(logprobs.gather(1, torch.tensor(ids[start:])[:, None]).tolist())
        found["logprobs"].append(likeliest.values.tolist())
        found["logprob_token_ids"].append(likeliest.indices.tolist())
    return found


def told_rows(count: int, chat: bool, told: Callable[[int, str], str]) -> Dataset:
    """Prompts, as texts or as conversations, with what the teacher is told beside each, by its number and answer."""
    return Dataset.from_list(
        [
            {"prompt": [user(ask)] if chat else ask, "privileged_context": told(number, answer)}
            for number, (ask, answer) in enumerate(sums(count))
        ]
    )
