"""The client of a vLLM server and lowtide's own server, without a vLLM: an engine that only remembers, and servers that
do wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch
from safetensors.torch import save

from lowtide.rollout.generators.generator import HoldsWeights, Request, Sampling
from lowtide.rollout.generators.vllm.http import Calls, Refused, ServerError
from lowtide.rollout.generators.vllm.label import LostWeights, StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.generators.vllm.remote import VLLMServerGenerator
from lowtide.rollout.generators.vllm.server import Service
from lowtide.rollout.generators.vllm.turns import Turn, to_json
from lowtide.rollout.generators.vllm.weights import Assembly, Piece
from tests.support.models.tiny_llama import tiny_llama
from tests.support.vllm.remembering_server import INFO, Remembers, Running, serving

SAMPLING = Sampling(4, stop_ids=(2,))
REQUESTS = [Request([5, 6], 2, seed=1), Request([7], 1, seed=2)]


@pytest.fixture
def engine() -> Remembers:
    return Remembers()


@pytest.fixture
def service(engine: Remembers) -> Service:
    return Service(engine, dict(INFO))


@pytest.fixture
def server(service: Service) -> Iterator[Running]:
    with serving(service) as running:
        yield running


@pytest.fixture
def answering() -> Iterator[Callable[[Callable], str]]:
    """Starts servers that answer as a function of the call says; gives their addresses."""
    started: list[Running] = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                answer(self)

            do_POST = do_GET

        started.append(Running(Handler))
        return started[-1].url

    yield start
    for running in started:
        running.stop()


def say(call: BaseHTTPRequestHandler, content: Any, status: int = 200) -> None:
    data = json.dumps(content).encode()
    call.send_response(status)
    call.send_header("Content-Length", str(len(data)))
    call.end_headers()
    call.wfile.write(data)


def generator_at(url: str, model: torch.nn.Module | None = None, **more: Any) -> VLLMServerGenerator:
    given: dict[str, Any] = {"timeout": 5.0} | more
    return VLLMServerGenerator(url, model or tiny_llama(), **given)


# -- what goes well ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [256 << 20, 3000])
def test_weights_arrive_in_buckets_as_they_are(server: Running, engine: Remembers, bucket_bytes: int):
    model = tiny_llama()
    generator = generator_at(server.url, model, bucket_bytes=bucket_bytes)
    sizes: list[int] = []
    send = generator.backend.send
    generator.backend.send = lambda label, bucket: (sizes.append(len(bucket)), send(label, bucket))[1]  # type: ignore

    generator.sync(model, 0)

    assert isinstance(generator, HoldsWeights)
    assert engine.weights.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(engine.weights[name], weight, rtol=0, atol=0)
    assert max(sizes) < bucket_bytes + 4000  # and names
    assert len(sizes) == 1 or bucket_bytes == 3000


def test_completions_come_in_the_order_of_requests(server: Running, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)

    found = generator.generate(model, REQUESTS, SAMPLING)

    assert [[each.token_ids for each in group] for group in found] == [[[3, 2], [4, 2]], [[5, 2]]]
    assert all(each.finish == "stop" and each.written == [True, True] for group in found for each in group)
    assert all(number != number for number in found[0][0].plain_logprobs)
    [[(turns, sampling, _)]] = engine.asked
    assert [turn.token_ids for turn in turns] == [[5, 6], [5, 6], [7]]
    assert len({turn.seed for turn in turns}) == 3
    assert sampling == SAMPLING


def test_completions_go_on_after_a_reply(server: Running, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)

    found = generator.generate(
        model, [Request([5, 6])], Sampling(6, stop_ids=(2,)), lambda *_: [9, 9] if len(engine.asked) == 1 else None
    )

    assert found[0][0].token_ids == [3, 2, 9, 9, 3, 2]
    assert found[0][0].written == [True, True, False, False, True, True]
    assert [jobs[0][0][0].token_ids for jobs in engine.asked] == [[5, 6], [5, 6, 3, 2, 9, 9]]
    assert engine.asked[1][0][0][0].most == 2


def test_weights_are_copied_when_they_changed_and_only_then(server: Running, service: Service):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    copies = []
    for version in (0, 0, 1, 1):
        generator.sync(model, version)
        copies.append(asdict(generator.label))  # type: ignore[arg-type]
    with torch.no_grad():  # as where the best weights are loaded again after the last step
        next(model.parameters()).add_(1.0)
    generator.sync(model, 1)
    assert [each["copy"] for each in copies] == [1, 1, 2, 2]
    assert service.labels == [{"run": generator.run, "version": 1, "copy": 3, "adapter": False}]


def test_a_server_that_lost_them_gets_all_weights_again(server: Running, service: Service, engine: Remembers):
    model = tiny_llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    generator.sync(model, 1)
    assert engine.coming.keys() == {"lm_head.weight"}
    service.labels = []
    generator.sync(model, 2)
    assert engine.coming.keys() == model.state_dict().keys()


def test_a_copy_that_failed_is_made_anew(server: Running, engine: Remembers):
    model = tiny_llama().requires_grad_(False)
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    end, engine.end = engine.end, lambda: [][0]  # type: ignore[method-assign]
    with pytest.raises(Refused):
        generator.sync(model, 1)
    engine.end = end  # type: ignore[method-assign]
    generator.sync(model, 1)
    assert engine.coming.keys() == model.state_dict().keys()
    assert len(generator.generate(model, REQUESTS, SAMPLING)) == 2


def test_no_more_completions_are_asked_for_at_a_time_than_are_allowed(server: Running, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model, limits=Limits(max_inflight_tasks=2))
    generator.sync(model, 0)

    found = generator.generate(model, REQUESTS, SAMPLING)

    assert [[turn.token_ids for turn in turns] for [(turns, *_)] in engine.asked] == [[[5, 6], [5, 6]], [[7]]]
    assert [len(group) for group in found] == [2, 1]
    assert generator.generate(model, [], SAMPLING) == []


def fail(*_: Any) -> Any:
    raise RuntimeError("of the engine")


FAULTS = {
    "fails": fail,
    "too few": lambda written: [each[:-1] for each in written],
    "too long": lambda written: [[replace(one, token_ids=[5] * 9, logprobs=[-1.0] * 9) for one in e] for e in written],
    "no such token": lambda written: [[replace(one, token_ids=[3, 99]) for one in each] for each in written],
}
"""What an engine does wrongly, by what it wrote."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_asked_again_for_the_same(server: Running, engine: Remembers, caplog, fault: str):
    model = tiny_llama()
    generator = generator_at(server.url, model, limits=Limits(retries=2, pause=0.01))
    generator.sync(model, 0)
    write, calls = engine.write, []

    def failing(jobs: Any) -> Any:
        calls.append(jobs)
        return FAULTS[fault](write(jobs)) if len(calls) < wrong else write(jobs)

    engine.write = failing  # type: ignore[method-assign]
    wrong = 3
    found = generator.generate(model, REQUESTS, SAMPLING)
    assert [[each.token_ids for each in group] for group in found] == [[[3, 2], [4, 2]], [[5, 2]]]
    assert calls[0] == calls[1] == calls[2]
    told = [each.message for each in caplog.records if "It is asked again in 0.01 seconds" in each.message]
    assert [each[each.rindex("(") :] for each in told] == [f"({n} of vllm_server_retries=2)" for n in (1, 2)]
    wrong = 99
    with pytest.raises((ServerError, ValueError)):
        generator.generate(model, REQUESTS, SAMPLING)
    assert len(calls) == 6


