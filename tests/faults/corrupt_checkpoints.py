"""a damaged checkpoint is refused by its file before training, and passed over for the last whole one"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lowtide.trainers.checkpoints.manifest import MANIFEST, seal

from .case import Case
from .tiny_run import refusal, trainer

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "run_state.json", "trainer_state.json")
OF_ADAPTERS = ("adapter_model.safetensors", "adapter_config.json")
SHORT: dict[str, Any] = {"max_steps": 4, "eval_strategy": "no"}


class Evil:
    """What would make a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def flipped(data: bytes) -> bytes:
    middle = random.Random(len(data)).randrange(len(data))
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "garbage": lambda data: random.Random(0).randbytes(len(data)),
    "a flipped bit": flipped,
    "zeros at the end": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}
UNSEALED = ("empty", "cut in half", "garbage")
"""Damage that shows without a manifest."""


def check_damage(name: str, how: str, sealed: bool, folder: Path) -> None:
    """Damages one file of the last checkpoint of a run."""
    options = {**SHORT, "adapters": name in OF_ADAPTERS}
    run = folder / "run"
    trainer(run, **options).train()
    last = run / "checkpoint-4"
    if not sealed:
        (last / MANIFEST).unlink()
    (last / name).write_bytes(DAMAGE[how]((last / name).read_bytes()))
    check_refused(run, name, options)


def check_missing(name: str, folder: Path) -> None:
    """Takes one file away."""
    trainer(folder / "run", **SHORT).train()
    (folder / "run" / "checkpoint-4" / name).unlink()
    check_refused(folder / "run", name, SHORT)


def check_refused(run: Path, name: str, options: dict[str, Any]) -> None:
    """By its folder the checkpoint is refused with the file's name; otherwise the one before is taken."""
    last = run / "checkpoint-4"
    named = trainer(run, **options)
    before = {key: p.detach().clone() for key, p in named.model.named_parameters()}
    text = refusal(lambda: named.train(resume_from_checkpoint=str(last)))
    assert name in text, f"{text} does not name {name}"
    assert all(torch.equal(p, before[key]) for key, p in named.model.named_parameters()), "weights were changed"
    again = trainer(run, **options)
    again.train(resume_from_checkpoint=True)
    assert again.resumption is not None
    assert again.resumption.folder == str(run / "checkpoint-2")
    assert name in again.resumption.notes[0]
    assert again.state.global_step == 4


def check_evil(name: str, folder: Path) -> None:
    """A file that would run code when it is loaded, with a manifest to match."""
    trainer(folder / "run", **SHORT).train()
    last = folder / "run" / "checkpoint-4"
    torch.save({"state": Evil(folder / "executed"), "param_groups": []}, last / name)
    seal(last)
    check_refused(folder / "run", name, SHORT)
    assert not (folder / "executed").exists(), "code of the file was run"


def check_other(options: dict[str, Any], wanted: str, folder: Path) -> None:
    """The checkpoint of another run."""
    trainer(folder / "run", **SHORT).train()
    other = trainer(folder / "run", **{**SHORT, **options})
    text = refusal(lambda: other.train(resume_from_checkpoint=True))
    assert wanted in text, f"{wanted!r} is not in {text}"
    assert other.state.global_step == 0


def check_none_whole(folder: Path) -> None:
    """All checkpoints of a run are damaged."""
    run = folder / "run"
    trainer(run, **SHORT).train()
    for last in run.glob("checkpoint-*"):
        (last / "model.safetensors").write_bytes(b"")
    text = refusal(lambda: trainer(run, **SHORT).train(resume_from_checkpoint=True))
    assert "no checkpoint in" in text
    assert text.count("model.safetensors") == 2


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"hidden_size": 32}, "model.safetensors is of another model"),
    "another optimizer": ({"optim": "adamw_compressed"}, "optimizer.pt: it is of torch.AdamW"),
    "adapters": ({"adapters": True}, "holds a whole model, and this run trains adapters"),
}


def cases(seed: int) -> Iterator[Case]:
    """Each file in each kind of damage."""
    for name in (*FILES, *OF_ADAPTERS):
        for how in DAMAGE:
            yield Case(f"{name}: {how}", partial(check_damage, name, how, True))
        for how in UNSEALED:
            yield Case(f"{name}: {how}, without a manifest", partial(check_damage, name, how, False))
    for name in FILES:
        yield Case(f"{name}: missing", partial(check_missing, name))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        yield Case(f"{name}: evil", partial(check_evil, name))
    for name, (options, wanted) in OTHERS.items():
        yield Case(name, partial(check_other, options, wanted))
    yield Case("none is whole", check_none_whole)
