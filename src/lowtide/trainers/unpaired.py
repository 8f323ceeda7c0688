"""The trainers over single completions that are desirable or not: their data, and their metrics."""

from __future__ import annotations

from datasets import Dataset, IterableDataset

from lowtide.data.preference import prepare_unpaired
from lowtide.trainers.method import Prepared
from lowtide.trainers.reference import ReferenceTrainer


class UnpairedTrainer(ReferenceTrainer):
    """A trainer over rows of one completion that is desirable or not."""

    columns, values = ("completion_ids",), ("label",)

    def prepare(self, dataset: Dataset | IterableDataset, name: str) -> Prepared:
        assert self.tokenizer is not None
        args = self.args
        rows = args.per_device_train_batch_size if name == "train" else args.per_device_eval_batch_size
        return prepare_unpaired(
            dataset,
            self.tokenizer,
            self.data_options(),
            batch_size=rows,
            name=name,
            kl_block=rows if "kl_completion_ids" in self.columns else None,
        )

    def metrics_of(self, sums: dict[str, float]) -> dict[str, float]:
        metrics = super().metrics_of(sums)
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics
