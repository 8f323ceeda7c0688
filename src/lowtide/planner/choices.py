"""What a plan may choose: the axes of the search, from the table of techniques.

A user's own settings are never overruled: of each axis those choices are left that agree with what was given. What
changes the numbers, by the table's word, is left out unless it was asked for. Not among them is what changes which rows
share a step, packing; and accumulation, in whose place the token budget cuts a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from datasets import Dataset

from lowtide.compat.torch import cpu_has_bf16
from lowtide.engine.layers.mixers import has_recurrences
from lowtide.memory.activations.chain_storage import HOST
from lowtide.memory.activations.checkpointing import OUTSIDE_RECURRENCES
from lowtide.memory.optimizers.states import IN_BFLOAT16
from lowtide.memory.options import TWO_PASS
from lowtide.memory.table import ANOTHER, TECHNIQUES
from lowtide.methods.shared.asked_teacher import ASKED
from lowtide.planner.answers.assumptions import files_dtype, stored_dtype
from lowtide.planner.candidate import PlannedRun
from lowtide.planner.estimate import BANDS
from lowtide.planner.pieces import Searches, sizes_in_pieces
from lowtide.planner.search import Axis, Between, Choice, Search, Sizes
from lowtide.run.engine import computed_in
from lowtide.run.options.configs import config_class

TILE = 1024
"""Tokens of a tile of the MLP: some thousand keep the products large."""
CHECKPOINTING = {"gradient_checkpointing": True, "checkpointing_policy": "full", "checkpointing_every": 1}
PLAIN = {**CHECKPOINTING, "gradient_checkpointing": False, "activation_offloading": False, "mlp_tile_tokens": None}
FULL = {**PLAIN, **CHECKPOINTING}
NONE, ALL = "no checkpointing", "gradient checkpointing"
IN_BACKWARD, TWO_PASSES = "optimizer in backward", "optimizer in backward, two passes"
LORA = "a LoRA adapter (rank 16) is trained in place of all weights"
FROZEN_BFLOAT16 = "frozen weights are stored in bfloat16, and so is what passes from layer to layer"
TRAINED_IN_16_BITS = "trained weights in 16 bits"
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
    layers: int = 0
    """Of the model, of which a part may be checkpointed."""
    recurrent: bool = False
    """Whether the model has recurrences, which may be computed again alone."""


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for."""

    run: PlannedRun
    """Without what spreads it over devices, for traces, which are of one rank."""
    rows: Dataset
    """Prepared."""
    sizes: Sizes
    room: int
    """The budget, in bytes."""
    explain: bool
    """Whether runners-up and the effect of each technique are wanted, which take more traces."""

    @property
    def most(self) -> float:
        """Bytes that a predicted peak may take: of the budget a part is left for what it may miss."""
        return self.room / (1 + BANDS[self.run.device.kind])

    def axes(self, sizes: Sizes) -> list[Axis]:
        """What is chosen from, for sizes of a micro-batch."""
        return axes(setting_of(self.run), sizes)

    def searches(self, search_of: Callable[[Sizes], Search]) -> Searches:
        """Those of whole rows and, where some may be cut, of rows in pieces."""
        return Searches(search_of, self.sizes, None if self.run.whole_rows else sizes_in_pieces(self.sizes))


def setting_of(run: PlannedRun) -> Setting:
    """What there is to choose from for a run."""
    plain, defaults = run.config({}), config_class(run.method)(output_dir="plan", use_cpu=True, report_to="none")
    stored = {"dtype"} if "dtype" in (plain.model_init_kwargs or {}) else set()
    return Setting(
        names={*vars(plain), "dtype", "use_peft"} - stored,
        defaults=vars(defaults),
        requested=run.requested,
        device_kind=run.device.kind,
        exact=run.exact,
        adapters=run.peft_config is not None,
        streamed=run.streamed,
        dtype=str(stored_dtype(run)).removeprefix("torch."),
        files_dtype=files_dtype(run, computed_in(plain)) if run.peft_config is not None else "",
        layers=getattr(run.described.get_text_config(), "num_hidden_layers", 0),
        recurrent=bool(getattr(plain, "padding_free", False)) and has_recurrences(run.described.get_text_config()),
    )


