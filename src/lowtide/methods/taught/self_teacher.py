"""The options of methods whose policy teaches itself, under the names that TRL's have in common."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.methods.online.rollouts import RolloutOptions
from lowtide.methods.shared.options import Following, StoredReference, check_whole_vocabulary
from lowtide.option import COUNT, POSITIVE, SHARE, option

MODES = ("sampled_token", "full_logits", "topk_logits")


@dataclass(kw_only=True)
class SelfTeacherOptions(RolloutOptions, StoredReference):
    """Of the methods whose policy teaches itself, under the names that TRL's have in common."""

    learning_rate: float = option(5e-5, "The initial learning rate.")
    disable_dropout: bool = option(True, "Train without dropout, so that student and teacher are comparable.")
    temperature: float = option(
        1.0, "Divisor of the logits: the student's in writing, and both models' in the loss.", POSITIVE
    )
    max_prompt_length: int | None = option(512, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int = option(256, "Most tokens of a completion.", COUNT)
    teacher_model_kind: str = option(
        "base",
        "Who teaches: the policy as it arrived (base), as it is (live), or a moving average of it (ema).",
        choices=["base", "live", "ema"],
    )
    teacher_update_rate: float = option(
        0.05, "How far the moving average moves towards the policy: 1 makes it the policy, and 0 leaves it.", SHARE
    )
    teacher_sync_steps: int = option(1, "Optimizer steps between two such moves.", COUNT)
    distillation_alpha: float = option(
        0.5,
        "Of the generalized Jensen-Shannon divergence: 0 is KL(teacher || student), 1 is KL(student || teacher).",
        SHARE,
    )
    distillation_mode: str = option(
        "topk_logits",
        "What is compared: whole distributions, those on the student's likeliest tokens, or the written token's "
        "log-probability.",
        choices=[*MODES],
    )
    distillation_topk: int | None = option(100, "How many tokens `topk_logits` compares.", COUNT)
    distillation_is_clip: float | None = option(
        2.0,
        "The most that a token counts for being likelier by now than when it was written, where weights changed since. "
        "None: each counts 1.",
        POSITIVE,
    )
    use_teacher_server: bool = option(
        False,
        "TRL's name: the server that writes has the live teacher. Here that is asked in this process, and "
        "`topk_logits` compares its likeliest tokens, as what a server would say.",
    )
    distillation_add_tail: bool = option(
        False, "`topk_logits` takes all other tokens as one more. False makes what is compared add up to 1."
    )

    @property
    def following(self) -> Following | None:
        if self.teacher_model_kind != "ema":
            return None
        return Following(self.teacher_update_rate, self.teacher_sync_steps, "teacher_model_kind='ema'")

    @property
    def is_live(self) -> bool:
        return self.teacher_model_kind == "live"

    @property
    def skipped(self) -> int:
        """Tokens at the start of a completion that nothing is learned of."""
        return 0

    def most_told(self, tokens: int) -> int:
        """Tokens at most of a teacher's prompt that has so many before anything is written."""
        return tokens

    def check_self_teaching(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: an option has no such value, or two options exclude each other.
        """
        self.check_rollouts()
        mode = self.distillation_mode
        if mode == "sampled_token" and self.distillation_alpha != 1:
            raise ValueError(
                f"distillation_mode='sampled_token' is of KL(student || teacher) alone, and distillation_alpha="
                f"{self.distillation_alpha:g}: set distillation_alpha=1, or another distillation_mode"
            )
        if mode == "topk_logits" and self.distillation_topk is None:
            raise ValueError("distillation_mode='topk_logits' requires distillation_topk: set it, such as to 100")
        if mode == "topk_logits":
            check_whole_vocabulary(self, "distillation_mode='topk_logits' looks for the likeliest of all tokens")
        if self.use_teacher_server:
            self._check_teacher_server()
        if self.follows and self.ref_model_storage != "same":
            raise ValueError(
                f"ref_model_storage={self.ref_model_storage!r} requires a frozen teacher, and "
                "teacher_model_kind='ema' moves it: leave one of them out"
            )

    def _check_teacher_server(self) -> None:
        """Refuses what the server that writes could not say of the policy, as TRL does, or says of other tokens."""
        asks = "use_teacher_server=True asks the server that writes, which has the policy as it is"
        if not self.served:
            raise ValueError(f"{asks}: set use_vllm=True and vllm_mode='server', or leave it out")
        if not self.is_live:
            raise ValueError(
                f"{asks}, and teacher_model_kind={self.teacher_model_kind!r} is another: set teacher_model_kind="
                "'live', or leave it out"
            )
        if self.distillation_mode == "full_logits" or getattr(self, "distillation_weight", 1.0) != 1:
            raise ValueError(
                f"{asks} and says how likely written tokens are, and its own likeliest: set distillation_mode="
                "'sampled_token' or 'topk_logits' and distillation_weight=1, or leave it out, which costs no memory "
                "and compares all tokens, or the student's likeliest"
            )

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        found = list(getattr(super(), "advice", []))
        if self.use_teacher_server:
            compares = ", on the teacher's likeliest tokens" if self.distillation_mode == "topk_logits" else ""
            found.append(
                "use_teacher_server=True asks no server: the policy as it is teaches, and says in this process how "
                f"likely tokens are{compares}, without the rounding of the server's copy, which writes alone"
            )
        return found
