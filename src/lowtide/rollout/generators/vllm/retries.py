"""What a server is asked for again where it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from lowtide.rollout.generators.vllm.http import Refused, ServerError
from lowtide.rollout.generators.vllm.label import LostWeights, StaleWeights
from lowtide.rollout.generators.vllm.limits import Limits

logger = logging.getLogger(__name__)

T = TypeVar("T")


def asked_again(
    work: Callable[[], T],
    limits: Limits,
    failures: type[Exception] = ServerError,
    *,
    tries: int | None = None,
    bring_weights: Callable[[], None] | None = None,
) -> T:
    """What a server is asked for, again where it fails; what it writes is the same, for seeds say what it draws.

    Args:
        failures: beside those of the server.
        tries: by default all that `limits` allow.
        bring_weights: sends them to a server that has lost them; None where they cannot be sent.

    Raises:
        ServerError: it failed each time, or refused.
        ValueError: likewise, where that is among the failures; or it holds other weights.
    """
    most = limits.retries + 1
    left = most if tries is None else tries
    while True:
        left -= 1
        try:
            return work()
        except (ServerError, failures) as error:
            refused = isinstance(error, Refused) and error.status < 500
            lost = isinstance(error, LostWeights) and bring_weights is not None
            if not left or refused or (isinstance(error, StaleWeights) and not lost):
                raise
            logger.warning(
                f"{error}. {'It is sent them and asked' if lost else 'It is asked'} again in {limits.pause:g} seconds "
                f"({most - left} of vllm_server_retries={limits.retries})"
            )
            time.sleep(limits.pause)
            if lost and bring_weights is not None:
                bring_weights()