def test_a_copy_that_fails_is_made_again_whole(server: Running, engine: Remembers):
    model = tiny_llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    generator = generator_at(server.url, model, limits=Limits(retries=1))
    generator.sync(model, 0)
    times = iter([fail, engine.end])
    engine.end = lambda: next(times)()  # type: ignore[method-assign]
    generator.sync(model, 1)
    assert engine.coming.keys() == model.state_dict().keys()


def test_what_is_refused_is_asked_for_once(server: Running, service: Service, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model, limits=Limits(retries=2, pause=5.0))
    generator.sync(model, 0)
    service.info["max_model_length"] = 3
    with pytest.raises(Refused, match="400"):
        generator.generate(model, REQUESTS, SAMPLING)
    service.info["max_model_length"] = 64
    service.labels = [{"run": "another", "version": 0, "copy": 1, "adapter": False}]
    with pytest.raises(StaleWeights):
        generator.generate(model, REQUESTS, SAMPLING)


# -- what does not ------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there():
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"no vLLM server answers at http://127.0.0.1:9 within .*=0.3 seconds"):
        generator_at("http://127.0.0.1:9", timeout=0.3)
    assert time.monotonic() - start < 5


def test_an_address_that_is_none():
    with pytest.raises(ValueError, match="is no address of a server"):
        generator_at("localhost:8000")


def test_a_server_that_is_something_else(answering: Callable):
    url = answering(lambda call: say(call, {"status": "ok"}) if call.path == "/health" else say(call, {}, 404))
    with pytest.raises(ValueError, match="no vLLM server: start `lowtide vllm-serve"):
        generator_at(url)


