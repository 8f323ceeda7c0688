"""Two processes with gloo: what happens to one of them alone leaves neither waiting, nor the weights apart.

All cases run in one pair of processes, each by its function in `CASES`; what either rank found is compared here. A rank
that waits for the other in vain fails by the time limit of the exchange.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback

from lowtide.data.batches.collate import CompletionCollator
from lowtide.ranks import replicas
from lowtide.ranks.failures import RankFailed, stopping_together, who_stopped
from lowtide.step import rehearsal
from lowtide.step.rank_sync import OutOfMemory
from lowtide.step.runner import StepRunner
from tests.support.heap import young_heap
from tests.support.matrix import matrix
from tests.support.matrix.matrix import HALF, ROUNDING, TECHNIQUES, make, watched, with_it
from tests.support.matrix.matrix_models import TRAINERS
from tests.support.ranks.processes import run_ranks
from tests.support.runs.sabotage import OPTIMIZER, PLACES, out_of_memory

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 2
SHARE = matrix.BATCH // RANKS
BUDGET = 80
"""Tokens of a micro-batch, of which the first step then has two or more on each rank."""
EXCHANGE = "exchange"
CULPRIT = "model.layers.1.mlp.down_proj"
KINDS = ("SFT", "DPO")
TECHNIQUES_ON = ("none", "activation offloading", "tiled MLP", "compressed AdamW", "gradient accumulation")
WRITERS = ("_save", "_save_scaler")
"""What writes the model of a checkpoint, and what comes after the optimizer's states."""
EVAL_ROWS = (5, 9)
"""In batches of 8 and of 4: the second rank has no row, or none after its first batch."""


# -- what goes wrong -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sabotaged(model: nn.Module, place: str | None, number: int) -> Iterator[list[str]]:
    """`out_of_memory`, and the place where gradients are exchanged; None is nowhere."""
    if place is None:
        yield []
        return
    if place != EXCHANGE:
        with out_of_memory(model, place, number) as fired:
            yield fired
        return
    fired, complete = [], replicas.Averaging.complete

    def failing(exchange: replicas.Averaging) -> Callable[[], None]:
        if not fired:
            fired.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return complete(exchange)

    with mock.patch.object(replicas.Averaging, "complete", failing):
        yield fired


def passages(place: str) -> int:
    """How many there are in a step's micro-batches, or in the optimizer's first step, at least."""
    return 10 if place == OPTIMIZER else 2


def drawn(name: str) -> tuple[int, int]:
    """(the rank that fails, the passage at which it does)"""
    draw = random.Random(name)
    return draw.randrange(RANKS), draw.randrange(passages(name.split()[1]))


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what it raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# -- the cases, on each rank -----------------------------------------------------------------------------------------


def trained(trainer: Any) -> dict[str, Any]:
    run = watched(trainer)
    return {"losses": run.losses, "weights": run.weights, "tokens": trainer.limits.tokens}


def shared(kind: str, **options: Any) -> Any:
    """A trainer with one rank's share of the batch."""
    return make(kind, **{"per_device_train_batch_size": SHARE, "max_steps": STEPS, "optim": "adamw_torch", **options})


def recovering(rank: int, kind: str, place: str) -> dict[str, Any]:
    """One rank runs out of memory; then the same from the start with the budget that this came to."""
    trainer = shared(kind, tokens_per_microbatch=BUDGET)
    failing, number = drawn(f"{kind} {place}")
    with sabotaged(trainer.model, place if rank == failing else None, number) as fired:
        found = trained(trainer)
    assert fired == ([place] if rank == failing else [])
    return {"failed": found, "smaller": smaller(kind, found["tokens"])}


@functools.cache
def smaller(kind: str, tokens: int) -> dict[str, Any]:
    trainer = shared(kind, tokens_per_microbatch=BUDGET)
    trainer.runner.token_budget = None if tokens == BUDGET else tokens
    return trained(trainer)


