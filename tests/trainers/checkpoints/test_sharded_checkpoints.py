"""Checkpoints in a file a rank: what they hold, what resumes from them, and what `lowtide merge` makes of them."""

from __future__ import annotations

import gc
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.main import main
from lowtide.engine.weights.loading import load_model
from lowtide.engine.weights.sharded.shard_files import WeightFiles, shards_in, write_shard
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import whole_of
from lowtide.run.options.sharding import sharding_of
from lowtide.trainers.checkpoints import whole
from lowtide.trainers.checkpoints.shards import load_weights, own_shard
from lowtide.trainers.checkpoints.soundness import damage
from tests.support.marks import slow_but
from tests.support.matrix import matrix
from tests.support.memory.live_bytes import LivingBytes
from tests.support.ranks.processes import run_ranks
from tests.support.ranks.sharded_training import assert_near, meeting_place, rank_of, trained

FSDP = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
SMALL = {"reduce_bucket_size": 20_000, "stage3_param_persistence_threshold": 100}
ZERO = {
    "deepspeed": {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False, **SMALL}},
}
SAVING = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear", "max_steps": 4, "logging_steps": 1}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": "tied"},
    "experts": {"model": "mixtral", "router_aux_loss_coef": 0.0},
}
LORA = {"LoRA": {"lora": True}}


def run(folder: Path, ranks: int, start: Path | None = None, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of four steps with a checkpoint every second; from another run's first, if given."""
    begun = None if start is None else str(start / "checkpoint-2")
    return trained("SFT", ranks, folder, checkpoint=begun, save_to=folder / "last", **SAVING, **options)[:2]


def run_on_ranks(rank: int, folder: str, ranks: int, names: list[str], engine: dict, start: str | None) -> None:
    place = Path(folder)
    with rank_of(place, rank, ranks):
        for name in names:
            begun = None if start is None else place / f"{start} {name}"
            found = run(place / f"{ranks} {name}", ranks, begun, **(MODELS | LORA)[name], **engine)
            if start is None:
                again = run(
                    place / f"again {name}", ranks, place / f"{ranks} {name}", **(MODELS | LORA)[name], **engine
                )
                assert all(torch.equal(again[1][key], value) for key, value in found[1].items()), name
            if rank == 0:
                torch.save(found, place / f"{ranks} {name}.pt")


def on_ranks(folder: Path, ranks: int, names: list[str], engine: dict, start: str | None = None) -> Path:
    run_ranks(run_on_ranks, str(meeting_place(folder)), ranks, names, engine, start, ranks=ranks)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, which resumed to equal bits."""
    return on_ranks(tmp_path_factory.mktemp("runs"), 2, ["plain"], FSDP)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the other models."""
    return on_ranks(tmp_path_factory.mktemp("others"), 2, ["tied", "experts", "LoRA"], FSDP)


@pytest.fixture(params=slow_but(["plain"], MODELS))
def one(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """The name of a model, and the folder of its runs."""
    return request.param, request.getfixturevalue("runs" if request.param == "plain" else "others")


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "2 plain", tmp_path / "run"))


def merged(checkpoint: Path, output: Path, *words: str) -> Any:
    assert main(["merge", "--checkpoint", str(checkpoint), "--output_dir", str(output), *words]) == 0
    return AutoModelForCausalLM.from_pretrained(output, dtype="auto")


def test_merge_makes_the_model_that_was_trained(one, tmp_path, capsys):
    name, runs = one
    _, weights = torch.load(runs / f"2 {name}.pt")
    model = merged(runs / f"2 {name}" / "checkpoint-4", tmp_path / "merged")
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], value) for key, value in weights.items())
    model.save_pretrained(tmp_path / "saved")  # as transformers names the weights
    names = {path.name: load_file(path).keys() for path in (tmp_path / "saved").glob("*.safetensors")}
    assert names == {path.name: load_file(path).keys() for path in (tmp_path / "merged").glob("*.safetensors")}
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size > 0
    last = merged(runs / f"2 {name}" / "last", tmp_path / "last", "--dtype", "bfloat16")
    assert all(torch.equal(p, weights[key].bfloat16()) for key, p in last.named_parameters())


def test_one_process_goes_on_from_it(one, tmp_path):
    name, runs = one
    losses, weights = run(tmp_path, 1, runs / f"2 {name}", **MODELS[name])
    expected, after = torch.load(runs / f"2 {name}.pt")
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_near(weights, after, 1e-5)


