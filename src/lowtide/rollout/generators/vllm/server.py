"""`lowtide vllm-serve`: vLLM behind HTTP, for trainers that run in another environment or on another machine.

One thread, which is the main one, has the engine and does one thing after the other, so that no batch is written by
weights that are being replaced. What several ranks ask for at a time is written together.

    GET  /health          200
    GET  /info            what is served, and the labels of its weights and of adapters on them
    POST /generate        {"label", "turns", "sampling"} -> {"label", "completions"}; 409 where it holds other weights
    POST /weights/begin   {"label"}: from here on it holds nobody's weights
    POST /weights/bucket  a bucket as safetensors; the header X-Run names the run
    POST /weights/end     {"label", "buckets"}: these were all
    POST /adapters/put    an adapter on these weights, as safetensors with its label
    POST /adapters/drop   {"label"}: nothing is written by it any more

Every call but /health tells the server's secret (`secret.py`), and is asked of the machine by its address or name: a
page in a browser, whatever name it gives to this machine, is refused. What a stranger sends is not read, and his
connection ends after some seconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from lowtide.parsing import parse_json
from lowtide.rollout.generators.generator import Sampling
from lowtide.rollout.generators.vllm.adapters import told_of
from lowtide.rollout.generators.vllm.label import Label
from lowtide.rollout.generators.vllm.secret import VARIABLE, is_authorized, kept_secret, secret_file
from lowtide.rollout.generators.vllm.turns import Job, Turn, WrittenTurn, of_json
from lowtide.rollout.generators.vllm.weights import MAX_BODY_BYTES, Assembly, from_bytes

logger = logging.getLogger(__name__)

PROTOCOL = 3
"""Raised when a client of another one would misunderstand."""
MAX_CONNECTIONS = 256
"""Calls at a time: one for each rank of a training. Further ones are closed."""
STRANGER_SECONDS = 20.0
"""The time that a connection has to tell the secret, and then each block of a body to arrive."""
BLOCK = 1 << 20
MAX_RUN_CHARACTERS = 128


class Served(Protocol):
    """What the server needs of an engine."""

    def write(self, jobs: Sequence[Job]) -> list[list[WrittenTurn]]:
        """The completions of each job."""
        ...

    def begin(self) -> None: ...

    def load(self, weights: dict[str, Any]) -> None: ...

    def end(self) -> None: ...

    def put_adapter(self, name: str, data: bytes) -> None: ...

    def drop_adapter(self, name: str) -> None: ...


class Conflict(ValueError):
    """What is asked does not go with the weights that are held."""


class Unknown(Exception):
    """There is nothing of the name that was asked for."""


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
        self.labels: list[dict[str, Any]] = []
        """Of the weights, and behind it those of adapters on them; none while weights come."""
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
            if isinstance(error, ValueError):  # of who asked, and told to him
                logger.warning("what was asked is refused: %s", error)
            else:
                logger.exception("what was asked failed")
            for job in jobs:
                job.error = error
        for job in jobs:
            job.done.set()

    def _write(self, jobs: list[_Job]) -> None:
        fitting = []
        for job in jobs:
            assert job.asked is not None
            expected = job.asked[2]
            if expected not in self.labels:
                job.error = Conflict(f"the weights that are held are {self.labels}, and not {expected}")
            else:
                fitting.append(job)
        found = self.engine.write([(*job.asked[:2], _adapter(job.asked[2])) for job in fitting]) if fitting else []
        for job, completions in zip(fitting, found, strict=True):
            job.result = {"label": job.asked[2], "completions": [asdict(each) for each in completions]}

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
            Unknown: there is nothing of that name.
        """
        if path == "/weights/bucket":
            return self._wait(_Job(lambda: self._take(body, run)))
        if path == "/adapters/put":
            return self._wait(_Job(lambda: self._put_adapter(body)))
        asked = parse_json(body or b"{}")
        if not isinstance(asked, dict):
            raise ValueError("what is asked has to be a JSON object")
        if path == "/generate":
            info = self.info
            turns, sampling = of_json(asked, info["max_model_length"], info["shapes"]["vocab_size"])
            return self._wait(_Job(asked=(turns, sampling, asked.get("label"))))
        if path == "/weights/begin":
            return self._wait(_Job(lambda: self._begin(asked.get("label"))))
        if path == "/weights/end":
            return self._wait(_Job(lambda: self._end(asked.get("label"), asked.get("buckets"))))
        if path == "/adapters/drop":
            return self._wait(_Job(lambda: self._drop_adapter(asked.get("label"))))
        raise Unknown(f"there is nothing at {path}")

    def _begin(self, label: Any) -> dict:
        _check_label(label)
        self.labels, self._coming = [], label
        self._buckets, self._assembly = 0, Assembly()
        self.engine.begin()
        return {}

    def _take(self, data: bytes, run: str | None) -> dict:
        if self._coming is None or self._coming.get("run") != run:
            raise Conflict("weights come that were not announced, or another run has begun to send its own")
        self.engine.load(self._assembly.take(from_bytes(data)))
        self._buckets += 1
        return {}

    def _end(self, label: Any, buckets: Any) -> dict:
        _check_label(label)
        if type(buckets) is not int or buckets < 0:
            raise ValueError("`buckets` has to be the number of buckets that were sent")
        if self._coming != label:
            raise Conflict("weights end that were not announced, or another run has begun to send its own")
        if self._buckets != buckets:
            raise Conflict(f"{self._buckets} buckets of weights came, and {buckets} were sent")
        self.engine.end()
        self.labels, self._coming = [label], None
        return {"label": label}

    def _put_adapter(self, data: bytes) -> dict:
        _, label = told_of(data)
        _check_label(label)
        if not label["adapter"] or not self.labels or self.labels[0]["run"] != label["run"]:
            raise Conflict("an adapter comes whose base is not here, or another run has sent its own")
        self.engine.put_adapter(Label(**label).name, data)
        self.labels.append(label)
        return {}

    def _drop_adapter(self, label: Any) -> dict:
        _check_label(label)
        if label in self.labels and label["adapter"]:
            self.engine.drop_adapter(Label(**label).name)
            self.labels.remove(label)
        return {}


