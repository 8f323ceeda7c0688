"""The example for the plain Trainer runs, trains, and keeps the rows of a batch apart."""

import runpy
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def run_example(monkeypatch, tmp_path):
    """Runs an example as a script whose temporary files go where the test's go; gives its names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_flattening_trainer(run_example):
    names = run_example("flattening_trainer.py")
    trainer, batch = names["trainer"], names["batch"]
    first, *_, last = losses(trainer)
    assert last < first - 0.3
    model = trainer.model.eval()
    device_batch = {key: value.to(model.device) if torch.is_tensor(value) else value for key, value in batch.items()}
    with torch.no_grad():
        together = model(**device_batch).logits[0].cpu()
        bounds = batch["cu_seq_lens_q"].tolist()
        for start, stop in pairwise(bounds):
            alone = model(input_ids=device_batch["input_ids"][:, start:stop]).logits[0].cpu()
            torch.testing.assert_close(together[start:stop], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_completion_only_collator(run_example):
    names = run_example("completion_only_collator.py")
    trainer, tokenizer, collator = names["trainer"], names["tokenizer"], names["collator"]
    first, *_, last = losses(trainer)
    assert last < first - 0.3
    texts = names["formatting_prompts_func"](names["dataset"][:2])
    batch = collator([{"input_ids": tokenizer(text)["input_ids"]} for text in texts])
    scored = batch["labels"][0] != -100
    assert (
        tokenizer.decode(batch["input_ids"][0][scored]).split()
        == " ".join(text.split("### Answer:")[1] for text in texts).split()
    )
