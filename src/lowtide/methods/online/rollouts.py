"""What methods share that learn from completions which the policy writes: options, prompts as rows, and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from lowtide.data.batches.images import ImageReader
from lowtide.data.prompts import PROMPT_IDS, PromptEncoder, prepare_prompts, shows_prompt_images
from lowtide.methods.online.learning import Learning
from lowtide.methods.shared.asked_teacher import unsaid
from lowtide.methods.shared.options import FollowedReference, zeros
from lowtide.methods.shared.rows import Drawing, Preparation, Prepared, RowLayout
from lowtide.option import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, option
from lowtide.ragged import RaggedBatch
from lowtide.ranks.world import launched
from lowtide.rollout.generators.generator import Completion, Sampling
from lowtide.rollout.generators.vllm.limits import Limits
from lowtide.rollout.images import PromptImages
from lowtide.rollout.rollout import Rollout
from lowtide.score_rules import ScoreRule

NEEDLESS = "lowtide's own generator keeps the keys and values of what is being written, and nothing else"
OF_SERVER = (
    *("vllm_server_retries", "vllm_server_retry_pause", "max_inflight_tasks", "request_timeout"),
    "weight_sync_timeout",
)
"""Options that say how a server is asked."""
OF_VLLM = ("vllm_weight_check_interval",)
"""Options of vLLM's copy of the weights."""
BACKENDS = ("auto", "lowtide", "transformers")
COPIED = ("copy", "merged")
"""Values of `generation_weights` that ask for a copy."""
SAMPLED_BY = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
"""Keys of `generation_kwargs` that every generator takes."""
OF_GENERATE = (
    *("num_beams", "length_penalty", "early_stopping", "min_new_tokens", "min_length", "max_time"),
    *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "exponential_decay_length_penalty"),
    *("forced_eos_token_id", "renormalize_logits", "remove_invalid_values", "guidance_scale"),
    "prompt_lookup_num_tokens",
)
"""Keys that transformers' `generate` alone takes, which writes where one is there."""


