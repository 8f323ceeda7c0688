"""The methods over pairs: however a batch is cut and the prompt stands, the gradients are the dense computation's."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, MistralConfig

from lowtide.data.batches.collate import CompletionCollator
from lowtide.engine.forward import install
from lowtide.engine.reference import FrozenModel
from lowtide.methods.cpo import METHOD as CPO
from lowtide.methods.cpo import CPOOptions
from lowtide.methods.dpo import METHOD as DPO
from lowtide.methods.dpo import DPOOptions
from lowtide.methods.orpo import METHOD as ORPO
from lowtide.methods.orpo import ORPOOptions
from lowtide.methods.reward import METHOD as REWARD
from lowtide.methods.reward import RewardOptions
from lowtide.methods.tpo import METHOD as TPO
from lowtide.methods.tpo import TPOOptions
from lowtide.objectives import preference
from lowtide.objectives.preference import Pairs
from lowtide.score_rules import LastToken
from lowtide.step.evaluate import evaluate_batch
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits
from tests.support.marks import slow_but
from tests.support.models.preference_models import (
    CUTS,
    SIZES,
    assert_equal,
    build,
    dense,
    dense_logprobs,
    gradients,
    pair_rows,
    policy_and_reference,
)

DPO_LOSSES = [*preference.LOSSES, "sft"]


THREE = ("chosen_ids", "rejected_ids", "reference_ids")


def triples() -> list[dict]:
    """Rows of pairs with a third completion, which one row has in common with its chosen one."""
    made = pair_rows()
    for number, row in enumerate(made):
        row["reference_ids"] = row["chosen_ids"] if number == 2 else [*range(number + 1, 2 * number + 2)]
    return made


def dense_pairs(model, reference, made) -> tuple[Pairs, torch.Tensor, torch.Tensor]:
    """Pairs of summed log-probs, and the chosen log-probs without and with the prompt's, end to end."""
    sides, chosen, whole = [], [], []
    for row in made:
        for name in ("chosen_ids", "rejected_ids"):
            every = dense_logprobs(model, row["prompt_ids"], row[name])
            own = every[len(row["prompt_ids"]) - 1 :]
            with torch.no_grad():
                theirs = dense_logprobs(reference, row["prompt_ids"], row[name])[len(row["prompt_ids"]) - 1 :].sum()
            sides.append((own.sum(), theirs, torch.tensor(float(len(row[name])))))
            if name == "chosen_ids":
                chosen.append(own)
                whole.append(every)
    policy, referred, lengths = (torch.stack(column) for column in zip(*sides, strict=True))
    pairs = Pairs(policy[::2], policy[1::2], referred[::2], referred[1::2], lengths[::2], lengths[1::2])
    return pairs, torch.cat(chosen), torch.cat(whole)


def run(options, method, limits, sharing, *, model=None, **collator):
    policy, other = policy_and_reference()
    policy = copy.deepcopy(policy if model is None else model)
    reference = FrozenModel.of(copy.deepcopy(other), padding_free=True)
    options.check()
    collate = CompletionCollator(("chosen_ids", "rejected_ids"), sharing=sharing, **collator)
    totals = Totals()
    models = Models(policy, reference)
    loss = train_step(models, collate(pair_rows()), method.objective(options), limits=limits, totals=totals)
    return loss.item(), gradients(policy), totals.read(torch.device("cpu"))


def dpo_options(name: str, **more) -> DPOOptions:
    smoothing = 0.1 if name in ("exo_pair", "robust", "aot") else 0.0
    return DPOOptions(loss_type=name, label_smoothing=smoothing, beta=0.3, **more)


@pytest.mark.parametrize("name", slow_but(["sigmoid", "aot"], DPO_LOSSES))
def test_each_dpo_loss_has_the_dense_gradients_under_any_cut(name):
    options = dpo_options(name)
    policy, other = policy_and_reference()
    plain = dense(policy)
    pairs, chosen, _ = dense_pairs(plain, dense(other), pair_rows())
    expected = -chosen.mean() if name == "sft" else preference.LOSSES[name].fn(pairs, options).mean()
    expected.backward()
    for limits in CUTS:
        for sharing in (True, False):
            loss, ours, _ = run(options, DPO, limits, sharing)
            assert loss == pytest.approx(expected.item(), rel=1e-6)
            assert_equal(ours, gradients(plain))


