"""The arguments that training scripts have in common, under TRL's names and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.data.sources.mixtures import DatasetConfig
from lowtide.option import COUNT, Range, option
from lowtide.option_values import check_ranges

__all__ = ["DatasetConfig", "DatasetMixtureConfig", "ModelConfig", "ScriptArguments"]

DTYPES = ["auto", "bfloat16", "float16", "float32"]


@dataclass
class ScriptArguments:
    """Which dataset a script trains on."""

    dataset_name: str | None = option(
        None, "The rows: a dataset's name on the hub, or a folder. `datasets` comes first."
    )
    dataset_config: str | None = option(None, "Configuration of a dataset on the hub.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Read rows while training, in place of preparing them first.")
    ignore_bias_buffers: bool = option(
        False,
        "Leave boolean buffers out of DistributedDataParallel; without effect here, since nothing is wrapped in it.",
    )


@dataclass
class DatasetMixtureConfig:
    """Several datasets as one; see `lowtide.data.sources.mixtures`."""

    datasets: list[DatasetConfig] = option([], "The datasets, each a mapping with the fields of `DatasetConfig`.")
    streaming: bool = option(False, "Read rows while training, in place of preparing them first.")
    test_split_size: float | None = option(None, "Share or number of rows that are taken for the split `test`.")

    def __post_init__(self) -> None:
        check_ranges(self)
        self.datasets = [DatasetConfig(**each) if isinstance(each, Mapping) else each for each in self.datasets]


@dataclass
class ModelConfig:
    """Which model is trained, with which adapters, and how its weights are stored.

    Raises:
        ValueError: a number is out of its range, or 8 and 4 bits are both asked for.
    """

    model_name_or_path: str | None = option(None, "The model: a folder, or a name on the hub.")
    model_revision: str = option("main", "Branch, tag or commit of a model on the hub.")
    dtype: str | None = option("float32", "What weights are stored in.", choices=DTYPES)
    attn_implementation: str | None = option(None, "Attention of the padded path (padding_free=False).")
    use_peft: bool = option(False, "Train a LoRA adapter in place of the whole model.")
    lora_r: int = option(16, "Rank of the adapter.", COUNT)
    lora_alpha: int = option(32, "Scale of the adapter: its output is multiplied by alpha / r.", COUNT)
    lora_dropout: float = option(0.05, "Dropout before the adapter.", Range(least=0, below=1))
    lora_target_modules: list[str] | None = option(None, "Names of the layers to adapt, or all-linear.")
    lora_target_parameters: list[str] | None = option(None, "Names of single parameters to adapt, such as experts'.")
    lora_modules_to_save: list[str] | None = option(None, "Layers to train whole beside the adapter.")
    lora_task_type: str = option("CAUSAL_LM", "PEFT's name of the task; SEQ_CLS for reward models.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) (rank-stabilized LoRA, arXiv 2312.03732).")
    use_dora: bool = option(False, "Train magnitude and direction apart (DoRA, arXiv 2402.09353).")
    load_in_8bit: bool = option(False, "Store the weights that are not trained in 8 bits (needs bitsandbytes).")
    load_in_4bit: bool = option(False, "Store the weights that are not trained in 4 bits (needs bitsandbytes).")
    bnb_4bit_quant_type: str = option("nf4", "The 4-bit format.", choices=["fp4", "nf4"])
    use_bnb_nested_quant: bool = option(False, "Quantize the scales of 4-bit weights as well.")
    bnb_4bit_quant_storage: str | None = option(None, "The dtype that 4-bit weights are packed into.")
    torch_dtype: str | None = option(None, "The older name of `dtype`.", choices=DTYPES)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit=True and load_in_4bit=True exclude each other: leave one of them out")
        targets = self.lora_target_modules
        if isinstance(targets, list) and len(targets) == 1:  # PEFT takes a pattern, or all-linear, as text alone
            self.lora_target_modules = targets[0]  # type: ignore[assignment]
        if self.torch_dtype is not None:
            self.dtype, self.torch_dtype = self.torch_dtype, None
