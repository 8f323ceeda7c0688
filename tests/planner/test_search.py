"""The search against trying everything, on tables of costs made up here."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planner.estimate import Estimate
from lowtide.planner.search import Axis, Between, Choice, Measure, Patience, Refused, Search, Sizes, peak_of

ACTIVATIONS = Axis(
    "activations",
    [
        Choice("plain"),
        Choice("some", {"checkpointing": "some"}, slower=1.1),
        Choice("full", {"checkpointing": "full"}, slower=1.4),
    ],
    scales=True,
)
STATES = Axis("states", [Choice("adam"), Choice("away", {"states": "away"}, slower=1.3)])
LOSSY = Axis("lossy", [Choice("whole"), Choice("rounded", {"rounded": True}, changes="it is rounded")])
ADAPTERS = Axis("trained", [Choice("all"), Choice("lora", {"lora": True}, 0.5, "another model", last_resort=True)])
SIZES = Sizes(20, 100)
KEPT = {"plain": 30.0, "some": 12.0, "a quarter": 23.0, "three quarters": 9.0, "full": 2.0}


def traced(phases: Any, rate: float | None = None) -> Estimate:
    """What a trace says of some settings, as far as the search reads it."""
    return Estimate(0, "", phases, "table", tokens_per_second=rate)


class Table:
    """A run whose bytes multiply, as the search believes they do."""

    def __init__(self, weights: float = 1000, *, tokens_per_second: float | None = None, wrong: float = 1.0) -> None:
        self.weights, self.tokens_per_second, self.wrong = weights, tokens_per_second, wrong
        self.asked: list[tuple[Mapping[str, Any], int | None]] = []

    def __call__(self, options: Mapping[str, Any], tokens: int | None) -> Estimate:
        self.asked.append((dict(options), tokens))
        return traced(self.phases(options, tokens))

    def phases(self, options: Mapping[str, Any], tokens: int | None) -> dict[str, dict[str, float]]:
        states = 2 * self.weights * (0.1 if options.get("states") == "away" else 1)
        states *= 0.5 if options.get("rounded") else 1
        gradients = self.weights
        if options.get("lora"):
            states, gradients = states * 0.01, gradients * 0.01
        activations = KEPT[options.get("checkpointing", "plain")] * (tokens or 100)
        several = len(options) > 1
        return {
            "head": {
                "weights": self.weights,
                "optimizer": states,
                "gradients": gradients if tokens else 0,
                "activations": activations * (self.wrong if several else 1),
            },
            "optimizer": {"weights": self.weights, "optimizer": states, "gradients": gradients},
        }

    def peak(self, options: Mapping[str, Any], tokens: int | None) -> float:
        return peak_of(self.phases(options, tokens))


def search(table: Measure, room: float, *axes: Axis, sizes: Sizes = SIZES) -> Search:
    return Search(table, axes or (ACTIVATIONS, STATES), sizes, room)


def test_where_all_fits_the_plain_settings_are_taken_after_one_trace():
    table = Table()
    (best,) = search(table, 1e9).best()
    assert (best.combination, best.tokens) == ((0, 0), None)
    assert table.asked == [({}, None)]


def test_nothing_slower_than_what_is_worth_it_is_looked_for():
    table = Table()
    found = search(table, 4100)
    (best,) = found.best()
    asked = len(table.asked)
    again = search(table, 4100)
    assert not again.best(worth=best.cost / 2)
    assert len(table.asked) < 2 * asked
    (same,) = search(table, 4100).best(worth=best.cost)
    assert (same.combination, same.tokens, same.cost) == (best.combination, best.tokens, best.cost)


@pytest.mark.parametrize("room", [2500, 3300, 4100, 4600, 5200, 6100])
def test_what_is_chosen_fits_and_nothing_faster_does(room):
    table = Table()
    found = search(table, room)
    (best,) = found.best()
    assert table.peak(found.options(best.combination), best.tokens) <= room
    assert best.estimate is not None
    for combination in itertools.product(range(3), range(2)):
        for tokens in (None, *range(20, 100, 16)):
            cost = found.cost(combination, tokens)
            if cost < best.cost * 0.999:
                assert table.peak(found.options(combination), tokens) > room, (combination, tokens)


BETWEEN = Axis(
    "activations",
    [
        Choice("plain"),
        Choice("a quarter", {"checkpointing": "a quarter"}, 1.1, between=Between("plain", "full", 0.25)),
        Choice("three quarters", {"checkpointing": "three quarters"}, 1.3, between=Between("plain", "full", 0.75)),
        Choice("full", {"checkpointing": "full"}, slower=1.4),
    ],
    scales=True,
)


@pytest.mark.parametrize("room", [2500, 3300, 4100, 4600, 4900, 5200, 5600, 6100])
def test_what_lies_between_two_choices_is_told_by_their_traces(room):
    table = Table(tokens_per_second=100)
    found = search(table, room, BETWEEN, STATES)
    (best,) = found.best()
    assert table.peak(found.options(best.combination), best.tokens) <= room
    assert best.estimate is not None, "what is chosen was traced"
    for combination in itertools.product(range(4), range(2)):
        for tokens in (None, *range(20, 100, 16)):
            if found.cost(combination, tokens) < best.cost * 0.999:
                assert table.peak(found.options(combination), tokens) > room, (combination, tokens)
    assert {choice.name for choice, _ in found.alone()} == {"full", "away"}


def test_a_choice_between_two_of_which_one_is_refused_is_passed_over():
    def refusing(options: Mapping[str, Any], tokens: int | None) -> Estimate:
        if options.get("checkpointing") == "full":
            raise Refused("no layers")
        return Table()(options, tokens)

    found = search(refusing, 4500, BETWEEN)
    assert not found.best()
    assert {choice.name for choice, _ in found.alone()} == set()


@pytest.mark.parametrize("at_once", [2, 4])
@pytest.mark.parametrize("room", [1000, 2500, 3300, 4100, 5200])
def test_with_several_traces_at_a_time_the_same_is_chosen(room, at_once):
    expected = search(Table(), room)
    found = Search(Table(), (ACTIVATIONS, STATES), SIZES, room, at_once)
    assert [each[1:] for each in found.best()] == [each[1:] for each in expected.best()], "but for whose they are"
    assert found.smallest()[1:] == expected.smallest()[1:]
    assert [*found.alone()] == [*expected.alone()]


def test_two_choices_that_store_the_same_are_not_combined():
    halves = Axis("optimizer", [Choice("whole"), Choice("half", {"rounded": True}, stores="weights")])
    other = Axis("precision", [Choice("whole"), Choice("also half", {"states": "away"}, stores="weights")])
    found = search(Table(), 500, halves, other)
    assert found.combinations == [(0, 0), (0, 1), (1, 0)]


def test_a_search_without_patience_ends_and_says_so():
    """Nothing fits so that without it all combinations are tried."""
    table = Table(wrong=10.0)
    found = Search(table, (ACTIVATIONS, STATES), SIZES, 2000, patience=Patience(0.0))
    assert found.best() == []
    assert found.gave_up
    assert len(table.asked) == 1, "the plain settings"
    assert found.smallest().estimate is not None
    patient = search(table, 1e9)
    assert patient.best()
    assert not patient.gave_up


@settings(max_examples=60, deadline=None)
@given(weights=st.floats(10, 5000), room=st.floats(500, 20_000), longest=st.integers(10, 100))
def test_the_choice_always_fits_and_there_is_none_only_where_nothing_fits(weights, room, longest):
    table, sizes = Table(weights), Sizes(longest, 100)
    found = search(table, room, sizes=sizes)
    candidates = found.best()
    least = min(
        table.peak(found.options(combination), tokens)
        for combination in itertools.product(range(3), range(2))
        for tokens in (None, longest)
        if tokens != 100
    )
    if candidates:
        (best,) = candidates
        assert table.peak(found.options(best.combination), best.tokens) <= room
    else:
        assert least > room
        assert found.smallest().peak == pytest.approx(least)


def test_where_the_states_alone_are_too_much_nothing_else_is_traced():
    table = Table()
    assert search(table, 3700, ACTIVATIONS).best() == []
    assert table.asked == [({}, None)]


def test_what_is_predicted_wrongly_is_not_believed():
    """Combinations take twice the activations that their parts tell of."""
    table = Table(wrong=2.0)
    found = search(table, 2500)
    (best,) = found.best()
    assert table.peak(found.options(best.combination), best.tokens) <= 2500


def test_another_model_is_trained_only_where_nothing_else_fits():
    fits = search(Table(), 4200, ACTIVATIONS, ADAPTERS).best()[0]
    assert fits.combination[1] == 0
    (needed,) = search(Table(), 1800, ACTIVATIONS, ADAPTERS).best()
    assert needed.combination[1] == 1


def test_what_is_as_fast_and_exact_comes_before_what_is_not():
    (roomy,) = search(Table(), 1e9, ACTIVATIONS, LOSSY).best()
    assert roomy.combination == (0, 0)


def test_runners_up_fit_and_are_slower():
    found = search(Table(), 4600).best(runners_up=3)
    assert len(found) == 4
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    assert all(each.peak <= 4600 for each in found)


def test_what_a_model_refuses_is_left_out_with_its_reason():
    class Refusing(Table):
        def __call__(self, options, tokens):
            if options.get("checkpointing") == "some":
                raise Refused("no such layers")
            return super().__call__(options, tokens)

    found = search(Refusing(), 4600)
    (best,) = found.best()
    assert found.options(best.combination).get("checkpointing") != "some"
    assert "no such layers" in found.refused.values()


def test_plain_settings_that_cannot_be_traced_end_the_search():
    def refusing(options, tokens):
        raise Refused("aten::nonzero has no shape")

    with pytest.raises(Refused, match="nonzero"):
        search(refusing, 1e9).best()


def test_measured_speed_decides_where_there_is_one():
    """The roofline says that keeping some is slower than was thought, and computing all again is not."""

    class Timed(Table):
        def __call__(self, options, tokens):
            rate = {"plain": 10.0, "some": 3.0, "full": 8.0}[options.get("checkpointing", "plain")]
            return traced(self.phases(options, tokens), rate)

    found = search(Timed(), 5000, ACTIVATIONS, sizes=Sizes(100, 100))
    (best,) = found.best()
    assert found.options(best.combination) == {"checkpointing": "full"}


def test_nothing_is_cut_where_the_sizes_are_one():
    table = Table()
    search(table, 4600, sizes=Sizes(100, 100)).best()
    assert {tokens for _, tokens in table.asked} == {None}


def test_the_smaller_size_is_traced_only_of_what_is_cut():
    """Where checkpointing is chosen for a whole micro-batch, no smaller one is traced with it."""
    table = Table()
    (best,) = search(table, 2500).best()
    assert best.tokens is None
    assert [options for options, tokens in table.asked if tokens is not None] == [{}]


def test_gradients_that_wait_shrink_as_those_of_a_step_do():
    """Adapters have few gradients: the head's phase has them where a batch is cut, and none in one micro-batch."""
    table = Table()
    (best,) = search(table, 1180, ACTIVATIONS, ADAPTERS).best()
    assert (best.combination, best.tokens) == ((2, 1), 64)
    assert ({"lora": True}, 20) not in table.asked


