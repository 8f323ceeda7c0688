"""What an option or a folder needs beside lowtide is asked for by name, before a model is loaded."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from lowtide import SFTConfig, SFTTrainer
from lowtide.cli.main import main
from lowtide.engine.weights.load_errors import to_install
from tests.support.matrix.matrix import build, rows, tokenizer

OPTIMIZERS = {
    "grokadamw": "grokadamw",
    "schedule_free_adamw": "schedulefree",
    "stable_adamw": "optimi",
    "adamw_torch_npu_fused": "torch_npu",
}


@pytest.fixture
def never_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("lowtide.engine.weights.loading.load_complete", load)


def config(folder: Path, **options: object) -> SFTConfig:
    return SFTConfig(output_dir=str(folder), max_steps=1, use_cpu=True, report_to="none", **options)  # type: ignore


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("never_loads")
def test_an_optimizer_names_its_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = OPTIMIZERS[name]
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    build("SFT", 64).save_pretrained(tmp_path / "model")
    message = f"optim='{name}' needs a package that is not installed: .*pip install .*{package}"
    with pytest.raises(ValueError, match=message):
        SFTTrainer(
            str(tmp_path / "model"),
            config(tmp_path / "run", optim=name),
            train_dataset=rows("SFT"),
            processing_class=tokenizer(),
        )


def adapters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of adapters that began as LoftQ makes them, which needs scipy; it is as if that were not installed."""
    build("SFT", 64).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    model = build("SFT", 64)
    model.name_or_path = str(folder / "base")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder / "adapters"))
    saved = folder / "adapters" / "adapter_config.json"
    said = {"init_lora_weights": "loftq", "loftq_config": {}, "base_model_name_or_path": str(folder / "base")}
    saved.write_text(json.dumps(json.loads(saved.read_text()) | said))
    monkeypatch.setitem(sys.modules, "scipy", None)
    return folder / "adapters"


@pytest.mark.usefixtures("never_loads")
def test_a_folder_of_adapters_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = adapters(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"the adapters in .* not installed: .*'scipy'.*pip install scipy"):
        SFTTrainer(str(folder), config(tmp_path), train_dataset=rows("SFT"), processing_class=tokenizer())


@pytest.mark.usefixtures("never_loads")
def test_adapters_that_are_merged_name_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = adapters(tmp_path, monkeypatch)
    assert main(["merge", "--adapter", str(folder), "--output_dir", str(tmp_path / "merged")]) != 0
    said = capsys.readouterr().err
    assert "pip install scipy" in said
    assert "Traceback" not in said


def test_the_command_that_installs_a_package_is_said_once():
    assert to_install(ImportError("Install it with `pip install x`")) == "Install it with `pip install x`"
    assert to_install(ModuleNotFoundError("No module named 'x.y'", name="x.y")).endswith("(pip install x)")
