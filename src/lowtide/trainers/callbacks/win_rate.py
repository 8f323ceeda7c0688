"""`WinRateCallback`: how often a judge prefers what the model writes to what it wrote before training.

TRL had it until 1.0; scripts that were written for it run with the import changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import gather_object
from transformers import GenerationConfig, TrainerCallback

from lowtide.rollout.judges import SECOND, judge_pairs
from lowtide.trainers.callbacks.log_completions import eval_prompts, prompts_of, show, write

COLUMNS = ("step", "prompt", "reference", "completion", "winner")


class WinRateCallback(TrainerCallback):
    """Logs `eval_win_rate` at each evaluation: the share of the evaluation set's prompts for which a judge prefers the
    model's completion to the reference's. A pair that the judge cannot tell is no win.

    The reference is the trainer's `ref_model`, or without one the model as it is when training begins.

    Args:
        judge: of pairs, see `lowtide.rollout.judges`.
        trainer: whose `eval_dataset` has prompts, as for `LogCompletionsCallback`.
        generation_config: how completions are written.
        num_prompts: the first so many of the prompts; by default all.
        shuffle_order: handed to the judge.
        use_soft_judge: the judge takes `return_scores=True`, and gives for each pair the probability that the first
            completion is better; the mean of the model's is logged as `eval_avg_win_prob`.

    Raises:
        ValueError: there is no evaluation set, or it has no prompts.
    """

    def __init__(
        self,
        judge: Any,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        shuffle_order: bool = True,
        use_soft_judge: bool = False,
    ) -> None:
        self.eval_dataset = eval_prompts(trainer, type(self).__name__, num_prompts)
        self.judge, self.trainer, self.generation_config = judge, trainer, generation_config
        self.shuffle_order, self.use_soft_judge = shuffle_order, use_soft_judge
        self.ref_completions: list[str] = []
        """Of the prompts of this rank."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        reference = getattr(self.trainer, "ref_model", None)
        self.ref_completions = self._written(args, reference)
        if args.eval_on_start:
            return
        self._compare(args, state, self.ref_completions if reference is None else self._written(args))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.ref_completions:
            self._compare(args, state, self._written(args))

    def _written(self, args: Any, model: Any = None) -> list[str]:
        """What a model, by default the policy, writes after the prompts of this rank."""
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model_wrapped) if model is None else model
        with accelerator.split_between_processes(self._prompts()) as prompts:
            tokenizer = self.trainer.processing_class
            return write(model, tokenizer, prompts, self.generation_config, args.per_device_eval_batch_size)

    def _prompts(self) -> list[str]:
        return prompts_of(self.eval_dataset, self.trainer.processing_class)

    def _compare(self, args: Any, state: Any, completions: Sequence[str]) -> None:
        """Has the judge compare, and logs what it says of the pairs of all ranks."""
        with self.trainer.accelerator.split_between_processes(self._prompts()) as prompts:
            pairs = list(zip(self.ref_completions, completions, strict=True))
            choices, of_policy = self._judged(prompts, pairs)
            step = [str(state.global_step)] * len(prompts)
            names = ["policy" if each == SECOND else "reference" for each in choices]
            rows = [list(row) for row in zip(step, prompts, self.ref_completions, completions, names, strict=True)]
        choices, of_policy, rows = (gather_object(each) for each in (choices, of_policy, rows))
        logged = {"eval_win_rate": sum(each == SECOND for each in choices) / len(choices)}
        if self.use_soft_judge:
            logged["eval_avg_win_prob"] = sum(of_policy) / len(of_policy)
        self.trainer.log(logged)
        if self.trainer.accelerator.is_main_process:
            show("Win rate", COLUMNS, rows, args.report_to)

    def _judged(self, prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[list[int], list[float]]:
        """(the better completion of each pair; the probabilities of the policy's, where the judge gives any)."""
        if not self.use_soft_judge:
            return judge_pairs(self._in_order, prompts, pairs), []
        given = self.judge.judge(
            list(prompts), [list(pair) for pair in pairs], shuffle_order=self.shuffle_order, return_scores=True
        )
        of_policy = [1 - float(each) for each in given]
        if len(of_policy) != len(prompts):
            raise ValueError(
                f"the judge returned {len(of_policy)} probabilities for {len(prompts)} prompts: one for each"
            )
        return [int(each >= 0.5) for each in of_policy], of_policy

    def _in_order(self, prompts: list[str], completions: list[list[str]]) -> Any:
        return getattr(self.judge, "judge", self.judge)(prompts, completions, self.shuffle_order)
