"""Optimizers that a user passes, or their arguments, are the ones that step; a second training is like the first."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PrinterCallback

from lowtide.memory.activations import checkpointing
from lowtide.memory.optimizers.compressed_adamw import CompressedAdamW
from lowtide.memory.optimizers.host_states import HostStates
from lowtide.memory.optimizers.states import state_sizes, states_of, wants_room
from lowtide.run import optimizers as run_optimizers
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.rehearsal import reserved_for_states
from lowtide.trainers.reports.start import StartReport
from tests.support.matrix.matrix import (
    TECHNIQUES,
    build,
    classes,
    folder,
    make,
    rows,
    tokenizer,
    watched,
    with_it,
)

COMMON = {"per_device_train_batch_size": 8, "max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none"}
COMMON |= {"save_strategy": "no", "disable_tqdm": True, "rehearsal": False, "lr_scheduler_type": "constant"}


def trainer(model, options: dict | None = None, **arguments):
    kind, config = classes("SFT")
    args = config(str(folder()), **COMMON, **(options or {}))
    made = kind(model=model, args=args, train_dataset=rows("SFT"), processing_class=tokenizer(), **arguments)
    made.remove_callback(PrinterCallback)
    return made


def test_groups_in_the_arguments_of_an_optimizer_are_its_groups():
    model = build("SFT", 64)
    head = [p for n, p in model.named_parameters() if "lm_head" in n]
    rest = [p for n, p in model.named_parameters() if "lm_head" not in n]
    given = {"params": [{"params": head, "lr": 7e-3}, {"params": rest, "lr": 1e-3}]}
    run = trainer(model, optimizer_cls_and_kwargs=(torch.optim.AdamW, given))
    run.train()
    assert [group["lr"] for group in run.optimizer.param_groups] == [7e-3, 1e-3]
    assert given["params"][0] == {"params": head, "lr": 7e-3}


def test_an_optimizer_beside_a_name_for_one_is_refused():
    model = build("SFT", 64)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"optim='adamw_compressed' .* `optimizers` has one, SGD.*leave one of them"):
        trainer(model, {"optim": "adamw_compressed"}, optimizers=(mine, None))


def test_a_class_of_optimizers_beside_a_name_for_one_is_refused():
    given = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ValueError, match=r"`optimizer_cls_and_kwargs` has one, SGD.*leave one of them"):
        trainer(build("SFT", 64), {"optim": "adamw_compressed"}, optimizer_cls_and_kwargs=given)


@pytest.mark.parametrize(("kind", "states"), [(torch.optim.SGD, None), (torch.optim.AdamW, 8)])
@pytest.mark.parametrize("as_class", [True, False])
def test_room_is_held_for_the_states_of_the_optimizer_that_is_given(kind, states, as_class):
    model = build("SFT", 64)
    given = {"optimizer_cls_and_kwargs": (kind, {})} if as_class else {"optimizers": (kind(model.parameters()), None)}
    run = trainer(model, **given)
    run.create_optimizer()
    expected = None if states is None else states * sum(p.numel() for p in model.parameters())
    assert sum(piece.nbytes for piece in reserved_for_states(run.runner)) == (expected or 0)
    [report] = [each for each in run.callback_handler.callbacks if isinstance(each, StartReport)]
    assert report.states.optimizer == expected


@pytest.mark.parametrize("at_home", [False, True])
def test_states_in_host_memory_are_not_moved_as_training_begins(at_home, monkeypatch):
    monkeypatch.setattr(run_optimizers, "wants_host_states", lambda args: at_home)
    run = make("SFT", optim="adamw_compressed")
    optimizer = run.create_optimizer()
    with mock.patch("accelerate.optimizer.move_to_device", side_effect=lambda states, device: states) as moved:
        run.accelerator.prepare(optimizer)
    assert moved.called != at_home


def test_embeddings_have_states_in_32_bits_beside_an_optimizer_in_8():
    pytest.importorskip("bitsandbytes")
    run = make("SFT", optim="adamw_8bit", max_steps=1, intermediate_size=160)
    rooms = {parameter: sum(sizes) for parameter, sizes in states_of(run.model, "adamw_8bit")}
    embedding, wide = run.model.get_input_embeddings().weight, run.model.model.layers[0].mlp.up_proj.weight
    run.train()
    for parameter, slack in ((embedding, 0), (wide, 4096)):  # of the codes, and of a scale for each block
        states = run.optimizer.state[parameter].values()
        kept = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim())
        assert 0 <= kept - rooms[parameter] <= slack


def test_paged_states_take_no_room_on_a_gpu():
    parameter = SimpleNamespace(is_cuda=True)
    optimizer = SimpleNamespace(state={}, param_groups=[{"params": [parameter]}], is_paged=True)
    assert not wants_room(optimizer)
    parameter.is_cuda = False
    assert wants_room(optimizer)


def test_an_optimizer_that_is_given_steps_and_its_states_are_where_the_options_say(monkeypatch):
    model = build("SFT", 64)
    mine = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = trainer(model, optimizers=(mine, None))
    run.train()
    assert run.optimizer.optimizer is mine
    monkeypatch.setattr(run_optimizers, "wants_host_states", lambda args: True)
    again = trainer(model, optimizers=(torch.optim.AdamW(model.parameters()), None))
    again.train()
    assert isinstance(again.optimizer.optimizer.host_states, HostStates)


def test_arguments_of_an_optimizer_that_it_does_not_know_are_refused():
    with pytest.raises(ValueError, match="optim_args"):
        make("SFT", optim="adamw_compressed", optim_args="betas=0.5")


def test_a_compressed_optimizer_sends_each_state_to_the_host_before_it_makes_the_next(monkeypatch):
    model = build("SFT", 64)
    optimizer = CompressedAdamW(model.parameters(), lr=0.1)
    there = []

    class Watched(HostStates):
        def __init__(self, inner) -> None:
            super().__init__(inner, offload=lambda parameter: True)

        def take_home(self, parameter) -> None:
            super().take_home(parameter)
            there.append(len(optimizer.state))

    monkeypatch.setattr(run_optimizers, "HostStates", Watched)
    monkeypatch.setattr(run_optimizers, "wants_host_states", lambda args: True)
    run_optimizers.settle_optimizer(optimizer, None, model)
    assert there == list(range(1, len(list(model.parameters())) + 1))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_stochastic", "adamw_stochastic_8bit"])
def test_a_rehearsal_holds_room_for_states_that_are_not_there_yet(optim):
    run = make("SFT", optim=optim)
    run.create_optimizer()
    assert wants_room(run.optimizer)
    wanted = sum(sum(state_sizes(p, optim)) for p in run.model.parameters())
    assert sum(piece.nbytes for piece in reserved_for_states(run.runner)) == wanted > 0


def test_the_room_for_muons_states_is_what_they_take():
    run = make("SFT", optim="muon")
    run.create_optimizer()
    room = sum(piece.nbytes for piece in reserved_for_states(run.runner))
    run.train()
    states = [value for state in run.optimizer.optimizer.state.values() for value in state.values()]
    assert room == sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.dim() > 0) > 0


@pytest.mark.slow
def test_states_that_do_not_fit_are_reported_before_the_first_step(monkeypatch):
    run = make("SFT", rehearsal=True)
    zeros = torch.zeros

    def full(*args, dtype=None, **kwargs):
        if dtype is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*args, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(OutOfMemory, match=r"states of AdamW take .*Train adapters"):
        run.train()
    assert run.state.global_step == 0


@pytest.mark.parametrize("name", ["checkpointing that keeps products", "activation offloading", "compiled layers"])
def test_a_second_training_has_the_techniques_of_the_first(name):
    technique = TECHNIQUES[name]
    run = make("SFT", **with_it(technique), max_steps=2)
    with torch.compiler.set_stance("force_eager"):
        first = watched(run)
        seen = [first.compiled, len(first.forwards), *first.layers]
        kept = [layer._gradient_checkpointing_func for layer in run.model.model.layers] if "keeps" in name else []
        run.run = type(first)(run, offload=first.offload)
        second = watched(run)
    assert [second.compiled, len(second.forwards), *second.layers] == seen
    for function, layer in zip(kept, run.model.model.layers, strict=False):
        assert function.keywords["context_fn"].args[0] == checkpointing.POLICIES["matmul"]
        again = layer._gradient_checkpointing_func
        assert again.keywords["context_fn"].args[0] == function.keywords["context_fn"].args[0]
    assert second.offload is None or second.offload.peak_offloaded_bytes > 0
    assert not any(hasattr(layer, "compiled_here") for layer in run.model.model.layers)
    assert "surviving" not in run.optimizer.step.__code__.co_name


def test_one_process_that_sees_several_gpus_trains_on_one(monkeypatch, caplog):
    from transformers import TrainingArguments

    from lowtide import SFTConfig

    seen = TrainingArguments.n_gpu.fget
    monkeypatch.setattr(SFTConfig, "n_gpu", property(lambda self: 4 if seen(self) == 0 else seen(self)))
    args = SFTConfig(str(folder()), use_cpu=True)
    assert args.n_gpu == 1
    assert "sees 4 GPUs and trains on the first of them: start with `torchrun --nproc_per_node 4`" in caplog.text


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    frozen = build("SFT", 64).requires_grad_(False)
    with pytest.raises(ValueError, match=r"every parameter is frozen: .* call requires_grad_\(True\)"):
        trainer(frozen)
    build("SFT", 64).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LORA).save_pretrained(tmp_path / "adapters")
    message = r"loaded for use only: .*PeftModel\.from_pretrained\(base_model, folder, is_trainable=True\)"
    with pytest.raises(ValueError, match=message):
        trainer(PeftModel.from_pretrained(build("SFT", 64), tmp_path / "adapters"))
    with pytest.raises(ValueError, match="has adapters already, and new ones are asked for"):
        trainer(str(tmp_path / "adapters"), peft_config=LORA)
    trainer(PeftModel.from_pretrained(build("SFT", 64), tmp_path / "adapters", is_trainable=True)).train()


def test_adapters_that_are_merged_are_not_trained_in_vain():
    model = get_peft_model(build("SFT", 64), LORA)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"\(default\) are merged into its weights, .* unmerge_adapter\(\) before"):
        trainer(model)
    model.unmerge_adapter()
    made = trainer(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made.train()
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_optimizer_that_holds_nothing_of_what_is_trained_is_refused():
    model = build("SFT", 64)
    others = torch.optim.SGD(build("SFT", 64).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"passed, SGD, holds none of the \d+ parameters that are trained"):
        trainer(model, optimizers=(others, None))
    with pytest.raises(ValueError, match="get_peft_model"):
        trainer(model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None), peft_config=LORA)
    trainer(model, optimizers=(torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), None)).train()
