"""Imports that a command waits for: what is seldom used is loaded when it is asked for, the rest is not collected.

PEFT imports bitsandbytes wherever that is installed, and with it torch's compiler, to call one function of it on layers
that are quantized. It takes a second, which an estimate is not to wait for.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

DEFERRED = ("bitsandbytes",)
_lock = RLock()


class _Deferred(ModuleType):
    """Stands for a package until an attribute is asked for that only the loaded one has; then it is that one."""

    def __getattr__(self, name: str) -> Any:
        with _lock:
            if type(self) is _Deferred:
                spec = self.__spec__
                assert spec is not None
                assert spec.loader is not None
                self.__class__ = ModuleType  # type: ignore[assignment]
                self.__path__ = spec.submodule_search_locations or []
                spec.loader.exec_module(self)
        return getattr(self, name)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """What is imported within is no garbage, so the collector does not look for any, neither now nor later: some
    thousand modules are a tenth of the time of an import, and of each full collection while a run is traced."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def defer_imports() -> None:
    """Has the packages of `DEFERRED` wait, as far as they are installed and not imported yet."""
    for name in DEFERRED:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None and spec.loader is not None:
            module = module_from_spec(spec)
            module.__class__ = _Deferred
            del module.__path__  # so that an import of a part of it loads the whole
            sys.modules[name] = module
