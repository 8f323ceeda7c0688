"""A launcher whose ranks were stopped by a signal ends with its status, and says nothing beside them."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from lowtide.compat.launching import ended_by_signals


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_the_status(number, status):
    def launch() -> None:
        raise SignalException("Process 1 got signal", sigval=number)

    with pytest.raises(SystemExit) as raised:
        ended_by_signals(launch)
    assert raised.value.code == status
