"""What a plan may choose: the axes of the search, from the table of techniques.

A user's own settings are never overruled: of each axis those choices are left that agree with what was given. What
changes the numbers, by the table's word, is left out unless it was asked for. Not among them is what changes which rows
share a step, packing; and accumulation, in whose place the token budget cuts a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from lowtide.compat.torch import cpu_has_bf16
from lowtide.memory.activations.chain_storage import HOST
from lowtide.memory.options import TWO_PASS
from lowtide.memory.table import ANOTHER, TECHNIQUES
from lowtide.planner.answers.assumptions import files_dtype, stored_dtype
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.search import Axis, Choice, Sizes
from lowtide.run.engine import computed_in
from lowtide.run.options.configs import config_class

TILE = 1024
"""Tokens of a tile of the MLP: some thousand keep the products large."""
CHECKPOINTING = {"gradient_checkpointing": True, "checkpointing_policy": "full", "checkpointing_every": 1}
PLAIN = {**CHECKPOINTING, "gradient_checkpointing": False, "activation_offloading": False, "mlp_tile_tokens": None}
FULL = {**PLAIN, **CHECKPOINTING}
IN_BACKWARD, TWO_PASSES = "optimizer in backward", "optimizer in backward, two passes"
LORA = "a LoRA adapter (rank 16) is trained in place of all weights"
FROZEN_BFLOAT16 = "frozen weights are stored in bfloat16, and so is what passes from layer to layer"
PURE_BFLOAT16 = "weights and states are stored in bfloat16, in which small updates are lost"


@dataclass(frozen=True)
class Setting:
    """What may be chosen from."""

    names: Collection[str]
    """Options that the method's config has."""
    defaults: Mapping[str, Any]
    requested: Mapping[str, Any]
    """A user's own settings."""
    device_kind: str
    exact: bool = True
    adapters: bool = False
    """Whether adapters are trained already."""
    streamed: bool = False
    """Whether rows are read while training."""
    dtype: str = "float32"
    """In which weights are loaded, where nobody chooses another."""
    files_dtype: str = ""
    """Of the model's files, where frozen weights can be streamed from them; empty elsewhere."""


def setting_of(run: PlannedRun, *, exact: bool, streamed: bool) -> Setting:
    """What there is to choose from for a run."""
    plain, defaults = run.config({}), config_class(run.method)(output_dir="plan", use_cpu=True, report_to="none")
    stored = {"dtype"} if "dtype" in (plain.model_init_kwargs or {}) else set()
    return Setting(
        names={*vars(plain), "dtype", "use_peft"} - stored,
        defaults=vars(defaults),
        requested=run.requested,
        device_kind=run.device.kind,
        exact=exact,
        adapters=run.peft_config is not None,
        streamed=streamed,
        dtype=str(stored_dtype(run)).removeprefix("torch."),
        files_dtype=files_dtype(run, computed_in(plain)) if run.peft_config is not None else "",
    )


def axes(setting: Setting, sizes: Sizes) -> list[Axis]:
    """All that may be chosen, each axis with its plain choice first."""
    lists: dict[str, Sequence[tuple[Choice, Mapping[str, Any]]]] = {
        "activations": _activations(sizes),
        "optimizer": _optimizers(),
        "gradients": _gradients(setting),
        "states": _states(setting),
        "reference": _reference(setting),
        "precision": _precision(setting),
        "trained": _trained(setting),
        "keys": _keys(setting, sizes),
    }
    if sizes.in_pieces:
        lists = {name: [each for each in choices if not each[0].whole] for name, choices in lists.items()}
    made = (_axis(name, choices, setting) for name, choices in lists.items())
    return [axis for axis in made if axis.scales or len(axis.choices) > 1]


def _axis(name: str, choices: Sequence[tuple[Choice, Mapping[str, Any]]], setting: Setting) -> Axis:
    left = []
    for choice, state in choices:
        known = {each: value for each, value in state.items() if each in setting.names}
        agrees = all(setting.requested.get(each, value) == value for each, value in known.items())
        if len(known) == len(state) and agrees and (choice.changes is None or not setting.exact):
            left.append(_written(choice, known, setting))
    return Axis(name, left or [Choice("as given")], scales=name == "activations")


def _written(choice: Choice, state: Mapping[str, Any], setting: Setting) -> Choice:
    """The choice with those options that a user would have to write."""
    options = {
        name: value
        for name, value in state.items()
        if name not in setting.requested and setting.defaults.get(name) != value
    }
    return replace(choice, options=options)


def _technique(name: str, /, **otherwise: Any) -> Choice:
    """As the table has it, but for some fields."""
    technique = TECHNIQUES[name]
    chosen = technique.chosen
    assert chosen is not None
    found = Choice(
        name,
        slower=chosen.slower,
        changes=technique.changes,
        last_resort=chosen.last_resort,
        whole=chosen.whole,
    )
    return replace(found, **otherwise)


