"""Steps without the host: the same tokens however seldom it looks, and nothing in between that a graph would freeze."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lowtide.ops.attention import cached_flash
from lowtide.ops.attention.attention_plan import Rules, Sight
from lowtide.ops.capture import Watch, difference
from lowtide.ops.logits import drawing
from lowtide.ops.target import planning_for
from lowtide.rollout.generators import plans
from lowtide.rollout.generators.decoding import AT_ONCE, IN_WINDOWS, Decoder, Pace, leave_now, pace_on
from lowtide.rollout.generators.generator import Completion, Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.marks import slow_but
from tests.support.models.architectures import TYPICAL_RECURRENT, VOCAB
from tests.support.references.flash import flash_of_used
from tests.support.runs.generating import prompt, some_requests, token_ids, writer, written_logprobs

STOPS = tuple(range(3, 9))
SAMPLINGS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "top_k and top_p": {"top_k": 9, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalty": {"repetition_penalty": 1.6},
    "never": {"never_ids": tuple(range(20, 60))},
    "all": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.7},
}
SHORT = Pace(steps=7, fewest=8, until_half=True)
"""Short enough that keys move and completions leave several times."""


WINDOWS = [*((case, IN_WINDOWS) for case in SAMPLINGS), ("plain", SHORT), ("all", SHORT)]


def asked() -> list[Request]:
    """Enough completions that they leave in halves, and more than two prompts of a length."""
    return [*some_requests(), Request(prompt(9, 1), 6, seed=3), Request(prompt(10, 1), 4, seed=4)]


@pytest.mark.parametrize(("case", "pace"), slow_but(WINDOWS[:1], WINDOWS))
def test_tokens_do_not_depend_on_when_the_host_looks(case: str, pace: Pace):
    model, sampling = writer(), Sampling(30, stop_ids=STOPS, **SAMPLINGS[case])
    wanted = RaggedGenerator(pace=AT_ONCE).generate(model, asked(), sampling)

    got = RaggedGenerator(pace=pace).generate(model, asked(), sampling)

    assert token_ids(got) == token_ids(wanted)
    assert [[row.finish for row in group] for group in got] == [[row.finish for row in group] for group in wanted]
    for plain in (False, True):
        close = {"atol": 1e-6, "rtol": 0}
        torch.testing.assert_close(written_logprobs(got, plain=plain), written_logprobs(wanted, plain=plain), **close)
    assert len({len(row.token_ids) for group in wanted for row in group}) > 3


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"top_p": 0.9}, {"top_p": 0.9, "repetition_penalty": 1.5}])
def test_a_token_that_the_likeliest_do_not_settle_waits_for_the_look(changes: dict, monkeypatch: pytest.MonkeyPatch):
    model, sampling = writer(), Sampling(20, stop_ids=STOPS, **changes)
    wanted = RaggedGenerator(pace=AT_ONCE).generate(model, asked(), sampling)
    monkeypatch.setattr(drawing, "CANDIDATES", 8)
    looks, inner = [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, whole=False: (looks.append(whole), inner(self, whole))[1])

    got = RaggedGenerator(pace=IN_WINDOWS).generate(model, asked(), sampling)

    assert token_ids(got) == token_ids(wanted)
    assert set(looks) == {True, False}
    torch.testing.assert_close(written_logprobs(got), written_logprobs(wanted), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", slow_but(["mistral", "gpt2"], ["mistral", "gpt2", "gemma2", "gpt_oss", "gemma3", *TYPICAL_RECURRENT])
)
def test_windows_other_rules_of_attention_and_states_are_kept(name: str):
    model, sampling = writer(name), Sampling(30, stop_ids=STOPS)

    got = RaggedGenerator(pace=IN_WINDOWS).generate(model, asked(), sampling)

    assert token_ids(got) == token_ids(RaggedGenerator(pace=AT_ONCE).generate(model, asked(), sampling))


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["llama"], ["llama", "gpt_oss"]))
def test_a_kernel_that_is_told_how_many_keys_are_used_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch):
    model, sampling = writer(name), Sampling(20, stop_ids=STOPS)
    wanted = RaggedGenerator(pace=AT_ONCE).generate(model, asked(), sampling)
    served: list[bool] = []

    def serves(query: torch.Tensor, value: torch.Tensor, rules: Rules) -> bool:
        served.append(rules.sight == Sight())
        return served[-1]

    monkeypatch.setattr(plans, "serves", serves)
    monkeypatch.setattr(cached_flash, "cuda_flash_of_used", flash_of_used)

    got = RaggedGenerator(pace=SHORT).generate(model, asked(), sampling)

    assert token_ids(got) == token_ids(wanted)
    torch.testing.assert_close(written_logprobs(got), written_logprobs(wanted), atol=1e-6, rtol=0)
    assert True in served


def replying(request: int, number: int, completion: Completion) -> list[int] | None:
    """Two tokens, of which the last is a stop; once."""
    return None if False in completion.written else [40 + number, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "budget"),
    [({}, None), ({"repetition_penalty": 1.7}, 100), pytest.param({"top_p": 0.9}, 100, marks=pytest.mark.slow)],
)
def test_replies_and_texts_that_stop_are_found_at_the_look(changes: dict, budget: int | None, monkeypatch):
    monkeypatch.setattr(drawing, "CANDIDATES", 8)
    model, tokenizer = writer(), _tokenizer()
    sampling = Sampling(20, stop_ids=STOPS, stop_strings=("w50", "w77"), **changes)

    def written(pace: Pace) -> list[list[list[int]]]:
        generator = RaggedGenerator(tokenizer, budget, pace=pace)
        return token_ids(generator.generate(model, asked()[:5], sampling, replying))

    assert written(SHORT) == written(AT_ONCE)


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    vocab = {f"w{number}": number for number in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")))


def test_each_token_is_heard_as_it_is_written():
    heard: list[tuple[int, int, int]] = []

    def hear(request: int, number: int, token: int) -> bool:
        heard.append((request, number, token))
        return False

    got = RaggedGenerator(pace=IN_WINDOWS).generate(writer(), [Request([5, 6], 2)], Sampling(20), heard=hear)

    assert [token for _, number, token in heard if number == 0] == got[0][0].token_ids
    assert [number for _, number, _ in heard] == [0, 1] * 20


def test_completions_leave_in_halves_and_small_batches_stay():
    pace = Pace(until_half=True)
    assert [leave_now(ended, 64, pace) for ended in (0, 1, 31, 32)] == [False, False, False, True]
    assert [leave_now(ended, 8, pace) for ended in (4, 7, 8)] == [False, False, True]
    assert [leave_now(ended, 8, AT_ONCE) for ended in (0, 1)] == [False, True]


def test_the_pace_goes_by_the_device():
    assert pace_on(torch.device("cpu")) == AT_ONCE
    with planning_for("cuda", (9, 0)):
        assert pace_on(torch.device("cpu")) == IN_WINDOWS


@pytest.mark.parametrize("case", slow_but([*SAMPLINGS][:1], SAMPLINGS))
def test_between_two_looks_a_graph_could_replay_every_step(case: str):
    model = writer("mistral", dtype=torch.bfloat16).to("meta")
    generator = RaggedGenerator()
    generator._served.add(model)  # nothing can be proved where nothing has values
    inner: Callable = Decoder.step

    with planning_for("cuda", (9, 0)), Watch(torch.device("meta")) as watch:

        def step(decoder: Decoder, whole: bool = False) -> None:
            watch.begin()
            inner(decoder, whole)

        with patch.object(Decoder, "step", step):
            generator.generate(model, asked(), Sampling(12, stop_ids=STOPS, **SAMPLINGS[case]))

    assert difference(*watch.steps[5:7]) is None
    assert not any(each.host_copies for each in watch.steps[3:])
