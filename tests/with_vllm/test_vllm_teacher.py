"""A teacher behind vLLM's own server: what it says is what its model computes, and a run learns of it what it learns of
the teacher in memory."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide.data.teacher_logprobs import Asked
from lowtide.rollout.served_teacher import ServedTeacher
from tests.support.references.parity_world import VOCABULARY, tokenizer
from tests.support.runs.distilling import distilling, losses
from tests.support.vllm.vllm_world import CACHE_BYTES, ServerProcess, needs_vllm, save, small_model

pytestmark = needs_vllm
TOP = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
    command += ["--model", save(tmp_path_factory.mktemp("served")), "--dtype", "float32", "--max-model-len", "192"]
    command += ["--max-logprobs", "-1", "--enforce-eager", "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    running = ServerProcess(command, {}, r"server.* on (http://\S+)")
    yield running
    running.kill()


def test_it_says_what_its_model_computes(server: ServerProcess):
    how = {"top": TOP, "temperature": 1.0, "timeout": 150.0, "vocabulary": VOCABULARY}
    text = Asked([5, 9, 30, 7, 12], [2, 3, 4])
    found = ServedTeacher(server.url, tokenizer=tokenizer(), **how).ask([text])
    with torch.no_grad():
        logprobs = small_model()(torch.tensor([text.token_ids])).logits[0].log_softmax(-1)
    for row, place in enumerate(text.places):
        expected = logprobs[place - 1].topk(TOP)
        assert torch.equal(found.tokens[row], expected.indices)
        torch.testing.assert_close(found.logprobs[row], expected.values, atol=1e-5, rtol=0)
        own = logprobs[place - 1, text.token_ids[place]]
        torch.testing.assert_close(found.written[row], own, atol=1e-5, rtol=0)


def test_a_run_learns_what_it_learns_of_the_teacher_in_memory(server: ServerProcess, tmp_path: Path):
    found = []
    for options in ({"teacher_model_server_url": server.url, "loss_top_k": VOCABULARY}, {}):
        teacher = None if options else small_model()
        trainer = distilling(tmp_path / str(len(options)), arguments={"teacher_model": teacher}, beta=0.0, **options)
        trainer.train()
        found.append(losses(trainer))
    torch.testing.assert_close(*found, rtol=1e-4, atol=0.0)