def axes(setting: Setting, sizes: Sizes) -> list[Axis]:
    """All that may be chosen, each axis with its plain choice first."""
    offered: dict[str, Iterable[Choice]] = {
        "activations": _activations(sizes, setting),
        "optimizer": [Choice("AdamW"), *_optimizers()],
        "gradients": [Choice("gradients kept to the step"), *_gradients(setting)],
        "states": [Choice("states on the device"), *_states(setting)],
        "reference": [Choice("reference as it is"), *_reference(setting)],
        "precision": [Choice("precision as it is"), *_precision(setting)],
        "trained": [Choice("trained as it is"), *_trained(setting)],
        "keys": [Choice("keys on the device"), *_keys(setting, sizes)],
        "writing": [Choice("written as it is"), *_writing(setting)],
    }
    if sizes.in_pieces:
        offered = {name: [each for each in choices if not each.whole] for name, choices in offered.items()}
    made = (_axis(name, choices, setting) for name, choices in offered.items())
    return [axis for axis in made if axis.scales or len(axis.choices) > 1]


def _axis(name: str, choices: Iterable[Choice], setting: Setting) -> Axis:
    """The choices that agree with what was given."""
    left = [_written(each, setting) for each in choices if _agrees(each, setting)]
    names = {each.name for each in left}
    alone = [each for each in left if each.between and not names.issuperset(each.between[:2])]
    left = [replace(each, between=None) if each in alone else each for each in left]
    return Axis(name, left or [Choice("as given")], scales=name == "activations")


def _agrees(choice: Choice, setting: Setting) -> bool:
    return (
        set(choice.options) <= set(setting.names)
        and all(setting.requested.get(name, value) == value for name, value in choice.options.items())
        and (choice.changes is None or not setting.exact)
    )


def _written(choice: Choice, setting: Setting) -> Choice:
    """The choice with those options that a user would have to write."""
    options = {
        name: value
        for name, value in choice.options.items()
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
        technique.options,
        slower=chosen.slower,
        changes=technique.changes,
        last_resort=chosen.last_resort,
        whole=chosen.whole,
        stores=TRAINED_IN_16_BITS if technique.options.get("optim") in IN_BFLOAT16 else "",
    )
    return replace(found, **otherwise)