def exhausted(rank: int, kind: str) -> dict[str, Any]:
    """The second rank has no memory for its optimizer's states, however often it tries."""
    trainer = shared(kind)
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with mock.patch.object(torch.optim.AdamW, "_init_group", full) if rank == 1 else contextlib.nullcontext():
        return {"error": error_of(trainer.train)}


def without_room(rank: int, kind: str) -> dict[str, Any]:
    """The second rank has no memory for what a rehearsal holds in the place of the optimizer's states."""
    trainer = shared(kind, rehearsal=True)
    full = mock.Mock(side_effect=OutOfMemory("out of memory: the states do not fit"))
    with mock.patch.object(rehearsal, "reserved_for_states", full) if rank == 1 else contextlib.nullcontext():
        return {"error": error_of(trainer.train)}


def not_finite(rank: int, kind: str) -> dict[str, Any]:
    """One module of the second rank gives NaN, from the second step on."""
    trainer = shared(kind, tokens_per_microbatch=BUDGET)

    def spoilt(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        return output * torch.nan if trainer.state.global_step == 1 else None

    if rank == 1:
        trainer.model.get_submodule(CULPRIT).register_forward_hook(spoilt)
    error = error_of(trainer.train)
    return {"error": error, "step": trainer.state.global_step, "weights": weights(trainer)}


def stopped(rank: int, kind: str) -> dict[str, Any]:
    """The second rank stops at an error of its own."""
    trainer = shared(kind)
    if rank == 1:
        trainer.model.get_submodule(CULPRIT).register_forward_hook(lambda *_: 1 / 0)
    return {"error": error_of(trainer.train)}


def stopped_in_optimizer(rank: int, kind: str) -> dict[str, Any]:
    """The second rank stops at another error in its optimizer's step."""
    trainer = shared(kind)
    broken = mock.Mock(side_effect=ZeroDivisionError)
    with mock.patch.object(torch.optim.AdamW, "_init_group", broken) if rank == 1 else contextlib.nullcontext():
        return {"error": error_of(trainer.train)}


def gone_on(rank: int) -> dict[str, Any]:
    """Each rank in turn stops alone and goes on at once, while the other looks only a second later."""

    def begin(failing: int) -> None:
        with stopping_together("training", "Again."):
            if rank == failing:
                raise ZeroDivisionError("alone")
            time.sleep(1)
            raise RankFailed(who_stopped())

    late, next_one = (error_of(functools.partial(begin, failing)) for failing in (1, 0))
    return {"late": ": ".join(late), "next": ": ".join(next_one)}


def too_long(rank: int, kind: str) -> dict[str, Any]:
    """A stream brings the second rank a row above the budget."""
    trainer = shared(kind)
    trainer.args.tokens_per_microbatch = 4 if rank == 1 else None
    return {"error": error_of(trainer.train)}


def unsaved(rank: int, place: str) -> dict[str, Any]:
    """The first rank's disk, to which checkpoints go, is full from the second step on."""
    with tempfile.TemporaryDirectory() as alone:
        folders: list[Any] = [alone]
        dist.broadcast_object_list(folders)
        trainer = shared("SFT", save_strategy="steps", save_steps=1, output_dir=folders[0])
        write = getattr(trainer, place)

        def full(*args: Any, **kwargs: Any) -> None:
            if rank == 0 and trainer.state.global_step == 2:
                raise OSError("No space left on device")
            write(*args, **kwargs)

        with mock.patch.object(trainer, place, full):
            error = error_of(trainer.train)
        dist.barrier()
        kept = sorted(path.name for path in Path(folders[0]).iterdir() if path.is_dir())
        dist.barrier()
    return {"error": error, "kept": kept}


def terminated(rank: int) -> dict[str, Any]:
    """One rank gets SIGTERM in its second step; then both resume, from what the first rank finds whole."""
    with tempfile.TemporaryDirectory() as alone:
        folders: list[Any] = [alone]
        dist.broadcast_object_list(folders)
        saving = {"save_strategy": "steps", "save_steps": 1, "output_dir": folders[0], "max_steps": 4}
        trainer = shared("SFT", **saving)
        if rank == 1:
            trainer.add_callback(Terminate())
        try:
            trainer.train()
            code = None
        except SystemExit as error:
            code = error.code
        dist.barrier()
        kept = sorted(path.name for path in Path(folders[0]).iterdir() if path.is_dir())
        dist.barrier()
        if rank == 0:
            (Path(folders[0]) / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
        again = shared("SFT", **saving)
        again.train(resume_from_checkpoint=True)
        refused = error_of(lambda: again.train(resume_from_checkpoint="nowhere"))
        dist.barrier()
    resumed = Path(again.resumption.folder).name
    found = {"code": code, "step": trainer.state.global_step, "kept": kept, "resumed": resumed, "refused": refused}
    return found | {"weights": weights(again)}


class Terminate(TrainerCallback):
    """Sends SIGTERM to this process in its second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def technique(rank: int, kind: str, name: str) -> dict[str, Any]:
    return trained(shared(kind, **technique_options(name)))


def technique_options(name: str) -> dict[str, Any]:
    return {} if name == "none" else with_it(TECHNIQUES[name])


def evaluated(rank: int, kind: str) -> dict[str, Any]:
    return {"metrics": [evaluation(kind, rows) for rows in EVAL_ROWS]}


def evaluation(kind: str, rows: int) -> dict[str, float]:
    batch = 8 if rows < 8 else 4
    trainer = make(kind, per_device_eval_batch_size=batch)
    trainer.eval_dataset = trainer.train_dataset.select(range(rows))
    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    found = trainer.evaluate()
    return {name: value for name, value in found.items() if name not in timed}


def exhausted_in_evaluation(rank: int, kind: str) -> dict[str, Any]:
    trainer = make(kind, per_device_eval_batch_size=2)
    trainer.eval_dataset = trainer.train_dataset
    with sabotaged(trainer.model, "head" if rank == 1 else None, 1):
        return {"error": error_of(trainer.evaluate)}


def exhausted_in_reference(rank: int) -> dict[str, Any]:
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    with mock.patch.object(StepRunner, "reference_logprobs", full) if rank == 1 else contextlib.nullcontext():
        return {"error": error_of(lambda: shared("DPO", precompute_ref_log_probs=True))}


class OwnCollator:
    """A user's own, whose text is its address and whose state differs among ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, rows: list[dict]) -> Any:
        return CompletionCollator(("chosen_ids", "rejected_ids"), values=("number",))(rows)


def precomputed(rank: int) -> dict[str, Any]:
    """A start computes the reference, and the next one finds it."""
    computed, compute = [], StepRunner.reference_logprobs
    with mock.patch.object(StepRunner, "reference_logprobs", lambda *args: computed.append(1) or compute(*args)):
        shared("DPO", precompute_ref_log_probs=True, data_collator=OwnCollator(rank))
        first = len(computed)
        made = shared("DPO", precompute_ref_log_probs=True, data_collator=OwnCollator(rank))
    return {"computed": (first > 0, len(computed) - first), "values": made.train_dataset["ref_logprobs"][:]}


def other_rows(rank: int, name: str) -> dict[str, Any]:
    """The second rank has fewer rows, or as many of which some differ."""
    rows = matrix.rows("SFT")
    kept = list(range(len(rows)))
    if rank == 1:
        kept = kept[:-3] if name == "fewer" else kept[::-1]
    own = mock.patch.object(matrix, "rows", return_value=rows.select(kept))
    with own, mock.patch.dict(matrix.Watched.prepared, clear=True):
        return {"error": error_of(lambda: shared("SFT"))}


def unwritten(rank: int) -> dict[str, Any]:
    """The disk is full where the reference's log-probabilities go."""
    full = mock.Mock(side_effect=OSError("No space left on device"))
    with mock.patch.object(pyarrow, "OSFile", full):
        return {"error": error_of(lambda: shared("DPO", precompute_ref_log_probs=True))}


def gradients(rank: int) -> dict[str, Any]:
    """Ranks that used different parameters, in two dtypes and one of them as it does not lie in memory."""
    shapes = ((3, 4), (5,), (2, 2), (7,), (6,))
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    model[3].data = model[3].data.bfloat16()
    model[0].data = torch.zeros(4, 3).T
    used = ((0, 1, 3), (0, 2, 3))[rank]
    for number in used:
        model[number].grad = torch.empty_like(model[number]).copy_(whole(number, model[number].shape) * (rank + 1))
    replicas.Averaging(model).complete()()
    return {"gradients": [p.grad for p in model]}


def overlapped(rank: int, reentrant: bool) -> dict[str, Any]:
    """Three layers, a bucket each, of which the middle one may run in a backward within the backward, twice."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.arange(4.0).requires_grad_() * (rank + 1)
    with mock.patch.object(replicas, "BUCKET_BYTES", 4 * (16 + 4)):
        exchange = replicas.Averaging(model)
    with exchange.overlap():
        hidden = model[0](x)
        twice = (
            [checkpoint(model[1], hidden, use_reentrant=True) for _ in range(2)] if reentrant else [model[1](hidden)]
        )
        model[2](sum(twice)).sum().backward()
        posted = exchange._posted
    exchange.complete()()
    return {"posted": posted, "buckets": len(exchange.buckets), "gradients": [p.grad for p in model.parameters()]}


def whole(number: int, shape: Any) -> Tensor:
    return torch.arange(shape.numel()).view(shape) + 8.0 * number


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "gradients": gradients,
    **{f"overlapped {how}": functools.partial(overlapped, reentrant=how == "within") for how in ("plain", "within")},
    "exhausted in reference": exhausted_in_reference,
    "unwritten": unwritten,
    "precomputed": precomputed,
    **{f"{name} rows": functools.partial(other_rows, name=name) for name in ("fewer", "other")},
    **{f"evaluated {kind}": functools.partial(evaluated, kind=kind) for kind in TRAINERS},
    "exhausted in evaluation": functools.partial(exhausted_in_evaluation, kind="SFT"),
    **{
        f"{kind} {place}": functools.partial(recovering, kind=kind, place=place)
        for kind in KINDS
        for place in (*PLACES, EXCHANGE, OPTIMIZER)
    },
    **{f"{kind} not finite": functools.partial(not_finite, kind=kind) for kind in KINDS},
    "terminated": terminated,
    "exhausted": functools.partial(exhausted, kind="SFT"),
    "without room": functools.partial(without_room, kind="SFT"),
    "stopped": functools.partial(stopped, kind="SFT"),
    "stopped in optimizer": functools.partial(stopped_in_optimizer, kind="SFT"),
    "too long": functools.partial(too_long, kind="SFT"),
    "gone on": gone_on,
    **{f"unsaved {place}": functools.partial(unsaved, place=place) for place in WRITERS},
    **{
        f"{kind} with {name}": functools.partial(technique, kind=kind, name=name)
        for kind in KINDS
        for name in TECHNIQUES_ON
    },
}


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", ACCELERATE_USE_CPU="true")  # the port is not used
    rendezvous, limit = f"file://{folder}/rendezvous", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=limit)
    found = {}
    cache = mock.patch("datasets.config.HF_DATASETS_CACHE", folder)
    with cache, mock.patch.object(matrix, "folder", return_value=folder), young_heap():
        for name, case in CASES.items():
            torch.manual_seed(rank)
            found[name] = case(rank)
    torch.save(found, Path(folder, f"{rank}.pt"))
    dist.barrier()  # leave together: gloo's teardown can hang on a rank that is gone
    dist.destroy_process_group()


# -- what they found -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, what each case found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(rank_main, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("how", ["plain", "within"])
def test_gradients_are_exchanged_in_backward_once_they_are_complete(how, found):
    first, second = (each[f"overlapped {how}"] for each in found)
    assert first["buckets"] == 3
    # of what may go on growing in a backward within the backward, and what follows it, nothing is sent before the end
    assert first["posted"] == second["posted"] == (3 if how == "plain" else 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for scale in (1, 2):
        hidden = model[0](torch.arange(4.0) * scale)
        middle = model[1](hidden) * (1 if how == "plain" else 2)
        (model[2](middle).sum() / 2).backward()
    expected = [p.grad for p in model.parameters()]
    for each in (first, second):
        torch.testing.assert_close(each["gradients"], expected)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("place", [*PLACES, EXCHANGE, OPTIMIZER])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_ran_out_of_memory_leaves_the_bits_of_a_smaller_budget(kind, place, found):
    first, second = (each[f"{kind} {place}"] for each in found)
    for each in (first, second):
        assert (each["failed"]["tokens"] == BUDGET) == (place == OPTIMIZER)
        assert each["failed"]["losses"] == each["smaller"]["losses"]
        assert_same_bits(each["failed"]["weights"], each["smaller"]["weights"])
    assert_same_bits(first["failed"]["weights"], second["failed"]["weights"])


def test_a_rank_that_cannot_make_its_states_stops_both(found):
    kinds, texts = zip(*(each["exhausted"]["error"] for each in found), strict=True)
    assert kinds == (OutOfMemory.__name__,) * RANKS
    assert texts[0].startswith("rank 1 ran out of memory in the optimizer's step")
    assert "do not fit together" in texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_nan_on_one_rank_stops_both_before_the_step(kind, found):
    first, second = (each[f"{kind} not finite"] for each in found)
    assert first["error"][0] == second["error"][0] == "ValueError"
    assert first["error"][1].startswith("step 2: rank 1's loss is not finite. That rank says")
    assert second["error"][1].startswith("step 2: the loss is nan. Micro-batch 0: ")
    assert f"first module with a non-finite output is {CULPRIT}" in second["error"][1]
    assert first["step"] == second["step"] == 1
    assert_same_bits(first["weights"], second["weights"])
    assert all(weight.isfinite().all() for weight in first["weights"].values())


def test_an_error_of_one_rank_stops_both(found):
    kind, text = found[0]["stopped"]["error"]
    assert kind == "RankFailed"
    assert text.startswith("rank 1 stopped at ZeroDivisionError: division by zero, while this rank was training. ")
    assert "resume from the last checkpoint" in text
    assert found[1]["stopped"]["error"][0] == "ZeroDivisionError"


def test_an_error_in_the_optimizer_of_one_rank_stops_both(found):
    kind, text = found[0]["stopped in optimizer"]["error"]
    assert kind == "RankFailed"
    assert text.startswith("rank 1 stopped at ZeroDivisionError")
    assert found[1]["stopped in optimizer"]["error"][0] == "ZeroDivisionError"


def test_a_rank_that_looks_late_finds_why_another_one_stopped_that_has_gone_on_since(found):
    first, second = (each["gone on"] for each in found)
    assert (
        first["late"] == "RankFailed: rank 1 stopped at ZeroDivisionError: alone, while this rank was training. Again."
    )
    assert second["late"] == "ZeroDivisionError: alone"
    assert first["next"] == "ZeroDivisionError: alone"
    assert (
        second["next"] == "RankFailed: rank 0 stopped at ZeroDivisionError: alone, while this rank was training. Again."
    )


def test_a_row_of_one_rank_above_the_budget_stops_both(found):
    kind, text = found[0]["too long"]["error"]
    assert kind == "RankFailed"
    assert text.startswith("rank 1 stopped at ValueError: ")
    kind, text = found[1]["too long"]["error"]
    assert kind == "ValueError"
    assert "tokens" in text


@pytest.mark.parametrize("place", WRITERS)
def test_a_full_disk_of_one_rank_stops_both_and_leaves_the_checkpoint_before(place, found):
    first, second = (each[f"unsaved {place}"] for each in found)
    assert first["kept"] == second["kept"] == ["checkpoint-1"]
    assert first["error"][0] == second["error"][0] == "ValueError"
    assert "step 2: the checkpoint could not be written to" in first["error"][1]
    assert "No space left on device. Checkpoints before it are whole" in first["error"][1]
    assert "another rank says why" in second["error"][1]


def test_a_signal_to_one_rank_stops_both_after_the_same_step_and_both_resume(found):
    first, second = (each["terminated"] for each in found)
    for each in (first, second):
        assert (each["code"], each["step"], each["kept"]) == (143, 2, ["checkpoint-1", "checkpoint-2"])
        assert each["resumed"] == "checkpoint-1"  # the second is damaged by then
        assert each["refused"][0] == "ValueError"
        assert "'nowhere' is no checkpoint folder" in each["refused"][1]
    assert_same_bits(first["weights"], second["weights"])


def test_a_rank_without_room_for_the_states_stops_both(found):
    first, second = (each["without room"]["error"] for each in found)
    assert first[0] == "RankFailed"
    assert first[1].startswith("rank 1 stopped at OutOfMemory: out of memory: the states do not fit")
    assert second[0] == OutOfMemory.__name__
    assert second[1].startswith("out of memory: the states do not fit")


@pytest.mark.parametrize("name", TECHNIQUES_ON)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one_process(kind, name, found):
    options = {"optim": "adamw_torch", **technique_options(name)}
    one = watched(make(kind, max_steps=STEPS, **options))
    first, second = (each[f"{kind} with {name}"] for each in found)
    assert_same_bits(first["weights"], second["weights"])
    within = HALF if name == "compressed AdamW" else ROUNDING
    together = [sum(losses) / RANKS for losses in zip(first["losses"], second["losses"], strict=True)]
    assert together == pytest.approx(one.losses, rel=within)
    for weight, value in one.weights.items():
        assert (first["weights"][weight].double() - value.double()).norm() <= within * value.double().norm()


@pytest.mark.parametrize("kind", TRAINERS)
def test_evaluation_of_few_rows_is_that_of_one_process(kind, found):
    for number, rows in enumerate(EVAL_ROWS):
        expected = evaluation(kind, rows)
        for each in found:
            assert each[f"evaluated {kind}"]["metrics"][number] == pytest.approx(expected, rel=1e-5)


def test_evaluation_that_runs_out_of_memory_on_one_rank_stops_both(found):
    (first, text), (second, its_text) = (each["exhausted in evaluation"]["error"] for each in found)
    assert first == second == OutOfMemory.__name__
    assert text.startswith("rank 1 ran out of memory. Lower `per_device_eval_batch_size`")
    assert its_text.startswith("out of memory in evaluation of micro-batch 1 (2 row(s) of ")


def test_precomputing_that_runs_out_of_memory_on_one_rank_stops_both(found):
    (first, text), (second, its_text) = (each["exhausted in reference"]["error"] for each in found)
    assert first == second == OutOfMemory.__name__
    assert text.startswith("rank 1 ran out of memory. Lower `precompute_ref_batch_size`")
    assert its_text.startswith("out of memory in reference of micro-batch 0 ")


@pytest.mark.parametrize("name", ["fewer", "other"])
def test_ranks_with_other_rows_are_refused(name, found):
    (first, text), (second, its_text) = (each[f"{name} rows"]["error"] for each in found)
    assert first == second == "ValueError"
    assert text == its_text
    numbers = re.findall(r"([\d,]+) rows of [\d,]+ tokens on rank (\d)", text)
    assert [rank for _, rank in numbers] == ["0", "1"]
    rows = len(matrix.rows("SFT"))
    assert [int(count) for count, _ in numbers] == [rows, rows - 3 if name == "fewer" else rows]
    assert "give all of them the whole dataset" in text


def test_ranks_share_what_the_first_precomputed(found):
    first, second = (each["precomputed"] for each in found)
    assert first["computed"] == second["computed"] == (True, 0)
    assert first["values"] == second["values"]


def test_a_cache_that_cannot_be_written_stops_both(found):
    assert found[0]["unwritten"]["error"] == ("OSError", "No space left on device")
    assert found[1]["unwritten"]["error"][0] == "RankFailed"


def test_gradients_are_means_over_ranks_and_those_that_no_rank_has_stay_none(found):
    shares = (1.5, 0.5, 1.0, 1.5)
    for each in found:
        *means, unused = each["gradients"]["gradients"]
        assert unused is None
        for number, (mean, share) in enumerate(zip(means, shares, strict=True)):
            assert torch.equal(mean.float(), whole(number, mean.shape) * share)
