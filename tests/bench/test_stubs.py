"""What editors know of configs and trainers is what the table of methods makes."""

import ast
import json
import subprocess
import sys

import pytest

from bench.stubs import OF_ALL, STUB, stub
from lowtide.cli.training.option_table import TABLE, table, written_options
from lowtide.cli.training.train import declared_options
from lowtide.methods import METHODS
from lowtide.run.options.configs import public_name
from lowtide.trainers.signatures import signature_of

RIGHT = """
from transformers.training_args import OptimizerNames
from lowtide import DPOConfig, DPOTrainer, GRPOTrainer, SFTConfig, SFTTrainer
SFTTrainer("m", None, compute_loss_func=print, callbacks=[], tokenizer=None)
DPOTrainer("m", None, DPOConfig("out"), train_dataset=None)
GRPOTrainer("m", [len], None, tools=[len])
SFTConfig("out", truncation_mode="keep_end", base_weights="stream", loss_type="mine.loss", optim="muon")
SFTConfig("out", optim=OptimizerNames.ADAMW_TORCH, save_strategy="best", lr_scheduler_type="cosine", ddp_backend=None)
loss: float = SFTTrainer("m").train().training_loss
SFTTrainer("m").model.save_pretrained("out")
"""
WRONG = """
from lowtide import DPOTrainer, GRPOTrainer, PretrainTrainer, SFTConfig, SFTTrainer
SFTTrainer("m", trian_dataset=None)
SFTTrainer("m", callbacks=3)
SFTTrainer("m", ref_model="m")
DPOTrainer("m", args="out")
PretrainTrainer("m", formatting_func=print)
GRPOTrainer("m", 3)
SFTConfig("out", truncation_mode="keep_stat")
SFTConfig("out", base_weights="streamed")
SFTConfig("out", lerning_rate=1e-4)
SFTConfig("out", optim="adamv")
SFTConfig("out", save_strategy="epochs")
SFTConfig("out", lr_scheduler_type="cosin")
SFTTrainer("m").train(resume_from_chekpoint=True)
print(SFTTrainer("m").train().traning_loss)
SFTTrainer("m").model.save_pretraned("out")
"""


def test_the_stub_is_that_of_the_table():
    assert STUB.read_text() == stub(), "python -m bench.stubs writes it anew"


def test_the_written_options_are_those_of_the_classes():
    declared = {name: declared_options(name) for name in METHODS}
    assert TABLE.read_text() == table(declared), "python -m bench.stubs writes it anew"
    assert {name: written_options(name) for name in METHODS} == declared


def test_the_stub_names_each_argument_of_each_trainer_and_in_its_order():
    classes = {each.name: each for each in ast.parse(stub()).body if isinstance(each, ast.ClassDef)}

    def keys(name: str) -> set[str]:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        return {ast.unparse(each.target) for each in classes[name].body if isinstance(each, ast.AnnAssign)}.union(
            *(keys(base) for base in bases)
        )

    for method in METHODS.values():
        (way,) = classes[f"{public_name(method)}Trainer"].bases
        (made,) = classes[ast.unparse(way)].body
        assert isinstance(made, ast.FunctionDef)
        positional = [each.arg for each in made.args.args[1:]]
        assert made.args.kwarg is not None
        kind = made.args.kwarg.annotation
        assert isinstance(kind, ast.Subscript)
        by_name = keys(ast.unparse(kind.slice))
        expected = [*signature_of(method).parameters]
        assert positional == expected[: len(positional)]
        assert by_name - OF_ALL == {*expected} - {*positional, "older"}


@pytest.mark.slow
def test_a_wrong_name_and_a_wrong_type_of_an_argument_are_errors_in_an_editor(tmp_path):
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(STUB.parents[2])]}))
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=500).stdout)
    wrong = {(each["file"].split("/")[-1], each["range"]["start"]["line"] + 1) for each in found["generalDiagnostics"]}
    assert wrong == {("wrong.py", number) for number in range(3, 1 + len(WRONG.splitlines()))}
