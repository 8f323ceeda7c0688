"""Runs whose peak is predicted and then measured: every trainer and technique, five architectures, 20M to 0.5B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.estimate.tasks import VISION
from bench.inputs.shapes import QWEN_05B
from bench.tasks import encoders, pairs
from bench.vision import child as vision_child

VOCABULARY = 32_000
"""Of the tokenizer that the benchmarks train."""


def _sized(model_type: str, hidden: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 256 * round(hidden * 8 / 3 / 256),
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "llama-22m": _sized("llama", 256, 8, tie_word_embeddings=False),
    "qwen2-45m": _sized("qwen2", 512, 10, tie_word_embeddings=True),
    "qwen3-60m": _sized("qwen3", 512, 12, tie_word_embeddings=False),
    "gemma2-50m": _sized("gemma2", 512, 12, tie_word_embeddings=True),
    "mistral-120m": _sized("mistral", 768, 12, tie_word_embeddings=True, sliding_window=None),
    "llama-160m": _sized("llama", 768, 16, tie_word_embeddings=False),
    "llama-33m": _sized("llama", 320, 8, tie_word_embeddings=False, num_attention_heads=5, num_key_value_heads=5),
    "qwen3-56m": _sized("qwen3", 448, 12, tie_word_embeddings=False, num_attention_heads=7, num_key_value_heads=7),
    "qwen2-59m": _sized("qwen2", 576, 12, tie_word_embeddings=True, num_attention_heads=9, num_key_value_heads=3),
    "llama-96m": _sized("llama", 640, 13, tie_word_embeddings=False),
    "bert-29m": {"model_type": "bert", "vocab_size": encoders.VOCABULARY, **encoders.SIZES},
    "electra-29m": {
        **{"model_type": "electra", "vocab_size": encoders.VOCABULARY, "embedding_size": 512, **encoders.SIZES},
    },
    "t5-60m": {
        **{"model_type": "t5", "vocab_size": pairs.VOCABULARY, "decoder_start_token_id": 0},
        **{"pad_token_id": 0, "eos_token_id": 1},
    },
    "qwen2.5-vl-38m": vision_child.described(),
    "qwen2.5-0.5b": {**QWEN_05B, "pad_token_id": 0},
}


ONLINE = ("grpo", "rloo", "online_dpo", "ppo")
"""Methods whose policy writes."""


@dataclass(frozen=True)
class EstimateCase:
    """One run: a trainer, a model, its options."""

    method: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    four_bit: bool = False
    dtype: str = "float32"
    rows: int = 4
    """`per_device_train_batch_size`."""
    max_length: int | None = 512
    """Most tokens of a row; of a completion, where the policy writes it."""
    teacher: str | None = None
    """Of `MODELS`, of a method that has one."""
    reward_model: str | None = None
    """A classifier of `MODELS` that rewards completions, in place of a function."""
    needs: tuple[str, ...] = ()
    """Packages beside lowtide's own requirements."""
    large: bool = False
    """For a GPU alone: a CPU would take long."""
    ranks: int = 1
    """Processes that train together; the options say how."""

    @property
    def writes(self) -> bool:
        """Whether the policy writes what it learns from."""
        return self.method in ONLINE

    @property
    def name(self) -> str:
        """All that sets it apart, in words."""
        options = [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        adapters = ["QLoRA"] if self.four_bit else ["LoRA"] if self.lora else []
        dtype = [self.dtype] if self.dtype != "float32" else []
        rewarded = [] if self.reward_model is None else [f"reward model {self.reward_model}"]
        rewarded += [] if self.teacher is None else [f"teacher {self.teacher}"]
        size = f"{self.rows} rows" if self.max_length is None else f"{self.rows} x {self.max_length}"
        return ", ".join([f"{self.method} {self.model}", *adapters, *dtype, *options, *rewarded, size])


def case_of(method: str, model: str, rows: int = 4, max_length: int | None = 512, **options: Any) -> EstimateCase:
    """A run; `options` are those of the trainer and the fields of `EstimateCase` after them."""
    names = ("lora", "four_bit", "dtype", "needs", "large", "ranks", "reward_model", "teacher")
    own = {name: options.pop(name) for name in names if name in options}
    return EstimateCase(method, model, options, rows=rows, max_length=max_length, **own)


BNB = ("bitsandbytes",)
LOW_RANK = {"optim_target_modules": "all-linear"}
IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
CASES: dict[str, EstimateCase] = {
    each.name: each
    for each in (
        # every trainer
        *(case_of(method, "llama-22m") for method in ("sft", "dpo", "kto", "reward", "orpo", "cpo", "bco")),
        case_of("dpo", "qwen2-45m"),
        case_of("kto", "qwen3-60m"),
        case_of("reward", "gemma2-50m"),
        case_of("orpo", "mistral-120m"),
        case_of("dpo", "mistral-120m", lora=True),
        case_of("kto", "llama-160m", lora=True),
        case_of("dpo", "llama-22m", precompute_ref_log_probs=True),
        case_of("cpo", "qwen2-45m", loss_type="simpo", cpo_alpha=0.0),
        # every architecture
        case_of("sft", "qwen2-45m"),
        case_of("sft", "qwen3-60m"),
        case_of("sft", "gemma2-50m"),
        case_of("sft", "mistral-120m"),
        case_of("sft", "llama-160m"),
        case_of("sft", "qwen2.5-0.5b", rows=2, max_length=128),
        case_of("sft", "qwen2.5-0.5b", rows=2, max_length=512, lora=True),
        # sizes of a step
        case_of("sft", "llama-22m", rows=16),
        case_of("sft", "llama-22m", rows=1, max_length=64),
        case_of("sft", "qwen3-60m", rows=8, max_length=1024),
        case_of("sft", "mistral-120m", gradient_accumulation_steps=2),
        case_of("sft", "qwen2-45m", rows=8, tokens_per_microbatch=1024),
        case_of("sft", "llama-22m", rows=2, packing=True),
        case_of("sft", "llama-22m", eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=16),
        # every technique
        case_of("sft", "qwen3-60m", gradient_checkpointing=False),
        case_of("sft", "qwen3-60m", rows=8, checkpointing_policy="attention"),
        case_of("sft", "qwen3-60m", rows=8, checkpointing_policy="matmul"),
        case_of("sft", "qwen3-60m", rows=8, checkpointing_every=2),
        case_of("sft", "qwen3-60m", rows=8, activation_offloading=True),
        case_of("sft", "mistral-120m", rows=8, mlp_tile_tokens=256),
        case_of("sft", "mistral-120m", **IN_BACKWARD),
        case_of("sft", "mistral-120m", optimizer_in_backward="two_pass"),
        case_of("sft", "mistral-120m", optim="adamw_compressed"),
        case_of("sft", "mistral-120m", optim="adamw_stochastic"),
        case_of("sft", "llama-160m", optim="adamw_stochastic_8bit"),
        case_of("sft", "llama-160m", optim="adafactor"),
        case_of("sft", "mistral-120m", optim="adamw_torch"),
        case_of("sft", "mistral-120m", optimizer_states_on_host=True),
        case_of("sft", "llama-160m", lora=True),
        case_of("sft", "llama-160m", lora=True, dtype="bfloat16"),
        case_of("sft", "qwen2.5-0.5b", rows=2, max_length=512, lora=True, four_bit=True, dtype="bfloat16", needs=BNB),
        case_of("sft", "mistral-120m", optim="adamw_8bit", needs=BNB),
        case_of("sft", "mistral-120m", optim="paged_adamw_32bit", needs=BNB),
        case_of("sft", "llama-160m", optim="lion_8bit", needs=BNB),
        case_of("sft", "mistral-120m", optim="adamw_torch_8bit", needs=("torchao",)),
        case_of("sft", "llama-160m", optim="adamw_torch_4bit", needs=("torchao",)),
        case_of("sft", "mistral-120m", optim="galore_adamw", **LOW_RANK, needs=("galore_torch",)),
        case_of("sft", "llama-160m", optim="apollo_adamw", **LOW_RANK, needs=("apollo_torch",)),
        case_of("sft", "llama-22m", padding_free=False),
        case_of("sft", "llama-22m", bf16=True),
        case_of("sft", "mistral-120m", rehearsal=False),
        case_of("dpo", "mistral-120m", optim="adamw_compressed", **IN_BACKWARD),
        # sizes that no constant was set by
        case_of("sft", "llama-96m", lora=True),
        case_of("dpo", "qwen2-59m"),
        case_of("kto", "llama-33m"),
        case_of("reward", "qwen3-56m"),
        case_of("sft", "qwen3-56m", rows=2, packing=True),
        case_of("dpo", "llama-33m", rows=8, activation_offloading=True),
        # tasks of encoders
        *(case_of(task, "bert-29m", rows=16) for task in (*encoders.NAMES, "sequence-classification")),
        case_of("masked-lm", "bert-29m", rows=16, gradient_checkpointing=True),
        case_of("replaced-token-detection", "electra-29m", rows=16),
        # other tasks
        case_of("seq2seq", "t5-60m", rows=16),
        case_of("pretrain", "llama-22m", rows=8),
        case_of("gkd", "llama-22m", lmbda=0.0, teacher="llama-96m"),
        case_of(VISION, "qwen2.5-vl-38m", rows=8, max_length=None),
        # what the policy writes
        case_of("grpo", "llama-22m", rows=8, max_length=128),
        case_of("grpo", "llama-22m", rows=8, max_length=128, beta=0.04),
        case_of("grpo", "llama-22m", rows=8, max_length=128, lora=True, beta=0.04),
        case_of("grpo", "llama-22m", rows=8, max_length=128, num_iterations=2, steps_per_generation=4),
        case_of("grpo", "llama-22m", rows=8, max_length=128, reward_model="llama-96m"),
        case_of("grpo", "llama-33m", rows=4, max_length=256, lora=True, num_generations=4, steps_per_generation=8),
        case_of("rloo", "llama-22m", rows=8, max_length=128),
        case_of("online_dpo", "llama-22m", rows=4, max_length=128),
        case_of("ppo", "llama-22m", rows=8, max_length=128),
        case_of("ppo", "llama-22m", rows=8, max_length=128, reward_model="llama-33m"),
        # for a GPU
        case_of("sft", "qwen2.5-0.5b", rows=8, max_length=1024, large=True),
        case_of("sft", "qwen2.5-0.5b", rows=8, max_length=1024, gradient_checkpointing=False, large=True),
        case_of("dpo", "qwen2.5-0.5b", rows=8, max_length=1024, large=True),
        case_of("dpo", "qwen2.5-0.5b", rows=8, max_length=1024, lora=True, large=True),
    )
}
"""By name."""
