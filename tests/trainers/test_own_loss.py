"""Losses that users write: `compute_loss` in a subclass and its kin, compared with a plain loop over padded batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide import CPOTrainer, DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from tests.support.marks import slow_but
from tests.support.matrix.matrix import COMMON, build, folder, rows, tokenizer

STEP = 8
"""Rows of an optimizer step, in whatever micro-batches."""


class OwnCrossEntropy(SFTTrainer):
    """As most people write it: a mean over the micro-batch, whatever `num_items_in_batch` says."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = token_losses(outputs.logits, labels).sum() / (labels[:, 1:] != -100).sum()
        return (loss, outputs) if return_outputs else loss


class Weighted(SFTTrainer):
    """Every token weighted, divided by the tokens of the whole step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = token_losses(outputs.logits, labels) * weights(labels)
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / count
        return (loss, outputs) if return_outputs else loss


class Older(SFTTrainer):
    """From the time before `num_items_in_batch`, by the model's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Added(SFTTrainer):
    """The method's loss, and a penalty on the logits of its outputs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        count = (inputs["labels"][:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss + 0.1 * penalties(outputs.logits, inputs["labels"]).sum() / count
        return (loss, outputs) if return_outputs else loss


class Fused(SFTTrainer):
    """The method's loss alone, doubled, without logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
    return flat.view(len(labels), -1)


def weights(labels: Tensor) -> Tensor:
    return 1 + (labels[:, 1:] % 3).float()


