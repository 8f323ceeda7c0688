"""GRPO whose completions a server writes beside training, under the names and with the defaults of TRL 1.16's
`trl.experimental.async_grpo`.

It is GRPO with `max_staleness` above 0 (`methods/online/ahead.py`), whose windows have a fixed order and are never
dropped. It deviates in the loss: TRL clips one ratio, of the policy to the weights that wrote. Here that ratio is two
factors: of the policy to the one that the window's turn came to, which is clipped, and of that to the weights that
wrote, which `vllm_importance_sampling_mode` bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lowtide.methods import METHODS
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, option
from lowtide.run.options.configs import config_class
from lowtide.run.options.training import default_of
from lowtide.trainers.online.trainer import OnlineTrainer
from lowtide.trainers.signatures import ONLINE, signature_of

GRPO = METHODS["grpo"]
ARGUMENTS = (
    *("model", "reward_funcs", "args", "train_dataset", "processing_class", "callbacks", "optimizers", "peft_config"),
    *("tools", "environment_factory"),
)
"""Of TRL's trainer, in its order."""
URL = "http://localhost:8000"
_Config: Any = config_class(GRPO)


@dataclass(kw_only=True, repr=False)
class AsyncGRPOConfig(_Config):
    """Options of `GRPOConfig` with the defaults of TRL's `AsyncGRPOConfig`, and those that TRL has there alone."""

    without_effect: ClassVar[dict[str, str]] = {
        **_Config.without_effect,
        "fork_threshold_tokens": "a conversation stays one row, with a segment for each context that it was written in",
    }

    use_vllm: bool = option(True, "Have vLLM write.")
    vllm_mode: str = option("server", "In this process, or in a server's.", choices=["colocate", "server"])
    vllm_server_base_url: str | None = option(URL, "Of the server, in place of host and port.")
    vllm_importance_sampling_mode: str = option(
        "token_truncate",
        "Ratios of tokens or completions, cut at the bounds or left out beyond them.",
        choices=["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    )
    max_staleness: int = option(
        4, "Optimizer steps that the weights which wrote a window may be behind when its turn comes.", NOT_NEGATIVE
    )
    request_timeout: float | None = option(600, "Seconds that a server may take for completions.", POSITIVE)
    weight_sync_timeout: float | None = option(1800, "Seconds that it may take for a copy of the weights.", POSITIVE)
    max_completion_length: int = option(2048, "Most tokens of a completion.", COUNT)
    logging_steps: float = option(1, "Optimizer steps between two logs.", NOT_NEGATIVE)
    lr_scheduler_type: str = option("constant", "How the learning rate changes.")
    dtype: str = option(
        "float32",
        "Of a model that is given by name, unless `model_init_kwargs` say it.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    token_budget: int | None = option(
        None, "TRL's name of `tokens_per_microbatch`. None, or a number below 1: no limit."
    )
    fork_threshold_tokens: int = option(1024, "Without effect.", NOT_NEGATIVE)

    def check(self) -> None:
        """As of GRPO.

        Raises:
            ValueError: likewise.
        """
        if (self.token_budget or 0) > 0:
            self.take_older("token_budget", "tokens_per_microbatch")
        if self.dtype != "float32":
            self.model_init_kwargs = {"dtype": self.dtype, **(self.model_init_kwargs or {})}
        for name in ("vllm_server_host", "vllm_server_port"):
            if getattr(self, name) != default_of(_Config, name) and self.vllm_server_base_url == URL:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect, since vllm_server_base_url={URL!r} names the "
                    "server: set that to the address, or to None for host and port"
                )
        super().check()


class AsyncGRPOTrainer(OnlineTrainer):
    """Trains by group relative policy optimization while a server writes.

    The arguments are those of `OnlineTrainer`, in the order of TRL's.
    """

    method = GRPO
    config = AsyncGRPOConfig
    __signature__ = signature_of(replace(GRPO, arguments=(*ARGUMENTS, *(n for n in ONLINE if n not in ARGUMENTS))))