def test_a_vllm_serve_that_takes_no_weights(answering: Callable):
    def answer(call: BaseHTTPRequestHandler) -> None:
        pages = {"/health": {}, "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]}}
        say(call, pages.get(call.path, {}), 200 if call.path in pages else 404)

    with pytest.raises(ValueError, match=r"takes no weights: start it with VLLM_SERVER_DEV_MODE=1.*lowtide vllm-serve"):
        generator_at(answering(answer))


def test_a_server_of_another_model(server: Running, service: Service):
    service.info["shapes"] = INFO["shapes"] | {"vocab_size": 99}
    with pytest.raises(ValueError, match=r"serves another model .* vocab_size of 99, .* of 64"):
        generator_at(server.url)


def test_a_server_of_another_protocol(server: Running, service: Service):
    service.info["protocol"] = 99
    with pytest.raises(ValueError, match="another version of lowtide"):
        generator_at(server.url)


def test_a_server_with_another_regex(server: Running):
    with pytest.raises(ValueError, match="start it with the same --structured_outputs_regex"):
        generator_at(server.url, regex="[0-9]+")


def test_a_server_that_dies_before_the_next_batch(server: Running):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    server.stop()
    with pytest.raises(ServerError, match="cannot be reached, or went away during /generate"):
        generator.generate(model, REQUESTS, SAMPLING)
    with pytest.raises(ServerError, match="cannot be reached, or went away during /info"):
        generator.sync(model, 1)
    with pytest.raises(StaleWeights):  # a copy that failed in the middle is none
        generator.generate(model, REQUESTS, SAMPLING)


def test_a_server_that_dies_in_its_answer(answering: Callable):
    def answer(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Length", "1000")
        call.end_headers()
        call.wfile.write(b"{")
        call.close_connection = True

    with pytest.raises(ServerError, match="went away during /x"):
        Calls(answering(answer), 5.0).get("/x")


def test_a_server_that_hangs(answering: Callable):
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer /x within 0.3 seconds.*raise vllm_server_timeout"):
        Calls(answering(lambda call: time.sleep(2)), 0.3).post("/x", {})
    assert time.monotonic() - start < 1.5


def test_completions_and_weights_have_times_of_their_own(server: Running, engine: Remembers):
    model = tiny_llama()
    generator_at(server.url, model, bucket_bytes=3000).sync(model, 0)  # what a process does first takes longer
    limits = Limits(request_timeout=0.5, weight_sync_timeout=1.0)
    generator = generator_at(server.url, model, bucket_bytes=3000, limits=limits)
    generator.sync(model, 0)
    write, load = engine.write, engine.load
    engine.write = lambda jobs: (time.sleep(0.8), write(jobs))[1]  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=r"did not answer /generate within 0.5 seconds.*raise request_timeout"):
        generator.generate(model, REQUESTS, SAMPLING)
    engine.load = lambda weights: (time.sleep(0.3), load(weights))[1]  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=r"did not answer /weights/bucket within 1 seconds.*weight_sync_timeout"):
        generator.sync(model, 1)  # no bucket takes so long, and all of them do


def test_a_server_that_sends_ever_so_little(answering: Callable):
    def answer(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Length", "1000")
        call.end_headers()
        for _ in range(20):
            call.wfile.write(b" ")
            call.wfile.flush()
            time.sleep(0.1)

    start = time.monotonic()
    with pytest.raises(ServerError, match=r"did not answer /x within 0.4 seconds"):
        Calls(answering(answer), 0.4).get("/x")
    assert time.monotonic() - start < 1.5


def test_what_is_no_json(answering: Callable):
    def answer(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.end_headers()
        call.wfile.write(b"<html>hello")

    with pytest.raises(ServerError, match="no vLLM server: /x gave b'<html>hello'"):
        Calls(answering(answer), 5.0).get("/x")


def test_an_error_of_the_engine_is_told(server: Running, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    engine.write = lambda jobs: [][0]  # type: ignore[method-assign]
    with pytest.raises(Refused, match=r"refuses /generate \(500\): IndexError"):
        generator.generate(model, REQUESTS, SAMPLING)


def test_as_many_logprobs_as_tokens(server: Running, engine: Remembers):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    engine.logprobs = 1
    with pytest.raises(ValueError, match="completion 0 has 2 tokens and 1 logprobs"):
        generator.generate(model, REQUESTS, SAMPLING)


def test_as_many_completions_as_prompts(server: Running, service: Service):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    service.engine.write = lambda jobs: [[] for _ in jobs]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"returned 0 completions for 3 prompts"):
        generator.generate(model, REQUESTS, SAMPLING)


def test_prompts_that_are_too_long(server: Running):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    with pytest.raises(ValueError, match=r"request 0 has a prompt of 61 tokens.*vLLM takes 64.*--max_model_length"):
        generator.generate(model, [Request([5] * 61)], SAMPLING)


def test_weights_that_nobody_copied(server: Running):
    model = tiny_llama()
    with pytest.raises(StaleWeights, match="never got the weights"):
        generator_at(server.url, model).generate(model, REQUESTS, SAMPLING)


def test_stale_weights(server: Running, service: Service):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 3)
    service.labels = [{"run": generator.run, "version": 2, "copy": 1, "adapter": False}]
    with pytest.raises(StaleWeights, match=r"stale weights: those after step 2 .* the policy is at step 3"):
        generator.generate(model, REQUESTS, SAMPLING)


def test_a_server_that_was_started_again(server: Running, service: Service):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 3)
    service.labels = []
    with pytest.raises(LostWeights, match="after step 3 that it was sent, nor any others: it was started again"):
        generator.generate(model, REQUESTS, SAMPLING)


