"""The reference's log-probabilities, computed before training and kept as a column of the dataset.

They are computed over the batches of the run's first epoch, cut as the step will cut them, so that a run of one
epoch sees bit by bit what it would have computed by itself; later epochs see the same to rounding. The result is
cached under a fingerprint of weights, data and everything else that the numbers depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset, concatenate_datasets, is_caching_enabled
from rich.progress import track
from torch import Tensor, nn

from lowtide.compat.datasets import fingerprint_of
from lowtide.data.batches.collate import REFERENCE_COLUMN
from lowtide.data.cache.fingerprint import cache_file, combine, function_fingerprint
from lowtide.data.sources.titles import title_of
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.ops.mapped import let_go
from lowtide.own_files import writing
from lowtide.ragged import RaggedBatch
from lowtide.ranks.shards import is_sharded, local_of
from lowtide.ranks.world import distributed, worst_of_ranks
from lowtide.run.edge import TO_DO
from lowtide.step.rank_sync import RankSync
from lowtide.step_plan import Limits
from lowtide.terminal import Console

if TYPE_CHECKING:
    from lowtide.trainers.hooks import LowtideTrainer

NUMBER = "number"
"""Row value: the row's number in its dataset."""
LAYOUT = 3
"""Goes up when the same run gets other numbers than an earlier version gave it, which are not read then."""


class Precomputed:
    """In place of a reference, where every batch has to know its log-probabilities already."""

    def __call__(self, batch: RaggedBatch) -> Tensor:
        raise ValueError(
            "a row came without the reference's log-probabilities: precompute_ref_log_probs=True computes them for "
            "the datasets that the trainer is made with, and for those that `evaluate` and `predict` get"
        )


def precompute(trainer: LowtideTrainer) -> tuple[str, str]:
    """Gives the datasets of a trainer the column of the reference's log-probabilities.

    Returns:
        (fingerprint of the reference, digest of its weights alone).

    Raises:
        ValueError: a dataset is a stream, whose rows are not known beforehand.
    """
    digest = state_digest(cast(Any, trainer.reference).model)
    weights = weights_fingerprint(trainer, digest)
    if trainer.train_dataset is not None:
        trainer.train_dataset = with_column(trainer, trainer.train_dataset, "train", weights)
    held_out: Any = trainer.eval_dataset
    if isinstance(held_out, dict):
        held_out = {name: with_column(trainer, each, name, weights) for name, each in held_out.items()}
    elif held_out is not None:
        held_out = with_column(trainer, held_out, "eval", weights)
    trainer.eval_dataset = held_out
    return weights, digest


def with_column(trainer: LowtideTrainer, dataset: Any, name: str, weights: str) -> Dataset:
    """A dataset with the column, computed or found in the cache; `weights` is the reference's fingerprint."""
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        raise ValueError(
            f"precompute_ref_log_probs=True is not supported with IterableDataset: it needs the rows of "
            f"{title_of(dataset, name)} beforehand, which is a {type(dataset).__name__}. Set it to False, or load the "
            "dataset whole"
        )
    args: Any = trainer.args
    training = name == "train"
    rows = args.precompute_ref_batch_size or (
        args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    )
    limits = Limits(rows, args.tokens_per_microbatch)
    order = (args.seed, args.data_seed, args.data_ranks, args.gradient_accumulation_steps, args.train_batch_size)
    precision = (args.bf16, args.fp16, trainer.padding_free, str(args.device), torch.__version__, LAYOUT)
    techniques = trainer.runner.techniques
    precision = (*precision, args.sharding.same_rows, techniques is not None and techniques.fuses)
    collator = function_fingerprint(trainer.data_collator)
    path = cache_file(combine(weights, fingerprint_of(dataset), limits, training and order, precision, collator))
    path = _of_first_on_node(path, args)
    known = Path(path).exists() and is_caching_enabled()
    if worst_of_ranks(not known, args.device):  # all compute where one has to
        own = cast(Any, trainer).site.model if trainer.runner.begun else None  # which is computed as in training then
        models = [each for each in getattr(trainer.reference, "models", ()) if each is not own]
        with contextlib.nullcontext() if techniques is None else techniques.comparing(models):
            values = _compute(trainer, dataset, limits, training, name)
        sync = RankSync("reference")
        with sync.local():
            if args.local_process_index == 0:
                _write(values, path)
        sync.meet(args.device)
    return concatenate_datasets([dataset, Dataset.from_file(path)], axis=1)


