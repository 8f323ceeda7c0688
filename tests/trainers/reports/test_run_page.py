"""`report.html` says what a run was and came to, in one file that asks nothing of the network."""

from __future__ import annotations

import re

import pytest
from transformers import TrainerCallback

from lowtide.trainers.reports.run_page import PAGE, RunPage
from tests.support.runs.small_runs import small, trained


def empty(**given) -> RunPage:
    nothing = {"facts": {}, "logs": [], "lines": [], "raised": {}, "states": {}, "ledger": [], "settings": {}}
    return RunPage(**{"title": "run", "about": "what", "versions": {}, **nothing, **given})


def test_a_run_leaves_its_page(tmp_path):
    trainer = trained(tmp_path / "run", max_steps=2, logging_steps=1, save_strategy="no", learning_rate=0.0125)
    found = (tmp_path / "run" / PAGE).read_text()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(re.findall(r"<polyline", found)) == 1
    for said in (
        f"{losses[-1]:.4g}",
        f"{trainer.ledger.scored_tokens:,}",
        "learning_rate</td><td>0.0125",
        "peak after",
    ):
        assert said in found
    assert str(tmp_path) not in found
    assert not re.search(r"(src|href)=|https?://", found)


class Stops(TrainerCallback):
    """Ends a run in its third step, as Ctrl-C or an error does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step == 2:
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_a_run_that_ended_early_leaves_its_page_too(error, tmp_path):
    trainer = small(tmp_path / "run", max_steps=5, logging_steps=1, save_strategy="no")
    trainer.add_callback(Stops(error))
    with pytest.raises(type(error)):
        trainer.train()
    found = (tmp_path / "run" / PAGE).read_text()
    assert "<dd>2 of 5</dd>" in found
    assert len(re.findall(r'points="\S+ \S+"', found)) == 1


def test_a_curve_goes_from_its_first_step_to_its_last_between_its_extremes():
    logs = [{"loss": 3.0, "step": 2}, {"loss": 1.0, "step": 4}, {"eval_loss": 2.0, "step": 6}]
    html = empty(logs=logs).html()
    assert re.findall(r'points="([^"]*)"', html) == ["0.00,0.00 50.00,100.00", "100.00,50.00"]
    assert "reward" not in html


def test_one_number_is_a_point_and_none_is_no_plot():
    assert 'points="0.00,100.00"' in empty(logs=[{"reward": 1.0, "step": 3}]).html()
    assert "<figure" not in empty().html()


def test_what_comes_from_a_run_is_escaped():
    nasty = "<script>x</script>"
    html = empty(
        title=nasty,
        about=nasty,
        facts={nasty: nasty},
        lines=[(nasty, nasty)],
        ledger=[(nasty, "1", nasty)],
        settings={nasty: nasty},
        logs=[{"eval_runtime": 1.0, nasty: 1.0, "step": 1}],
    ).html()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