def test_a_server_that_is_started_again_before_it_writes_is_sent_the_weights(server, service, engine, caplog):
    model = tiny_llama().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    generator = generator_at(server.url, model, limits=Limits(retries=1))
    generator.sync(model, 2)
    generator.sync(model, 3)
    service.labels = []
    found = generator.generate(model, REQUESTS, SAMPLING)
    assert [[each.token_ids for each in group] for group in found] == [[[3, 2], [4, 2]], [[5, 2]]]
    assert engine.coming.keys() == model.state_dict().keys()
    assert service.labels == [{"run": generator.run, "version": 3, "copy": 3, "adapter": False}]
    assert "It is sent them and asked again" in caplog.text

    service.labels = []
    with ThreadPoolExecutor(1) as beside_training, pytest.raises(LostWeights, match="started again"):
        beside_training.submit(generator.generate, model, REQUESTS, SAMPLING).result()


def test_two_runs_that_send_at_a_time(server: Running):
    model = tiny_llama()
    first, second = generator_at(server.url, model), generator_at(server.url, model)
    begin = first.backend.begin
    first.backend.begin = lambda label: (begin(label), second.sync(model, 0))[0]  # type: ignore[method-assign]
    with pytest.raises(Refused, match="another run has begun"):
        first.sync(model, 0)
    assert len(second.generate(model, REQUESTS, SAMPLING)) == 2


def test_a_bucket_that_is_none(server: Running):
    model = tiny_llama()
    generator = generator_at(server.url, model)
    generator.sync(model, 0)
    assert generator.label is not None
    generator.backend.begin(generator.label)
    with pytest.raises(Refused, match="no bucket of weights"):
        generator.backend.send(generator.label, b"12345678nonsense")


def test_other_ranks_wait_for_the_first_to_send(server: Running, service: Service, monkeypatch: pytest.MonkeyPatch):
    copied = "lowtide.rollout.generators.vllm.copied"
    monkeypatch.setattr(f"{copied}.objects_of_all_ranks", lambda run: ["ours"])
    model = tiny_llama()
    first, other = (generator_at(server.url, model, timeout=30.0) for _ in range(2))
    monkeypatch.setattr(f"{copied}.distributed", lambda: threading.current_thread() is threading.main_thread())
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    other.calls.timeout = 0.3
    with pytest.raises(
        ServerError, match=r"did not get the weights of step 0 from the first rank within 1 times .*=0.3 seco"
    ):
        other.sync(model, 0)
    other.calls.timeout = 30.0
    sending = threading.Timer(0.3, lambda: first.sync(model, 0))
    sending.start()
    other.sync(model, 0)
    assert len(other.generate(model, REQUESTS, SAMPLING)) == 2
    sending.join()


# -- requests that are none --------------------------------------------------------------------------------------

TURN = {"token_ids": [5, 6], "seed": 1, "most": 4}
ASKED = to_json([Turn(**TURN)], SAMPLING)


def turn(**more: Any) -> dict[str, Any]:
    return {**ASKED, "turns": [{**TURN, **more}]}