@pytest.mark.parametrize("limits", [Limits(rows=8), Limits(rows=1)], ids=str)
def test_combined_losses_are_their_weighted_sum(limits):
    together, ours, _ = run(
        DPOOptions(loss_type=["sigmoid", "aot", "sft"], loss_weights=[0.5, 2, 1]), DPO, limits, True
    )
    parts = [run(DPOOptions(loss_type=[name]), DPO, limits, True) for name in ("sigmoid", "aot", "sft")]
    assert together == pytest.approx(0.5 * parts[0][0] + 2 * parts[1][0] + parts[2][0], rel=1e-6)
    expected = {name: 0.5 * parts[0][1][name] + 2 * parts[1][1][name] + parts[2][1][name] for name in ours}
    assert_equal(ours, expected)


def test_ld_alpha_weights_what_is_beyond_the_shorter_completion():
    policy, other = policy_and_reference()
    sums = []
    for model in (dense(policy), dense(other)):
        with torch.no_grad():
            for row in pair_rows():
                shorter = min(len(row["chosen_ids"]), len(row["rejected_ids"]))
                sides = [dense_logprobs(model, row["prompt_ids"], row[n])[len(row["prompt_ids"]) - 1 :] for n in
                         ("chosen_ids", "rejected_ids")]  # fmt: skip
                sums.append([side[:shorter].sum() + 0.3 * side[shorter:].sum() for side in sides])
    policy_sums, reference_sums = torch.tensor(sums).chunk(2)
    margin = (policy_sums[:, 0] - reference_sums[:, 0]) - (policy_sums[:, 1] - reference_sums[:, 1])
    for sharing in (True, False):
        loss, _, _ = run(DPOOptions(ld_alpha=0.3), DPO, Limits(rows=3), sharing)
        assert loss == pytest.approx(-F.logsigmoid(0.1 * margin).mean().item(), rel=1e-5)


def test_wpo_weights_are_means_of_aligned_log_probs():
    policy, other = policy_and_reference()
    plain = dense(policy)
    weights = []
    with torch.no_grad():
        for row in pair_rows():
            total = 0.0
            for name in ("chosen_ids", "rejected_ids"):
                ids = torch.tensor([row["prompt_ids"] + row[name]])
                logps = torch.log_softmax(type(plain).forward(plain, input_ids=ids).logits[0, :-1], -1)
                logps = logps[len(row["prompt_ids"]) - 1 :]
                own = logps.gather(-1, torch.tensor(row[name])[:, None])[:, 0]
                total += (own - logps.exp().square().sum(-1).log()).mean()
            weights.append(torch.exp(total))
        pairs, _, _ = dense_pairs(plain, dense(other), pair_rows())
    expected = (preference.sigmoid(pairs, DPOOptions()) * torch.stack(weights)).mean()
    loss, _, _ = run(DPOOptions(use_weighting=True), DPO, Limits(rows=3), True)
    assert loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("limits", CUTS, ids=str)
def test_orpo_scores_prompt_and_chosen_side(limits, sharing):
    policy, other = policy_and_reference()
    plain = dense(policy)
    pairs, _, whole = dense_pairs(plain, dense(other), pair_rows())
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    expected = -whole.mean() - 0.2 * F.logsigmoid(odds).mean()
    expected.backward()
    loss, ours, metrics = run(ORPOOptions(beta=0.2), ORPO, limits, sharing, scores_prompt=True)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert metrics["nll_loss"] == pytest.approx(-whole.mean().item(), rel=1e-6)
    assert_equal(ours, gradients(plain))


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "simpo"])
@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_cpo_and_simpo(name, alpha):
    policy, other = policy_and_reference()
    plain = dense(policy)
    pairs, likely, _ = dense_pairs(plain, dense(other), pair_rows())
    chosen, rejected = pairs.chosen, pairs.rejected
    if name in ("ipo", "simpo"):
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    if alpha:
        chosen, rejected = (1 - chosen.exp() ** -alpha) / alpha, (1 - rejected.exp() ** -alpha) / alpha
    contrast = chosen - rejected
    losses = {
        "sigmoid": -F.logsigmoid(0.2 * contrast),
        "hinge": torch.relu(1 - 0.2 * contrast),
        "ipo": (contrast - 2.5) ** 2,
        "simpo": -F.logsigmoid(0.2 * contrast - 0.5),
    }
    expected = losses[name].mean() - 0.7 * likely.mean()
    expected.backward()
    for limits in (Limits(), Limits(rows=1)):
        loss, ours, _ = run(CPOOptions(loss_type=name, beta=0.2, cpo_alpha=0.7, alpha=alpha), CPO, limits, True)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert_equal(ours, gradients(plain))