@pytest.mark.slow
def test_four_ranks_go_on_from_it(others, tmp_path):
    shutil.copytree(others, tmp_path, dirs_exist_ok=True)
    on_ranks(tmp_path, 4, ["tied", "experts"], FSDP, start="2")
    for name in ("tied", "experts"):
        losses, weights = torch.load(tmp_path / f"4 {name}.pt")
        expected, after = torch.load(others / f"2 {name}.pt")
        assert losses == pytest.approx(expected, rel=1e-6)
        assert_near(weights, after, 1e-5)


def load_into_split_layers(rank: int, folder: str, start: str) -> None:
    with rank_of(Path(folder), rank, 2):
        options = {"tensor": 2, "max_steps": 2, "resume_without_states": True}
        _, weights, _ = trained("SFT", 2, Path(folder), checkpoint=start, **options)
        with WeightFiles(shards_in(Path(start))) as files:
            assert all(torch.equal(weights[name], files.rows(name)) for name in files.shapes)


@pytest.mark.slow
def test_ranks_that_split_layers_take_its_weights(copied, tmp_path):
    for path in (copied / "checkpoint-2" / "manifest.json", *copied.glob("checkpoint-2/optimizer-*")):
        path.unlink()  # the states cannot be cut anew for them
    run_ranks(load_into_split_layers, str(meeting_place(tmp_path)), str(copied / "checkpoint-2"))


@pytest.mark.slow
def test_adapters_are_saved_whole(others):
    for folder in ("checkpoint-4", "last"):
        assert (others / "2 LoRA" / folder / "adapter_model.safetensors").is_file()
        assert not shards_in(others / "2 LoRA" / folder)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
def test_a_run_of_zero_3_resumes_and_merges_too(tmp_path):
    on_ranks(tmp_path, 2, ["plain", "experts"], ZERO)
    for name in ("plain", "experts"):
        _, weights = torch.load(tmp_path / f"2 {name}.pt")
        model = merged(tmp_path / f"2 {name}" / "last", tmp_path / f"merged {name}")
        assert all(torch.equal(p, weights[key]) for key, p in model.named_parameters())


