"""`MergeModelCallback`: the trained model merged with another one, tensor by tensor.

Names and settings are TRL's, which has mergekit merge. A linear merge needs no other package: each weight is the mean
of both, weighted, formed in float32 and rounded once, a file at a time; mergekit forms it in `dtype`. Its other methods
are mergekit's own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, TrainerCallback

from lowtide.engine.weights.merging import write_shards
from lowtide.engine.weights.sharded.shard_files import OF_A_MODEL, WeightFiles

logger = logging.getLogger(__name__)

OF_MERGEKIT = ("ties", "dare_ties", "slerp")
"""Methods that TRL has mergekit do."""
DTYPES = ("float32", "float16", "bfloat16")
MERGED = "merged"
"""The folder in a checkpoint."""


@dataclass(eq=False)
class MergeConfig:
    """How two models are merged.

    Args:
        method: "linear". Others are mergekit's, and are refused.

    Raises:
        ValueError: another method.
    """

    method: str = "linear"
    policy_model_path: str | None = field(default=None, init=False)
    """The folder of the trained model; set by `MergeModelCallback`."""
    target_model_path: str | None = field(default=None, init=False)
    """The folder or hub name of the other; None for the one that training began from."""
    policy_model_weight: float = field(default=0.5, init=False)
    """Of the trained model, in proportion to the sum of both weights; likewise `target_model_weight`."""
    target_model_weight: float = field(default=0.5, init=False)
    dtype: str = field(default="float16", init=False)
    """Of the merged weights."""

    def __post_init__(self) -> None:
        if self.method in OF_MERGEKIT:
            raise ValueError(
                f"MergeConfig(method={self.method!r}) is mergekit's, which does it after training: write its YAML and "
                "run mergekit-yaml merge.yaml OUT on the checkpoint. Here method='linear' merges"
            )
        if self.method != "linear":
            raise ValueError(f"Unsupported merge method: {self.method!r}. There is 'linear'")


def merge_models(config: MergeConfig, out_path: str | Path) -> None:
    """Writes the merged model, with the config and the tokenizer of the trained one.

    Raises:
        ValueError: a path is not set, the models have other weights, or the weights add up to 0; says which.
    """
    if config.policy_model_path is None or config.target_model_path is None:
        raise ValueError("MergeConfig: policy_model_path and target_model_path name the two models: set both")
    if config.dtype not in DTYPES:
        raise ValueError(f"MergeConfig.dtype={config.dtype!r} is not one of {', '.join(DTYPES)}")
    total = config.policy_model_weight + config.target_model_weight
    if total == 0:
        raise ValueError("MergeConfig: policy_model_weight and target_model_weight add up to 0")
    own, other, out = Path(config.policy_model_path), _folder(config.target_model_path), Path(out_path)
    shares = config.policy_model_weight / total, config.target_model_weight / total
    with WeightFiles(_files(own)) as ours, WeightFiles(_files(other)) as theirs:
        lacks = [name for name, shape in ours.shapes.items() if theirs.shapes.get(name) != shape]
        if lacks:
            raise ValueError(
                f"{own} and {other} are not one architecture: {lacks[0]} has the shape {ours.shapes[lacks[0]]} in the "
                f"first and {theirs.shapes.get(lacks[0], 'is not')} in the second"
            )
        out.mkdir(parents=True, exist_ok=True)
        write_shards(_mixed(ours, theirs, shares, getattr(torch, config.dtype)), out)
    described = AutoConfig.from_pretrained(own)
    described.dtype = config.dtype
    described.save_pretrained(out)
    for kind in (GenerationConfig, AutoTokenizer):
        with contextlib.suppress(OSError, ValueError):  # a model may have none
            kind.from_pretrained(own).save_pretrained(out)


def _mixed(
    ours: WeightFiles, theirs: WeightFiles, shares: tuple[float, float], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in ours.shapes:
        first, second = ours.rows(name), theirs.rows(name)
        if not first.is_floating_point():
            yield name, first
            continue
        yield name, (first.float() * shares[0] + second.float() * shares[1]).to(dtype)


class MergeModelCallback(TrainerCallback):
    """Merges the trained model with another one, into `merged` in its checkpoint's folder.

    Args:
        merge_config: how; by default the mean of the trained model and the one that training began from, in float16.
        merge_at_every_checkpoint: at each, rather than at the last one alone.
        push_to_hub: also push each merged model to the hub, as `OUTPUT_DIR_checkpoint-N_merged`.
    """

    def __init__(
        self,
        merge_config: MergeConfig | None = None,
        merge_at_every_checkpoint: bool = False,
        push_to_hub: bool = False,
    ) -> None:
        self.merge_config = merge_config or MergeConfig()
        self.merge_at_every_checkpoint = merge_at_every_checkpoint
        self.push_to_hub = push_to_hub

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuses a run that writes no whole model.

        Raises:
            ValueError: says which option, and what to do.
        """
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            raise ValueError("MergeModelCallback merges checkpoints, and save_strategy='no' writes none: set another")
        if hasattr(model, "peft_config"):
            raise ValueError(
                "MergeModelCallback merges whole models, and checkpoints of adapters hold these alone: leave it out, "
                "and run `lowtide merge` on the adapters after training"
            )

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.merge_at_every_checkpoint:
            self._merge(args, state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.merge_at_every_checkpoint:
            self._merge(args, state, model)

    def _merge(self, args: Any, state: Any, model: Any) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if not checkpoint.is_dir():
            logger.warning(f"MergeModelCallback: training ended without {checkpoint}, so that nothing is merged")
            return
        config = self.merge_config
        config.policy_model_path = str(checkpoint)
        if config.target_model_path is None:
            config.target_model_path = model.config.name_or_path
        merge_models(config, checkpoint / MERGED)
        logger.info(f"the merged model is in {checkpoint / MERGED}")
        if self.push_to_hub:
            hub, name = HfApi(), f"{args.output_dir}_checkpoint-{state.global_step}_merged"
            hub.upload_folder(repo_id=hub.create_repo(name).repo_id, folder_path=checkpoint / MERGED)


def _folder(name: str) -> Path:
    """Of a model, in the hub's cache for one that is there."""
    return Path(name) if Path(name).is_dir() else Path(snapshot_download(name))


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        ValueError: there are none.
    """
    found = [each for each in sorted(folder.glob("*.safetensors")) if OF_A_MODEL.fullmatch(each.name)]
    if not found:
        raise ValueError(f"{folder} has no model in safetensors files, so that it cannot be merged")
    return found