def _adapter(label: Mapping[str, Any]) -> str | None:
    """The adapter that a label says; None for the weights alone."""
    return Label(**label).name if label["adapter"] else None


def _check_label(label: Any) -> None:
    """Refuses what is no label of weights.

    Raises:
        ValueError: says what one is.
    """
    run = label.get("run") if isinstance(label, dict) else None
    numbers = [label.get("version"), label.get("copy")] if isinstance(label, dict) else []
    if not isinstance(run, str) or not 0 < len(run) <= MAX_RUN_CHARACTERS or not all(type(n) is int for n in numbers):
        raise ValueError("a label of weights has a run's name, the number of its step and that of its copy")
    if label.keys() != {"run", "version", "copy", "adapter"} or type(label["adapter"]) is not bool:
        raise ValueError("a label of weights has `run`, `version`, `copy` and `adapter`, and nothing else")


class Handler(BaseHTTPRequestHandler):
    """Answers the calls of a service; `handler_of` sets what they are answered by."""

    service: Service
    secret: str
    names: set[str]
    """Beside IP addresses, the names by which the machine may be called."""
    timeout = STRANGER_SECONDS

    def setup(self) -> None:
        super().setup()
        self._patience = threading.Timer(STRANGER_SECONDS, self._shut)
        self._patience.daemon = True
        self._patience.start()

    def finish(self) -> None:
        self._patience.cancel()
        with contextlib.suppress(OSError):
            super().finish()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _is_refused(self) -> bool:
        """Whether this call is a stranger's; if so, it has been told."""
        hosts = self.headers.get_all("Host") or [""]
        if "Origin" in self.headers or len(hosts) > 1 or not _is_address_or(hosts[0], self.names):
            self._say(403, {"error": "the server answers programs that call this machine by its address or name"})
            return True
        if not is_authorized(self.headers.get("Authorization"), self.secret):
            self._say(401, {"error": f"the server's secret is missing or wrong: {VARIABLE} says it"})
            return True
        self._patience.cancel()
        return False

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def do_GET(self) -> None:
        if self.path == "/health":
            self._say(200, {"status": "ok"})
        elif self._is_refused():
            return
        elif self.path == "/info":
            self._say(200, {**self.service.info, "labels": self.service.labels})
        else:
            self._say(404, {"error": f"there is nothing at {self.path}"})

    def do_POST(self) -> None:
        if self._is_refused():
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > MAX_BODY_BYTES:
            self._say(413, {"error": f"a body of {length[:20] or 'unknown'} bytes, where {MAX_BODY_BYTES} are taken"})
            return
        try:
            body = self._body(int(length))
        except OSError:  # it went away, or sends nothing
            return
        self.connection.settimeout(None)
        try:
            self._say(200, self.service.answer(self.path, body, self.headers.get("X-Run")))
        except Conflict as error:
            self._say(409, {"error": str(error)})
        except Unknown as error:
            self._say(404, {"error": str(error)})
        except (ValueError, RecursionError) as error:
            self._say(400, {"error": str(error)})
        except Exception as error:
            self._say(500, {"error": f"{type(error).__name__}: {error}"})

    def _body(self, length: int) -> bytes:
        """What is sent, for which memory is taken as it comes."""
        body = bytearray()
        while len(body) < length:
            block = self.rfile.read1(min(BLOCK, length - len(body)))
            if not block:
                raise ConnectionResetError
            body += block
        return bytes(body)

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


def handler_of(service: Service, secret: str, host: str = "127.0.0.1") -> type[BaseHTTPRequestHandler]:
    """What answers the calls of a service.

    Args:
        secret: that a call has to tell.
        host: the name by which the server was told to listen.
    """
    names = {"localhost", socket.gethostname().lower(), host.lower()}
    return type("Handler", (Handler,), {"service": service, "secret": secret, "names": names})


def _is_address_or(host: str, names: set[str]) -> bool:
    """Whether a header `Host` has an IP address or one of these names; a page that leads its own name here does not."""
    name = host[1:].partition("]")[0] if host.startswith("[") and "]" in host else host.partition(":")[0]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Server(ThreadingHTTPServer):
    """One thread a call, of which there are not more than `MAX_CONNECTIONS` at a time."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, BaseHTTPRequestHandler)
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)

    @property
    def port(self) -> int:
        """At which it listens."""
        return self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a connection ended", exc_info=True)


def serve(service: Service, host: str, port: int) -> None:
    """Answers calls until the process is interrupted.

    Raises:
        OSError: the port is taken.
    """
    server = Server((host, port))
    with kept_secret(server.port) as secret:
        server.RequestHandlerClass = handler_of(service, secret, host)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(
            f"lowtide serves {service.info.get('model')} at http://{host}:{server.port} (its secret: "
            f"{secret_file(server.port)}, which trainings of yours on this machine find; others need it in {VARIABLE})",
            flush=True,
        )
        try:
            service.run()
        finally:
            server.shutdown()
            server.server_close()