@dataclass(kw_only=True)
class WritingOptions:
    """How completions are written, under TRL's names and with its defaults."""

    temperature: float = option(1.0, "Divisor of the logits, in writing and in scoring.", NOT_NEGATIVE)
    top_p: float = option(
        1.0, "Draw among the fewest likeliest tokens with so much probability.", Range(above=0, most=1)
    )
    top_k: int = option(0, "Draw among so many of the likeliest tokens; 0 among all.", Range(least=0, also=-1))
    min_p: float | None = option(None, "Draw among tokens at least so many times as likely as the likeliest.", SHARE)
    repetition_penalty: float = option(1.0, "Above 1, tokens that were there already become less likely.", POSITIVE)
    generation_kwargs: dict | str | None = option(
        None, f"Further settings: {', '.join(SAMPLED_BY)}, do_sample; others have transformers write."
    )
    tokens_per_generation_batch: int | None = option(
        None,
        "The most tokens whose keys and values are held while completions are written. None: of all at once.",
        COUNT,
    )
    generation_backend: str = option(
        "auto",
        "Who writes: lowtide where it knows the model's attention, else transformers' generate.",
        choices=[*BACKENDS],
    )
    generation_weights: str = option(
        "auto",
        "What lowtide's own generator writes by: trained weights themselves (trained), a copy of them in the dtype of "
        "products (copy), one with adapters merged in 16 bits too, which changes numbers (merged), or copy where there "
        "is room (auto).",
        choices=["auto", "trained", *COPIED],
    )
    ds3_gather_for_generation: bool | str | int = option(
        True,
        "Gather sharded weights for writing: all (true), layer by layer (false), or so many bytes and the rest layer "
        "by layer.",
        NOT_NEGATIVE,
    )

    @property
    def most_written(self) -> int:
        """Most tokens of a completion that is written."""
        raise NotImplementedError

    def sampling(self, stop_ids: Sequence[int] = ()) -> Sampling:
        """How tokens are drawn."""
        given: dict[str, Any] = {
            "max_new_tokens": self.most_written,
            "temperature": self.temperature,
            "top_k": max(self.top_k, 0),
            "top_p": self.top_p,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty,
            **self._further(SAMPLED_BY),
        }
        if not self._further(("do_sample",)).get("do_sample", True):
            given["temperature"] = 0.0
        strings = given.pop("stop_strings", ())
        return Sampling(
            **given,
            stop_ids=tuple(stop_ids),
            stop_strings=(strings,) if isinstance(strings, str) else tuple(strings),
            others=self.of_generate,
        )

    @property
    def of_generate(self) -> dict[str, Any]:
        """The settings that transformers' `generate` alone takes."""
        return self._further(OF_GENERATE)

    def _further(self, names: Sequence[str]) -> dict[str, Any]:
        given = self.generation_kwargs if isinstance(self.generation_kwargs, Mapping) else {}
        return {name: given[name] for name in names if name in given}

    def check_writing(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: likewise.
        """
        if isinstance(self.ds3_gather_for_generation, str):
            raise ValueError(
                f"ds3_gather_for_generation={self.ds3_gather_for_generation!r} must be true, false or a number of bytes"
            )
        known = (*SAMPLED_BY, "do_sample", *OF_GENERATE)
        unknown = sorted(set(self.generation_kwargs or ()) - set(known))
        if isinstance(self.generation_kwargs, Mapping) and unknown:
            raise ValueError(f"generation_kwargs: {unknown[0]!r} is unknown (it takes {', '.join(known)})")
        others, vllm = ", ".join(self.of_generate), getattr(self, "use_vllm", False)
        if self.generation_weights in COPIED and (vllm or self.generation_backend == "transformers" or others):
            who = "use_vllm=True" if vllm else "transformers' generate"
            raise ValueError(
                f"generation_weights={self.generation_weights!r} is for lowtide's own generator, and {who} writes: "
                "leave one of them out"
            )
        if others and (vllm or self.generation_backend == "lowtide"):
            who = "use_vllm=True" if vllm else "generation_backend='lowtide'"
            raise ValueError(
                f"generation_kwargs: {others} of transformers' generate has no effect with {who}: drop one of them"
            )
        self.sampling()


@dataclass(kw_only=True)
class RolloutOptions(WritingOptions):
    """Of the methods that learn from what the policy writes, under TRL's names and with its defaults."""

    completions_of_row: ClassVar[int] = 1
    """Completions that TRL counts as one row of `per_device_train_batch_size`."""
    without_effect: ClassVar[Mapping[str, str]] = {
        "cache_implementation": NEEDLESS,
        "use_transformers_continuous_batching": NEEDLESS,
        "transformers_continuous_batching_config": NEEDLESS,
        "use_transformers_paged": NEEDLESS,
        "cast_lm_head_to_fp32": "log-probabilities are formed in float32 from the head's products already",
        "log_multimodal": "the table of completions says where images stand, and leaves them out",
        "vllm_group_port": "weights go to a server through its own interface",
    }

    learning_rate: float = option(1e-6, "The initial learning rate.")
    remove_unused_columns: bool = option(False, "Drop the columns that only reward functions read.")
    dataset_num_proc: int | None = option(None, "Processes that prepare the dataset.", NOT_NEGATIVE)
    disable_dropout: bool = option(False, "Train without dropout.")
    cast_lm_head_to_fp32: bool = option(False, "Without effect.")
    router_aux_loss_coef: float | None = option(
        None,
        "Weight of a mixture of experts' load-balancing loss. None takes the model's own; 0 leaves it out.",
        NOT_NEGATIVE,
    )
    prefix_sharing: bool = option(
        True, "Compute a prompt once for all its completions. False repeats it; the numbers are equal."
    )
    token_metrics: bool = option(True, "Log `entropy`; off, it costs nothing.")
    # what is written
    num_generations: int = option(8, "Completions of a prompt.", COUNT)
    num_generations_eval: int | None = option(None, "The same in evaluation. None: as many.", COUNT)
    max_prompt_length: int | None = option(None, "Most tokens of a prompt; its end is kept.", COUNT)
    max_completion_length: int = option(512, "Most tokens of a completion.", COUNT)
    shuffle_dataset: bool = option(True, "Take prompts in random order.")
    generation_batch_size: int | None = option(
        None, "Completions that all ranks write at a time. None follows from `steps_per_generation`.", COUNT
    )
    steps_per_generation: int | None = option(
        None, "Micro-batches that learn from what is written at a time. None: `gradient_accumulation_steps`.", COUNT
    )
    num_iterations: int = option(1, "How often each completion is learned from.", COUNT)
    chat_template_kwargs: dict | str | None = option(None, "Arguments of the chat template.")
    mask_truncated_completions: bool = option(False, "Learn nothing from completions that were cut off.")
    cache_implementation: str | None = option(None, "Without effect.")
    use_transformers_continuous_batching: bool = option(False, "Without effect.")
    transformers_continuous_batching_config: dict | str | None = option(None, "Without effect.")
    use_transformers_paged: bool = option(False, "Without effect.")
    # tools
    tool_timeout: float | None = option(
        None, "Seconds that a tool may take, after which the policy reads that it took too long. None waits.", POSITIVE
    )
    max_tool_calling_iterations: int | None = option(None, "Turns in which tools are called. None: no limit.", COUNT)
    # logs
    log_completions: bool = option(False, "Print completions with their rewards, and keep them as Parquet files.")
    num_completions_to_print: int | None = option(None, "Completions that are printed. None: all.", COUNT)
    log_unique_prompts: bool = option(False, "Log each prompt once.")
    log_multimodal: bool = option(True, "Without effect.")
    # vLLM
    use_vllm: bool = option(False, "Have vLLM write.")
    vllm_mode: str = option("colocate", "In this process, or in a server's.", choices=["colocate", "server"])
    vllm_model_impl: str = option("vllm", "Whose model code vLLM runs.", choices=["vllm", "transformers"])
    vllm_enable_sleep_mode: bool = option(False, "Have vLLM give its memory back while the policy is trained.")
    vllm_structured_outputs_regex: str | None = option(None, "What completions must match.")
    vllm_server_base_url: str | None = option(None, "Of the server, in place of host and port.")
    vllm_server_host: str = option("0.0.0.0", "Of the server.")
    vllm_server_port: int = option(8000, "Of the server.", COUNT)
    vllm_server_timeout: float = option(240.0, "Seconds to wait for the server.", POSITIVE)
    vllm_server_retries: int = option(
        2,
        "How often a server is asked again that went away, hangs, fails or answers wrongly, before the run ends.",
        NOT_NEGATIVE,
    )
    vllm_server_retry_pause: float = option(5.0, "Seconds before it is asked again.", NOT_NEGATIVE)
    vllm_weight_check_interval: int = option(
        10,
        "Copies of the weights between two checks that vLLM writes by them, beginning with the first one. 0: none.",
        NOT_NEGATIVE,
    )
    vllm_group_port: int = option(51216, "Without effect.", COUNT)
    vllm_gpu_memory_utilization: float = option(0.3, "The share of the GPU that vLLM takes, colocated.", SHARE)
    vllm_max_model_length: int | None = option(None, "Most tokens of a prompt with its completion, colocated.", COUNT)
    vllm_tensor_parallel_size: int = option(1, "GPUs that vLLM runs on, colocated.", COUNT)

    @property
    def scores_reference(self) -> bool:
        """Whether a reference's log-probabilities of what was written are needed."""
        return False

    @property
    def most_written(self) -> int:
        return self.max_completion_length

    @property
    def scored_at(self) -> float:
        """The temperature at which policy and reference are scored."""
        return self.temperature

    @property
    def corrects(self) -> bool:
        """Whether ratios take in how the generator's probabilities differ from the policy's."""
        return False

    @property
    def written_by_others(self) -> bool:
        """Whether completions are drawn from probabilities that are not the policy's own to rounding."""
        return self.use_vllm or self.generation_weights == "merged"

    @property
    def server_limits(self) -> Limits:
        """What a server is held to, beside `vllm_server_timeout`."""
        return Limits(
            retries=self.vllm_server_retries,
            pause=self.vllm_server_retry_pause,
            checked_every=self.vllm_weight_check_interval,
        )

    @property
    def writes_as_teacher(self) -> bool:
        """Whether completions are written after the prompts of the teacher."""
        return False

    @property
    def served(self) -> bool:
        """Whether a server writes."""
        return self.use_vllm and self.vllm_mode == "server"

    @property
    def generations_eval(self) -> int:
        return self.num_generations_eval or self.num_generations

    def check_rollouts(self) -> None:
        """Refuses what cannot work, naming the option and the way out.

        Raises:
            ValueError: likewise.
        """
        kind, each = type(self).__name__, self._rows_a_microbatch
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ValueError(
                "generation_batch_size and steps_per_generation both say how much is written at a time: set one of them"
            )
        if self.generation_batch_size is not None and self.generation_batch_size % each:
            raise ValueError(
                f"generation_batch_size={self.generation_batch_size} must be a multiple of {each}, the completions of "
                "a micro-batch on all ranks (per_device_train_batch_size times ranks)"
            )
        written = self.written_at_a_time
        if written % self.num_generations:
            raise ValueError(
                f"{kind}: {written} completions are written at a time (per_device_train_batch_size times ranks times "
                f"steps_per_generation), which num_generations={self.num_generations} does not divide: a group would "
                "be cut in two"
            )
        evaluated = self.per_device_eval_batch_size * self._groups  # type: ignore[attr-defined]
        if str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no" and evaluated % self.generations_eval:  # type: ignore[attr-defined]
            raise ValueError(
                f"{evaluated} completions are evaluated at a time (per_device_eval_batch_size times ranks), which "
                f"num_generations_eval={self.generations_eval} does not divide: a group would be cut in two"
            )
        if getattr(self, "auto_find_batch_size", False):
            raise ValueError(
                "auto_find_batch_size=True would change how many completions a group has: leave it out. Where memory "
                "runs out, lowtide takes smaller micro-batches by itself"
            )
        self._check_limits()
        self.check_writing()

    def _check_limits(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in OF_SERVER and value != each.default and not self.served:
                raise ValueError(
                    f"{each.name}={value:g} is for a server that writes: set use_vllm=True and vllm_mode='server', or "
                    "leave it out"
                )
            if each.name in OF_VLLM and value != each.default and not self.use_vllm:
                raise ValueError(f"{each.name}={value:g} is for vLLM that writes: set use_vllm=True, or leave it out")

    @property
    def uncut_prompt_tokens(self) -> int | None:
        """Tokens at the end of a prompt that stay whatever is written after it; None where all of them do."""
        return None

    def take_older(self, older: str, name: str) -> None:
        """Moves the value of an option's older name to the option.

        Raises:
            ValueError: the option is set too, to something else.
        """
        value = getattr(self, older)
        if value is None:
            return
        default = next(each.default for each in fields(self) if each.name == name)
        known = getattr(self, name)
        if known not in (default, value):
            raise ValueError(f"{older}={value!r} is an older name of {name}, which is {known!r}: leave {older} out")
        setattr(self, name, value)
        setattr(self, older, None)

    @property
    def _groups(self) -> int:
        """Ranks that see different rows, before they have met."""
        return launched() // self.sharding.same_rows  # type: ignore[attr-defined]

    @property
    def _rows_a_microbatch(self) -> int:
        """Completions of a micro-batch, of all ranks."""
        return self.per_device_train_batch_size * self.completions_of_row * self._groups  # type: ignore[attr-defined]

    @property
    def steps_of_generation(self) -> int:
        """Micro-batches, as Trainer counts them, that learn once from what is written at a time."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self._rows_a_microbatch
        return self.steps_per_generation or self.gradient_accumulation_steps  # type: ignore[attr-defined]

    @property
    def written_at_a_time(self) -> int:
        """Completions of all ranks."""
        return self._rows_a_microbatch * self.steps_of_generation


@dataclass(kw_only=True)
class RewardedOptions(RolloutOptions):
    """Of those whose completions are rewarded, under TRL's names and with its defaults."""

    divergence_weight: ClassVar[str] = "beta"
    """The option that weighs how far the policy is from a reference, which is there where it is not 0."""

    reward_weights: list[float] | None = option(None, "Weight of each reward function. None: 1 each.")
    reward_timeout: float | None = option(
        None, "Seconds that each reward function may take for a batch. None waits.", POSITIVE
    )

    @property
    def compares(self) -> bool:
        """Whether there is a reference."""
        return getattr(self, self.divergence_weight, 0.0) != 0.0

    @property
    def advice(self) -> list[str]:
        """What is unwise in these options."""
        if not zeros(self, "reward_weights"):
            return []
        return [f"reward_weights={self.reward_weights} takes every reward times 0: the policy is rewarded for nothing"]

    def check_rollouts(self) -> None:
        """As of any rollouts.

        Raises:
            ValueError: likewise.
        """
        super().check_rollouts()
        if self.temperature == 0:
            raise ValueError(
                "temperature=0 writes the likeliest token each time: the completions of a prompt are all the same, and "
                "no importance ratio is defined. Set a temperature above 0"
            )


@dataclass(kw_only=True)
class ReferredOptions(RewardedOptions, FollowedReference):
    """Of those among them whose completions are compared with what the reference says of the same tokens."""

    vllm_importance_sampling_correction: bool = option(
        True, "Weigh by how the probabilities of vLLM, or of merged weights, differ."
    )

    @property
    def scores_reference(self) -> bool:
        return self.compares

    @property
    def corrects(self) -> bool:
        return self.written_by_others and self.vllm_importance_sampling_correction


@dataclass(frozen=True)
class Prompts(RowLayout):
    """A prompt, after which the policy writes; what else a row holds is for reward functions."""

    learning: Learning
    """What is made of what it wrote."""
    with_images: bool = False
    """Whether prompts may show images."""

    completions = 0

    @property
    def takes_images(self) -> bool:  # type: ignore[override]
        return self.with_images

    def shows_images(self, rows: Any) -> bool:
        first = next(iter(rows.with_format(None)), None)
        return first is not None and shows_prompt_images(first)

    def prepare(self, dataset: Any, how: Preparation, name: str) -> Prepared:
        options = how.options
        encoder = PromptEncoder(
            how.tokenizer,
            options.max_prompt_length,
            options.chat_template_kwargs or {},
            source=f"the {name} dataset",
            uncut=options.uncut_prompt_tokens,
        )
        return prepare_prompts(dataset, encoder, num_proc=options.dataset_num_proc, reader=how.reader), None

    def collator(
        self, options: Any, *, sharing: bool, score_rule: ScoreRule, reader: ImageReader | None = None
    ) -> Callable:
        most, budget = options.max_completion_length, options.tokens_per_microbatch
        return LongestGroups(self.learning, self.together(options), most, budget, sharing, reader)

    def drawing(
        self,
        options: Any,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        reader: ImageReader | None = None,
    ) -> Drawing | None:
        """What a teacher that is asked says, in steps that are rehearsed and planned."""
        return unsaid(options)

    def together(self, options: Any) -> int:
        return min(options.num_generations // self.learning.completions, options.per_device_train_batch_size)


@dataclass(frozen=True)
class LongestGroups:
    """Prompts with the most and longest completions of a micro-batch: what a step is rehearsed and planned on."""

    learning: Learning
    count: int
    """Rows of a prompt that a micro-batch may hold together."""
    most: int
    """Tokens of a completion."""
    budget: int | None = None
    """Tokens of a micro-batch."""
    sharing: bool = True
    reader: ImageReader | None = None
    """Makes the images of prompts ready, of a vision-language model."""

    def together(self, prompt_tokens: int) -> int:
        """Rows that go with a prompt of so many tokens."""
        if self.budget is None:
            return self.count
        completions = self.learning.completions
        room = self.budget - prompt_tokens if self.sharing else self.budget
        each = completions * (self.most if self.sharing else self.most + prompt_tokens)
        return max(min(self.count, room // each), 1)

    def lengths(self, prompts: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """The tokens of each prompt with its completions, from those of the prompt alone."""
        together = np.array([self.together(int(tokens)) for tokens in prompts], dtype=np.int64)
        completions = together * self.learning.completions
        return completions * self.most + prompts * (1 if self.sharing else completions)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> RaggedBatch:
        each = self.learning.completions
        repeated = [row for row in rows for _ in range(self.together(len(row[PROMPT_IDS])) * each)]
        prompts = [list(row[PROMPT_IDS]) for row in repeated]
        nothing = [0.0] * self.most
        written = [Completion([p[-1]] * self.most, nothing, nothing, [True] * self.most) for p in prompts]
        row_values, score_values = self.learning.blank(len(prompts), len(prompts) * self.most)
        images = None if self.reader is None else PromptImages.of_rows(self.reader, repeated)
        rollout = Rollout(prompts, written, 0, row_values=row_values, score_values=score_values, images=images)
        return self.learning.batch(rollout, range(len(prompts) // each), sharing=self.sharing)
