"""Every architecture: what is written with held keys is what transformers writes, and what the scorer scores."""

import pytest
import torch

from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.plans import NextPlan
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.support import why_not
from lowtide.rollout.generators.transformers import TransformersGenerator
from tests.support.marks import slow_but
from tests.support.models.architectures import PADDED, RAGGED, RECURRENT, TYPICAL, TYPICAL_RECURRENT
from tests.support.runs.generating import scored, some_requests, token_ids, writer, written_logprobs

SERVED = [*RAGGED, *RECURRENT]
QUICK = [*TYPICAL, *TYPICAL_RECURRENT]
FIRST, SECOND = ([each for each in SERVED[start::2] if each not in QUICK] for start in range(2))
"""Halves of the others: the slow tests write the first greedily, and draw from the second; the sweep does both."""
MOST = 20
MISLED_BY_PADDING = {"llama4"}
"""Their own forward counts padding on the left as positions."""
OTHER_TOKEN_BY_TOKEN = {"nemotron_h", "zamba2"}
"""Their own forward bounds time steps from below in whole rows, and not token by token: it differs from itself."""


@pytest.mark.parametrize("name", slow_but(QUICK, SERVED, swept=SECOND))
def test_greedy_tokens_are_those_of_transformers(name: str):
    model, sampling = writer(name), Sampling(MOST, temperature=0)

    got = RaggedGenerator().generate(model, some_requests(), sampling)

    oracle = TransformersGenerator(rows_per_generation_batch=1 if name in MISLED_BY_PADDING else None)
    wanted = oracle.generate(model, some_requests(), sampling)
    assert token_ids(got) == token_ids(wanted)
    if name not in OTHER_TOKEN_BY_TOKEN:
        torch.testing.assert_close(written_logprobs(got), written_logprobs(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", slow_but(QUICK, SERVED, swept=FIRST))
def test_sampled_logprobs_are_those_of_the_scorer(name: str):
    model = writer(name)

    got = RaggedGenerator().generate(model, some_requests(), Sampling(MOST))

    wanted = scored(model, some_requests(), got)
    torch.testing.assert_close(written_logprobs(got), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(written_logprobs(got, plain=False), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", slow_but(QUICK, SERVED, swept=SECOND))
def test_a_reply_is_computed_after_what_is_held(name: str):
    """Completions longer than the windows are replied to, by more and by fewer tokens."""
    model, replies = writer(name), [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
    sampling = Sampling(2 * MOST, stop_ids=tuple(range(3, 15)))

    def reply(request: int, number: int, completion) -> list[int] | None:
        return replies[(request + number) % 3] if all(completion.written) else None

    got = RaggedGenerator().generate(model, some_requests(), sampling, reply)

    wrote = torch.tensor([each for group in got for row in group for each in row.written])
    assert not wrote.all()
    wanted = scored(model, some_requests(), got)
    torch.testing.assert_close(written_logprobs(got)[wrote], wanted[wrote], atol=1e-5, rtol=0)
    assert (written_logprobs(got)[~wrote] == 0).all()


@pytest.mark.parametrize("name", slow_but(["bloom"], PADDED))
def test_what_cannot_be_served_is_told(name: str):
    model = writer(name, dtype=torch.float32)

    reason = why_not(model)

    assert reason is not None
    with pytest.raises(ValueError, match=r"the ragged generator cannot serve .* use `TransformersGenerator`"):
        RaggedGenerator().generate(model, some_requests(), Sampling(2))


def test_a_state_beside_the_keys_is_found_on_the_model_itself(monkeypatch: pytest.MonkeyPatch):
    """One that its layers forget from token to token."""
    monkeypatch.setattr(NextPlan, "convolve", lambda plan, layer, x, weight: x * weight[:, -1])
    model = writer("lfm2", dtype=torch.float32)

    reason = why_not(model)

    assert reason is not None
    assert "token by token" in reason or "held from before" in reason, reason


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("mamba", marks=pytest.mark.slow), "bloom"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_transformers_generator_says_what_it_drew(name: str, temperature: float):
    model = writer(name, dtype=torch.float32, padding_free=False)
    sampling = Sampling(8, temperature=temperature)

    got = TransformersGenerator().generate(model, some_requests(), sampling)

    for request, group in zip(some_requests(), got, strict=True):
        for each in group:
            with torch.no_grad():
                logits = model.eval()(torch.tensor([[*request.prompt_ids, *each.token_ids]])).logits[0]
            logprobs = torch.log_softmax(logits / (temperature or 1), -1)[len(request.prompt_ids) - 1 : -1]
            wanted = logprobs.gather(1, torch.tensor(each.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(each.plain_logprobs), wanted, atol=1e-4, rtol=0)
            assert each.logprobs == ([0] * 8 if temperature == 0 else pytest.approx(each.plain_logprobs, abs=1e-5))
