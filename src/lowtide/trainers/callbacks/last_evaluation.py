"""An evaluation of the trained model while trackers still listen: they close a run when training ends, and what came
later would be a run of its own."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

EVALUATED = "eval_"


class LastEvaluation(TrainerCallback):
    """Has the last step evaluated, whatever `eval_strategy` says."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = True


def last_evaluation(trainer: Any) -> dict[str, float]:
    """What the evaluation of the trained model found; made now where the last step was not evaluated, as in a run that
    stopped early, or where another checkpoint was loaded after it."""
    state = trainer.state
    found: dict[str, float] = {}
    if not trainer.args.load_best_model_at_end:
        for entry in state.log_history:
            if entry.get("step") == state.global_step:
                found |= {name: value for name, value in entry.items() if name.startswith(EVALUATED)}
    return found or trainer.evaluate()
