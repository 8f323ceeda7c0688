"""Trainings over ranks of gloo, in one start for many cases, beside the same training on one rank."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from lowtide import SFTConfig, SFTTrainer
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.ranks.shards import is_sharded, whole_of
from lowtide.trainers.checkpoints.shards import whole_state
from tests.support.heap import leave_out
from tests.support.matrix import matrix, matrix_models
from tests.support.models import architectures
from tests.support.models.classifiers import classifier
from tests.support.ranks.processes import run_ranks
from tests.support.references.parity_world import build_model, tokenizer
from tests.support.runs.online_runs import online

LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}


FOUND = ("eval_loss", "eval_scores", "eval_weighed")
"""What is compared of an evaluation."""
EVALUATED = {"evaluated": True, "per_device_eval_batch_size": 2, "include_num_input_tokens_seen": "all"}
A_RANK_WITHOUT = 12
"""Rows of a step, of 16: the second has four, and half of the ranks have none of them."""
CASES: dict[str, dict[str, Any]] = {
    "SFT": {"kind": "SFT", "rehearsal": True, **EVALUATED},
    "evaluated between steps": {
        **{"kind": "SFT", "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.05, "max_steps": 4},
        **{"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True},
    },
    "moved between steps": {"kind": "SFT", "moved": True},
    "DPO": {"kind": "DPO", "tokens_per_microbatch": 90},
    **{name: {"kind": name} for name in ("Reward", "ORPO", "CPO", "BCO")},
    "KTO": {"kind": "KTO", "rows": A_RANK_WITHOUT},
    "packed": {"kind": "SFT", "packing": True, "max_length": 52, "rows": 2, "max_steps": 2},
    "epochs": {"kind": "SFT", "max_steps": -1, "num_train_epochs": 2, "rows": 4, **EVALUATED},
    "LoRA": {"kind": "SFT", "lora": True, "rows": A_RANK_WITHOUT},
    "LoRA, DPO": {"kind": "DPO", "lora": True, "gradient_accumulation_steps": 2},
    "trained LoRA, DPO": {"kind": "DPO", "lora": {"init_lora_weights": False}, "came": True},
    "few scores": {"kind": "SFT", "scored": "half"},
    "few scores, small micro-batches": {"kind": "SFT", "scored": "half", "tokens_per_microbatch": 40},
    "a loss of the whole batch": {"kind": "DPO", "loss_type": "aot", "rows": A_RANK_WITHOUT},
    "reference computed before": {"kind": "DPO", "precompute_ref_log_probs": True},
    "clipped": {"kind": "SFT", "max_grad_norm": 0.01},
    "accumulation": {"kind": "SFT", "gradient_accumulation_steps": 2, "tokens_per_microbatch": 64},
    "checkpointing": {"kind": "SFT", "gradient_checkpointing": True, "mlp_tile_tokens": 16},
    "offloading": {"kind": "DPO", "gradient_checkpointing": True, "activation_offloading": True},
    "LoRA, checkpointing": {"kind": "SFT", "lora": True, "gradient_checkpointing": True},
    "tied": {"kind": "SFT", "model": "tied"},
    "windows": {"kind": "DPO", "model": "gemma3"},
}
"""What `trained` is asked for, however weights, layers or sequences are spread: every method and most options."""

MODELS: dict[str, dict[str, Any]] = {
    "four layers": {"model_type": "llama", "num_hidden_layers": 4},
    "one layer": {"model_type": "llama", "num_hidden_layers": 1},
    "shared keys": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
    },
    "tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "tied, four layers": {"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "olmo2": {"model_type": "olmo2"},
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 16, "decoder_sparse_step": 1},
    },
    **{
        name: {"model_type": kind, "pad_token_id": 0, **changes}
        for name, (kind, changes) in architectures.RECURRENT.items()
    },
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def build(name: str, vocab_size: int | None = None) -> Any:
    """One of `MODELS`, of seeded weights; by default with a row for each token."""
    torch.manual_seed(0)
    vocab_size = vocab_size or len(matrix.tokenizer())
    config = AutoConfig.for_model(**{**SIZES, **MODELS[name]}, vocab_size=vocab_size, eos_token_id=0)
    return AutoModelForCausalLM.from_config(config)


def half_scored(number: int) -> Any:
    """Token rows of which those of every second batch are not scored: with two ranks, one has no scores at all."""
    rows = token_rows(number)
    labels = [row if n // 4 % 2 == 0 else [-100] * len(row) for n, row in enumerate(rows)]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def answers_scored(number: int) -> Any:
    """Token rows of which the last third is scored, as an assistant's answers are."""
    rows = token_rows(number)
    labels = [[-100] * (len(row) - len(row) // 3) + row[len(row) - len(row) // 3 :] for row in rows]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def token_rows(number: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 20, (number,), generator=generator).tolist()
    return [torch.randint(1, 40, (length,), generator=generator).tolist() for length in lengths]


SCORED = {"half": half_scored, "answers": answers_scored}
"""By the name of what is scored, token rows."""


def trained(
    kind: str,
    ranks: int,
    folder: Path,
    *,
    lora: bool | Mapping[str, Any] = False,
    came: bool = False,
    model: str | None = None,
    scored: str = "",
    checkpoint: str | None = None,
    save_to: Path | None = None,
    sequence: int = 1,
    tensor: int = 1,
    stages: int = 1,
    **options: Any,
) -> Any:
    """(losses, weights by name, evaluation) of a training of the tiny Llama of `matrix`.

    Args:
        ranks: that train, each on its share of the rows of a step.
        scored: of `SCORED`; empty: all tokens.
        lora: whether adapters are trained; with what differs from `LORA`.
        came: whether they come with the model.
        sequence: so many of them split sequences, and have the same rows.
        tensor: so many of them split layers, likewise.
        stages: so many of them have layers of their own, likewise.
    """
    split = {name: size for name, size in (("sp_size", sequence), ("tp_size", tensor)) if size > 1}
    if split:
        options["parallelism_config"] = {**split, **options.get("parallelism_config", {})}
    if stages > 1:
        options["pipeline_parallel_size"] = stages
    base = matrix.COMMON["per_device_train_batch_size"] if kind not in matrix_models.ONLINE else matrix.ROWS
    evaluated, moved = options.pop("evaluated", False), options.pop("moved", False)
    rows = options.pop("rows", options.get("per_device_train_batch_size", base))
    options = {"output_dir": str(folder), "max_steps": 3, **options}
    options["per_device_train_batch_size"] = rows * sequence * tensor * stages // ranks
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    adapters = LoraConfig(**{**LORA, **(lora if isinstance(lora, Mapping) else {})}, task_type=task) if lora else None
    given: Any = None if model is None else build(model)
    if came:
        torch.manual_seed(3)
        given = get_peft_model(matrix.build(kind, 64) if given is None else given, cast(LoraConfig, adapters))
        adapters = None
    if scored:
        config = SFTConfig(**{**matrix.COMMON, **options}, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = SFTTrainer(matrix.build(kind, 64), config, train_dataset=SCORED[scored](matrix.ROWS))
    else:
        trainer = matrix.make(kind, model=given, **{"peft_config": adapters, **options})
    if evaluated:
        trainer.compute_metrics = metrics
    if moved:
        trainer.add_callback(Moved())
    trainer.train(resume_from_checkpoint=checkpoint)
    if save_to is not None:
        trainer.save_model(str(save_to))
    evaluation = trainer.evaluate(matrix.rows(kind).select(range(7))) if evaluated else {}
    weights = trained_weights(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seen = {"epoch": trainer.state.epoch, "tokens": trainer.state.num_input_tokens_seen}
    seen |= {"num_tokens": [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry][-1]}
    return losses, weights, seen | {name: value for name, value in evaluation.items() if name in FOUND}


class Moved(TrainerCallback):
    """Casts a model there and back between steps, after which its weights lie elsewhere."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].double().float()


def trained_weights(model: Any) -> dict[str, Tensor]:
    """Whole, by their names; all ranks ask together, and of a pipeline the first is told."""
    if (stage := stage_of(causal_model(model))) is None:
        return {name: whole_of(p).clone() for name, p in model.named_parameters() if p.requires_grad}
    found = whole_state(model, keep=True)
    return {name: found[name] for name, p in stage.whole.named_parameters() if p.requires_grad and name in found}


def metrics(evaluated: Any) -> dict[str, float]:
    """Metrics of an evaluation: all scored targets with their log-probabilities, each once."""
    return {"scores": len(evaluated.label_ids), "weighed": float((evaluated.predictions * evaluated.label_ids).sum())}


ONLINE: dict[str, dict[str, Any]] = {
    "GRPO": {"num_generations": 4, "beta": 0.1},
    "GRPO, layer by layer": {"num_generations": 4, "beta": 0.1, "ds3_gather_for_generation": False},
    "GRPO, some bytes": {"num_generations": 4, "beta": 0.1, "ds3_gather_for_generation": 20_000},
    "RLOO": {"num_generations": 4},
    "OnlineDPO": {"num_generations": 2},
    "PPO": {"num_generations": 1, "num_ppo_epochs": 2},
    "GRPO, a reward model": {"num_generations": 4},
}


def written(folder: Path, name: str, rows: int, **more: Any) -> dict[str, Tensor]:
    """The weights after three steps on completions of unequal length, of so many rows on each rank."""
    options = {
        "per_device_train_batch_size": rows,
        "generation_kwargs": {"stop_strings": ["7", "e"]},
        **ONLINE[name],
        **more,
    }
    if name.endswith("a reward model"):
        reward = classifier(vocab_size=len(tokenizer()))
        options["arguments"] = {"reward_funcs": reward, "reward_processing_classes": tokenizer()}
    trainer = online(folder, name.split(",")[0], model=build_model("llama"), **options)
    for source in trainer.rewards.sources if "arguments" in options else ():
        assert is_sharded(source.model) is is_sharded(trainer.model)
    trainer.train()
    return {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}


def resumed(folder: Path, ranks: int, start: Path | None, **options: Any) -> dict[str, Tensor]:
    """The weights after four steps, with a checkpoint every second; from one of them, if it is given."""
    saving = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "max_steps": 4}
    checkpoint = None if start is None else str(start / "checkpoint-2")
    _, weights, _ = trained("SFT", ranks, folder, checkpoint=checkpoint, save_to=folder / "last", **saving, **options)
    return weights


def assert_as_on_one_rank(folder: Path, found: str, case: Mapping[str, Any]) -> None:
    """What ranks left in a file is what one rank comes to in a case."""
    losses, weights, seen = torch.load(folder / f"{found}.pt")
    expected_losses, expected_weights, expected_seen = on_one_rank(json.dumps(case, sort_keys=True))
    assert losses == pytest.approx(expected_losses, rel=1e-5, abs=1e-6)
    assert seen == pytest.approx(expected_seen, rel=1e-5)
    assert_near(weights, expected_weights, 2e-5)


@functools.cache
def on_one_rank(case: str) -> Any:
    """What one rank comes to in a case, which is given as JSON: many tests ask for the same."""
    with tempfile.TemporaryDirectory() as folder:
        return trained(ranks=1, folder=Path(folder), **json.loads(case))


def resumed_on_ranks(folder: Path, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """`resumed` on two ranks: a first run of each case and one from its checkpoint, and one from that of one rank if it
    lies in the folder; the weights of each lie in a file of its name."""
    run_ranks(_resume, str(meeting_place(folder)), cases)


def _resume(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for name, options in cases.items():
            starts = {"first": None, "again": f"first {name}", "from one rank": f"one {name}"}
            for run, start in starts.items():
                begun = None if start is None else place / start
                if begun is None or begun.exists():
                    found = resumed(place / f"{run} {name}", 2, begun, **options)
                    if rank == 0:
                        torch.save(found, place / f"{run} {name}.pt")


def of_equal_bits(folder: Path, name: str) -> dict[str, Tensor]:
    """The weights of the first run of a case of `resumed_on_ranks`, to which the resumed one came as well."""
    first, again = (torch.load(folder / f"{run} {name}.pt") for run in ("first", "again"))
    assert all(torch.equal(again[key], value) for key, value in first.items())
    return first


def rank_main(rank: int, folder: str, ranks: int) -> None:
    place = Path(folder)
    with rank_of(place, rank, ranks):
        cases = json.loads((place / "cases.json").read_text())
        for number, (name, case) in enumerate(cases.items()):
            found = trained(folder=place / f"run-{name}", ranks=ranks, **case)
            if not number:  # what its engine imported is left out of later garbage collections too
                leave_out()
            if rank == 0:
                torch.save(found, place / f"{name}.pt")


@contextlib.contextmanager
def rank_of(folder: Path, rank: int, ranks: int) -> Iterator[None]:
    """Around what a rank does: it finds the others, and leaves with them."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=(folder / "port").read_text())
    yield
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


def meeting_place(folder: Path) -> Path:
    """A folder that names a free port, at which ranks meet."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (folder / "port").write_text(str(port))
    return folder


def on_ranks(folder: Path, cases: Mapping[str, Mapping[str, Any]], ranks: int = 2) -> None:
    """Trains all cases on so many ranks; what came of each lies in a file of its name."""
    (meeting_place(folder) / "cases.json").write_text(json.dumps(cases))
    run_ranks(rank_main, str(folder), ranks, ranks=ranks)


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float) -> None:
    """Weights are equal to rounding: by their norms. Biases of keys are left out: a softmax does not see them, so their
    gradients are rounding alone, of which AdamW makes steps."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name.endswith("k_proj.bias"):
            continue
        distance = (found[name] - value).norm() / value.norm()
        assert distance <= relative, f"{name}: {distance:.2e}"
