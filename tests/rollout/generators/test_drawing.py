"""How tokens are drawn: the distribution against transformers' processors, and the random numbers."""

from importlib.util import find_spec

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lowtide.ops.counter_random import stream_key, uniforms
from lowtide.ops.logits import drawing
from lowtide.ops.logits.drawing import draw, drawn, likeliest
from lowtide.ops.target import planning_for
from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.sampling import Streams, draw_tokens
from tests.support.marks import NEEDS_TRITON, slow_but

CASES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8, "temperature": 2.0},
    "narrow top_p": {"top_p": 0.05},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 40, "top_p": 0.7},
    "penalty": {"repetition_penalty": 1.7},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.7},
    "k beyond the vocabulary": {"top_k": 5000},
}


def wanted_logprobs(logits: torch.Tensor, used: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[rows, vocab] by transformers' processors, in the order in which `generate` calls them."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return torch.log_softmax(steps(used, logits.clone()), -1)  # type: ignore[arg-type]


def streams(rows: int, used: torch.Tensor | None = None) -> Streams:
    return Streams(torch.tensor([stream_key(3, row) for row in range(rows)]), torch.zeros(rows).long(), used)


@pytest.mark.parametrize("vocab", slow_but([50], [50, 1201]))
@pytest.mark.parametrize("tied", [False, True], ids=["unlike", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_logprobs_are_those_of_transformers(case: str, tied: bool, vocab: int):
    """Of 20,000 draws of one row; with ties at the cut, all that are tied there stay with top-k."""
    sampling, rows = Sampling(1, **CASES[case]), 20000
    if tied and sampling.top_p < 1:
        pytest.skip("which of several equals top-p keeps depends on how they are sorted")
    logits = 2 * torch.randn(1, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = logits.round() if tied else logits
    used = torch.tensor([[4, 9, 9, 30]])
    wanted = wanted_logprobs(logits, used, sampling)[0]
    given = used.expand(rows, -1) if sampling.repetition_penalty != 1 else None

    drawn = draw_tokens(logits.repeat(rows, 1), sampling, streams(rows, given))

    torch.testing.assert_close(drawn.logprobs, wanted[drawn.tokens], atol=1e-9, rtol=0)
    plain = torch.log_softmax(logits[0] / sampling.temperature, -1)
    torch.testing.assert_close(drawn.plain_logprobs, plain[drawn.tokens], atol=1e-9, rtol=0)
    shares = torch.bincount(drawn.tokens, minlength=vocab) / rows
    assert (shares - wanted.exp()).abs().max() < 4 * 0.5 / rows**0.5


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits = torch.tensor([[3.0, 2.9, -1.0], [-3.0, -2.0, -1.9]])
    sampling = Sampling(1, temperature=0, repetition_penalty=2.0)

    drawn = draw_tokens(logits.clone(), sampling, streams(2, torch.tensor([[0, 0], [2, 0]])))

    assert drawn.tokens.tolist() == [1, 1]
    assert drawn.logprobs.tolist() == [0, 0]
    torch.testing.assert_close(drawn.plain_logprobs, torch.log_softmax(logits, -1)[:, 1])


@pytest.mark.parametrize("entries", [5, 1024, 1030, 4000, 50257])
def test_nothing_of_probability_0_is_drawn(entries: int):
    generator = torch.Generator().manual_seed(entries)
    weights = torch.rand(300, entries, generator=generator) * (torch.rand(300, entries, generator=generator) < 0.01)
    weights[:, entries // 2] += 1e-3
    for uniform in (torch.rand(300, generator=generator).double(), torch.zeros(300).double()):
        assert (weights.gather(1, draw(weights, uniform)[:, None]) > 0).all()
    last = torch.full((300,), 1 - 2.0**-53, dtype=torch.float64)
    assert (weights.gather(1, draw(weights, last)[:, None]) > 0).all()


@pytest.mark.parametrize("entries", [700, 5000])
def test_the_draw_inverts_the_cumulative_distribution(entries: int):
    weights = torch.rand(64, entries, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    drawn = draw(weights, uniform)

    wanted = (weights.cumsum(-1) <= (uniform * weights.sum(-1))[:, None]).sum(-1)
    assert drawn.tolist() == wanted.tolist()


def test_random_numbers_are_uniform_and_each_its_own():
    keys = torch.tensor([stream_key(seed, number) for seed in range(-20, 20) for number in range(50)])
    found = torch.stack([uniforms(keys, torch.full_like(keys, place)) for place in range(50)])

    assert found.unique().numel() == found.numel()
    assert found.min() >= 0
    assert found.max() < 1
    counts = torch.histc(found.float(), 100, 0, 1)
    assert (counts / found.numel() - 0.01).abs().max() < 1.3e-3
    assert abs(torch.corrcoef(torch.stack([found[:-1].flatten(), found[1:].flatten()]))[0, 1]) < 0.01


def test_random_numbers_are_those_of_splitmix64():
    """The first numbers of the reference implementation for the seed 1234567 (Vigna, splitmix64.c)."""
    keys = torch.full((3,), 1234567)
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]

    found = uniforms(keys, torch.arange(3))

    assert found.tolist() == [(word >> 11) * 2.0**-53 for word in words]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"stop_strings": ("a", "")},
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(wrong: dict):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` of Sampling"):
        Sampling(**{"max_new_tokens": 4, **wrong})


def test_the_smallest_number_draws_no_entry_of_probability_0():
    probabilities = torch.tensor([[0.0, 0.0, 0.3, 0.7], [0.5, 0.0, 0.5, 0.0]])
    assert draw(probabilities, torch.tensor([0.0, 0.5])).tolist() == [2, 2]
    assert draw(probabilities, torch.tensor([1.0, 1.0])).tolist() == [3, 2]


@pytest.fixture(params=["plain", pytest.param("triton", marks=NEEDS_TRITON)])
def picks(request, monkeypatch):
    if request.param == "triton":
        monkeypatch.setattr(drawing, "serves", lambda scores: True)
        monkeypatch.setattr(drawing, "COLUMNS", 64)
    return request.param


@pytest.mark.parametrize("entries", [5, 512, 1300])
def test_picks_are_those_of_the_cumulative_distribution(picks, entries: int):
    scores = 4 * torch.randn(40, entries)
    scores[:, ::3] = float("-inf")
    scores[1] = torch.tensor([float("-inf")] * (entries - 1) + [0.0])
    scores[2, 1:3] = 50.0  # as likely as the first of them
    keys, counters = torch.randint(-(2**62), 2**62, (40,)), torch.arange(40)
    shares = torch.softmax(scores.double(), -1)
    expected = (shares.cumsum(-1) <= uniforms(keys, counters)[:, None] * shares.sum(-1, keepdim=True)).sum(-1)

    places, logprobs = drawn(scores.clone(), keys, counters)
    assert torch.equal(places, expected)
    torch.testing.assert_close(logprobs.double(), shares.gather(1, places[:, None])[:, 0].log(), atol=1e-5, rtol=1e-5)

    places, logprobs = likeliest(scores.clone())
    assert torch.equal(places, scores.max(-1).indices)
    torch.testing.assert_close(logprobs.double(), shares.amax(-1).log(), atol=1e-5, rtol=1e-5)


def test_a_row_that_is_not_finite_says_so(picks):
    scores = torch.randn(3, 512)
    scores[0, 7], scores[1, 300] = float("nan"), float("inf")
    for found in (drawn(scores.clone(), torch.arange(3), torch.arange(3)), likeliest(scores.clone())):
        assert found.logprobs.isfinite().tolist() == [False, False, True]
        assert 0 <= found.places.min() <= found.places.max() < 512


def test_a_kernel_picks_on_a_gpu_on_which_it_is_right(monkeypatch: pytest.MonkeyPatch, caplog):
    scores = torch.zeros(1, 4)
    assert not drawing.serves(scores)
    with planning_for("cuda", (9, 0)):
        assert drawing.serves(scores)
        assert not drawing.serves(scores.double())
    drawing.right_on.cache_clear()
    assert drawing.right_on(torch.device("cpu")) is (find_spec("triton") is not None)  # in the interpreter
    monkeypatch.setattr(drawing, "_pick", lambda scores, *_: drawing.Picked(scores[:, 0].long(), scores[:, 0]))
    drawing.right_on.cache_clear()
    assert not drawing.right_on(torch.device("cpu"))
    assert "since the kernel for it is wrong by" in caplog.text
    drawing.right_on.cache_clear()
