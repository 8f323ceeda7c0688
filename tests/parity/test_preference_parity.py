"""lowtide's preference and reward trainers against TRL 1.16's: steps from the same weights, on the same rows.

TRL pads, repeats prompts and runs a second model as the reference; so this compares prefix sharing, the ragged path,
the reference and every loss with the plain computation inside a real run. TRL's ORPO and CPO append an end token to
conversations after the one that the chat template writes, which is not done here: they are compared on texts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.support.references.parity_world import (
    COMMON,
    MODELS,
    assert_metrics_agree,
    assistant,
    build_model,
    lora,
    runs_of,
    sums,
    tokenizer,
    train,
    trained_alike,
    trained_before,
    user,
    without_ties,
)

trl = pytest.importorskip("trl", reason="parity is against trl==1.16.0: install the bench extra")
lowtide = pytest.importorskip("lowtide")
cpo = pytest.importorskip("trl.experimental.cpo")
orpo = pytest.importorskip("trl.experimental.orpo")
tpo = pytest.importorskip("trl.experimental.tpo")

SETTINGS = COMMON | {"learning_rate": 3e-4}
THEIRS = {"dpo": trl, "kto": trl, "reward": trl, "orpo": orpo, "cpo": cpo, "tpo": tpo}
NAMES = {"dpo": "DPO", "kto": "KTO", "reward": "Reward", "orpo": "ORPO", "cpo": "CPO", "tpo": "TPO"}


@dataclass(frozen=True)
class Case:
    """One way to train; `flags` go to both libraries, `ours` to lowtide alone."""

    method: str = "dpo"
    format: str = "explicit"
    flags: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    came: bool = False
    """Whether the adapters come with the model, trained."""
    model: str = "llama"
    rows: int = 40


WHOLE = {"turns": "whole"}


def loss(*names: str, **flags: Any) -> Case:
    return Case(flags={"loss_type": list(names), **flags})


CASES = {
    **{name: loss(name) for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "apo_zero", "apo_down")},
    **{name: loss(name) for name in ("sft", "sigmoid_norm", "aot", "aot_unpaired")},
    # Squares and exponentials of log-ratios blow rounding up; in smaller steps they stay within its reach.
    **{name: loss(name, learning_rate=3e-5) for name in ("sppo_hard", "discopop")},
    "exo_pair": loss("exo_pair", label_smoothing=0.05),
    "robust": loss("robust", label_smoothing=0.1),
    "aot, smoothed": loss("aot", label_smoothing=0.1),
    "three losses": loss("sigmoid", "bco_pair", "sft", loss_weights=[0.8, 0.2, 1.0]),
    "forward_kl": loss("sigmoid", f_divergence_type="forward_kl", learning_rate=3e-5),
    "js_divergence": loss("hinge", f_divergence_type="js_divergence"),
    "alpha_divergence": loss(
        "sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7, learning_rate=3e-5
    ),
    "ld_alpha": loss("sigmoid", ld_alpha=0.4),
    "wpo": loss("sigmoid", use_weighting=True),
    "sync_ref_model": loss("sigmoid", sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5),
    "dpo, implicit prompts": Case(format="implicit"),
    "dpo, conversations": Case(format="explicit chat", ours=WHOLE),
    "dpo, conversations, implicit prompts": Case(format="implicit chat", ours=WHOLE),
    "dpo, lora": Case(lora=True, flags={"learning_rate": 3e-3}),
    "dpo, lora trained before": Case(lora=True, came=True, flags={"learning_rate": 3e-3}),
    "dpo, cut": Case(flags={"max_length": 70}),
    "dpo, padded by us": Case(ours={"padding_free": False}),
    "dpo, prompts repeated": Case(ours={"prefix_sharing": False}),
    "dpo within a token budget": Case(ours={"tokens_per_microbatch": 400}),
    "dpo, accumulated": Case(flags={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "dpo, reference precomputed": Case(ours={"precompute_ref_log_probs": True}),
    "dpo, tied head": Case(model="tied"),
    "dpo, nothing checkpointed": Case(flags={"gradient_checkpointing": False}),
    "kto": Case("kto"),
    "kto, weighted": Case("kto", flags={"desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.3}),
    "kto, apo_zero_unpaired": Case("kto", flags={"loss_type": "apo_zero_unpaired"}),
    "kto, from pairs": Case("kto", "explicit"),
    "kto, conversations": Case("kto", "unpaired chat", ours=WHOLE),
    "kto, lora": Case("kto", "unpaired", lora=True, flags={"learning_rate": 3e-3}),
    "kto, lora trained before": Case("kto", "unpaired", lora=True, came=True, flags={"learning_rate": 3e-3}),
    "kto, batch of two": Case("kto", "unpaired", flags={"per_device_train_batch_size": 2}),
    "kto, reference precomputed": Case("kto", "unpaired", ours={"precompute_ref_log_probs": True}),
    "reward": Case("reward"),
    "reward, implicit prompts": Case("reward", "implicit"),
    "reward, conversations": Case("reward", "implicit chat", ours=WHOLE),
    "reward, margins": Case("reward", "margins"),
    "reward, centred": Case("reward", flags={"center_rewards_coefficient": 0.01}),
    "reward, lora": Case("reward", lora=True, flags={"learning_rate": 3e-3}),
    "reward, long sides left out": Case("reward", flags={"max_length": 70}),
    "reward, padded with the end": Case("reward", flags={"pad_token": "<|im_end|>"}),
    "orpo": Case("orpo", flags={"max_length": 1024}),
    "orpo, lora": Case("orpo", lora=True, flags={"learning_rate": 3e-3}),
    "cpo": Case("cpo"),
    "cpo, hinge": Case("cpo", flags={"loss_type": "hinge"}),
    "cpo, ipo": Case("cpo", flags={"loss_type": "ipo"}),
    "cpo, simpo": Case("cpo", flags={"loss_type": "simpo", "cpo_alpha": 0.0}),
    "cpo, cpo-simpo": Case("cpo", flags={"loss_type": "simpo", "cpo_alpha": 0.5, "label_smoothing": 0.1}),
    "cpo, alphapo": Case("cpo", flags={"loss_type": "simpo", "alpha": 0.1}),
    "tpo": Case("tpo", "three"),
    "tpo, implicit prompts": Case("tpo", "implicit three", flags={"tpo_alpha": 0.3}),
    "tpo, hinge": Case("tpo", "three", flags={"loss_type": "hinge", "beta": 0.1}),
    "tpo, ipo": Case("tpo", "three", flags={"loss_type": "ipo", "beta": 0.5}),
    "tpo, tpo-l": Case("tpo", "three", flags={"loss_type": "tpo-l", "beta": 0.5, "label_smoothing": 0.1}),
    "tpo, alpha 0": Case("tpo", "three", flags={"tpo_alpha": 0.0, "beta": 0.1}),
    "tpo, conversations": Case("tpo", "three chat", ours=WHOLE),
    "tpo, lora": Case("tpo", "three", lora=True, flags={"learning_rate": 3e-3}),
    "tpo within a token budget": Case("tpo", "three", ours={"tokens_per_microbatch": 400}),
}

QUICK = ("sigmoid", "reward", "kto", "orpo", "cpo")
LONG = (*QUICK, "dpo, lora", "dpo, lora trained before", "sync_ref_model")


def pair(question: str, answer: str) -> tuple[str, str, str]:
    """A prompt, its answer, and a worse one: other digits, and the last step missing."""
    wrong = answer.translate(str.maketrans("0123456789", "5678901234"))
    return question, f" {answer}", f" {wrong.rsplit('. ', 1)[0]}"


FORMATS = {
    "explicit": lambda q, c, r: {"prompt": q, "chosen": c, "rejected": r},
    "margins": lambda q, c, r: {"prompt": q, "chosen": c, "rejected": r, "margin": len(c) / 100},
    "implicit": lambda q, c, r: {"chosen": q + c, "rejected": q + r},
    "explicit chat": lambda q, c, r: {"prompt": [user(q)], "chosen": [assistant(c)], "rejected": [assistant(r)]},
    "implicit chat": lambda q, c, r: {"chosen": [user(q), assistant(c)], "rejected": [user(q), assistant(r)]},
    "three": lambda q, c, r: {"prompt": q, "chosen": c, "rejected": r, "reference": f"{c} That is all."},
    "implicit three": lambda q, c, r: {"chosen": q + c, "rejected": q + r, "reference": f"{q}{c} That is all."},
    "three chat": lambda q, c, r: {
        "prompt": [user(q)],
        **{name: [assistant(text)] for name, text in (("chosen", c), ("rejected", r), ("reference", f"So: {c}"))},
    },
}


def rows_of(format: str, count: int) -> list[dict[str, Any]]:
    pairs = [pair(question, answer) for question, answer in sums(count)]
    if not format.startswith("unpaired"):
        return [FORMATS[format](*each) for each in pairs]
    rows = []
    for number, (question, chosen, rejected) in enumerate(pairs):
        good = number % 3 != 1
        completion = chosen if good else rejected
        chat = format.endswith("chat")
        prompt: Any = [user(question)] if chat else question
        rows.append({"prompt": prompt, "completion": [assistant(completion)] if chat else completion, "label": good})
    return rows


def model_for(case: Case):
    if case.method != "reward":
        return build_model(case.model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODELS[case.model], num_labels=1, pad_token_id=tokenizer().pad_token_id)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


def build_trainer(library: Any, case: Case, output_dir: Any, steps: int, more: dict[str, Any] | None = None) -> Any:
    name = NAMES[case.method]
    own = {**SETTINGS, "max_steps": steps}
    if library in (cpo, orpo):
        own["max_length"] = 1024
    config = getattr(library, f"{name}Config")(output_dir=str(output_dir), **own | case.flags | (more or {}))
    format = case.format if case.method != "kto" or case.format != "explicit" else "unpaired"
    if case.method == "kto" and case is CASES["kto, from pairs"]:
        format = "explicit"
    model = model_for(case)
    arguments: dict[str, Any] = {}
    precomputes = (more or {}).get("precompute_ref_log_probs")
    if case.method in ("dpo", "kto") and not case.lora and not (library is lowtide and precomputes):
        arguments["ref_model"] = copy.deepcopy(model)
    if case.lora:
        save = {"modules_to_save": ["score"], "task_type": "SEQ_CLS"} if case.method == "reward" else {}
        torch.manual_seed(1)
        arguments["peft_config"] = lora(**save)
    if case.came:
        model = trained_before(model, arguments.pop("peft_config"))
    return getattr(library, f"{name}Trainer")(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows_of(format, case.rows)),
        processing_class=copy.deepcopy(tokenizer()),  # TRL writes its `pad_token` into it
        **arguments,
    )


UNLIKE = ("logits/chosen", "logits/rejected")
"""Means of whole logits, which are not formed here."""
OF_TOKENS = {"entropy": 0.01, "mean_token_accuracy": 0.5}
"""Accumulated; the accuracy of so few tokens is exact in the last test."""


@runs_of(CASES, QUICK, LONG)
def test_steps_agree_with_trl(name, steps, tmp_path):
    """The loss, the gradient's norm and the metrics of every step."""
    case = CASES[name]
    theirs = build_trainer(THEIRS[case.method], case, tmp_path, steps)
    ours = build_trainer(lowtide, case, tmp_path, steps, case.ours)
    expected, actual = trained_alike(theirs, ours, steps)
    scale = expected["loss"].abs().mean().item()
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(actual["grad_norm"], expected["grad_norm"], rtol=2e-3, atol=1e-6)
    if "rewards/accuracies" in expected:
        margins = expected["rewards/margins"]
        expected, actual = without_ties(expected, margins), without_ties(actual, margins)
    near = OF_TOKENS if "gradient_accumulation_steps" in case.flags else {}
    assert_metrics_agree(actual, expected, unlike=UNLIKE, near=near)