def sampling(**more: Any) -> dict[str, Any]:
    return {**ASKED, "sampling": {**ASKED["sampling"], **more}}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ([], "JSON object"),
        (3, "JSON object"),
        ({}, "sampling"),
        ({**ASKED, "turns": {}}, "`turns`"),
        ({**ASKED, "turns": [{}]}, "token_ids"),
        ({**ASKED, "turns": [3]}, "turn 0"),
        ({**ASKED, "turns": [TURN] * 100_001}, "100,001 turns"),
        ({**ASKED, "sampling": []}, "`sampling`"),
        (turn(token_ids=[]), "`token_ids` of turn 0"),
        (turn(token_ids="56"), "`token_ids` of turn 0"),
        (turn(token_ids=[5, -1]), "outside of the vocabulary"),
        (turn(token_ids=[10**30]), "outside of the vocabulary"),
        (turn(token_ids=[1.5]), "whole numbers"),
        (turn(token_ids=[True]), "whole numbers"),
        (turn(token_ids=[5] * 64), "takes 64 together"),
        (turn(most=0), "`most`"),
        (turn(most=-(10**9)), "`most`"),
        (turn(most=10**9), "takes 64 together"),
        (turn(most=10**30), "`most`"),
        (turn(most="4"), "`most`"),
        (turn(most=True), "`most`"),
        (turn(seed=-1), "`seed`"),
        (turn(seed=2**63), "`seed`"),
        (turn(seed=None), "`seed`"),
        (turn(n=10**9), "n"),
        (sampling(n=10**9), "n"),
        (sampling(max_new_tokens=-1), "max_new_tokens"),
        (sampling(max_new_tokens=10**30), "max_new_tokens"),
        (sampling(temperature=float("nan")), "temperature"),
        (sampling(temperature=float("inf")), "temperature"),
        (sampling(temperature="1"), "temperature"),
        (sampling(top_k=1.5), "top_k"),
        (sampling(top_k=10**30), "top_k"),
        (sampling(top_p=-1), "top_p"),
        (sampling(min_p=[]), "min_p"),
        (sampling(repetition_penalty=0), "repetition_penalty"),
        (sampling(stop_ids="2"), "stop_ids"),
        (sampling(stop_ids=[-1]), "stop_ids"),
        (sampling(stop_strings=[1]), "stop_strings"),
        (sampling(never_ids=None), "never_ids"),
    ],
)
def test_a_request_that_is_none_is_answered_400_before_anything_is_made(
    server: Running, service: Service, engine: Remembers, asked: Any, what: str
):
    service.labels = [label := {"run": "a", "version": 0, "copy": 1, "adapter": False}]
    asked = {**asked, "label": label} if isinstance(asked, dict) else asked
    with pytest.raises(Refused, match=rf"refuses /generate \(400\): .*{what}"):
        Calls(server.url, 5.0).post("/generate", asked)
    assert not engine.asked
    Calls(server.url, 5.0).post("/generate", {**ASKED, "label": label})
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "body", [{}, [], {"label": {"run": "a", "version": 0, "copy": 1, "adapter": False}, "buckets": "1"}]
)
@pytest.mark.parametrize("path", ["/weights/begin", "/weights/end"])
def test_weights_that_are_announced_wrongly_are_answered_400(server: Running, path: str, body: Any):
    if path == "/weights/begin" and "label" in body:
        body = {"label": 3}
    with pytest.raises(Refused, match=rf"refuses {path} \(400\)"):
        Calls(server.url, 5.0).post(path, body)


def send_rows(server: Running, place: list) -> None:
    calls, label = Calls(server.url, 5.0), {"run": "a", "version": 0, "copy": 1, "adapter": False}
    calls.post("/weights/begin", {"label": label})
    data = save({"w": torch.ones(2, 3)}, {"places": json.dumps({"w": place})})
    calls.post_bytes("/weights/bucket", data, {"X-Run": "a"})


@pytest.mark.parametrize("place", [[-1, 4], [0, 1], ["0", 4], [0, None], [True, 4], [0, -2], [3, -1], [0, 4, 5]])
def test_rows_without_a_place_are_answered_400(server: Running, place: list):
    with pytest.raises(Refused, match=r"\(400\).*no bucket of weights"):
        send_rows(server, place)


@pytest.mark.parametrize("total", [10**15, 10**30])
def test_rows_that_have_not_come_take_no_memory(server: Running, total: int):
    send_rows(server, [0, total])


def test_pieces_of_a_weight_have_one_shape_and_type():
    assembly = Assembly()
    rows = torch.arange(12.0).view(4, 3)
    assert not assembly.take([Piece("w", rows[:2], 0, 4)])
    torch.testing.assert_close(assembly.take([Piece("w", rows[2:], 2, 4)])["w"], rows)
    for other in (rows[2:].double(), rows[2:, :2]):
        assembly = Assembly()
        assembly.take([Piece("w", rows[:2], 0, 4)])
        with pytest.raises(ValueError, match="another shape or type"):
            assembly.take([Piece("w", other, 2, 4)])
