"""`lowtide generate RUN --prompts FILE --output FILE`: a file of prompts to a file of completions.

What a row's completion is depends on its prompt, its number and the seed alone, and not on what else is in the batch.
So an interrupted command goes on behind the last row that it wrote, and the file is the one of a run that never
stopped. Its rows have `prompt` and `completion`, which `lowtide sft` takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.after_training.writing_options import (
    DRAWN_BY,
    WritingOptions,
    add_writing_options,
    read_writing_options,
    told,
)
from lowtide.cli.endings import UsageError
from lowtide.cli.options import whole_number
from lowtide.compat.argparse import Subparsers
from lowtide.escaping import shown
from lowtide.spelling import nearest

if TYPE_CHECKING:
    from lowtide.cli.after_training.loaded_run import LoadedRun
    from lowtide.rollout.generators.generator import Completion, Request, Sampling

PROMPT, MESSAGES, COMPLETION, REFERENCE = "prompt", "messages", "completion", "reference_completion"


def add_parser(subparsers: Subparsers) -> None:
    """Add the subcommand to `lowtide`'s parser."""
    parser = subparsers.add_parser(
        "generate",
        help="write completions of a file of prompts with a trained model",
        description="Write completions of a file of prompts (rows with `prompt`, a text or messages, or with "
        "`messages`, whose last answer is left out) to a JSONL file, in batches. The same command goes on where it was "
        "interrupted.",
        allow_abbrev=False,
    )
    add_writing_options(parser)
    parser.add_argument(
        "--prompts", required=True, metavar="DATA", help="a JSONL, JSON, CSV or Parquet file, a folder, or a hub name"
    )
    parser.add_argument("--dataset_split", default="train", metavar="SPLIT", help="which split (default: train)")
    parser.add_argument("--dataset_config", metavar="NAME", help="which configuration of a dataset on the hub")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the JSONL file of completions")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--overwrite", action="store_true", help="write the output anew if it is there")
    parser.add_argument("--as_chat", action="store_true", help="take prompts that are texts as messages of a user")
    parser.add_argument("--system", metavar="TEXT", help="the system's message of conversations that have none")
    for name, default, what in (
        ("--num_generations", 1, "completions of each prompt"),
        ("--batch_size", 32, "prompts whose completions are written together; halved where memory runs out"),
    ):
        parser.add_argument(
            name, type=whole_number(), default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the completions; the exit status.

    Raises:
        ValueError: the model, the prompts or an option can't be used, or the output was begun with other settings.
        OSError: the prompts are not there.
    """
    options = read_writing_options(arguments)
    if arguments.output.is_dir():
        raise UsageError(f"--output {arguments.output} is a folder: give a file")
    from lowtide.cli.after_training.loaded_run import folder_of
    from lowtide.cli.after_training.output_file import Output, digest, weights_of
    from lowtide.data.sources.load import load_rows

    rows: Any = load_rows(arguments.prompts, split=arguments.dataset_split, name=arguments.dataset_config)
    prompts = prompts_of(rows, arguments.prompts, as_chat=arguments.as_chat, system=arguments.system)
    folder = folder_of(arguments.model)
    settings = {
        "model": folder,
        "weights": weights_of(folder),
        "prompts": digest(prompts),
        **{name: getattr(options, name) for name in ("max_new_tokens", *DRAWN_BY, "seed", "dtype")},
        **{name: getattr(options, name) for name in ("chat_template_path", "chat_template_kwargs")},
        "num_generations": arguments.num_generations,
    }
    output = Output(arguments.output, arguments.num_generations)
    done = output.begin(settings, overwrite=arguments.overwrite)
    seconds, written = 0.0, 0
    if done < len(prompts):
        writer = Writer(options.load(folder), options, arguments.num_generations, arguments.prompts)
        _say(f"{folder}: {told(writer.sampling)}, by {writer.loaded.by}" + (f"; {done:,} rows are there" * bool(done)))
        start = time.monotonic()
        for first, groups in writer.write(prompts, done, arguments.batch_size):
            output.append(
                [
                    line_of(rows[first + place], prompts[first + place], each, writer.text(each))
                    for place, group in enumerate(groups)
                    for each in group
                ]
            )
            written += sum(len(each.token_ids) for group in groups for each in group)
            behind, seconds = first + len(groups), time.monotonic() - start
            left = seconds * (len(prompts) - behind) / (behind - done)
            _say(f"{behind:,} of {len(prompts):,} prompts, {written:,} tokens, {seconds:.0f} s, {left:.0f} s left")
    count = len(prompts) * arguments.num_generations
    if arguments.json:
        now = {"prompts": len(prompts) - done, "tokens": written, "seconds": seconds}
        print(json.dumps({"output": str(arguments.output), "model": folder, "completions": count, "now": now}))
    else:
        print(shown(f"Written: {arguments.output} ({count:,} completions)"))
    return 0


class Writer:
    """Writes completions of prompts.

    Args:
        count: of each prompt.
        source: what messages call the prompts.
    """

    def __init__(self, loaded: LoadedRun, options: WritingOptions, count: int, source: str) -> None:
        from lowtide.data.prompts import PromptEncoder

        self.loaded, self.options, self.count = loaded, options, count
        self.encoder = PromptEncoder(
            loaded.tokenizer, template_kwargs=options.chat_template_kwargs or {}, source=source
        )
        self.sampling: Sampling = options.sampling(loaded)

    def write(self, prompts: Sequence[Any], first: int, size: int) -> Iterator[tuple[int, list[list[Completion]]]]:
        """From the first prompt on, so many at a time: the number of the first, and the completions of each."""
        from lowtide.memory.allocators.out_of_memory import drop_frames, free_caches, is_out_of_memory

        while first < len(prompts):
            asked = [self._request(prompts, number) for number in range(first, min(first + size, len(prompts)))]
            try:
                groups = self.loaded.generator.generate(self.loaded.model, asked, self.sampling)
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                drop_frames(error)
                groups = None
            if groups is None:
                free_caches()
                size = max(len(asked) // 2, 1)
                _say(f"out of memory: --batch_size {size} from now on")
                continue
            yield first, groups
            first += len(asked)

    def text(self, completion: Completion) -> str:
        """What was written, without special tokens."""
        return str(self.loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def _request(self, prompts: Sequence[Any], number: int) -> Request:
        from lowtide.rollout.generators.generator import Request
        from lowtide.run.writing import seed_of

        prompt = prompts[number]
        if not isinstance(prompt, str) and not self.loaded.tokenizer.chat_template:
            raise ValueError(
                f"{self.encoder.where(number)}: the prompt is a conversation, and the tokenizer has no chat template: "
                "give one by --chat_template_path"
            )
        return Request(self.encoder(prompt, number), self.count, seed_of(self.options.seed, number))


def prompts_of(rows: Any, source: str, *, as_chat: bool = False, system: str | None = None) -> list[Any]:
    """The prompts of rows, each a text or messages.

    Args:
        rows: with a column `prompt`, or `messages`, whose last answer is left out.
        source: what messages call them.

    Raises:
        ValueError: there is no such column, or a prompt is of another kind.
    """
    columns = list(rows.column_names)
    name = next((each for each in (PROMPT, MESSAGES) if each in columns), None)
    if name is None:
        raise ValueError(
            f"{source} has no column `prompt` or `messages`{nearest(PROMPT, columns)}, only {', '.join(columns)}: "
            "rename the column of prompts to `prompt`"
        )
    found = []
    for number, prompt in enumerate(rows[name]):
        is_talk = isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt)
        if not (isinstance(prompt, str) or is_talk):
            raise ValueError(
                f"{source}, row {number} (the first is 0): `{name}` is {prompt!r:.80}, and a prompt is a text or a "
                "list of messages: mend or drop the row"
            )
        found.append(_prompt(prompt, as_chat, system))
    if system is not None and any(isinstance(each, str) for each in found):
        raise UsageError(
            "--system goes before messages, and the prompts are texts: add --as_chat to make messages of them"
        )
    return found


def _prompt(given: Any, as_chat: bool, system: str | None) -> Any:
    if isinstance(given, str):
        if not as_chat:
            return given
        given = [{"role": "user", "content": given}]
    messages = [{name: value for name, value in each.items() if value is not None} for each in given]
    while len(messages) > 1 and messages[-1].get("role") == "assistant":
        messages.pop()
    if system is not None and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def line_of(row: Mapping[str, Any], prompt: Any, completion: Completion, text: str) -> dict[str, Any]:
    """A line of the output: the row's columns, with its prompt and what was written after it."""
    kept = {name: value for name, value in row.items() if name not in (PROMPT, MESSAGES, COMPLETION)}
    if COMPLETION in row:
        kept[REFERENCE] = row[COMPLETION]
    elif PROMPT not in row and row[MESSAGES][-1].get("role") == "assistant":
        kept[REFERENCE] = row[MESSAGES][-1].get("content")
    said = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
    ending = {"finish": completion.finish, "completion_tokens": len(completion.token_ids)}
    return {PROMPT: prompt, COMPLETION: said, **kept, **ending}


def _say(text: str) -> None:
    from lowtide.terminal import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