def _of_first_on_node(path: str, args: Any) -> str:
    """The file that the first rank of this node writes.

    Another rank may name another one: its device, its temporary folder and what cannot be hashed are its own.
    """
    if not distributed():
        return path
    paths: list[str] = gather_object([path])
    return paths[args.process_index - args.local_process_index]


@torch.no_grad()
def _compute(trainer: LowtideTrainer, dataset: Dataset, limits: Limits, training: bool, name: str) -> list:
    """The log-probabilities of all scores of each row, in the dataset's order."""
    numbered = dataset.add_column(NUMBER, np.arange(len(dataset)))  # type: ignore[call-arg]
    found: list[np.ndarray | None] = [None] * len(dataset)
    random_state = torch.get_rng_state()
    size = trainer.args.gradient_accumulation_steps if training else 1
    for attempt in range(2):  # the second for rows that the first epoch leaves out
        missing = [number for number, value in enumerate(found) if value is None]
        if not missing:
            break
        loader = _loader(trainer, numbered if attempt == 0 else numbered.select(missing), training and attempt == 0)
        steps = range(-(-len(loader) // size))
        iterator = iter(loader)
        quiet = trainer.args.disable_tqdm or trainer.args.process_index > 0
        console = Console(stderr=True, quiet=quiet)
        for _ in track(steps, f"reference log-probs of {name}", console=console, disable=quiet):
            batches = [trainer.as_ragged(inputs) for _, inputs in zip(range(size), iterator, strict=False)]
            batch = RaggedBatch.concat(batches)
            sync, mine = RankSync("reference", part=batch, remedy=TO_DO["precomputing the reference"]), []
            with sync.local(waited_for=trainer.runner.waited_for):
                mine = _by_row(batch, trainer.runner.reference_logprobs(batch, limits).float().cpu().numpy())
            sync.meet(trainer.args.device)
            for number, value in gather_object(mine) if distributed() else mine:
                found[number] = value
    torch.set_rng_state(random_state)
    assert all(value is not None for value in found)
    return found


def _loader(trainer: LowtideTrainer, dataset: Dataset, training: bool) -> Any:
    if not training:
        return trainer.get_eval_dataloader(dataset)  # type: ignore[arg-type]
    own, trainer.train_dataset = trainer.train_dataset, dataset
    try:
        return trainer.get_train_dataloader()
    finally:
        trainer.train_dataset = own


def _by_row(batch: RaggedBatch, values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(number in the dataset, values of its scores) of each row."""
    numbers = batch.row_values[NUMBER].tolist()
    spans = [
        (batch.segments[of_row[0]].score_start, batch.segments[of_row[-1]].score_stop) for of_row in batch.row_segments
    ]
    return [(number, values[start:stop]) for number, (start, stop) in zip(numbers, spans, strict=True)]


def _write(values: list[np.ndarray], path: str) -> None:
    """Writes beside, then renames, so that a killed start leaves no half of a cache."""
    offsets = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(values)))
    table = pa.table({REFERENCE_COLUMN: column})
    with (
        writing(Path(path)) as beside,
        pa.OSFile(str(beside), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)


def weights_fingerprint(trainer: LowtideTrainer, digest: str) -> str:
    """One fingerprint of the reference's weights, and of the model that they are in."""
    model: Any = cast(Any, trainer.reference).model
    config = causal_model(model).config.to_json_string(use_diff=False)
    adapters = {name: each.to_dict() for name, each in getattr(model, "peft_config", {}).items()}
    scales = json.dumps(adapters, sort_keys=True, default=_plain)
    return combine(digest, config, scales, type(model).__name__, type(trainer.reference).__name__)


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON has it, alike in each process."""
    return sorted(map(str, value)) if isinstance(value, set) else str(value)


def state_digest(model: nn.Module) -> str:
    """Of the names, shapes and numbers of a model's weights and buffers; of the shards of all ranks together."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(local_of(tensor).detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
        let_go(tensor)
    if not is_sharded(model) and stage_of(causal_model(model)) is None:
        return digest.hexdigest()
    everyones: list[str] = gather_object([digest.hexdigest()])
    return combine(*everyones)
