"""lowtide: post-training of language models at the lowest peak memory that the arithmetic allows.

The public names, and no more. They resolve when first used, so that `import lowtide` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.data.collate import DataCollatorForCompletionOnlyLM, DataCollatorWithFlattening
    from lowtide.ragged import RaggedBatch
    from lowtide.trainers.sft import SFTConfig, SFTTrainer

__version__ = "0.1.0"
__all__ = [
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorWithFlattening",
    "RaggedBatch",
    "SFTConfig",
    "SFTTrainer",
]

_HOME = {
    "DataCollatorForCompletionOnlyLM": "lowtide.data.collate",
    "DataCollatorWithFlattening": "lowtide.data.collate",
    "RaggedBatch": "lowtide.ragged",
    "SFTConfig": "lowtide.trainers.sft",
    "SFTTrainer": "lowtide.trainers.sft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
