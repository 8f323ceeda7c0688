"""A row above the token budget, run in pieces: loss, metrics and gradients are those of the whole row."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from lowtide.engine.forward import install
from lowtide.engine.layers.mixers import chunks_of
from lowtide.engine.reference import logprobs
from lowtide.memory.activations.checkpointing import set_checkpointing
from lowtide.methods.method import TokenObjective
from lowtide.objectives.sft import LOSSES, smoothed_nll
from lowtide.ops.attention import chained_attention
from lowtide.ops.attention.piece_keys import OnDevice
from lowtide.ops.logits.linear_logprobs import Want
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from lowtide.step.cut import parts_of
from lowtide.step.evaluate import evaluate_batch, score_in_parts
from lowtide.step.execute import Backward
from lowtide.step.metrics import Totals
from lowtide.step.models import Models
from lowtide.step.train_step import train_step
from lowtide.step_plan import Limits, cut_rows
from tests.support.marks import slow_but
from tests.support.models import tiny_models
from tests.support.models.architectures import FIRST_TOKEN, RAGGED, RECURRENT, TYPICAL, TYPICAL_RECURRENT, VOCAB, build

NLL = TokenObjective(LOSSES["nll"], want=Want(entropies=True, top1=True))
CAP = Limits(tokens=16)


def draw(length: int, seed: int, below: int = VOCAB) -> list[int]:
    return torch.randint(FIRST_TOKEN, below, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def labelled(length: int, seed: int, below: int = VOCAB) -> dict:
    tokens = draw(length, seed, below)
    kept = torch.rand(length, generator=torch.Generator().manual_seed(seed)) < 0.7
    return {"input_ids": tokens, "labels": [t if k else IGNORE for t, k in zip(tokens, kept.tolist(), strict=True)]}


def rows(below: int = VOCAB) -> RaggedBatch:
    """Long rows and short ones, and a packed row whose segments are long and short."""
    packed = labelled(61, 9, below) | {"seq_lengths": [4, 35, 6, 16]}
    return RaggedBatch.from_rows([labelled(53, 1, below), labelled(7, 2, below), packed, labelled(16, 3, below)])


def prompts() -> RaggedBatch:
    """Prompts with completions, of which each may be long."""
    segments, prefix, row = [], [], []
    for number, (prompt, *completions) in enumerate([(41, 5, 38), (7, 20, 3, 4), (33, 2, 2, 9)]):
        first = len(segments)
        segments.append(draw(prompt, 10 * number))
        segments += [draw(length, 10 * number + n + 1) for n, length in enumerate(completions)]
        prefix += [-1, *[first] * len(completions)]
        row += [number] * (len(completions) + 1)
    return RaggedBatch.from_segments(segments, prefix=prefix, row=row)


CHAINED = RAGGED | RECURRENT


@pytest.fixture(autouse=True)
def several_chunks() -> Iterator[None]:
    """Of recurrences: the pieces are shorter than a chunk of real runs."""
    with chunks_of(4):
        yield


TREES = [(47, [(9, 12), (30, 5), (30, 24), (46, 3), (47, 2)]), (12, [(5, 4)]), (20, [(1, 18)])]
"""Conversations: the tokens of their last round, and of each other one where it leaves that, and how it goes on."""


def trees(below: int = VOCAB) -> RaggedBatch:
    """Conversations, each of whose tokens is there once."""
    found = []
    for number, (last, others) in enumerate(TREES):
        lengths = [last, *(length for _, length in others)]
        parts = [labelled(length, 100 * number + n, below) for n, length in enumerate(lengths)]
        row = {name: [token for part in parts for token in part[name]] for name in ("input_ids", "labels")}
        places = {"prefix": [-1] + [0] * len(others), "prefix_length": [-1, *(place for place, _ in others)]}
        found.append(row | places | {"seq_lengths": lengths})
    return RaggedBatch.from_rows(found)


def rounds(below: int = VOCAB) -> RaggedBatch:
    """The same conversations with a row for each round."""
    found = []
    for number, (last, others) in enumerate(TREES):
        found.append(spine := labelled(last, 100 * number, below))
        for n, (place, length) in enumerate(others, 1):
            own = labelled(length, 100 * number + n, below)
            found.append(
                {
                    "input_ids": spine["input_ids"][:place] + own["input_ids"],
                    "labels": [IGNORE] * place + own["labels"],
                }
            )
    return RaggedBatch.from_rows(found)


def step(model, batch: RaggedBatch, limits: Limits, objective=NLL, **more) -> tuple[float, dict, dict]:
    """(loss, gradients, metrics), of a model that is left as it was."""
    model = copy.deepcopy(model)
    totals = Totals()
    loss = train_step(model, batch, objective, limits=limits, totals=totals, **more)
    policy = Models.of(model).policy
    grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return loss.item(), grads, totals.read(torch.device("cpu"))


def assert_same(ours: tuple[float, dict, dict], theirs: tuple[float, dict, dict], tolerance: float) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    assert ours[2] == pytest.approx(theirs[2], rel=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    largest = max(grad.norm() for grad in theirs[1].values())
    for name, grad in theirs[1].items():
        assert (ours[1][name] - grad).norm() <= tolerance * torch.maximum(grad.norm(), 1e-3 * largest), name


def has_experts(name: str) -> bool:
    """Their products are float32 at most."""
    return any("experts" in each for each in CHAINED[name][1])


def ready(name: str, dtype: torch.dtype = torch.float64, **changes):
    model = build(name, **changes)
    install(model)
    return model.to(dtype)


# -- the tree of pieces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [16, 17, 23, 40, 60])
@pytest.mark.parametrize("make", [rows, prompts, trees])
def test_pieces_hold_each_token_and_each_score_once(make, most):
    batch = make()
    for number in range(batch.rows):
        row = batch.select_rows([number])
        if row.tokens <= most:
            continue
        [part] = parts_of(row, Limits(tokens=most))
        pieces = part.pieces
        assert max(piece.batch.tokens for piece in pieces) <= most
        assert sum(piece.batch.tokens for piece in pieces) == row.tokens
        assert torch.cat([piece.scores for piece in pieces]).sort()[0].tolist() == list(range(row.scores))
        for piece in pieces:
            assert torch.equal(piece.batch.score_target, row.score_target[piece.scores])
            read = piece.batch.token_ids[piece.batch.score_index]
            assert torch.equal(read, row.token_ids[row.score_index[piece.scores]])


def test_short_completions_share_a_piece_and_long_ones_are_cut():
    row = prompts().select_rows([2])
    (plan,) = cut_rows(row.segments, CAP)
    assert [each.after for each in plan.pieces] == [-1, 0, 1, 2]
    assert [len(each.spans) for each in plan.pieces] == [1, 1, 1, 3]
    plan = cut_rows(prompts().segments, CAP)[0]
    assert [each.after for each in plan.pieces] == [-1, 0, 1, 2, 2, 4, 5]


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rows, prompts, trees])
@pytest.mark.parametrize("name", slow_but([*TYPICAL, *TYPICAL_RECURRENT], CHAINED))
def test_gradients_equal_those_of_whole_rows(name, make):
    experts = has_experts(name)
    model, batch = ready(name, torch.float32 if experts else torch.float64), make()
    assert_same(step(model, batch, CAP), step(model, batch, Limits()), 2e-5 if experts else 1e-6)


@pytest.mark.parametrize("limits", [Limits(), CAP], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", slow_but([*TYPICAL, *TYPICAL_RECURRENT], CHAINED))
def test_a_conversation_as_a_tree_equals_a_row_for_each_round(name, limits):
    experts = has_experts(name)
    model = ready(name, torch.float32 if experts else torch.float64)
    tree, each = step(model, trees(), limits), step(model, rounds(), Limits())
    assert tree[2].pop("tokens") < each[2].pop("tokens")
    assert_same(tree, each, 2e-5 if experts else 1e-6)


def test_a_padded_tree_equals_a_row_for_each_round():
    model = ready("llama")
    tree = step(Models(model, padding_free=False), trees(), Limits())
    each = step(Models(model, padding_free=False), rounds(), Limits())
    assert tree[2].pop("tokens") < each[2].pop("tokens")
    assert_same(tree, each, 1e-9)


@pytest.mark.parametrize("limits", [Limits(tokens=17), Limits(tokens=30), Limits(rows=1, tokens=40)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_float32_gradients_do_not_depend_on_the_budget(tied, limits):
    model, batch = ready("llama", torch.float32, tie_word_embeddings=tied), rows()
    assert_same(step(model, batch, limits), step(model, batch, Limits()), 1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen3_5"])
@pytest.mark.parametrize("policy", ["full", "attention", "matmul"])
def test_pieces_are_checkpointed(policy, name):
    model, batch = ready(name), rows()
    expected = step(model, batch, Limits())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    set_checkpointing(model, policy)
    assert_same(step(model, batch, CAP), expected, 1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
def test_adapters_and_frozen_weights(accumulate):
    model = tiny_models.with_adapters(tiny_models.build(), lora_dropout=0.0)
    install(model)
    model, batch, backward = model.double(), rows(tiny_models.VOCAB), Backward(accumulate=accumulate)
    assert_same(step(model, batch, CAP, backward=backward), step(model, batch, Limits(), backward=backward), 1e-6)


def test_label_smoothing():
    objective = TokenObjective(smoothed_nll(0.1), want=Want(mean_logprobs=True))
    model, batch = ready("llama"), rows()
    assert_same(step(model, batch, CAP, objective), step(model, batch, Limits(), objective), 1e-6)


def test_dropout_is_drawn_again_in_the_second_pass(monkeypatch):
    """The second pass computes the keys that the first one kept, bit by bit; with another draw it would not."""
    model = tiny_models.with_adapters(tiny_models.build(), lora_dropout=0.2)
    install(model)
    kept: dict = {}
    seen: list[bool] = []
    original = chained_attention.carried

    def watched(layer, own, piece, last):
        if torch.is_grad_enabled() and piece.keeps:
            seen.append(all(map(torch.equal, own, kept[piece, layer])))
        elif piece.keeps:
            kept[piece, layer] = [each.clone() for each in own]
        return original(layer, own, piece, last)

    monkeypatch.setattr(chained_attention, "carried", watched)
    train_step(model.train(), rows(tiny_models.VOCAB), NLL, limits=CAP)
    assert seen == [True] * 2 * (3 + 2)  # layers, and the pieces of two rows that others go on from


# -- without gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [rows, prompts])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2", "qwen3_5"])
def test_log_probs_and_evaluation(name, make):
    model, batch = ready(name), make()
    whole = logprobs(model, batch, padding_free=True)
    ours = score_in_parts(Models.of(model), batch, CAP, lambda part: logprobs(model, part, padding_free=True))
    torch.testing.assert_close(ours, whole, rtol=1e-8, atol=1e-8)
    found = []
    for limits in (CAP, Limits()):
        totals = Totals()
        evaluate_batch(model, batch, NLL, totals, limits=limits)
        found.append(totals.read(torch.device("cpu")))
    assert found[0] == pytest.approx(found[1], rel=1e-7)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_dropout": 0.1}, "attention dropout"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_models_that_cannot_are_refused(changes, said):
    model = ready("llama", **changes)
    with pytest.raises(ValueError, match=f"row 2 .*61 tokens.*16.*not run in pieces.*{said}"):
        step(model, rows(), CAP)


def test_other_reasons_are_said():
    model, batch = ready("llama"), rows()
    with pytest.raises(ValueError, match="at least 16 tokens"):
        step(model, batch, Limits(tokens=15))
    padded = build("llama")
    install(padded, padding_free=False)
    with pytest.raises(ValueError, match="runs padded"):
        train_step(Models(padded, padding_free=False), batch, NLL, limits=CAP)
    with pytest.raises(ValueError, match="router_aux_loss_coef"):
        step(model, batch, CAP, TokenObjective(LOSSES["nll"], aux_coefficient=0.1))


def test_a_row_without_scores_has_no_gradient():
    model = ready("llama")
    silent = {"input_ids": draw(50, 4), "labels": [IGNORE] * 50}
    batch = RaggedBatch.from_rows([labelled(40, 5), silent])
    assert_same(step(model, batch, CAP), step(model, batch, Limits(rows=1)), 1e-6)


def test_keys_wait_where_the_models_say():
    kept: list[torch.Size] = []

    class Noted(OnDevice):
        def keep(self, tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.shape)
            return super().keep(tensor)

    model, batch = ready("llama"), rows()
    step(model, batch, CAP)
    assert not kept
    train_step(Models(model, place=Noted), batch, NLL, limits=CAP)
    assert kept
    kept.clear()
    evaluate_batch(Models(model, place=Noted), batch, NLL, Totals(), limits=CAP)
    assert kept
