"""Two processes with gloo against one: the same weights, the same losses, the same evaluation; a user's loss too, and
a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lowtide import SFTConfig, SFTTrainer
from tests.support.marks import slow_but
from tests.support.ranks.processes import run_ranks

ROWS = 21  # no multiple of the batch: the last one is filled up with rows that must not count twice


class OwnMean(SFTTrainer):
    """A mean over the micro-batch, by logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


KINDS = {"the method's loss": SFTTrainer, "a loss of one's own": OwnMean, "a stream": SFTTrainer}


def run(folder: str, batch_size: int, kind: str) -> tuple[dict[str, torch.Tensor], list[float], dict[str, float]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(0, 40, (length,), generator=generator).tolist() for length in lengths]
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    args = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        max_steps=4,  # the third has a batch of one row
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=0.1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    given = data.to_iterable_dataset() if kind == "a stream" else data
    trainer = KINDS[kind](model, args, train_dataset=given, eval_dataset=given)
    trainer.train()
    evaluation = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    keys = ("eval_loss", "eval_entropy", "eval_mean_token_accuracy")
    return (
        {n: p.detach() for n, p in model.named_parameters()},
        losses,
        {key: evaluation[key] for key in keys if key in evaluation},
    )


def rank_main(rank: int, folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    port = Path(folder, "port").read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found = run(folder, 2, kind)
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    torch.distributed.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", slow_but(["the method's loss"], KINDS))
def test_two_ranks_train_and_evaluate_as_one(kind, tmp_path):
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    port, store = store.port, None
    (tmp_path / "port").write_text(str(port))
    run_ranks(rank_main, str(tmp_path), kind)
    weights, losses, evaluation = torch.load(tmp_path / "found.pt", weights_only=True)
    expected_weights, expected_losses, expected_evaluation = run(str(tmp_path / "one"), 4, kind)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert evaluation == pytest.approx(expected_evaluation, rel=1e-5)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
