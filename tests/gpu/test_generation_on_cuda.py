"""lowtide's own generator on CUDA: windows without the host and recorded steps write what single steps write."""

from dataclasses import replace

import pytest
import torch

from lowtide.rollout.generators import replays
from lowtide.rollout.generators.decoding import AT_ONCE, IN_WINDOWS
from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from tests.support.runs.generating import prompt, token_ids, writer


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_p": 0.9, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_tokens_however_steps_are_made(graphs, changes, monkeypatch):
    model, sampling = writer(dtype=torch.float32).cuda(), Sampling(60, stop_ids=(3, 4, 5), **changes)
    requests = [Request(prompt(9), 8, seed=3), Request(prompt(12), 9, seed=4)]
    wanted = RaggedGenerator(pace=AT_ONCE).generate(model, requests, sampling)
    made, record = [], replays.recorded
    monkeypatch.setattr(replays, "recorded", lambda *given: made.append(record(*given)) or made[-1])

    got = RaggedGenerator(pace=replace(IN_WINDOWS, graphs=graphs)).generate(model, requests, sampling)

    assert token_ids(got) == token_ids(wanted)
    assert bool(made) is graphs
