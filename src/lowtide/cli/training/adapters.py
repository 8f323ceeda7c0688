"""LoRA and quantized weights from options, under TRL's names and with its defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from lowtide.cli.endings import UsageError
from lowtide.option import COUNT, Group, Range, option

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig


@dataclass(kw_only=True)
class AdapterOptions:
    """What is trained in place of the whole model, and how the rest of it is stored."""

    group: ClassVar[Group] = Group.ADAPTERS

    use_peft: bool = option(False, "Train a LoRA adapter in place of the whole model.")
    lora_r: int = option(16, "Rank of the adapter.", COUNT)
    lora_alpha: int = option(32, "Scale of the adapter: its output is multiplied by alpha / r.", COUNT)
    lora_dropout: float | None = option(
        None,
        "Dropout before the adapter. None: 0.05, or 0 if experts' weights are adapted.",
        Range(least=0, below=1),
    )
    lora_target_modules: str | list[str] | None = option(
        None,
        "Names of the layers to adapt, 'all-linear', or 'all-linear-experts' for routed experts' weights too. "
        "None: PEFT's choice, or all if it has none.",
    )
    lora_target_parameters: list[str] | None = option(None, "Names of single parameters to adapt, such as experts'.")
    lora_modules_to_save: list[str] | None = option(None, "Layers to train whole beside the adapter.")
    lora_task_type: str = option("CAUSAL_LM", "PEFT's name of the task.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) (rank-stabilized LoRA, arXiv 2312.03732).")
    use_dora: bool = option(False, "Train magnitude and direction apart (DoRA, arXiv 2402.09353).")
    load_in_4bit: bool = option(False, "Store the weights that are not trained in 4 bits (needs bitsandbytes).")
    load_in_8bit: bool = option(False, "Store the weights that are not trained in 8 bits (needs bitsandbytes).")
    bnb_4bit_quant_type: str = option("nf4", "The 4-bit format.", choices=["nf4", "fp4"])
    use_bnb_nested_quant: bool = option(False, "Quantize the scales of 4-bit weights as well.")

    def check(self) -> None:
        """Refuses options that have no effect, or contradict each other.

        Raises:
            UsageError: naming both options.
        """
        if self.load_in_4bit and self.load_in_8bit:
            raise UsageError("load_in_4bit and load_in_8bit exclude each other: drop one")
        if not self.use_peft:
            if self.load_in_4bit or self.load_in_8bit:
                raise UsageError("quantized weights cannot be trained themselves: add --use_peft, or drop load_in_*")
            for name in self._changed("lora_", "use_rslora", "use_dora"):
                raise UsageError(f"{name} has no effect without use_peft: add --use_peft, or drop it")
        if not self.load_in_4bit:
            for name in self._changed("bnb_4bit_", "use_bnb_"):
                raise UsageError(f"{name} has no effect without load_in_4bit: add --load_in_4bit, or drop it")

    def _changed(self, *prefixes: str) -> list[str]:
        """The options with one of these prefixes that differ from their defaults."""
        named = [field for field in fields(self) if field.name.startswith(prefixes)]
        return [field.name for field in named if getattr(self, field.name) != field.default]

    def peft_config(self) -> LoraConfig | None:
        if not self.use_peft:
            return None
        from peft import LoraConfig

        targets = self.lora_target_modules
        if isinstance(targets, str) and targets.isidentifier():
            targets = [targets]  # PEFT takes a bare string for a pattern of whole module paths
        return LoraConfig(
            task_type=self.lora_task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self._dropout(),
            target_modules=targets,
            target_parameters=self.lora_target_parameters,
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
            bias="none",
        )

    def _dropout(self) -> float:
        """TRL's, where PEFT has one: it has none for adapters of a parameter, such as that of all experts."""
        from lowtide.engine.weights.loading import WITH_EXPERTS

        if self.lora_dropout is not None:
            return self.lora_dropout
        return 0.0 if self.lora_target_parameters or self.lora_target_modules == WITH_EXPERTS else 0.05

    def quantization_config(self, *, bf16: bool, fp16: bool) -> BitsAndBytesConfig | None:
        """How weights are quantized, and computed with in the precision of the run."""
        if not (self.load_in_4bit or self.load_in_8bit):
            return None
        from transformers import BitsAndBytesConfig

        if self.load_in_8bit:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype="bfloat16" if bf16 else "float16" if fp16 else "float32",
            bnb_4bit_quant_type=self.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=self.use_bnb_nested_quant,
        )