def penalties(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[:, :-1].float().logsumexp(-1) ** 2 * (labels[:, 1:] != -100)


TOKEN = {
    OwnCrossEntropy: token_losses,
    Older: token_losses,
    Weighted: lambda logits, labels: token_losses(logits, labels) * weights(labels),
    Added: lambda logits, labels: token_losses(logits, labels) + 0.1 * penalties(logits, labels),
    Fused: lambda logits, labels: 2 * token_losses(logits, labels),
}
"""What each is a mean of, over the scored tokens of the whole step."""


def trainer_of(kind: type, title: str, **options: Any) -> Any:
    more = {name: options.pop(name) for name in ("model", "data_collator", "compute_metrics") if name in options}
    functions = ("compute_loss_func", "preprocess_logits_for_metrics")
    more |= {name: options.pop(name) for name in functions if name in options}
    args = getattr(lowtide, f"{title}Config")(
        **{**COMMON, "output_dir": str(folder()), "max_steps": 1, "learning_rate": 0.0, **options}
    )
    model = more.pop("model", None)
    return kind(
        build(title, 64) if model is None else model,
        args=args, train_dataset=rows(title), processing_class=tokenizer(), **more,
    )  # fmt: skip


class Gradients:
    """Those of the first step, and its loss."""

    def __init__(self, trainer: Any, monkeypatch: Any) -> None:
        self.found: dict[str, Tensor] = {}
        clip = trainer.runner.updater.norm

        def watched(model: nn.Module, *args: Any) -> Any:
            self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            return clip(model, *args)

        monkeypatch.setattr(trainer.runner.updater, "norm", watched)
        trainer.train()
        self.loss = trainer.state.log_history[0]["loss"]


def padded(trainer: Any, count: int = STEP) -> tuple[Tensor, Tensor, Tensor]:
    """The first rows of the training set, as a plain collator pads them."""
    kept = [trainer.train_dataset[n] for n in range(count)]
    longest = max(len(row["input_ids"]) for row in kept)
    ids, labels, mask = (torch.zeros(count, longest, dtype=torch.long) for _ in range(3))
    labels -= 100
    for line, row in enumerate(kept):
        length = len(row["input_ids"])
        ids[line, :length] = torch.tensor(row["input_ids"])
        labels[line, :length] = torch.tensor(row.get("labels") or row["input_ids"])
        mask[line, :length] = 1
    return ids, labels, mask


def expected(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(got[name], each, rtol=1e-4, atol=1e-5)


CUTS = {
    "one": {"per_device_train_batch_size": STEP},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "budget": {"per_device_train_batch_size": STEP, "tokens_per_microbatch": 60},
}


@pytest.mark.parametrize("cut", slow_but(["accumulated"], CUTS))
@pytest.mark.parametrize("kind", TOKEN, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_a_plain_loop(kind, cut, monkeypatch):
    trainer = trainer_of(kind, "SFT", **CUTS[cut])
    plain = copy.deepcopy(trainer.model)
    del plain.forward  # the transformers model's own again
    found = Gradients(trainer, monkeypatch)
    ids, labels, mask = padded(trainer)
    plain.set_attn_implementation("eager")
    logits = plain.train()(input_ids=ids, attention_mask=mask).logits
    loss = TOKEN[kind](logits, labels).sum() / (labels[:, 1:] != -100).sum()
    assert found.loss == pytest.approx(loss.item(), rel=1e-4)
    assert_near(found.found, expected(plain, loss))


def test_evaluation_is_by_the_own_loss():
    trainer = trainer_of(Fused, "SFT")
    plain = trainer_of(SFTTrainer, "SFT")
    evaluated = [each.evaluate(rows("SFT"))["eval_loss"] for each in (trainer, plain)]
    assert evaluated[0] == pytest.approx(2 * evaluated[1], rel=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_a_loss_function_that_is_passed(cut, monkeypatch):
    def mean(outputs, labels, num_items_in_batch=None):
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return (token_losses(outputs.logits, labels) * weights(labels)).sum() / count

    trainer = trainer_of(SFTTrainer, "SFT", compute_loss_func=mean, **CUTS[cut])
    same = Gradients(trainer_of(Weighted, "SFT", **CUTS[cut]), monkeypatch)
    assert_near(Gradients(trainer, monkeypatch).found, same.found)


@pytest.mark.parametrize("budget", [None, 60])
def test_logits_are_preprocessed_for_metrics(budget):
    seen = {}

    def accuracy(prediction) -> dict[str, float]:
        seen.update(predictions=prediction.predictions, labels=prediction.label_ids)
        kept = prediction.label_ids[:, 1:] != -100
        return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])[kept].mean())}

    trainer = trainer_of(
        SFTTrainer, "SFT", compute_metrics=accuracy, per_device_eval_batch_size=5, tokens_per_microbatch=budget,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    found = trainer.evaluate(rows("SFT"))
    ids, labels, mask = padded(trainer, 16)
    assert np.array_equal(seen["labels"][:, 1:], labels[:, 1:].numpy())  # nothing predicts the first token
    with torch.no_grad():
        best = trainer.model(input_ids=ids, attention_mask=mask).logits.argmax(-1)
    kept = labels[:, 1:] != -100
    assert found["eval_accuracy"] == pytest.approx((best[:, :-1] == labels[:, 1:])[kept].float().mean().item())
    assert found["eval_loss"] == pytest.approx(
        trainer_of(SFTTrainer, "SFT").evaluate(rows("SFT"))["eval_loss"], rel=1e-5
    )


def test_predictions_that_are_no_rows_are_in_the_order_of_micro_batches():
    seen = []

    def flat(logits, labels) -> Tensor:
        return logits.argmax(-1)[labels != -100]

    def kept(prediction) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {}

    for batch in (2, 16):
        options = {"compute_metrics": kept, "per_device_eval_batch_size": batch}
        trainer_of(SFTTrainer, "SFT", preprocess_logits_for_metrics=flat, **options).evaluate(rows("SFT"))
    (few, labels), (many, whole) = seen
    assert few.shape == (int((labels != -100).sum()),)
    assert np.array_equal(few, many)
    assert np.array_equal(labels, whole)


def test_an_evaluation_hands_out_what_training_does():
    names = []

    class Own(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            names.append(sorted(inputs))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = trainer_of(Own, "SFT")
    trainer.train()
    trainer.evaluate(rows("SFT"))
    assert len({tuple(each) for each in names}) == 1


def test_an_overridden_prediction_step_is_called():
    class Own(SFTTrainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss + 1, logits, labels

    found = trainer_of(Own, "SFT").evaluate(rows("SFT"))["eval_loss"]
    assert found == pytest.approx(trainer_of(SFTTrainer, "SFT").evaluate(rows("SFT"))["eval_loss"] + 1, rel=1e-5)


def test_a_loss_of_which_a_part_is_not_divided_is_warned_of(caplog):
    class Mixed(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss + outputs.logits.square().mean()

    trainer_of(Mixed, "SFT", **CUTS["accumulated"]).train()
    assert "a part of Mixed.compute_loss is divided by num_items_in_batch and a part is not" in caplog.text


def test_columns_of_a_collator_reach_the_loss(monkeypatch):
    """A weight for each row, from a collator of the user's."""

    class ByRow(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels, weight = inputs.pop("labels"), inputs.pop("weight")
            losses = token_losses(model(**inputs).logits, labels) * weight[:, None]
            return losses.sum() / num_items_in_batch

    def collate(found: list) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in found)
        fill = lambda name, value: torch.tensor(  # noqa: E731
            [[*row[name], *[value] * (longest - len(row[name]))] for row in found]
        )
        mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in found])
        weight = torch.tensor([float(len(row["input_ids"])) for row in found])
        ids, labels = fill("input_ids", 0), fill("input_ids", -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask, "weight": weight}

    trainer = trainer_of(ByRow, "SFT", data_collator=collate, **CUTS["accumulated"])
    plain = copy.deepcopy(trainer.model)
    found = Gradients(trainer, monkeypatch)
    ids, labels, mask = padded(trainer)
    losses = token_losses(plain(input_ids=ids, attention_mask=mask).logits, labels) * mask.sum(1, keepdim=True)
    assert_near(found.found, expected(plain, losses.sum() / (labels[:, 1:] != -100).sum()))


# -- pairs -------------------------------------------------------------------------------------------------------------


class OwnPairs(DPOTrainer):
    """The loss of DPO from logits; the reference through the trainer's own method."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["completion_mask"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logps = torch.log_softmax(outputs.logits[:, :-1].float(), -1)
        logps = (logps.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0] * mask).sum(1)
        chosen, rejected = logps.chunk(2)
        ref_chosen, ref_rejected = self.compute_ref_log_probs(model, inputs)
        loss = -F.logsigmoid(0.1 * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()
        return (loss, outputs) if return_outputs else loss


class AddedPairs(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs) * 1


class AddedLogits(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("cut", slow_but(["budget"], CUTS))
@pytest.mark.parametrize("kind", [OwnPairs, AddedPairs, AddedLogits], ids=lambda kind: kind.__name__)
def test_pairs_have_the_gradients_of_the_method(kind, cut, monkeypatch):
    reference = build("DPO", 64)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)

    def made(kind: type) -> Gradients:
        trainer = trainer_of(kind, "DPO", **CUTS[cut])
        trainer.reference.model.load_state_dict(reference.state_dict())
        return Gradients(trainer, monkeypatch)

    found, plain = made(kind), made(DPOTrainer)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    assert_near(found.found, plain.found)


@pytest.mark.parametrize("with_outputs", [False, True])
@pytest.mark.parametrize("cut", ["one", "accumulated"])
def test_a_reward_model_with_an_own_loss(with_outputs, cut, monkeypatch):
    class Own(RewardTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if with_outputs:
                return super().compute_loss(model, inputs, return_outputs=True)[0]
            chosen, rejected = model(**{k: inputs[k] for k in ("input_ids", "attention_mask")}).logits[:, 0].chunk(2)
            return -F.logsigmoid(chosen - rejected).mean()

    found = Gradients(trainer_of(Own, "Reward", **CUTS[cut]), monkeypatch)
    plain = Gradients(trainer_of(RewardTrainer, "Reward", **CUTS[cut]), monkeypatch)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    assert_near(found.found, plain.found)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [KTOTrainer, CPOTrainer])
def test_a_method_without_a_padded_form_cannot_have_ones_own_loss(base):
    own = type("Own", (base,), {"compute_loss": lambda self, model, inputs, **kwargs: None})
    with pytest.raises(ValueError, match=r"Own overrides compute_loss, and padded batches .*make_objective"):
        trainer_of(own, base.__name__.removesuffix("Trainer"))


def test_a_loss_of_the_whole_batch_cannot_be_ones_own():
    with pytest.raises(ValueError, match="AddedPairs overrides compute_loss, and this loss is of the whole batch"):
        trainer_of(AddedPairs, "DPO", loss_type="aot")


@pytest.mark.parametrize("name", ["get_batch_loss_metrics", "dpo_loss"])
def test_a_method_that_would_not_be_called_is_refused(name):
    own = type("Own", (DPOTrainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match=rf"Own.{name} would not be called.*make_objective"):
        trainer_of(own, "DPO")


def test_a_loss_that_is_no_number_is_named():
    own = type("Own", (SFTTrainer,), {"compute_loss": lambda self, model, inputs, **kwargs: None})
    for cut in ("one", "accumulated"):
        with pytest.raises(ValueError, match=r"Own.compute_loss returned NoneType: it must return one number"):
            trainer_of(own, "SFT", **CUTS[cut]).train()


NO_LOSSES = {
    "detached": (lambda outputs: outputs.logits.float().mean().detach(), "without a gradient"),
    "an integer": (lambda outputs: outputs.logits.argmax(-1).sum(), r"torch.int64: it must return a real number"),
    "complex": (lambda outputs: outputs.logits.float().mean() * 1j, "torch.complex64: it must return a real number"),
    "a float": (lambda outputs: 1.5, "float: it must return one number as a tensor"),
}


@pytest.mark.parametrize("case", NO_LOSSES)
def test_a_loss_that_nothing_is_learned_from_is_named(case):
    compute, said = NO_LOSSES[case]
    trainer = trainer_of(
        SFTTrainer, "SFT", compute_loss_func=lambda outputs, labels, num_items_in_batch=None: compute(outputs)
    )
    with pytest.raises(ValueError, match=rf"SFTTrainer.compute_loss_func returned .*{said}"):
        trainer.train()


def test_a_loss_function_that_wants_to_end_the_program_is_named():
    def leaves(outputs, labels, num_items_in_batch=None):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit: 3") as caught:
        trainer_of(SFTTrainer, "SFT", compute_loss_func=leaves).train()
    assert "compute_loss_func" in " ".join(caught.value.__notes__)


def test_the_cost_is_said(caplog):
    trainer_of(OwnCrossEntropy, "SFT").train()
    assert "OwnCrossEntropy.compute_loss on padded batches, with logits" in caplog.text