@pytest.mark.parametrize("limits", CUTS, ids=str)
def test_tpo_learns_the_likelihood_of_the_third_completion_alone(limits):
    plain = dense(policy_and_reference()[0])
    sums, gold = [], []
    for row in triples():
        each = [dense_logprobs(plain, row["prompt_ids"], row[name])[len(row["prompt_ids"]) - 1 :] for name in THREE]
        sums.append(each[0].sum() - each[1].sum())
        gold.append(each[2])
    expected = -F.logsigmoid(0.2 * torch.stack(sums)).mean() - 0.7 * torch.cat(gold).mean()
    expected.backward()
    for sharing in (True, False):
        batch = CompletionCollator(THREE, sharing=sharing)(triples())
        policy, totals = copy.deepcopy(policy_and_reference()[0]), Totals()
        objective = TPO.objective(TPOOptions(beta=0.2, tpo_alpha=0.7))
        loss = train_step(Models(policy), batch, objective, limits=limits, totals=totals)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert_equal(gradients(policy), gradients(plain))
        assert totals.read(torch.device("cpu"))["nll_loss"] == pytest.approx(-torch.cat(gold).mean().item())


def test_tpo_without_the_third_completion_is_cpo_without_a_likelihood():
    assert TPO.rows.columns(TPOOptions()) == THREE
    assert TPO.rows.columns(TPOOptions(tpo_alpha=0.0)) == THREE[:2]
    loss, ours, _ = run(TPOOptions(tpo_alpha=0.0, beta=0.2), TPO, Limits(rows=3), True)
    expected, theirs, _ = run(CPOOptions(cpo_alpha=0.0, beta=0.2), CPO, Limits(rows=3), True)
    assert loss == expected
    assert all(torch.equal(ours[name], grad) for name, grad in theirs.items())


@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize("limits", CUTS, ids=str)
def test_reward_models_read_each_sides_last_token(limits, margin):
    model = build(0, kind=AutoModelForSequenceClassification, num_labels=1)
    plain = dense(model)
    values = torch.stack([
        torch.stack([type(plain).forward(plain, input_ids=torch.tensor([r["prompt_ids"] + r[n]])).logits[0, 0]
                     for n in ("chosen_ids", "rejected_ids")])
        for r in pair_rows()
    ])  # fmt: skip
    by = torch.tensor([row["margin"] for row in pair_rows()]) if margin else 0.0
    expected = (-F.logsigmoid(values[:, 0] - values[:, 1] - by) + 0.05 * values.sum(1) ** 2).mean()
    expected.backward()
    for sharing in (True, False):
        loss, ours, metrics = run(
            RewardOptions(center_rewards_coefficient=0.05),
            REWARD,
            limits,
            sharing,
            model=model,
            score_rule=LastToken(),
            values=("margin",) if margin else (),
        )
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert_equal(ours, gradients(plain))
        assert metrics["accuracy"] == (values[:, 0] > values[:, 1]).double().mean().item()
        assert metrics["min_reward"] == pytest.approx(values.min().item())
        assert metrics["max_reward"] == pytest.approx(values.max().item())
        assert metrics["margin"] == pytest.approx((values[:, 0] - values[:, 1]).mean().item())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_sharing_prompts_changes_nothing_with_windows_adapters_and_checkpointing(lora, checkpointing):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MistralConfig(**SIZES, sliding_window=5)).double()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    install(model)
    model.double().train()
    if checkpointing:
        inner = model.get_base_model() if lora else model
        inner.enable_input_require_grads()
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    found = []
    for sharing in (True, False):
        model.zero_grad()
        collate = CompletionCollator(("chosen_ids", "rejected_ids"), sharing=sharing)
        models = Models(model, FrozenModel(policy_and_reference()[1], padding_free=True))
        loss = train_step(models, collate(pair_rows()), DPO.objective(DPOOptions()), limits=Limits(rows=4))
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert_equal(*(grads for _, grads in found), tolerance=1e-6)


