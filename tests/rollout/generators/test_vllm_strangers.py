"""Who does not know the server's secret gets nothing of it, and a server cannot fill the memory of who asks."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

from lowtide.rollout.generators.vllm import server as server_module
from lowtide.rollout.generators.vllm.http import MOST_BYTES, Calls, Refused, ServerError
from lowtide.rollout.generators.vllm.secret import VARIABLE, secret_file, secret_for
from lowtide.rollout.generators.vllm.server import Service
from tests.support.vllm.remembering_server import INFO, Remembers, Running, serving

LABEL = {"run": "a", "version": 0, "copy": 1, "adapter": False}


@pytest.fixture
def running(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    with serving(Service(Remembers(), dict(INFO))) as made:
        yield made


def status(running: Running, path: str = "/weights/begin", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", running.server.port, timeout=5)
    try:
        body = json.dumps({"label": LABEL}) if path.startswith("/w") else None
        connection.request("POST" if body else "GET", path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def bearer(running: Running) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret_for('127.0.0.1', running.server.port)}"}


def test_weights_are_taken_from_who_knows_the_secret(running):
    assert status(running, **{"Content-Type": "text/plain"}) == 401
    assert status(running, Authorization="Bearer wrong") == 401
    assert status(running, "/info") == 401
    assert status(running, "/health") == 200
    assert status(running, **bearer(running)) == 200
    assert status(running, **bearer(running), Origin="http://evil.example") == 403
    assert status(running, **bearer(running), Host=f"evil.example:{running.server.port}") == 403
    assert status(running, **bearer(running), Host=f"localhost:{running.server.port}") == 200


def test_the_secret_is_its_users_alone_and_the_variable_goes_before_it(running, monkeypatch):
    assert secret_file(running.server.port).stat().st_mode & 0o777 == 0o600
    assert secret_for("elsewhere.example", running.server.port) is None
    Calls(running.url, 5.0).get("/info")
    monkeypatch.setenv(VARIABLE, "other")
    with pytest.raises(Refused, match=rf"401.*{VARIABLE}"):
        Calls(running.url, 5.0).get("/info")


@pytest.mark.parametrize("label", [3, {}, {**LABEL, "run": "x" * 1000}, {**LABEL, "version": "1"}, {**LABEL, "z": 1}])
def test_a_label_that_is_none_is_refused(running, label):
    with pytest.raises(Refused, match="a label of weights has"):
        Calls(running.url, 5.0).post("/weights/begin", {"label": label})


def test_a_body_that_does_not_come_takes_no_memory_and_no_time_without_end(running, monkeypatch):
    taken = []

    class Watched(bytearray):
        def __init__(self, *args) -> None:
            taken.append(args)
            super().__init__(*args)

    monkeypatch.setattr(server_module, "bytearray", Watched, raising=False)
    monkeypatch.setattr(running.server.RequestHandlerClass, "timeout", 0.3)
    told = bearer(running)["Authorization"]
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=5) as stranger:
        head = (
            f"POST /weights/bucket HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {told}\r\nContent-Length: 1000000000"
        )
        stranger.sendall(f"{head}\r\n\r\n".encode())
        assert stranger.recv(1) == b""  # it is closed
    assert taken == [()]


def test_a_connection_that_says_too_little_or_is_one_too_many_is_closed(running, monkeypatch):
    monkeypatch.setattr(server_module, "STRANGER_SECONDS", 0.3)
    address = ("127.0.0.1", running.server.port)
    with socket.create_connection(address, timeout=5) as slow:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 5:
                slow.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begin < 5
    monkeypatch.setattr(running.server, "_free", server_module.threading.BoundedSemaphore(1))
    with socket.create_connection(address, timeout=5), socket.create_connection(address, timeout=5) as second:
        assert second.recv(1) == b""


def test_an_answer_without_end_is_not_read(tmp_path):
    sent = []

    class Endless(BaseHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            while len(sent) < 200:
                self.wfile.write(bytes(1 << 20))
                sent.append(1)

    running = Running(Endless)
    try:
        with pytest.raises(ServerError, match=f"more than the {MOST_BYTES:,} bytes"):
            Calls(running.url, 20.0).get("/info")
        assert len(sent) < 100
    finally:
        running.stop()


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"a"], ids=["to be continued", "a header's end"])
def test_an_answer_that_never_begins_is_awaited_for_its_time(piece):
    """Each piece comes within the socket's own timeout."""

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 " if piece == b"a" else piece)
            while True:
                connection.sendall(piece)
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(ServerError, match=r"did not answer /info within 0.4 seconds"):
            Calls(f"http://127.0.0.1:{listening.getsockname()[1]}", 0.4).get("/info")
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("hosts", [("[::1",), ("127.0.0.1", "evil.example")])
def test_hosts_that_are_none_or_two_are_refused(running, hosts):
    named = "".join(f"Host: {host}\r\n" for host in hosts)
    with socket.create_connection(("127.0.0.1", running.server.port), timeout=5) as stranger:
        secret = bearer(running)["Authorization"]
        stranger.sendall(f"GET /info HTTP/1.1\r\n{named}Authorization: {secret}\r\n\r\n".encode())
        assert stranger.recv(1 << 16).split()[1] == b"403"


def test_what_is_refused_is_no_traceback_on_the_server(running, caplog):
    with caplog.at_level("WARNING"):
        assert status(running, "/weights/end", **bearer(running)) == 400
    (record,) = caplog.records
    assert record.getMessage().startswith("what was asked is refused: ")
    assert record.exc_info is None
