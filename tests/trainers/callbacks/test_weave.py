"""`WeaveCallback`, with a module in weave's place that keeps what is logged."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from lowtide import WeaveCallback
from lowtide.trainers.callbacks.log_completions import prompts_of, write
from tests.support.runs.talking import trainer

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)


@pytest.fixture
def weave(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Weave, as far as the callback calls it; `logged` has all that it was told."""
    logged: list[Any] = []

    class Prediction:
        def log_score(self, **told: Any) -> None:
            logged.append(("score", told))

        def finish(self) -> None:
            logged.append("finished")

    class EvaluationLogger:
        def __init__(self, **told: Any) -> None:
            logged.append(("begun", told))

        def log_prediction(self, **told: Any) -> Prediction:
            logged.append(("prediction", told))
            return Prediction()

        def log_summary(self, told: Any) -> None:
            logged.append(("summary", told))

        def finish(self) -> None:
            logged.append("all finished")

    clients: list[str] = []
    made = SimpleNamespace(EvaluationLogger=EvaluationLogger, init=clients.append, logged=logged, clients=clients)
    context = SimpleNamespace(get_weave_client=lambda: clients[0] if clients else None)
    monkeypatch.setitem(sys.modules, "weave", made)
    monkeypatch.setitem(sys.modules, "weave.trace.context.weave_client_context", context)
    return made


@pytest.mark.parametrize("scored", [True, False])
def test_each_completion_is_a_prediction(scored, weave, tmp_path):
    made = trainer(tmp_path, disable_tqdm=True, eval_strategy="no")
    scorers = {"length": lambda prompt, completion: float(len(completion))} if scored else None
    callback = WeaveCallback(made, "project", scorers, GREEDY, num_prompts=3, model_name="tiny")
    prompts = prompts_of(made.eval_dataset, made.processing_class)[:3]
    expected = write(made.model, made.processing_class, prompts, GREEDY, 8)
    made.add_callback(callback)
    made.evaluate()
    assert weave.clients == ["project"]
    kinds = {name: [each[1] for each in weave.logged if each[0] == name] for name in ("begun", "prediction", "score")}
    (begun,) = kinds["begun"]
    assert (begun["model"], begun["dataset"], begun["eval_attributes"]["training_step"]) == ("tiny", "eval_dataset", 0)
    assert [(each["inputs"]["prompt"], each["output"]) for each in kinds["prediction"]] == list(
        zip(prompts, expected, strict=True)
    )
    assert weave.logged.count("finished") == 3
    scores = [float(len(each)) for each in expected] if scored else []
    assert [each["score"] for each in kinds["score"]] == scores
    if scored:
        means = {"avg_length": pytest.approx(sum(scores) / 3)}
        assert weave.logged[-1] == ("summary", {"total_predictions": 3, "successful_predictions": 3, **means})
    else:
        assert weave.logged[-1] == "all finished"


def test_what_is_missing_is_said(weave, tmp_path, monkeypatch):
    made = trainer(tmp_path, disable_tqdm=True, eval_strategy="no")
    monkeypatch.setitem(sys.modules, "wandb", None)
    made.add_callback(WeaveCallback(made, generation_config=GREEDY, num_prompts=1))
    with pytest.raises(ValueError, match="give project_name, or call weave"):
        made.evaluate()
    monkeypatch.setitem(sys.modules, "weave", None)
    with pytest.raises(ImportError, match="WeaveCallback needs weave: pip install weave"):
        WeaveCallback(made)