def _activations(sizes: Sizes) -> list[tuple[Choice, Mapping[str, Any]]]:
    """What is computed again comes on top; of several techniques together nothing but this says how much."""
    found = [
        (Choice("no checkpointing"), PLAIN),
        (_technique("checkpointing that keeps products"), {**FULL, "checkpointing_policy": "matmul"}),
        (_technique("checkpointing of every k-th layer"), {**FULL, "checkpointing_every": 2}),
        (_technique("checkpointing that keeps attention"), {**FULL, "checkpointing_policy": "attention"}),
        (_technique("gradient checkpointing"), FULL),
        (
            Choice("checkpointing and activation offloading", slower=4.3 / 3),
            {**FULL, "activation_offloading": True},
        ),
    ]
    tile = min(TILE, 1 << max(0, (sizes.whole // 4).bit_length() - 1))
    if tile >= 64:
        tiled = {**FULL, "mlp_tile_tokens": tile}
        found += [
            (Choice("checkpointing and tiled MLP", slower=4.1 / 3), tiled),
            (
                Choice("checkpointing, offloading and tiled MLP", slower=4.4 / 3),
                {**tiled, "activation_offloading": True},
            ),
        ]
    return sorted(found, key=lambda each: each[0].slower)


def _optimizers() -> list[tuple[Choice, Mapping[str, Any]]]:
    """Those that are no AdamW come last."""
    on_axis = [each for each in TECHNIQUES.values() if each.chosen and each.chosen.axis == "optimizer"]
    on_axis = [each for each in on_axis if all(map(find_spec, each.needs))]
    on_axis.sort(key=lambda each: str(each.changes).startswith(ANOTHER))
    return [(Choice("AdamW"), {}), *((_technique(each.name), each.options) for each in on_axis)]


def _gradients(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("gradients kept to the step"), {})]
    if setting.requested.get("fp16") or setting.requested.get("gradient_accumulation_steps", 1) > 1:
        return found
    clips = setting.requested.get("max_grad_norm", setting.defaults.get("max_grad_norm"))
    unclipped = "gradients are no longer clipped" if clips else None
    found.append((_technique(IN_BACKWARD, changes=unclipped), TECHNIQUES[IN_BACKWARD].options))
    if clips:
        found.append((_technique(TWO_PASSES), TECHNIQUES[TWO_PASSES].options))
    if setting.device_kind in ("cpu", "cuda") and not setting.adapters and "ref_model_storage" not in setting.names:
        where = "a file" if setting.device_kind == "cpu" else "host memory"
        in_file = _technique("streamed trained weights", name=f"weights and states in {where}")
        in_file = replace(in_file, slower=in_file.slower * (_technique(TWO_PASSES).slower if clips else 1.0))
        found.append((in_file, {"optimizer_in_backward": TWO_PASS if clips else True, "trained_weights": "stream"}))
    return found


def _states(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("states on the device"), {})]
    if setting.device_kind == "cuda":
        found.append((_technique("optimizer states in host memory"), {"optimizer_states_on_host": True}))
    return found


def _reference(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("reference as it is"), {})]
    taught = "teacher_model_name_or_path" in setting.names and (
        not setting.adapters or setting.requested.get("teacher_model_name_or_path") is not None
    )
    precomputes = "precompute_ref_log_probs" in setting.names and not setting.adapters
    if not (taught or precomputes) or setting.requested.get("sync_ref_model"):
        return found
    if precomputes and not setting.streamed:
        found.append((Choice("precomputed reference", timed=False), {"precompute_ref_log_probs": True}))
    if not setting.requested.get("precompute_ref_log_probs"):
        if setting.device_kind == "cuda":
            found.append((Choice("reference in host memory", slower=1.3), {"ref_model_storage": "cpu"}))
        for bits, package in ((8, "torchao"), (4, "bitsandbytes")):
            if find_spec(package):
                rounded = f"the reference's weights are rounded to {bits} bits"
                name = f"reference in {bits} bits"
                found.append((Choice(name, slower=1.1, changes=rounded), {"ref_model_storage": f"{bits}bit"}))
    return found


def _precision(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    """How weights are stored and computed with; frozen ones are streamed in the precision of their files alone."""
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("precision as it is"), {}), *_streamed(setting)]
    if setting.requested.get("fp16"):
        return found
    if setting.device_kind == "cpu":
        slower = {} if cpu_has_bf16() else {"slower": 1.5}
        found.append((_technique("bfloat16 mixed precision", **slower), {"bf16": True}))
    if setting.adapters:
        frozen = Choice("frozen weights in bfloat16", slower=0.95, changes=FROZEN_BFLOAT16)
        return [*found, (frozen, {"dtype": "bfloat16"})]
    pure = Choice("bfloat16 weights", slower=0.9, changes=PURE_BFLOAT16, last_resort=True)
    return [*found, (pure, {"dtype": "bfloat16"})]


def _streamed(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    """Frozen weights of which a layer at a time is resident, for when nothing else fits."""
    choice = _technique("streamed base weights", name="frozen weights streamed")
    if setting.files_dtype == setting.dtype:
        return [(choice, {"base_weights": "stream"})]
    if setting.files_dtype == "bfloat16":
        rounded = replace(choice, name="frozen weights in bfloat16, streamed", changes=FROZEN_BFLOAT16)
        return [(rounded, {"base_weights": "stream", "dtype": "bfloat16"})]
    return []


def _trained(setting: Setting) -> list[tuple[Choice, Mapping[str, Any]]]:
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("trained as it is"), {})]
    if setting.adapters:
        return found
    return [*found, (Choice("LoRA", slower=0.8, changes=LORA, last_resort=True), {"use_peft": True})]


def _keys(setting: Setting, sizes: Sizes) -> list[tuple[Choice, Mapping[str, Any]]]:
    """Where those of a row wait that is run in pieces."""
    found: list[tuple[Choice, Mapping[str, Any]]] = [(Choice("keys on the device"), {})]
    if sizes.in_pieces:
        where = "host memory" if setting.device_kind == "cuda" else "a file"
        found.append((Choice(f"keys in {where}", slower=1.1), {"chain_storage": HOST}))
    return found
