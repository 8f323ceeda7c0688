"""Compilation is said while it happens: once as it begins, once when it is over; and its results have a folder."""

import os
from pathlib import Path

import pytest
import torch
import torch._dynamo

from lowtide.memory.kernels.compilation_log import FOLDER, CompilationLog, cache_folder, keep_compiled
from lowtide.memory.kernels.compiling import compile_layers
from tests.support.models.tiny_models import RaggedBatch, build, loss_of, prepared, tokens


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_compilation_is_said_once_as_it_begins_and_once_when_it_is_over(caplog, capsys):
    caplog.set_level("INFO")
    model = prepared(build())
    compile_layers(model, backend="aot_eager")
    log = CompilationLog(model, "2 layers with aot_eager")
    said = []
    for length in (5, 9, 13, 20):
        loss_of(model, RaggedBatch.from_segments([tokens(length), tokens(7)])).backward()
        said.append([record.message for record in caplog.records if record.name.endswith("compilation_log")])
    begin = "compiling 2 layers with aot_eager; forward and backward of the first steps wait for it"
    assert said[0] == [begin]
    assert len(said[-1]) == 2
    assert said[-1][1].startswith("compiled ")
    assert " graphs in " in said[-1][1]
    assert capsys.readouterr().err.count("compiling 2 layers") == 1
    log.remove()
    assert not model._forward_pre_hooks
    torch._dynamo.reset()
    before = len(caplog.records)
    loss_of(model, RaggedBatch.from_segments([tokens(6), tokens(7)]))
    assert len(caplog.records) == before


@pytest.mark.slow
def test_what_is_pending_is_said_at_the_end(caplog):
    caplog.set_level("INFO")
    model = prepared(build())
    compile_layers(model, backend="aot_eager")
    log = CompilationLog(model, "2 layers", quiet=True)
    loss_of(model, RaggedBatch.from_segments([tokens(6), tokens(7)])).backward()
    log.remove()
    assert "compiled " in caplog.records[-1].message


def test_the_folder_is_the_environments_or_one_that_stays(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
    keep_compiled()
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv(FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled()
    assert Path(os.environ[FOLDER]) == tmp_path / "lowtide" / "inductor"
    monkeypatch.delenv(FOLDER)
