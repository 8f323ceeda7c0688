"""A memory technique of a user's: it takes hold of a run, is reported and predicted, and what cannot be one is said."""

from __future__ import annotations

import contextlib
from importlib.metadata import EntryPoint
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig

import lowtide
from lowtide import SFTConfig, SFTTrainer
from lowtide.demo.model import make_model, make_tokenizer
from lowtide.memory import own
from lowtide.memory.technique import Technique

ROWS = [{"text": "17 + 5 = 22"}, {"text": "40 + 2 = 42"}]


@contextlib.contextmanager
def halved():
    def pack(tensor):
        return tensor.bfloat16() if tensor.dtype == torch.float32 and not tensor.is_leaf else tensor

    with torch.autograd.graph.saved_tensors_hooks(
        pack, lambda kept: kept.float() if kept.is_floating_point() else kept
    ):
        yield


HALF = Technique("half", "half of the activations", {}, changes="rounds", around=lambda site: halved)
CALLS: list[str] = []
TOLD = Technique(
    "told", "nothing", {},
    prepare=lambda site: CALLS.append(f"prepare {site.ranks}"),
    begin=lambda site: CALLS.append("begin") or (lambda: CALLS.append("end")),
)  # fmt: skip
NEVER = Technique("never", "nothing", {}, refused=lambda site: "it is Monday")
IDLE = Technique("idle", "nothing", {}, idle=lambda site: "all is small")
FAILS = Technique("fails", "nothing", {}, prepare=lambda site: 1 / 0)
NO_FUNCTION = Technique("no function", "nothing", {}, prepare=cast(Any, 3))
HERE = __name__


def trained(folder, *names: str, **options) -> SFTTrainer:
    tokenizer = make_tokenizer()
    args = SFTConfig(
        output_dir=str(folder), techniques=[f"{HERE}.{name}" for name in names] or None, max_steps=2, use_cpu=True,
        report_to="none", save_strategy="no", gradient_checkpointing=False, **{"disable_tqdm": True, **options},
    )  # fmt: skip
    trainer = SFTTrainer(
        make_model(tokenizer, seed=0), args, processing_class=tokenizer, train_dataset=Dataset.from_list(ROWS)
    )
    trainer.train()
    return trainer


def weights(trainer: SFTTrainer) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


def test_it_is_around_each_forward(tmp_path):
    plain, rounded = (weights(trained(tmp_path, *names, optim="sgd", learning_rate=0.1)) for names in ((), ("HALF",)))
    assert not torch.equal(plain, rounded)
    torch.testing.assert_close(rounded, plain, atol=2e-3, rtol=0)


def test_it_is_prepared_begun_and_undone(tmp_path):
    CALLS.clear()
    trained(tmp_path, "TOLD")
    assert CALLS == ["prepare 1", "begin", "end"]


def test_the_report_has_a_line_of_it(tmp_path, capsys):
    trained(tmp_path, "HALF", "IDLE", disable_tqdm=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "half not exact: rounds" in said
    assert "idle does nothing here: all is small" in said


def test_what_it_saves_is_predicted():
    shape = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4
    )

    def activations(techniques) -> int:
        common = {"output_dir": "x", "use_cpu": True, "gradient_checkpointing": False, "fused_layers": False}
        config = SFTConfig(**common, techniques=techniques)
        return lowtide.estimate(config, shape, lengths=[512, 512], device="cpu").peak_bytes

    assert activations([f"{HERE}.HALF"]) < activations(None) - (1 << 20)


def test_what_cannot_work_is_refused_in_its_own_words(tmp_path):
    with pytest.raises(ValueError, match=r"never \(techniques=\['.*NEVER'\]\) cannot work here: it is Monday"):
        trained(tmp_path, "NEVER")
    with pytest.raises(ZeroDivisionError) as caught:
        trained(tmp_path, "FAILS")
    assert any("techniques, a function that was passed" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("half", "is no path"),
        (f"{HERE}.HALV", "has no 'HALV'; did you mean 'HALF'"),
        (f"{HERE}.ROWS", "is of type list, and no Technique"),
        (f"{HERE}.NO_FUNCTION", "prepare=3, which is no function"),
        ("no_such_module.HALF", "there is no module 'no_such_module'"),
    ],
)
def test_what_is_no_technique_is_refused_at_construction(name, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        SFTConfig(output_dir=str(tmp_path), techniques=[name], use_cpu=True)


def test_a_package_offers_one_by_an_entry_point(monkeypatch, tmp_path):
    points = [EntryPoint("half-activations", f"{HERE}:HALF", own.GROUP)]
    monkeypatch.setattr(own, "entry_points", lambda group: points if group == own.GROUP else [])
    own.own_technique.cache_clear()
    assert own.own_technique("half-activations").name == "half"
    assert SFTConfig(output_dir=str(tmp_path), techniques=["half-activations"], use_cpu=True).techniques
    own.own_technique.cache_clear()
