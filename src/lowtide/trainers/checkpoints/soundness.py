"""Whether the files of a checkpoint are undamaged: by its manifest, and by what each kind of file has to contain.

Checkpoints without a manifest (transformers', or of earlier versions) are checked as far as their formats allow: JSON
is parsed, the records of a `.pt` file have checksums of their own, a safetensors file says how long it is. Nothing is
loaded that could run code: torch reads with `weights_only=True`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.trainer_pt_utils import safe_globals

from lowtide.engine.weights.sharded.shard_files import missing_shards
from lowtide.memory.optimizers.low_rank import projectors
from lowtide.parsing import parse_json
from lowtide.trainers.checkpoints.manifest import MANIFEST, difference, read_manifest
from lowtide.trainers.checkpoints.output_folder import TRAINER_STATE

RUN_STATE = "run_state.json"
OPTIMIZER, SCHEDULER, RANDOM = "optimizer.pt", "scheduler.pt", "rng_state*.pth"
"""The states beside the weights; of the last there is one file a rank."""
OPTIMIZERS = "optimizer*.pt"
"""The optimizer's states: one file, or one a rank where weights are sharded."""
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "adapter_model.safetensors", "adapter_model.bin", "shard-*-of-*.safetensors",
)  # fmt: skip
READ = (".json", ".safetensors", ".bin", ".pt", ".pth")
"""How the names of files end that a resumed run reads."""
UNREAD = {"training_args.bin", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""Files of a checkpoint that no resumed run reads; users may change them."""


class Damage(ValueError):
    """What is wrong with one file."""


def load_states(path: Path) -> Any:
    """The tensors and numbers of a file of `torch.save`, their bytes left in the file until they are read.

    Raises:
        Damage: the file is none, or holds anything else.
    """
    try:
        with safe_globals(), torch.serialization.safe_globals(list(projectors())):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # garbage ends in errors of all types
        text = str(error)
        if "Unsupported" in text or "GLOBAL" in text:
            raise Damage(
                "it holds Python objects other than tensors and numbers, which are not loaded since they could run code"
            ) from error
        raise Damage(f"torch cannot read it ({type(error).__name__})") from error


def damage(folder: Path) -> dict[str, str]:
    """The damaged files of a checkpoint, and what is wrong with each; empty where it is whole.

    A state that the checkpoint lacks altogether is no damage where no manifest lists it.
    """
    found: dict[str, str] = {}
    try:
        manifest = read_manifest(folder)
    except (ValueError, KeyError, AttributeError) as error:
        return {MANIFEST: f"it cannot be read ({error})"}
    for name, entry in (manifest or {}).items():
        is_read = Path(name).suffix in READ and Path(name).name not in UNREAD
        if is_read and (reason := difference(folder / name, entry)):
            found[name] = reason
    for path, check in _checks(folder, sealed=manifest is not None):
        name = path.relative_to(folder).as_posix()
        if name in found:
            continue
        try:
            check(path)
        except FileNotFoundError:
            found[name] = "it is missing"
        except (Damage, OSError) as error:
            found[name] = str(error)
    for name in missing_shards(folder):
        found.setdefault(name, "it is missing")
    if not _weights(folder):
        found.setdefault("model.safetensors", "it is missing")
    return found


def _weights(folder: Path) -> list[Path]:
    """The files that say which weights there are, those of adapters in folders of their own too."""
    return [path for name in WEIGHTS for path in (*folder.glob(name), *folder.glob(f"*/{name}"))]


def _checks(folder: Path, *, sealed: bool) -> Iterator[tuple[Path, Callable[[Path], object]]]:
    """Each file that a resumed run reads, and what looks into it. Where the manifest has checked the bytes (`sealed`),
    the checksums of records are not computed again."""
    yield folder / TRAINER_STATE, _trainer_state
    if (folder / RUN_STATE).exists():
        yield folder / RUN_STATE, _run_state
    states = [path for name in (OPTIMIZERS, SCHEDULER, RANDOM) for path in sorted(folder.glob(name))]
    for path in dict.fromkeys((*states, *_weights(folder), *folder.glob("*.safetensors"))):
        yield path, _FORMATS[path.suffix] if sealed else _records_and_format
    for path in _weights(folder):
        if path.name.startswith("adapter"):
            yield path.with_name("adapter_config.json"), _json
        if path.name.endswith(".index.json"):
            yield from ((path.with_name(name), _FORMATS[Path(name).suffix]) for name in _shards(path))


def _records_and_format(path: Path) -> None:
    if path.suffix in (".pt", ".pth", ".bin"):
        _records(path)
    _FORMATS[path.suffix](path)


def _records(path: Path) -> None:
    """Refuses a file of `torch.save` with a record that does not have its checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise Damage("it is no whole file of torch.save" if path.stat().st_size else "it is empty") from error
    if broken is not None:
        raise Damage(f"the bytes of its record {broken} are not those that were written")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Damage(f"it is no JSON ({error})" if path.stat().st_size else "it is empty") from error
    if not isinstance(value, dict):
        raise Damage("it is no JSON object")
    return value


def _trainer_state(path: Path) -> None:
    state = _json(path)
    step, last = state.get("global_step"), state.get("max_steps")
    if type(step) is not int or step < 0:
        raise Damage(f"its global_step is {step!r}")
    if type(last) is int and 0 < last < step:
        raise Damage(f"its global_step is {step}, beyond the {last} steps of the run that wrote it")


def _run_state(path: Path) -> None:
    state = _json(path)
    wanted = {"num_tokens": int | float, "token_budget": int | float | None, "running": dict}
    for name, kind in wanted.items():
        if name not in state or not isinstance(state[name], kind):
            raise Damage(f"its {name} is {state.get(name)!r}")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(_json(index)["weight_map"].values()))
    except (Damage, KeyError, AttributeError, TypeError):  # which the check of the index itself says
        return []


def _index(path: Path) -> None:
    _json(path)
    if not _shards(path):
        raise Damage("it names no files with weights")


def _safetensors(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except FileNotFoundError:
        raise
    except Exception as error:
        if path.stat().st_size == 0:
            raise Damage("it is empty") from error
        raise Damage(f"safetensors cannot read it ({str(error).splitlines()[0]})") from error


def _states(path: Path) -> None:
    if not path.stat().st_size:
        raise Damage("it is empty")
    loaded = load_states(path)
    keys: Mapping[str, set[str]] = {"optimizer": {"state", "param_groups"}, "rng_state": {"python", "numpy", "cpu"}}
    wanted = next((names for kind, names in keys.items() if path.name.startswith(kind)), set())
    if not isinstance(loaded, dict) or not wanted <= loaded.keys():
        raise Damage(f"it does not hold {' and '.join(sorted(wanted)) or 'what a scheduler has'}")


_FORMATS: Mapping[str, Callable[[Path], object]] = {
    ".json": _index, ".safetensors": _safetensors, ".bin": _states, ".pt": _states, ".pth": _states,
}  # fmt: skip
"""What looks into a file, by the end of its name."""