def _activations(sizes: Sizes, setting: Setting) -> list[Choice]:
    """What is computed again comes on top; of several techniques together nothing but this says how much."""
    offloaded = {**FULL, "activation_offloading": True}
    found = [
        Choice(NONE, PLAIN),
        _technique("checkpointing that keeps products", options={**FULL, "checkpointing_policy": "matmul"}),
        *_of_some_layers(setting.layers),
        _technique("checkpointing that keeps attention", options={**FULL, "checkpointing_policy": "attention"}),
        _technique(ALL, options=FULL),
        Choice("checkpointing and activation offloading", offloaded, slower=4.3 / 3),
    ]
    if setting.recurrent:
        alone = {**FULL, "checkpointing_policy": OUTSIDE_RECURRENCES}
        found.append(_technique("checkpointing of recurrences alone", options=alone))
    tile = min(TILE, 1 << max(0, (sizes.whole // 4).bit_length() - 1))
    if tile >= 64:
        tiled = {"mlp_tile_tokens": tile}
        found += [
            Choice("checkpointing and tiled MLP", {**FULL, **tiled}, slower=4.1 / 3),
            Choice("checkpointing, offloading and tiled MLP", {**offloaded, **tiled}, slower=4.4 / 3),
        ]
    return sorted(found, key=lambda each: each.slower)


def _of_some_layers(layers: int) -> Iterator[Choice]:
    """Quarters of the layers are checkpointed, or thirds, so that layers recur, of which a trace needs few."""
    parts = next((each for each in (4, 3, 2) if layers % each == 0), 2)
    every_layer = _technique(ALL).slower
    for part in range(1, parts):
        share, every = Fraction(part, parts), Fraction(parts, part)
        yield _technique(
            "checkpointing of every k-th layer",
            name=f"checkpointing of {share.numerator} in {share.denominator} layers",
            options={**FULL, "checkpointing_every": int(every) if every == int(every) else round(float(every), 2)},
            slower=1 + float(share) * (every_layer - 1),
            between=Between(NONE, ALL, float(share)),
        )


def _optimizers() -> list[Choice]:
    """Those that are no AdamW come last."""
    on_axis = [each for each in TECHNIQUES.values() if each.chosen and each.chosen.axis == "optimizer"]
    found = [_technique(each.name) for each in on_axis if all(map(find_spec, each.needs))]
    return sorted(found, key=lambda each: str(each.changes).startswith(ANOTHER))


def _gradients(setting: Setting) -> Iterator[Choice]:
    if setting.requested.get("fp16") or setting.requested.get("gradient_accumulation_steps", 1) > 1:
        return
    clips = setting.requested.get("max_grad_norm", setting.defaults.get("max_grad_norm"))
    yield _technique(IN_BACKWARD, changes="gradients are no longer clipped" if clips else None)
    if clips:
        yield _technique(TWO_PASSES)
    if setting.device_kind in ("cpu", "cuda") and not setting.adapters and "ref_model_storage" not in setting.names:
        where = "a file" if setting.device_kind == "cpu" else "host memory"
        options = {"optimizer_in_backward": TWO_PASS if clips else True, "trained_weights": "stream"}
        streamed = _technique("streamed trained weights", name=f"weights and states in {where}", options=options)
        yield replace(streamed, slower=streamed.slower * (_technique(TWO_PASSES).slower if clips else 1.0))


def _states(setting: Setting) -> Iterator[Choice]:
    if setting.device_kind == "cuda":
        yield _technique("optimizer states in host memory")


def _reference(setting: Setting) -> Iterator[Choice]:
    taught = "teacher_model_name_or_path" in setting.names and (
        not setting.adapters or setting.requested.get("teacher_model_name_or_path") is not None
    )
    if any(setting.requested.get(name) is not None for name in ASKED):
        return  # no teacher is loaded
    precomputes = "precompute_ref_log_probs" in setting.names and not setting.adapters
    if not (taught or precomputes) or setting.requested.get("sync_ref_model"):
        return
    if precomputes and not setting.streamed:
        yield Choice("precomputed reference", {"precompute_ref_log_probs": True}, timed=False)
    if setting.requested.get("precompute_ref_log_probs"):
        return
    if setting.device_kind == "cuda":
        yield Choice("reference in host memory", {"ref_model_storage": "cpu"}, slower=1.3)
    for bits, package in ((8, "torchao"), (4, "bitsandbytes")):
        if find_spec(package):
            rounded = f"the reference's weights are rounded to {bits} bits"
            options = {"ref_model_storage": f"{bits}bit"}
            yield Choice(f"reference in {bits} bits", options, slower=1.1, changes=rounded)


def _precision(setting: Setting) -> Iterator[Choice]:
    """How weights are stored and computed with; frozen ones are streamed in the precision of their files alone."""
    yield from _streamed(setting)
    if setting.requested.get("fp16"):
        return
    if setting.device_kind == "cpu":
        slower = {} if cpu_has_bf16() else {"slower": 1.5}
        yield _technique("bfloat16 mixed precision", **slower)
    options = {"dtype": "bfloat16"}
    if setting.adapters:
        yield Choice("frozen weights in bfloat16", options, slower=0.95, changes=FROZEN_BFLOAT16)
    else:
        yield Choice("bfloat16 weights", options, 0.9, PURE_BFLOAT16, last_resort=True, stores=TRAINED_IN_16_BITS)


def _streamed(setting: Setting) -> Iterator[Choice]:
    """Frozen weights of which a layer at a time is resident, for when nothing else fits."""
    choice = _technique("streamed base weights", name="frozen weights streamed")
    if setting.files_dtype == setting.dtype:
        yield choice
    elif setting.files_dtype == "bfloat16":
        options = {**choice.options, "dtype": "bfloat16"}
        yield replace(choice, name="frozen weights in bfloat16, streamed", options=options, changes=FROZEN_BFLOAT16)


def _trained(setting: Setting) -> Iterator[Choice]:
    if not setting.adapters:
        yield Choice("LoRA", {"use_peft": True}, slower=0.8, changes=LORA, last_resort=True)


def _writing(setting: Setting) -> Iterator[Choice]:
    """What completions are written by: without a copy of the weights, which is made where there is room."""
    yield Choice("written by the weights themselves", {"generation_weights": "trained"}, slower=1.1)


def _keys(setting: Setting, sizes: Sizes) -> Iterator[Choice]:
    """Where those of a row wait that is run in pieces."""
    if sizes.in_pieces:
        where = "host memory" if setting.device_kind == "cuda" else "a file"
        yield Choice(f"keys in {where}", {"chain_storage": HOST}, slower=1.1)
