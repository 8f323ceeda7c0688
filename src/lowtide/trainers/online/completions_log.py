"""The table of completions that a run logs: printed to be read, kept as a Parquet file, and handed to trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from huggingface_hub import HfApi
from rich.table import Table
from rich.text import Text

from lowtide.data.formats.images import in_words
from lowtide.own_files import writing
from lowtide.ranks.world import objects_of_all_ranks
from lowtide.rollout.readable import readable
from lowtide.run.rollouts import Made
from lowtide.terminal import Console
from lowtide.trainers.callbacks.log_completions import hand_to_trackers, trackers_of

SHOWN = 400
"""Characters of a prompt or a completion that are printed."""


class CompletionsLog:
    """The completions that were written last, of all ranks."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.rows: deque[dict[str, Any]] = deque(maxlen=args.written_at_a_time)

    def take_in(self, made: Made, names: Sequence[str]) -> None:
        """The completions of a rollout; a further column is None where a rank did not log it."""
        if not self.args.log_completions:
            return
        copies = self.args.world_size // self.args.data_ranks
        everyones = objects_of_all_ranks(_readable(made), copies)
        further = dict.fromkeys(name for _, extra in everyones for name in extra)
        rows = [(said, extra, number) for said, extra in everyones for number, said in enumerate(said)]
        for (said, extra, number), rewards, advantage in zip(rows, made.rewards, made.advantages, strict=True):
            self.rows.append(
                {
                    **said,
                    **dict(zip(names, rewards.tolist(), strict=True)),
                    **{name: extra[name][number] if name in extra else None for name in further},
                    **({"advantage": advantage.item()} if names else {}),
                }
            )

    def write(self, step: int) -> None:
        """Prints the table, and writes `completions/completions_<step>.parquet` into the output folder."""
        if not self.rows or self.args.process_index:
            return
        rows = list(self.rows)
        self.rows.clear()
        folder = Path(str(self.args.output_dir), "completions")
        folder.mkdir(parents=True, exist_ok=True)
        written = columns_of([{"step": step, **row} for row in rows])
        with writing(folder / f"completions_{step:05d}.parquet") as beside:
            pq.write_table(written, beside)
        if trackers_of(self.args.report_to):
            hand_to_trackers(written.to_pandas(), self.args.report_to)
        if getattr(self.args, "log_completions_hub_repo", None):
            self._push(folder)
        if self.args.log_unique_prompts:
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        Console().print(table(rows[: self.args.num_completions_to_print], step))

    def _push(self, folder: Path) -> None:
        """Uploads the files to the dataset on the hub, which is made if it is not there."""
        api, name = HfApi(token=self.args.hub_token), self.args.log_completions_hub_repo
        repo = api.create_repo(name, repo_type="dataset", private=self.args.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, repo_type="dataset", folder_path=str(folder))


def _readable(made: Made) -> tuple[list[dict[str, str]], dict[str, list]]:
    """The prompts and completions of this rank, and its further columns."""
    said = zip(made.prompts, made.completions, strict=True)
    columns = {readable(name): [plain(value) for value in made.column(name)] for name in made.extra}
    return [readable({"prompt": as_text(p), "completion": as_text(c)}) for p, c in said], columns


def plain(value: Any) -> Any:
    """A value as another process and a table can hold it: numbers of a tensor, and as text what is of no plain type."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {readable(str(key)): plain(each) for key, each in value.items()}
    return readable(value if isinstance(value, (str, bool, int, float, type(None))) else str(value))


def columns_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows as a table; what stands in a column of values of several kinds, or too large ones, is text."""

    def column(values: list[Any]) -> pa.Array:
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError):
            return pa.array([None if value is None else str(value) for value in values])

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: column([row.get(name) for row in rows]) for name in names})


def table(rows: Sequence[dict[str, Any]], step: int) -> Table:
    """Rows of completions as they are printed; a prompt stands once before its completions."""
    made = Table(title=f"completions at step {step}", show_lines=True, expand=True)
    for name in rows[0]:
        number = isinstance(rows[0][name], float)
        made.add_column(Text(name), justify="right" if number else "left", no_wrap=number, ratio=None if number else 1)
    before = None
    for row in rows:
        cells = [Text(_cell(value)) for value in row.values()]
        if row["prompt"] == before:
            cells[0] = Text()
        before = row["prompt"]
        made.add_row(*cells)
    return made


def as_text(said: Any) -> str:
    """A prompt or a completion: a text, or messages one after the other."""
    if isinstance(said, str):
        return said
    return "\n".join(
        f"[{message.get('role')}] {in_words(message.get('content')) or message.get('tool_calls')}" for message in said
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    text = str(value)
    return text if len(text) <= SHOWN else text[: SHOWN // 2] + " ... " + text[-SHOWN // 2 :]
