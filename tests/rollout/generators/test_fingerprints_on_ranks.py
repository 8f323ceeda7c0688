"""Where several ranks write by vLLM, all of them bring weights again that one of them found to be others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.rollout.generators.generator import Request, Sampling
from lowtide.rollout.generators.vllm.colocated import VLLMColocatedGenerator
from lowtide.rollout.generators.vllm.label import StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from tests.rollout.generators.test_fingerprints import Lossy, policy
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import meeting_place, rank_of
from tests.support.vllm.writing_server import writing_server

pytestmark = pytest.mark.slow


def rank_main(rank: int, folder: str, url: str) -> None:
    with rank_of(Path(folder), rank, 2):
        torch.distributed.init_process_group("gloo")
        model = policy()
        served = VLLMServerGenerator(url, model, limits=Limits(checked_every=1))
        served.sync(model, 0)  # the server took nothing of what the first rank sent
        [[completion]] = served.generate(model, [Request([5, 6], 1, rank)], Sampling(4))
        assert completion.token_ids
        engine = Lossy(rank)  # that of the second took nothing at first
        VLLMColocatedGenerator(engine, checked_every=1).sync(model, 0)
        assert engine.copies == 2
        with pytest.raises(StaleWeights, match="nats away from the policy's"):
            VLLMColocatedGenerator(Lossy(9 * rank), checked_every=1).sync(model, 0)


def test_all_ranks_bring_weights_again_that_one_found_wrong(tmp_path):
    engine = Lossy(1)
    with writing_server(engine) as server:
        run_ranks(rank_main, str(meeting_place(tmp_path)), server.url)
    assert engine.copies == 2
