"""Drops what installed packages log as they are imported, where a user can do nothing about it and nothing is amiss.

transformers and PEFT import torchao and bitsandbytes wherever these are installed, so their messages would open each
command. Only these messages are dropped, each by the logger that it comes from and by how it begins.
"""

from __future__ import annotations

import logging

NOISE = {
    # Kernels for other GPUs or another Python; torchao's optimizers, all that lowtide takes of it, are plain torch.
    "torchao": "Failed to load ",
    # torchao registers enumerations with torch in an older way.
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
    # An optional kernel from the hub, in place of which bitsandbytes takes its own.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}
"""By the name of a logger, how the message begins, before its values are filled in."""


def drop_import_noise() -> None:
    """Has the loggers of `NOISE` pass over its messages; to be called before the packages are imported."""
    for name, begins in NOISE.items():
        logging.getLogger(name).addFilter(lambda record, begins=begins: not str(record.msg).startswith(begins))
