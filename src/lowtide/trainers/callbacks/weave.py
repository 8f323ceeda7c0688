"""`WeaveCallback`: what the model writes to the prompts of an evaluation, as predictions in Weights & Biases' Weave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from transformers import GenerationConfig, TrainerCallback

from lowtide.run.inputs.loading import model_name
from lowtide.trainers.callbacks.log_completions import eval_prompts, written_pairs


class WeaveCallback(TrainerCallback):
    """Writes completions of the evaluation set's prompts at each evaluation, and logs them by Weave's EvaluationLogger,
    each with its scores if there are `scorers`. Writing does not change the training.

    Args:
        trainer: whose `eval_dataset` has prompts, as for `LogCompletionsCallback`.
        project_name: of Weave; by default the client that there is, else the project of wandb's run.
        scorers: by name, functions of a prompt and a completion, both texts, to a number.
        generation_config: how completions are written; by default as the model's own says.
        num_prompts: the first so many of the prompts; by default all.
        dataset_name: what Weave calls the prompts.
        model_name: what it calls the model; by default the name that this was loaded by.

    Raises:
        ImportError: weave is not installed.
        ValueError: there are no prompts; later, no project is known.
    """

    def __init__(
        self,
        trainer: Any,
        project_name: str | None = None,
        scorers: Mapping[str, Callable[[str, str], float]] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ) -> None:
        try:
            self.weave: Any = import_module("weave")
        except ImportError as error:
            raise ImportError("WeaveCallback needs weave: pip install weave") from error
        self.eval_dataset = eval_prompts(trainer, type(self).__name__, num_prompts)
        self.trainer, self.project_name, self.scorers = trainer, project_name, dict(scorers or {})
        self.generation_config, self.dataset_name, self.model_name = generation_config, dataset_name, model_name
        self._last_step: int | None = None

    def _begin(self) -> None:
        """Finds Weave's client, or makes one."""
        context = import_module("weave.trace.context.weave_client_context")
        if context.get_weave_client() is None:
            self.weave.init(self.project_name or _project_of_wandb())

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._last_step:
            return
        self._last_step = state.global_step
        pairs = written_pairs(self.trainer, self.eval_dataset, self.generation_config, args.per_device_eval_batch_size)
        if self.trainer.accelerator.is_main_process:
            self._log(state.global_step, pairs)

    def _log(self, step: int, pairs: list[tuple[str, str]]) -> None:
        self._begin()
        name = self.model_name or model_name(self.trainer.model) or "model"
        config = None if self.generation_config is None else self.generation_config.to_dict()
        about = {"training_step": step, "model_name": name, "generation_config": config}
        logger = self.weave.EvaluationLogger(model=name, dataset=self.dataset_name, eval_attributes=about)
        sums = dict.fromkeys(self.scorers, 0.0)
        for prompt, completion in pairs:
            logged = logger.log_prediction(inputs={"prompt": prompt}, output=completion)
            for scorer, function in self.scorers.items():
                score = function(prompt, completion)
                logged.log_score(scorer=scorer, score=score)
                sums[scorer] += score
            logged.finish()
        if not self.scorers:
            logger.finish()
            return
        means = {f"avg_{scorer}": total / len(pairs) for scorer, total in sums.items()}
        logger.log_summary({"total_predictions": len(pairs), "successful_predictions": len(pairs), **means})


def _project_of_wandb() -> str:
    """The project of wandb's run, as `entity/project`.

    Raises:
        ValueError: there is no run.
    """
    try:
        run = import_module("wandb").run
    except ImportError:
        run = None
    if run is None:
        raise ValueError("WeaveCallback knows no project: give project_name, or call weave.init('PROJECT') before")
    return f"{run.entity}/{run.project}"
