"""What all tests share: one thread a process, no network, fixed seeds, and signatures that are checked."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import datasets
import jaxtyping
import numpy as np
import pytest
import torch

from tests.support.heap import leave_out
from tests.support.recording import record_if_asked
from tests.support.shapes import check_what_is_imported
from tests.support.short_tests import ASKED, check_is_short, checked, cpu_seconds, long_tests, not_counted
from tests.support.signals import in_the_foreground

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
check_what_is_imported()
from lowtide.planner import process  # noqa: E402  (after the hook)
from lowtide.planner.tracing_process import tracing_here  # noqa: E402

process._measured = not_counted(process._measured)

BEGAN = time.monotonic()
SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = cpu_seconds()
    yield
    if checked(item.config):
        check_is_short(item, cpu_seconds() - began)


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # a worker knows of its own tests alone
    if lines := long_tests(terminalreporter.stats.get("passed", [])):
        terminalreporter.section(f"not marked slow, and above {ASKED:g} s of CPU time")
        terminalreporter.write_line("\n".join(lines))
    if exitstatus == pytest.ExitCode.OK:
        passed, skipped = (len(terminalreporter.stats.get(name, ())) for name in ("passed", "skipped"))
        record_if_asked(passed, skipped, time.monotonic() - BEGAN)


@pytest.fixture(scope="module", autouse=True)
def _young_heap() -> None:
    """What modules before have left stays left out: to look at all of it again takes a second a module."""
    leave_out()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rows that an earlier run prepared would hide that the code which prepares them has changed."""
    folder = tmp_path_factory.mktemp("datasets")
    os.environ["HF_DATASETS_CACHE"] = str(folder)
    datasets.config.HF_DATASETS_CACHE = folder


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with in_the_foreground():
        yield


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _unchecked_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    disabled = request.node.get_closest_marker("unchecked_shapes") is not None
    jaxtyping.config.update("jaxtyping_disable", disabled)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _traced_here(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process of its own takes seconds to begin: only its own tests have one."""
    apart = request.node.get_closest_marker("traced_apart") is not None
    with contextlib.nullcontext() if apart else tracing_here():
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded data sets beside the checkout; tests that want it are skipped where there is none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the data sets of ../shared/data, which this machine does not have")
    return SHARED_DATA
