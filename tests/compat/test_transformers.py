"""What `lowtide.compat.transformers` takes from the inside of transformers is there, and its Trainer calls the hooks.

A failure here says what a new version of transformers has moved.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
    masking_utils,
)
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.mamba import modeling_mamba as mamba
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import lowtide
from lowtide.compat import transformers as inside
from lowtide.compat.trainer_optimizers import groups_as_on_one_rank
from lowtide.compat.transformers import HOOKS, USED, Hook, find_packed_rows_where
from lowtide.trainers.checkpoints.output_folder import CHECKPOINT, TRAINER_STATE
from tests.support.models.vision_models import vision_model

TRAINERS = Path(lowtide.__file__).parent / "trainers"
TINY = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
PUBLIC = {"train", "evaluate", "predict", "hyperparameter_search"}
"""Entry points of the Trainer, which users call."""


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(**TINY))  # type: ignore[arg-type]


def called_in(function) -> set[str]:
    """The methods that a function calls on `self`, those that it hands on included."""
    return set(re.findall(r"self\.(\w+)", textwrap.dedent(inspect.getsource(function))))


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_trainer_still_has_and_calls_what_is_overridden(hook: Hook):
    own = getattr(Trainer, hook.name, None)
    assert own is not None, f"transformers.Trainer has no {hook.name} any more, which lowtide overrides: {hook.reason}"
    taken = tuple(name for name in inspect.signature(own).parameters if name != "self")
    expected = taken if hook.parameters is None else hook.parameters
    assert taken == expected, f"Trainer.{hook.name} takes {taken}, and lowtide's passes {expected} on"
    caller = getattr(Trainer, hook.called_by, None)
    assert caller is not None, f"transformers.Trainer has no {hook.called_by} any more, which called {hook.name}"
    assert hook.name in called_in(caller), f"Trainer.{hook.called_by} no longer calls {hook.name}: {hook.reason}"


@pytest.mark.parametrize("name", USED)
def test_the_trainer_still_has_what_is_used(name):
    source = inspect.getsource(Trainer)
    known = hasattr(Trainer, name) or re.search(rf"self\.{name}\b.*=", source)
    assert known, f"transformers.Trainer has no {name} any more: {USED[name]}"


def names_of_trainer() -> set[str]:
    return set(dir(Trainer)) | set(re.findall(r"self\.(_[a-z]\w*)\s*[:=]", inspect.getsource(Trainer)))


def test_all_that_is_overridden_is_listed():
    listed, own = {hook.name for hook in HOOKS} | PUBLIC, set(dir(Trainer))
    found = {
        function.name
        for kind in lowtide_trainers()
        for function in kind.body
        if isinstance(function, ast.FunctionDef) and function.name in own and not function.name.startswith("__")
    }
    assert found == listed, f"compat.transformers.HOOKS lacks {found - listed}, or lists {listed - found} in vain"


def test_all_private_names_of_the_trainer_are_listed():
    listed = {hook.name for hook in HOOKS} | USED.keys()
    names = {name for name in names_of_trainer() if re.match("_[a-z]", name)}
    found = {
        node.attr
        for kind in lowtide_trainers()
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert found <= listed, f"compat.transformers.USED lacks {found - listed}"


def lowtide_trainers() -> list[ast.ClassDef]:
    """The classes of `lowtide.trainers` that are part of a Trainer."""
    for module in pkgutil.walk_packages([str(TRAINERS)], "lowtide.trainers."):
        importlib.import_module(module.name)
    names, left = {"Trainer"}, Trainer.__subclasses__()
    while left:
        kind = left.pop()
        if kind.__name__ not in names and kind.__module__.startswith("lowtide."):
            names.add(kind.__name__)
            left += [*kind.__bases__, *kind.__subclasses__()]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in TRAINERS.rglob("*.py")]
    return [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and is_trainer(node, names)
    ]


def is_trainer(node: ast.ClassDef, names: set[str]) -> bool:
    return node.name in names or any(isinstance(base, ast.Name) and base.id in names for base in node.bases)


def test_a_model_says_how_it_attends_and_what_it_does_not_save(model):
    model.set_attn_implementation("eager")
    attends = inside.attention_implementation(model.config)
    assert attends == "eager", "PretrainedConfig._attn_implementation is not the name of the attention function"
    known = hasattr(model, "_keys_to_ignore_on_save")
    assert known, "PreTrainedModel has no _keys_to_ignore_on_save any more"
    model._keys_to_ignore_on_save = ["left_out"]
    assert inside.names_not_saved(model) == {"left_out"}


def test_adapters_in_a_folder_are_seen(model):
    assert not inside.has_loaded_adapters(model)
    from peft import LoraConfig

    try:
        model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    except ValueError as error:  # 5.24 takes PEFT from 0.22 on
        pytest.skip(str(error))
    assert inside.has_loaded_adapters(model), "transformers notes adapters otherwise than by _hf_peft_config_loaded"
    other = torch.nn.Linear(1, 1)
    inside.note_loaded_adapters(other)
    assert inside.has_loaded_adapters(other)


def test_a_mixture_has_the_loss_of_its_file():
    config = MixtralConfig(**TINY, num_local_experts=2, num_experts_per_tok=1, num_key_value_heads=2)  # type: ignore[arg-type]
    mixture = MixtralForCausalLM(config)
    outputs = mixture(torch.ones(1, 3, dtype=torch.long), output_router_logits=True)
    loss = inside.load_balancing_loss(mixture, outputs.router_logits, 2, 1, None)
    message = "load_balancing_loss_func of a model's file is no longer its auxiliary loss"
    torch.testing.assert_close(loss, outputs.aux_loss, msg=message)


def test_layers_are_checkpointed_by_the_function_that_is_set(model):
    enable = getattr(model.train(), "activation_checkpointing_enable", None)  # 5.20 has the older name
    (enable or model.gradient_checkpointing_enable)()
    layers = inside.checkpointed_layers(model)
    assert len(layers) == 2, "the layers of a Llama are no GradientCheckpointingLayer any more"
    ran = []

    def checkpoint(forward, *args):
        ran.append(forward)
        return forward(*args)

    for layer in layers:
        inside.checkpoint_by(layer, checkpoint)
    model(torch.ones(1, 3, dtype=torch.long))
    assert len(ran) == 2, "a layer is not checkpointed by its _gradient_checkpointing_func any more"
    assert inside.run_checkpointed(layers[0], lambda x: x + 1, 1) == 2


def test_a_layer_has_a_forward_without_its_wrapper(model):
    layer = model.model.layers[0]
    plain = inside.plain_forward(layer)
    assert "hidden_states" in inspect.signature(plain).parameters
    read = plain.__code__.co_names
    assert "gradient_checkpointing" not in read, f"a layer is checkpointed by another function than {inside.WRAPPER}"


def test_options_that_are_mappings_are_listed(tmp_path):
    listed = inside.dict_fields(TrainingArguments)
    assert "gradient_checkpointing_kwargs" in listed, "TrainingArguments._VALID_DICT_FIELDS lists other things"
    assert "_VALID_DICT_FIELDS" in inspect.getsource(TrainingArguments.__post_init__), (
        "TrainingArguments no longer reads _VALID_DICT_FIELDS as it is made, so that a subclass cannot extend it"
    )
    config = TrainingArguments(str(tmp_path), use_cpu=True)
    inside.place_on(config, torch.device("meta"))
    assert config.device == torch.device("meta"), "TrainingArguments.device is no longer _setup_devices"


def test_a_parser_takes_its_fields_from_add_field():
    @dataclass
    class Options:
        rate: float = field(default=0.5)

    class Doubled(inside.FieldParser):
        def add_field(self, parser, field):
            seen.append(field.name)
            super().add_field(parser, field)

    seen: list[str] = []
    (options,) = Doubled([Options]).parse_args_into_dataclasses(["--rate", "2"])  # type: ignore[arg-type]
    assert options.rate == 2
    assert seen == ["rate"], "HfArgumentParser no longer calls _parse_dataclass_field for each field"


def test_the_trainer_says_whose_schedule_it_has(model, tmp_path):
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    trainer.create_optimizer_and_scheduler(num_training_steps=2)
    assert inside.made_own_schedule(trainer), "Trainer._created_lr_scheduler is not set for its own schedule"


def test_the_trainer_asks_whether_parameters_are_on_several_meshes():
    assert "has_mixed_dtensor" not in vars(Trainer), "it is no name of the module any more"
    source = inspect.getsource(inspect.getmodule(Trainer))
    if "has_mixed_dtensor" in source:
        with groups_as_on_one_rank():
            assert not inspect.getmodule(Trainer).has_mixed_dtensor([torch.ones(1)])
    else:
        assert "by_mesh" not in source, "the Trainer makes groups by mesh in another way"


def test_a_vision_tower_takes_what_is_worked_out_of_the_sizes_of_images():
    tower = vision_model().model.visual
    inside.set_attention(tower.config, "eager")
    assert inside.attention_implementation(tower.config) == "eager", "_attn_implementation_internal does not set it"
    grid = torch.tensor([[1, 4, 6], [1, 2, 2]])
    pixels = torch.randn(28, 96)
    expected = tower(pixels, grid_thw=grid).pooler_output
    layout = inside.packed_layout(tower, grid)
    nowhere = torch.zeros_like(grid)  # all that is read of the sizes is given
    found = tower(pixels, grid_thw=nowhere, **layout).pooler_output
    torch.testing.assert_close(found, expected, msg=lambda text: f"the tower reads the sizes in another way: {text}")


@pytest.mark.parametrize("masks", [True, False])
def test_packed_rows_are_looked_for_only_where_masks_are_wanted(masks, model, monkeypatch):
    """A forward without a mask asks for this function by its name in the module, and reads what it says."""
    asked: list[bool] = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: asked.append(True))
    find_packed_rows_where(lambda: masks)
    model(torch.tensor([[1, 2, 3]]), use_cache=False)
    assert bool(asked) is masks


def test_a_weight_that_is_declared_tied_is_saved_once(model, tmp_path):
    model.add_module("other", torch.nn.Embedding(16, 8))
    model.other.weight = model.model.embed_tokens.weight
    with pytest.raises(RuntimeError, match="shared tensors"):
        model.save_pretrained(tmp_path)
    inside.declare_tied(model, {"other.weight": "model.embed_tokens.weight"})
    model.save_pretrained(tmp_path)
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        names = {*file.keys()}
    assert "model.embed_tokens.weight" in names, "save_pretrained leaves out the wrong one of two tied weights"
    assert "other.weight" not in names


def test_checkpoints_are_called_as_transformers_calls_them():
    assert (CHECKPOINT, TRAINER_STATE) == (PREFIX_CHECKPOINT_DIR, TRAINER_STATE_NAME)


def test_which_modules_of_recurrent_families_hand_no_keyword_arguments_on():
    """`engine.layers.mixers` gives them the plan as their attention mask."""
    told = {
        (mamba.MambaModel, True),
        (mamba.MambaBlock, True),
        (mamba.MambaMixer, False),
        (jamba.JambaMambaDecoderLayer, True),
        (jamba.JambaModel, False),
        (bamba.BambaModel, False),
    }
    assert {(kind, inside.drops_keywords(kind)) for kind, _ in told} == told