@pytest.mark.slow
def test_accuracy_is_that_of_tokens_where_trl_has_the_mean_of_micro_batches(tmp_path, monkeypatch):
    """TRL's numbers of each micro-batch, weighed by their tokens, are ours."""
    flags = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 3e-2}
    case = replace(CASES["sigmoid"], flags={**CASES["sigmoid"].flags, **flags})
    theirs = build_trainer(THEIRS["dpo"], case, tmp_path / "theirs", 4)
    ours = build_trainer(lowtide, case, tmp_path / "ours", 4)
    ours.model.load_state_dict(theirs.model.state_dict())
    seen, compute = [], type(theirs)._compute_loss

    def noted(self, model, inputs, *given, **named):
        found = compute(self, model, inputs, *given, **named)
        chosen = inputs["completion_mask"].chunk(2)[0].sum().item()
        seen.append((self._metrics["train"]["mean_token_accuracy"][-1], chosen))
        return found

    monkeypatch.setattr(type(theirs), "_compute_loss", noted)
    expected, actual = train(theirs)["mean_token_accuracy"], train(ours)["mean_token_accuracy"]
    steps = [seen[4 * step : 4 * step + 4] for step in range(4)]
    weighed = [sum(share * count for share, count in each) / sum(count for _, count in each) for each in steps]
    assert actual.tolist() == pytest.approx(weighed, rel=1e-5)
    assert expected.tolist() != pytest.approx(weighed, rel=1e-2)