def test_torch_reads_the_files(runs):
    with WeightFiles(shards_in(runs / "2 plain" / "last")) as files:
        wanted = {name: files.rows(name) for name in files.shapes}
        found = {name: torch.zeros_like(value) for name, value in wanted.items()}
        load(found, storage_reader=HuggingFaceStorageReader(str(runs / "2 plain" / "last")), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# -- memory ----------------------------------------------------------------------------------------------------------


def deep() -> Any:
    """A model of many small weights."""
    config = matrix.build("SFT", 64).config
    config.num_hidden_layers = 16
    return AutoModelForCausalLM.from_config(config)


def save_and_load(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        for engine in (FSDP, ZERO) if find_spec("deepspeed") else (FSDP,):
            trainer = matrix.make("SFT", model=deep(), max_steps=1, **engine)
            before = {name: whole_of(p).clone() for name, p in trainer.model.named_parameters()}
            total, largest = (f(p.nbytes for p in before.values()) for f in (sum, max))
            assert largest < 0.05 * total
            with LivingBytes() as counted:
                with counted.during("saving"):
                    name, rows = own_shard(trainer.model)
                    write_shard(place / name, rows)
                gathered = 0 if engine is FSDP else total / 2 + largest  # ZeRO's parts are no rows
                assert counted.peaks["saving"] - counted.living() <= gathered + 1000
                del rows
            gc.collect()
            torch.distributed.barrier()
            for parameter in trainer.model.parameters():
                (parameter.to_local() if engine is FSDP else parameter.ds_tensor).data.zero_()
            with LivingBytes() as counted, counted.during("loading"):
                load_weights(trainer.model, shards_in(place))
            assert counted.peaks["loading"] <= total / 2 + 3 * largest
            assert all(torch.equal(whole_of(p), before[name]) for name, p in trainer.model.named_parameters())
            torch.distributed.barrier()


def test_no_rank_holds_a_whole_model_while_it_saves_and_loads(tmp_path):
    run_ranks(save_and_load, str(meeting_place(tmp_path)))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def fail_to_write(rank: int, folder: str) -> None:
    place = Path(folder)
    with rank_of(place, rank, 2):
        trainer = matrix.make("SFT", output_dir=str(place / "run"), max_steps=2, **{**FSDP, "save_steps": 1})
        failing = mock.patch.object(whole, "write_shard", side_effect=OSError(28, "No space left on device"))
        with failing if rank == 1 else mock.patch.object(whole, "write_shard", wraps=write_shard):
            said = "the disk is full" if rank == 1 else "another rank could not write its part"
            with pytest.raises(ValueError, match=said):
                trainer.save_model(str(place / "model"))
            trainer.args.save_strategy = trainer.args.save_strategy.__class__("steps")
            with pytest.raises(ValueError, match=r"step 1: the checkpoint could not be written .*" + said):
                trainer.train()
        torch.distributed.barrier()
        assert not list((place / "run").glob("checkpoint-*"))


def test_a_rank_that_cannot_write_its_part_ends_all_and_leaves_no_checkpoint(tmp_path):
    run_ranks(fail_to_write, str(meeting_place(tmp_path)))


def test_a_missing_or_damaged_file_is_named(copied, tmp_path, capsys):
    checkpoint = copied / "checkpoint-2"
    second = checkpoint / "shard-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    words = ["merge", "--checkpoint", str(checkpoint), "--output_dir", str(tmp_path / "out")]
    for sealed in (True, False):
        if not sealed:
            (checkpoint / "manifest.json").unlink()
            second.unlink()
        said = "bytes are not those" if sealed else "it is missing"
        assert said in damage(checkpoint)[second.name]
        with pytest.raises(ValueError, match=f"{second.name}: .*{said}"):
            run(tmp_path / "again", 1, copied)
        assert main(words) == 2
        assert second.name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match="checkpoint-2 is of another model: 6 of the model's 27 weights"):
        run(tmp_path, 1, runs / "2 plain", model="tied")
    with pytest.raises(ValueError, match="holds a whole model, and this run trains adapters"):
        run(tmp_path, 1, runs / "2 plain", lora=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "nowhere"], "--checkpoint: there is no folder 'nowhere'"),
        (["--checkpoint", "."], "has no model in a file for each rank: take checkpoint-4"),
        (["--checkpoint", "whole"], "it holds a whole model, which loads as it is"),
        (["--checkpoint", "last", "--output_dir", "full"], "--output_dir full is not empty"),
        (["--checkpoint", "last", "--model", "m"], "--model goes with --adapter"),
        (["--checkpoint", "last", "--adapter", "a"], "not allowed with argument"),
        (["--checkpoint", "other"], "does not hold the weights that its config.json describes"),
    ],
)
def test_what_cannot_be_merged_is_said(copied, monkeypatch, capsys, words, message):
    monkeypatch.chdir(copied)
    for folder, file in {"whole": "model.safetensors", "full": "file"}.items():
        Path(folder).mkdir()
        Path(folder, file).touch()
    shutil.copytree("last", "other")
    config = Path("other", "config.json")
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    given = {"--output_dir": "out", **dict(zip(words[::2], words[1::2], strict=True))}
    assert main(["merge", *(word for pair in given.items() for word in pair)]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_loading_it_names_the_command(runs):
    with pytest.raises(ValueError, match=r"lowtide merge --checkpoint .*last --output_dir NEW"):
        load_model(str(runs / "2 plain" / "last"))


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "gathers"),
    [
        (FSDP["fsdp_config"], False),
        ({"version": 2, "fsdp_state_dict_type": "3"}, False),
        ({"version": 2, "state_dict_type": "FULL_STATE_DICT"}, True),
        ({"version": 2}, True),
        (ZERO["deepspeed"], False),
        ({"zero_optimization": {"stage": 3}}, True),
        ({"zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": False}}, True),
    ],
    ids=str,
)
def test_what_is_said_elsewhere_is_read(given, gathers):
    assert Sharding.read({"version": 2, **given}, devices=2).gather_on_save is gathers


def test_what_accelerate_says_is_read_and_what_is_not_built_is_refused(monkeypatch, tmp_path):
    config = matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, report_to="none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with monkeypatch.context() as environment:
        environment.setenv("ACCELERATE_USE_FSDP", "true")
        environment.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
        assert not sharding_of(config).gather_on_save
        environment.setenv("FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT")
        with pytest.raises(ValueError, match="'LOCAL_STATE_DICT' is not built"):
            sharding_of(config)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert sharding_of(config).gather_on_save
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false")
    assert not sharding_of(config).gather_on_save


def test_parts_are_not_pushed(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="push_to_hub=True pushes what is saved"):
        matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, push_to_hub=True, **FSDP)


def test_parts_of_layers_that_are_split_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    split = {**FSDP, "parallelism_config": {"tp_size": 2}}
    with pytest.raises(ValueError, match="with tp_size=2 ranks hold other parts"):
        matrix.classes("SFT")[1](output_dir=str(tmp_path), use_cpu=True, **split)
