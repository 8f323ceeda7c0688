"""`lowtide vllm-serve`: vLLM behind HTTP, for trainers that run in another environment or on another machine.

One thread, which is the main one, has the engine and does one thing after the other, so that no batch is written by
weights that are being replaced. What several ranks ask for at a time is written together.

    GET  /health          200
    GET  /info            what is served, and the label of its weights
    POST /generate        {"label", "turns", "sampling"} -> {"label", "completions"}; 409 where it holds other weights
    POST /weights/begin   {"label"}: from here on it holds nobody's weights
    POST /weights/bucket  a bucket as safetensors; the header X-Run names the run
    POST /weights/end     {"label", "buckets"}: these were all

Whoever reaches the port can use and replace the model: keep it on a private network. The default is this machine alone.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.vllm.turns import Turn, WrittenTurn, of_json
from lowtide.rollout.generators.vllm.weights import MAX_BUCKET_BYTES, Assembly, from_bytes

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Raised when a client of another one would misunderstand."""
MAX_BODY_BYTES = 4 * MAX_BUCKET_BYTES
"""Of what a server takes at a time: a row of a weight may be above a bucket."""


class Served(Protocol):
    """What the server needs of an engine."""

    def write(self, jobs: Sequence[tuple[Sequence[Turn], Sampling]]) -> list[list[WrittenTurn]]:
        """The completions of each job."""
        ...

    def begin(self) -> None: ...

    def load(self, weights: dict[str, Any]) -> None: ...

    def end(self) -> None: ...


class Conflict(ValueError):
    """What is asked does not go with the weights that are held."""


@dataclass
class _Job:
    """Something for the thread of the engine."""

    work: Callable[[], Any] | None = None
    asked: tuple[list[Turn], Sampling, Any] | None = None
    """Turns, how, and the label that is expected; of completions alone."""
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: Exception | None = None


class Service:
    """The engine behind a queue.

    Args:
        info: what `/info` says of the model.
    """

    def __init__(self, engine: Served, info: dict[str, Any]) -> None:
        self.engine, self.info = engine, info
        self.label: dict[str, Any] | None = None
        self._coming: dict[str, Any] | None = None
        self._buckets, self._assembly = 0, Assembly()
        self._jobs: queue.Queue[_Job | None] = queue.Queue()

    # -- the thread of the engine --------------------------------------------------------------------------------

    def run(self) -> None:
        """Does what is asked, until `stop`."""
        while True:
            taken = [self._jobs.get()]
            while not self._jobs.empty():
                taken.append(self._jobs.get_nowait())
            while taken:
                job = taken.pop(0)
                if job is None:
                    return
                together = [job]
                while job.asked is not None and taken and taken[0] is not None and taken[0].asked is not None:
                    together.append(taken.pop(0))  # type: ignore[arg-type]
                self._do(together)

    def stop(self) -> None:
        self._jobs.put(None)

    def _do(self, jobs: list[_Job]) -> None:
        try:
            if jobs[0].work is not None:
                jobs[0].result = jobs[0].work()
            else:
                self._write(jobs)
        except Exception as error:
            logger.exception("what was asked failed")
            for job in jobs:
                job.error = error
        for job in jobs:
            job.done.set()

    def _write(self, jobs: list[_Job]) -> None:
        fitting = []
        for job in jobs:
            assert job.asked is not None
            if self.label is None or not _fits(job.asked[2], self.label):
                job.error = Conflict(f"the weights that are held are {self.label}, and not {job.asked[2]}")
            else:
                fitting.append(job)
        found = self.engine.write([(job.asked[0], job.asked[1]) for job in fitting]) if fitting else []
        for job, completions in zip(fitting, found, strict=True):
            job.result = {"label": self.label, "completions": [asdict(each) for each in completions]}

    def _wait(self, job: _Job) -> Any:
        self._jobs.put(job)
        job.done.wait()
        if job.error is not None:
            raise job.error
        return job.result

    # -- what is asked -------------------------------------------------------------------------------------------

    def answer(self, path: str, body: bytes, run: str | None) -> Any:
        """What a POST comes to.

        Raises:
            ValueError: it makes no sense.
            Conflict: it does not go with the weights that are held.
            LookupError: there is nothing of that name.
        """
        if path == "/weights/bucket":
            return self._wait(_Job(lambda: self._take(body, run)))
        asked = json.loads(body or b"{}")
        if path == "/generate":
            turns, sampling = of_json(asked)
            return self._wait(_Job(asked=(turns, sampling, asked.get("label"))))
        if path == "/weights/begin":
            return self._wait(_Job(lambda: self._begin(asked["label"])))
        if path == "/weights/end":
            return self._wait(_Job(lambda: self._end(asked["label"], asked["buckets"])))
        raise LookupError(f"there is nothing at {path}")

    def _begin(self, label: dict[str, Any]) -> dict:
        self.label, self._coming = None, label
        self._buckets, self._assembly = 0, Assembly()
        self.engine.begin()
        return {}

    def _take(self, data: bytes, run: str | None) -> dict:
        if self._coming is None or self._coming.get("run") != run:
            raise Conflict("weights come that were not announced, or another run has begun to send its own")
        self.engine.load(self._assembly.take(from_bytes(data)))
        self._buckets += 1
        return {}

    def _end(self, label: dict[str, Any], buckets: int) -> dict:
        if self._coming != label:
            raise Conflict("weights end that were not announced, or another run has begun to send its own")
        if self._buckets != buckets:
            raise Conflict(f"{self._buckets} buckets of weights came, and {buckets} were sent")
        self.engine.end()
        self.label, self._coming = label, None
        return {"label": label}


def _fits(expected: Any, held: dict[str, Any]) -> bool:
    return isinstance(expected, dict) and all(held.get(name) == value for name, value in expected.items())


def handler_of(service: Service) -> type[BaseHTTPRequestHandler]:
    """What answers the calls of a service."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

        def do_GET(self) -> None:
            if self.path == "/health":
                self._say(200, {"status": "ok"})
            elif self.path == "/info":
                self._say(200, {**service.info, "label": service.label})
            else:
                self._say(404, {"error": f"there is nothing at {self.path}"})

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self.close_connection = True
                self._say(413, {"error": f"a body of {length or 'unknown'} bytes, where {MAX_BODY_BYTES} are taken"})
                return
            body = self.rfile.read(int(length))
            try:
                self._say(200, service.answer(self.path, body, self.headers.get("X-Run")))
            except Conflict as error:
                self._say(409, {"error": str(error)})
            except LookupError as error:
                self._say(404 if not isinstance(error, KeyError) else 400, {"error": str(error)})
            except ValueError as error:
                self._say(400, {"error": str(error)})
            except Exception as error:
                self._say(500, {"error": f"{type(error).__name__}: {error}"})

        def _say(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                logger.info("whoever asked is gone")

    return Handler


def serve(service: Service, host: str, port: int) -> None:
    """Answers calls until the process is interrupted.

    Raises:
        OSError: the port is taken.
    """
    server = ThreadingHTTPServer((host, port), handler_of(service))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    print(f"lowtide serves {service.info.get('model')} at http://{host}:{server.server_address[1]}", flush=True)
    try:
        service.run()
    finally:
        server.shutdown()
        server.server_close()