class Moments(Table):
    """A run whose backward holds most at its beginning, with all activations, or at its end, with all gradients; and
    whose allocator keeps what it has taken."""

    def phases(self, options: Mapping[str, Any], tokens: int | None) -> dict[str, dict[str, float]]:
        streamed, holes = options.get("weights") == "streamed", 20.0
        weights = 100.0 if streamed else self.weights
        states = {"weights": weights, "optimizer": 0.0 if streamed else 2 * self.weights}
        gradients, buffers = (10.0, 200.0) if streamed else (self.weights, 0.0)
        forward = {**states, "activations": KEPT[options.get("checkpointing", "plain")] * 30}
        begin = {**forward, "activations": forward["activations"] + buffers}
        end = {**states, "activations": 1.0, "gradients": gradients}
        backward = max(begin, end, key=lambda each: sum(each.values()))
        step = {**states, "gradients": gradients}
        held = {"forward": forward, "backward": backward, "optimizer": step, "saving": states}
        reserved = max(sum(each.values()) for each in held.values()) + holes
        return {phase: {**each, "cache": reserved - sum(each.values())} for phase, each in held.items()}


STREAMED = Axis("weights", [Choice("resident"), Choice("streamed", {"weights": "streamed"}, 2.0, last_resort=True)])


def test_a_phase_that_holds_most_at_another_moment_is_no_reason_to_drop_what_fits():
    table = Moments()
    found = search(table, 700, ACTIVATIONS, STREAMED, sizes=Sizes(100, 100))
    (best,) = found.best()
    assert found.options(best.combination) == {"checkpointing": "some", "weights": "streamed"}
    least = search(table, 300, ACTIVATIONS, STREAMED, sizes=Sizes(100, 100))
    assert least.best() == []
    assert least.options(least.smallest().combination) == {"checkpointing": "full", "weights": "streamed"}


def test_a_choice_that_multiplies_activations_is_no_reason_to_drop_what_fits():
    """As weights that are streamed do, whose layers are not fused."""

    class Unfused(Table):
        def phases(self, options, tokens):
            held = super().phases(options, tokens)
            if options.get("weights") == "streamed":
                held["head"]["activations"] *= 3
                held = {name: {**each, "weights": 10, "optimizer": 20, "gradients": 10} for name, each in held.items()}
            return held

    found = search(Unfused(), 700, ACTIVATIONS, STREAMED, sizes=Sizes(100, 100))
    (best,) = found.best()
    assert found.options(best.combination) == {"checkpointing": "full", "weights": "streamed"}
    assert best.peak == 640


def test_the_smallest_is_that_of_all_that_was_traced():
    """Combinations take three times the activations that their parts tell of, but for one."""

    class Odd(Table):
        def phases(self, options, tokens):
            less = options.get("checkpointing") == "some" and options.get("states") == "away"
            return Table.phases(Table(wrong=0.01 if less else 3.0), options, tokens)

    found = search(Odd(), 1000, sizes=Sizes(100, 100))
    least = found.smallest()
    assert found.options(least.combination) == {"checkpointing": "some", "states": "away"}
    assert found.fitting() == []
