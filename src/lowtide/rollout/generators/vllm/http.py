"""Calls of a server over HTTP, each of which ends within a given time."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from lowtide.parsing import parse_json
from lowtide.rollout.generators.vllm.secret import VARIABLE, secret_for

CHUNK = 1 << 20
MOST_BYTES = 16 << 20
"""Of an answer that says nothing of how long it may be."""
ERROR_CHARACTERS = 500
"""Of what a server says, in a message."""


class ServerError(ConnectionError):
    """A server is not there, went away, took too long, or answered with an error."""


class Refused(ServerError):
    """A server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def _ended_at(until: float, connected: socket.socket) -> Iterator[None]:
    """Ends a connection at a time, however little is sent on it now and then: a socket's own timeout is of one read.

    Raises:
        TimeoutError: the time is over.
    """

    def end() -> None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(until - time.monotonic(), 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if time.monotonic() >= until:
        raise TimeoutError


class Calls:
    """Calls of one server.

    Args:
        url: its address, `http://host:port` and perhaps a path.
        timeout: seconds that a call may take.
        option: the one that sets them, for messages.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, url: str, timeout: float, option: str = "vllm_server_timeout") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"vllm_server_base_url={url!r} is no address of a server, such as http://localhost:8000")
        self.url, self.timeout, self.option = url.rstrip("/"), timeout, option
        self._parts = parts
        self.until = math.inf
        """When the last call has ended at the latest, as `time.monotonic` says it."""
        self._secret = secret_for(parts.hostname, parts.port)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def within(self, seconds: float | None, option: str) -> Calls:
        """The same server, with other seconds for a call, which an option sets; itself where they are None."""
        if seconds is None:
            return self
        other = copy.copy(self)
        other.timeout, other.option = seconds, option
        return other

    def ending(self) -> Calls:
        """The same server, whose calls from now on have the seconds of one call together."""
        other = copy.copy(self)
        other.until = time.monotonic() + self.timeout
        return other

    def get(self, path: str, timeout: float | None = None) -> Any:
        """The JSON that a server answers; None for an empty answer.

        Raises:
            ServerError: as in its docstring.
        """
        return self._call("GET", path, None, {}, timeout)

    def post(self, path: str, body: Any = None, most: int = 0) -> Any:
        """Likewise, of a server that is told something as JSON; `most` are the bytes that what was asked may take."""
        data = b"" if body is None else json.dumps(body).encode()
        return self._call("POST", path, data, {"Content-Type": "application/json"}, most=most)

    def tell(self, path: str, body: Any) -> None:
        """As `post`, of a server whose answer says no more than that it was done, and need not be JSON."""
        self._call("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}, reads=False)

    def post_bytes(self, path: str, data: bytes, headers: dict[str, str]) -> Any:
        """Likewise, of a server that is sent bytes."""
        return self._call("POST", path, data, {"Content-Type": "application/octet-stream", **headers})

    def wait(self, path: str) -> None:
        """Until a server answers.

        Raises:
            ServerError: it does not within the time.
        """
        until = time.monotonic() + self.timeout
        while True:
            left = until - time.monotonic()
            try:
                self.get(path, max(min(left, 10.0), 0.1))
                return
            except ServerError as error:
                if left <= 0 or (isinstance(error, Refused) and error.status < 500):
                    raise ServerError(
                        f"no vLLM server answers at {self.url} within vllm_server_timeout={self.timeout:g} seconds "
                        f"({error}): start one with `lowtide vllm-serve --model MODEL`, or correct vllm_server_host "
                        "and vllm_server_port, or vllm_server_base_url"
                    ) from error
            time.sleep(min(0.5, max(left, 0.0)))

    def _call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        timeout: float | None = None,
        *,
        most: int = 0,
        reads: bool = True,
    ) -> Any:
        if self._secret is not None:
            headers = {**headers, "Authorization": f"Bearer {self._secret}"}
        timeout = self.timeout if timeout is None else timeout
        until = min(time.monotonic() + timeout, self.until)
        left = max(until - time.monotonic(), 0.001)
        connection = self._kind(self._parts.hostname or "", self._parts.port, timeout=left)
        try:
            connection.connect()
            with _ended_at(until, connection.sock):
                connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
                response = connection.getresponse()
                content = self._read(response, MOST_BYTES + most)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TimeoutError) or time.monotonic() >= until:
                raise ServerError(
                    f"the vLLM server at {self.url} did not answer {path} within {timeout:g} seconds: it hangs, or "
                    f"what it was asked takes longer (raise {self.option} then)"
                ) from error
            raise ServerError(
                f"the vLLM server at {self.url} cannot be reached, or went away during {path}: "
                f"{error or type(error).__name__}"
            ) from error
        finally:
            connection.close()
        return self._content(path, response.status, content, reads)

    @staticmethod
    def _read(response: http.client.HTTPResponse, most: int) -> bytes:
        """All that is answered."""
        parts, size = [], 0
        while part := response.read1(CHUNK):
            parts.append(part)
            size += len(part)
            if size > most:
                raise http.client.HTTPException(f"its answer has more than the {most:,} bytes that were asked for")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)

    def _content(self, path: str, status: int, content: bytes, reads: bool) -> Any:
        if status != 200:
            try:
                said = str(parse_json(content)["error"])
            except (ValueError, KeyError, TypeError, RecursionError):
                said = content[: 4 * ERROR_CHARACTERS].decode(errors="replace")
            if status == 401:
                said += (
                    f". It is in the environment variable {VARIABLE}, on both sides, or, for a server that you started "
                    "on this machine, in a file that is found by itself"
                )
            raise Refused(f"the vLLM server at {self.url} refuses {path} ({status}): {said[:ERROR_CHARACTERS]}", status)
        if not content or not reads:
            return None
        try:
            return parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"what answers at {self.url} is no vLLM server: {path} gave {content[:80]!r}") from error