def test_whole_losses_repeat_the_dropout_of_their_first_pass():
    """With dropout, a loss that needs two passes is still the gradient of one loss."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.3)).double().train()
    install(model)
    reference = FrozenModel(policy_and_reference()[1], padding_free=True)
    batch = CompletionCollator(("chosen_ids", "rejected_ids"))(pair_rows())
    found = []
    for limits in (Limits(rows=4), Limits(rows=4)):
        torch.manual_seed(7)
        model.zero_grad()
        options = DPOOptions(loss_type="aot")
        loss = train_step(Models(model, reference), batch, DPO.objective(options), limits=limits)
        found.append((loss.item(), torch.rand(()).item()))
    assert found[0] == found[1]
    torch.manual_seed(7)
    model.zero_grad()
    totals = Totals()
    train_step(Models(model, reference), batch, DPO.objective(DPOOptions()), limits=Limits(rows=4), totals=totals)
    once = totals.read(torch.device("cpu"))["logps/chosen"]
    torch.manual_seed(7)
    model.zero_grad()
    totals = Totals()
    options = DPOOptions(loss_type="aot")
    train_step(Models(model, reference), batch, DPO.objective(options), limits=Limits(rows=4), totals=totals)
    assert totals.read(torch.device("cpu"))["logps/chosen"] == pytest.approx(once, rel=1e-9)


@pytest.mark.parametrize("limits", [Limits(rows=3), Limits(tokens=40)], ids=str)
def test_gradients_of_two_passes_are_of_the_dropout_of_the_first(limits, monkeypatch):
    """A loss that is a sum over pairs, once in one pass, and once as if it needed the whole batch."""
    found = []
    for whole in (False, True):
        monkeypatch.setitem(preference.LOSSES, "sigmoid", replace(preference.LOSSES["sigmoid"], whole=whole))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.3)).double().train()
        install(model)
        models = Models(model, FrozenModel(policy_and_reference()[1], padding_free=True))
        batch = CompletionCollator(("chosen_ids", "rejected_ids"))(pair_rows())
        torch.manual_seed(7)
        loss = train_step(models, batch, DPO.objective(DPOOptions(beta=0.5)), limits=limits)
        found.append((loss.item(), gradients(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert_equal(found[1][1], found[0][1], tolerance=1e-8)


@pytest.mark.parametrize("name", ["sigmoid", "aot"])
def test_evaluation_gives_the_training_loss_and_metrics(name):
    policy, other = policy_and_reference()
    objective = DPO.objective(DPOOptions(loss_type=name))
    batch = CompletionCollator(("chosen_ids", "rejected_ids"))(pair_rows())
    models = Models(copy.deepcopy(policy), FrozenModel(other, padding_free=True))
    trained, evaluated = Totals(), Totals()
    loss = train_step(models, batch, objective, limits=Limits(rows=3), totals=trained)
    evaluate_batch(models, batch, objective, evaluated, limits=Limits(rows=3))
    ours, theirs = evaluated.read(torch.device("cpu")), trained.read(torch.device("cpu"))
    assert ours.pop("loss") == pytest.approx(loss.item(), rel=1e-9)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_rows_of_the_same_prompt_share_it():
    batch = CompletionCollator(("chosen_ids", "rejected_ids"))(pair_rows())
    joined = batch.share_prefixes()
    assert joined.tokens == batch.tokens - len(pair_rows()[0]["prompt_ids"])
    assert joined.repeated_tokens == batch.repeated_tokens
    assert torch.equal(joined.score_target, batch.score_target)
    assert torch.equal(joined.token_ids[joined.score_index], batch.token_ids[batch.score_index])
    assert torch.equal(joined.position_ids[joined.score_index], batch.position_ids[batch.score_index])
