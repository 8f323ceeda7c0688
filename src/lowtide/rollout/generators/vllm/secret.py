"""The secret that a server of vLLM and the trainings that use it share.

A server makes one when it starts and keeps it, for its user alone, in a file of the user's cache folder: a training of
the same user on the same machine finds it there by itself. For other machines or users, the environment variable
`LOWTIDE_VLLM_TOKEN` says it on both sides. It travels as `Authorization: Bearer`, as an API key of `vllm serve` does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "LOWTIDE_VLLM_TOKEN"


def secret_file(port: int) -> Path:
    """Where the secret of this machine's server at a port is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lowtide" / f"vllm-{socket.gethostname()}-{port}.token"


@contextlib.contextmanager
def kept_secret(port: int) -> Iterator[str]:
    """The secret of a server that starts; kept in its file, which only its user can read, while it lasts."""
    secret = os.environ.get(VARIABLE) or secrets.token_urlsafe(32)
    path = secret_file(port)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(secret)
    os.replace(beside, path)
    try:
        yield secret
    finally:
        with contextlib.suppress(OSError):
            if path.read_text() == secret:
                path.unlink()


def secret_for(host: str, port: int | None) -> str | None:
    """The secret of the server at an address; None where none is known."""
    if given := os.environ.get(VARIABLE):
        return given
    if port is None or not is_this_machine(host):
        return None
    try:
        return secret_file(port).read_text().strip() or None
    except OSError:
        return None


def is_this_machine(host: str) -> bool:
    """Whether an address says this machine by a name that no other has."""
    return host in ("localhost", "0.0.0.0", "::", "::1", socket.gethostname()) or host.startswith("127.")


def is_authorized(header: str | None, secret: str) -> bool:
    """Whether a header `Authorization` tells the secret; takes as long whatever it tells."""
    return hmac.compare_digest((header or "").encode(errors="replace"), f"Bearer {secret}".encode())
