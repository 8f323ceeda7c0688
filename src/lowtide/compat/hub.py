"""The hub where it cannot be reached: said at once, in place of the retries of each request.

`huggingface_hub` tries each request six times with pauses of up to 8 s, and loading a model makes several: some 100 s
before what is in the cache is used, or the run ends. Its own switch HF_HUB_OFFLINE leaves all requests out. One short
look at whether the hub's address answers sets that.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
HUB = "https://huggingface.co"
SECONDS = 3.0
"""That an address has to answer in."""

logger = logging.getLogger(__name__)


def go_offline_if_unreachable(names: Iterable[str | None]) -> bool:
    """Sets HF_HUB_OFFLINE where some of these names are of the hub, and the hub's address does not answer; says so.
    Where the switch is set already, or requests go through a proxy, nothing is looked at.

    Args:
        names: of models and datasets; those that are files or folders here need no hub.
    """
    wanted = [name for name in names if name and not Path(name).expanduser().exists()]
    if not wanted or any(os.environ.get(each) for each in SWITCHES) or _has_proxy():
        return False
    address = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), SECONDS).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        for module, switch in (("huggingface_hub.constants", "HF_HUB_OFFLINE"), ("datasets.config", "HF_HUB_OFFLINE")):
            if module in sys.modules:  # which have read the variable
                setattr(sys.modules[module], switch, True)
        logger.warning(
            f"{address.hostname} cannot be reached ({error.strerror or error}), so that only a cache can have "
            f"{', '.join(wanted)}: HF_HUB_OFFLINE=1"
        )
        return True
    return False


def _has_proxy() -> bool:
    return any(os.environ.get(each) or os.environ.get(each.lower()) for each in PROXIES)
