"""Plans with rows in pieces: on a table of costs made up here, and of runs that are traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import LlamaConfig

import lowtide
from lowtide.planner.estimate import Estimate
from lowtide.planner.pieces import LEAST_TOKENS, Searches, sizes_in_pieces
from lowtide.planner.plan import Plan, PlanError
from lowtide.planner.search import Axis, Candidate, Choice, Refused, Search, Sizes, peak_of
from lowtide.planner.tracing_process import tracing_here

LENGTHS = [1024, 200, 100]
MODEL: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
LITTLE_TO_CHOOSE: dict[str, Any] = {
    "per_device_train_batch_size": 1, "gradient_checkpointing": False, "checkpointing_policy": "full",
    "checkpointing_every": 1,
    "activation_offloading": False, "mlp_tile_tokens": None, "optimizer_in_backward": False, "bf16": False,
    "use_cpu": True,
}  # fmt: skip

LITTLE = 100 << 20
"""Bytes that hold the weights, and no process."""

# -- the search ------------------------------------------------------------------------------------------------------

ACTIVATIONS = Axis(
    "activations", [Choice("plain"), Choice("full", {"full": True}, 4 / 3), Choice("slow", {"slow": True}, 2)], True
)
KEYS = Axis("keys", [Choice("here"), Choice("away", {"away": True}, 1.1)])
ROW = 1600


class Table:
    """One row of so many tokens; pieces of at most `tokens`."""

    def __init__(self, *, cuts: bool = True) -> None:
        self.cuts = cuts
        self.asked: list[int | None] = []

    def __call__(self, options: Mapping[str, Any], tokens: int | None) -> Estimate:
        self.asked.append(tokens)
        piece = tokens or ROW
        if piece < ROW and not self.cuts:
            raise Refused("rows are seen whole")
        pieces = -(-ROW // piece)
        kept = 2.0 if options.get("slow") else 4.0 if options.get("full") else 10.0
        held = {
            "weights": 1000.0,
            "activations": kept * ROW / pieces,
            "keys": 0.0 if options.get("away") else 0.5 * ROW * (pieces - 1) / pieces,
        }
        slower = 2 if options.get("slow") else 4 / 3 if options.get("full") else 1
        slower *= 1 if pieces == 1 else 4 / 3 + 0.01 * pieces
        rate = 1 / slower / (1.1 if options.get("away") else 1)
        return Estimate(0, "backward", {"backward": held}, "table", tokens_per_second=rate)  # type: ignore[arg-type]


def searches(table: Table, room: float) -> Searches:
    def search_of(sizes: Sizes) -> Search:
        return Search(table, [ACTIVATIONS, KEYS] if sizes.in_pieces else [ACTIVATIONS], sizes, room)

    sizes = Sizes(ROW, ROW)
    return Searches(search_of, sizes, sizes_in_pieces(sizes))


def seconds(table: Table, options: Mapping[str, Any], tokens: int | None, room: float) -> float:
    """Of a token; without end where it does not fit."""
    found = table(options, tokens)
    assert found.tokens_per_second is not None
    return 1 / found.tokens_per_second if peak_of(found.phases) <= room else float("inf")


@pytest.mark.parametrize(
    ("room", "cut", "options"),
    [
        (20_000, False, {}),
        (8000, False, {"full": True}),  # no slower than pieces
        (6000, True, {}),  # in place of `slow`
        (3200, True, {}),
        (2300, True, {"away": True}),
        (1500, True, {"full": True, "away": True}),
    ],
)
def test_rows_are_cut_where_that_is_faster_or_nothing_else_fits(room, cut, options):
    table = Table()
    settings = searches(table, room).best()[0].settings
    budget = settings.pop("tokens_per_microbatch", None)
    assert (settings, budget is not None) == (options, cut)
    assert cut == any(tokens is not None for tokens in table.asked)
    fastest = min(
        seconds(table, {**activations.options, **keys.options}, tokens, room)
        for activations in ACTIVATIONS.choices
        for keys in KEYS.choices
        for tokens in (None, *range(LEAST_TOKENS, ROW // 2 + 1, 16))
    )
    assert seconds(table, settings, budget, room) <= 1.05 * fastest


def test_where_rows_cannot_be_cut_whole_ones_are_all_there_is():
    found = searches(Table(cuts=False), 6000)
    assert found.best()[0].settings == {"slow": True}
    assert found.why_whole == "rows are seen whole"
    nothing = searches(Table(cuts=False), 2000)
    assert nothing.best() == []
    assert nothing.smallest().peak == 1000 + 2 * ROW


def test_the_best_is_traced_where_others_are_predicted_to_be_faster(monkeypatch):
    found = searches(Table(), 20_000)
    slow = Candidate(found.whole, (2,), None, 0.0, 5.0, Estimate(0, "", {}, "table"))
    full = Candidate(found.whole, (1,), None, 0.0, 3.0)
    monkeypatch.setattr(Search, "best", lambda search, *_: [] if search.sizes.in_pieces else [slow, full])
    assert found.best(1) == [slow, full]


def test_where_predictions_are_too_high_the_smallest_that_fits_is_the_plan(monkeypatch):
    monkeypatch.setattr(Search, "best", lambda *_: [])
    best = searches(Table(), 6000).best()[0]
    assert best.estimate is not None
    assert best.peak <= best.search.room
    assert searches(Table(), 1000).best() == []


def test_the_smallest_peak_is_that_of_pieces():
    found = searches(Table(), 1000)
    assert found.best() == []
    assert found.smallest().settings == {"slow": True, "away": True, "tokens_per_microbatch": LEAST_TOKENS}


def test_short_rows_and_budgets_that_are_given_leave_nothing_to_cut():
    assert sizes_in_pieces(Sizes(200, 2000)) is None
    assert sizes_in_pieces(Sizes(4096, 4096, given=True)) is None
    assert sizes_in_pieces(Sizes(4100, 9000)) == Sizes(272, 2064, in_pieces=True)


# -- runs ------------------------------------------------------------------------------------------------------------


def planned(budget: int, *, model: Mapping[str, Any] = MODEL, **given: Any) -> Plan:
    with tracing_here():
        return lowtide.plan(
            "sft", LlamaConfig(**model), None, budget, lengths=LENGTHS, explain=False, config=LITTLE_TO_CHOOSE | given
        )  # fmt: skip


def estimated(plan: Plan, folder: str) -> int:
    args = lowtide.SFTConfig(folder, report_to="none", **LITTLE_TO_CHOOSE, **plan.settings)
    with tracing_here():
        return lowtide.estimate(args, LlamaConfig(**MODEL), lengths=LENGTHS).peak_bytes


def least_of_whole_rows() -> int:
    """The smallest peak of whole rows: a budget that they do not fit, since a part of it is left free."""
    with pytest.raises(PlanError) as error:
        planned(LITTLE, tokens_per_microbatch=None)
    return error.value.peak_bytes


@pytest.mark.slow
def test_below_what_whole_rows_take_a_plan_cuts_them(tmp_path):
    plan = planned(least_of_whole_rows())
    assert plan.settings["tokens_per_microbatch"] < max(LENGTHS)
    assert plan.chosen.peak_bytes <= plan.budget_bytes
    assert plan.chosen.peak_bytes == estimated(plan, str(tmp_path))
    assert f"tokens_per_microbatch: {plan.settings['tokens_per_microbatch']}" in plan.to_yaml()


@pytest.mark.slow
def test_where_a_model_cannot_the_budget_holds_the_longest_row():
    model = MODEL | {"attention_dropout": 0.1}
    with pytest.raises(PlanError) as error:
        planned(LITTLE, model=model)
    assert error.value.settings.get("tokens_per_microbatch", 1 << 20) >= max(LENGTHS)
    assert "Rows in pieces cannot work here: " in str(error.value)
    assert "attention dropout (0.1)" in str(error.value)


@pytest.mark.slow
def test_a_budget_that_is_given_may_have_its_keys_on_the_host():
    with pytest.raises(PlanError) as error:
        planned(LITTLE, tokens_per_microbatch=256)
    assert error.value.settings["chain_storage"] == "host"
    assert "tokens_per_microbatch" not in error.value.settings
