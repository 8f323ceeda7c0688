"""What a run says of itself: at start what will happen to data, numbers and memory; at the end what it took."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from lowtide.compat.torch import cpu_has_bf16
from lowtide.engine.forward import causal_model
from lowtide.engine.over_ranks.stage import stage_of
from lowtide.engine.weights.quantized import is_quantized
from lowtide.memory.allocators.measure import bytes_text, peak_bytes
from lowtide.memory.optimizers.states import predict_states
from lowtide.memory.weights.streaming import stream_of
from lowtide.own_files import writing
from lowtide.planner.devices import device_named
from lowtide.ranks.sharding import Sharding
from lowtide.ranks.shards import whole_shape
from lowtide.run.engine import Engine
from lowtide.run.options.secrets import without_secrets
from lowtide.run.options.without_effect import without_effect
from lowtide.run.streamed_weights import text_of
from lowtide.terminal import Console
from lowtide.trainers.reports.memory_bar import memory_bar
from lowtide.trainers.reports.model_card import without_folder
from lowtide.trainers.reports.reported import Reported
from lowtide.trainers.reports.run_page import PAGE, RunPage

logger = logging.getLogger(__name__)


def noise_text(args: Any, reference: object) -> str:
    """What the noise on embeddings is, and where there is none."""
    without = "none in evaluation" if reference is None else "none in evaluation and in the reference"
    return (
        f"embeddings get noise in training, uniform within {args.neftune_noise_alpha:g} / sqrt(tokens of the row x "
        f"hidden size); {without}"
    )


def _whole_text(sharding: Sharding) -> str:
    """Of a run whose ranks have whole weights each, what else they share."""
    shared = {"zero1": "; moments in parts (ZeRO-1)", "zero2": "; gradients and moments in parts (ZeRO-2)"}
    return f"whole on each of {sharding.replicas} ranks{shared.get(sharding.kind, '')}"


class StartReport(TrainerCallback):
    """Prints the start-up report and the ledger before the first step, and writes the memory report after the last."""

    def __init__(self, trainer: Reported, engine: Engine) -> None:
        self.trainer, self.engine = trainer, engine
        self.states = predict_states(trainer.model, trainer.optimizer_maker.name)
        self.stream = stream_of(trainer.model)
        self.first_step, self.begun = 0, time.perf_counter()
        self.told: list[tuple[str, str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step, self.begun = state.global_step, time.perf_counter()
        if not state.is_world_process_zero:
            return
        ledger, self.told = self.trainer.ledger, self.lines()
        for line in (*(f"{name}: {text}" for name, text in self.told), *([ledger.summary()] if ledger else [])):
            logger.info(line)
        if args.disable_tqdm:
            for name, text in without_effect(args):
                logger.warning(f"{name}: {text}")
            return
        console = Console(stderr=True)
        table = Table(title="lowtide", title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, text in self.told:
            table.add_row(name, escape(text))
        table.add_row("memory", self.bar())
        console.print(table)
        if ledger is not None:
            console.print(ledger)
        elif not self.trainer.method.writes:
            console.print("ledger: rows are streamed or prepared elsewhere, so they are not counted beforehand")

    def lines(self) -> list[tuple[str, str]]:
        """What will happen, as (name, text)."""
        args, model = self.trainer.args, causal_model(self.trainer.model)
        stage = stage_of(model)
        parameters = [*(self.trainer.model if stage is None else stage.whole).parameters()]
        trained = [p for p in parameters if p.requires_grad]
        total = sum(whole_shape(p).numel() for p in parameters)
        share = sum(whole_shape(p).numel() for p in trained) / max(total, 1)
        optimizer = "" if self.states.optimizer is None else f" + optimizer {bytes_text(self.states.optimizer)}"
        ranks = "rank(s)" if args.data_ranks == args.world_size else "group(s) of ranks"
        budget = f", at most {args.tokens_per_microbatch:,} tokens" if args.tokens_per_microbatch else ""
        planned = self.trainer.planned.text
        return [
            *([("resuming", str(resumption))] if (resumption := self.trainer.resumption) else []),
            *([("memory budget", planned)] if planned else []),
            ("model", f"{model.config.model_type}, {total:,} parameters, {share:.1%} trained"),
            *self._sharding_line(),
            ("precision", self._precision(trained)),
            ("path", f"{'ragged' if self.engine.padding_free else 'padded'} ({self.engine.reason})"),
            *([("attention", self.engine.attention)] if self.engine.attention else []),
            *([("recurrent layers", self.engine.mixing)] if self.engine.mixing else []),
            (
                "step",
                f"{args.per_device_train_batch_size} rows x {args.gradient_accumulation_steps} accumulated x "
                f"{args.data_ranks} {ranks}; micro-batches of {args.per_device_train_batch_size} rows{budget}",
            ),
            *([("sequences split", self.engine.sequences)] if self.engine.sequences else []),
            ("checkpointing", "on: activations are recomputed in backward" if args.gradient_checkpointing else "off"),
            (
                "states",
                f"{bytes_text(self.states.total)} = weights {bytes_text(self.states.weights)} + gradients "
                f"{bytes_text(self.states.gradients)}{optimizer}",
            ),
            *([("streamed weights", text_of(self.stream))] if self.stream else []),
            *self._technique_lines(),
            *(
                [("use_liger_loss", "an older name of the fused head, which is always on")]
                if args.use_liger_loss
                else []
            ),
            *([("loss", cost)] if (cost := self.trainer.own_loss.cost()) else []),
            *([("NEFTune", noise_text(args, self.trainer.reference))] if args.neftune_noise_alpha else []),
            *without_effect(args),
            *self.trainer.report_lines(),
        ]

    def bar(self) -> Text:
        """The bytes that stay against the device; with a prediction, what a step takes beside them too."""
        states, kind = self.states, self.trainer.args.device.type
        device = device_named(kind if kind == "cuda" else "cpu")  # Apple's GPUs share the memory of the system
        waiting = 0 if self.stream is None else self.stream.bytes - self.stream.largest
        weights = max(0, states.weights - waiting)
        parts = {"weights": weights, "gradients": states.gradients, "optimizer": states.optimizer or 0}
        if self.trainer.predicted_bytes:
            parts["the rest, predicted"] = max(0, self.trainer.predicted_bytes - sum(parts.values()))
        return memory_bar(parts, device.memory_bytes)

    def _sharding_line(self) -> list[tuple[str, str]]:
        """Where the weights of a run of several ranks lie."""
        sharding = self.trainer.args.sharding
        if (stages := sharding.pipeline_parallel) > 1:
            copies = f", {sharding.data_ranks} copies" if sharding.data_ranks > 1 else ""
            held = f"{bytes_text(self.states.weights)} on the first rank"
            return [("weights", f"the layers are split between {stages} ranks (a pipeline){copies}, {held}")]
        if sharding.tensor_parallel > 1:
            return [("weights", self._split_text(sharding))]
        if not sharding.cuts_weights:
            return [("weights", _whole_text(sharding))] if sharding.replicas > 1 else []
        copies = f", {sharding.replicas // sharding.shards} copies" if sharding.hybrid else ""
        where = " in host memory" if sharding.offload_weights else ""
        kept = "" if sharding.reshard else "; kept whole from forward to backward"
        by, held = "ZeRO-3" if sharding.by_deepspeed else "FSDP2", f"{bytes_text(self.states.weights)} a rank{where}"
        return [("weights", f"sharded over {sharding.shards} ranks ({by}){copies}, {held}{kept}")]

    def _split_text(self, sharding: Sharding) -> str:
        """Where the weights lie of layers that are split."""
        groups = sharding.replicas
        text = f"layers split between {sharding.tensor_parallel} ranks (tensor parallelism)"
        if sharding.shards > 1:
            copies = f" in {groups // sharding.shards} copies" if sharding.hybrid else ""
            text += f", their parts sharded over {sharding.shards} groups (FSDP2){copies}"
        elif groups > 1:
            text += f", {groups} groups with the same weights"
        return f"{text}, {bytes_text(self.states.weights)} a rank"

    def _technique_lines(self) -> list[tuple[str, str]]:
        """The techniques that a user switched on, and what they change."""
        lines = []
        for technique in self.trainer.techniques:
            idle = self.trainer.why_idle(technique)
            if technique.named and idle != "":
                exact = f"not exact: {technique.changes}" if technique.changes else "exact"
                text = f"{exact}; {technique.remark}" if technique.remark else exact
                lines.append((technique.name, f"does nothing here: {idle}" if idle else text))
        return lines

    def _precision(self, trained: list) -> str:
        args, stored = self.trainer.args, [*self.trainer.model.parameters()]
        storage, computed, master = (
            sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
            for parameters in (stored, (p for p in stored if not is_quantized(p)), trained)
        )
        compute = "bfloat16" if args.bf16 else "float16" if args.fp16 else "/".join(computed)
        why = ""
        if args.device.type == "cpu" and not args.bf16 and storage == ["float32"]:
            why = (
                " (the default on a CPU; this one has bfloat16 instructions, --bf16 true --use_cpu true uses them)"
                if cpu_has_bf16()
                else " (this CPU has no bfloat16 instructions)"
            )
        return f"stored {'/'.join(storage)}, computed {compute}{why}, trained weights kept in {'/'.join(master)}"

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and not args.disable_tqdm:
            print("\n".join(self.summary()), file=sys.stderr, flush=True)
        self.write_page()
        if args.memory_report and state.is_world_process_zero:
            path = Path(args.memory_report)
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path) as beside:
                beside.write_text(json.dumps(self.memory_report(), indent=2) + "\n", encoding="utf-8")

    def write_page(self) -> None:
        """Writes `report.html` of the steps so far; nothing where none was made, or it cannot be written."""
        trainer = self.trainer
        if trainer.state.is_world_process_zero and trainer.state.global_step > self.first_step:
            with contextlib.suppress(OSError):  # the run is worth more than its page
                self.page().write(Path(str(trainer.args.output_dir)) / PAGE)

    def summary(self) -> list[str]:
        """What the training took, and its best checkpoint."""
        trainer, state = self.trainer, self.trainer.state
        log, steps = trainer.run_log, state.global_step - self.first_step
        if not steps:
            return []
        seconds, tokens = log.time.seconds, log.tokens_trained
        whole = timedelta(seconds=round(time.perf_counter() - self.begun))
        at = f", {tokens:,.0f} tokens, {tokens / seconds:,.0f} a second" if tokens and seconds else ""
        prediction = log.prediction
        predicted = f" ({bytes_text(prediction.bytes)} predicted by {prediction.by})" if prediction else ""
        lines = [
            f"Trained {steps:,} {'step' if steps == 1 else 'steps'} in {whole}{at}; peak memory "
            f"{bytes_text(log.mark.bytes)} in {log.mark.phase}{predicted}."
        ]
        if state.best_model_checkpoint is not None:
            metric = f"{trainer.args.metric_for_best_model} {state.best_metric:.4g}"
            lines.append(f"The best checkpoint is {state.best_model_checkpoint} ({metric}).")
        return lines

    def page(self) -> RunPage:
        """What `report.html` says of the run."""
        trainer, args, state, card = self.trainer, self.trainer.args, self.trainer.state, self.trainer.card
        last = {name: value for each in state.log_history for name, value in each.items()}
        prediction, mark = trainer.run_log.prediction, trainer.run_log.mark
        ended = f" of {state.max_steps:,}" if state.global_step < state.max_steps else ""
        figures = {
            "steps": f"{state.global_step:,}{ended}",
            "time of this training": str(timedelta(seconds=round(time.perf_counter() - self.begun))),
            "tokens": f"{last['num_tokens']:,.0f}" if "num_tokens" in last else None,
            "tokens a second": f"{last['tokens_per_second']:,.0f}" if "tokens_per_second" in last else None,
            "peak memory": bytes_text(mark.bytes),
            "peak predicted": bytes_text(prediction.bytes) if prediction else None,
            "loss, last": f"{last['loss']:.4g}" if "loss" in last else None,
            "loss, evaluated": f"{last['eval_loss']:.4g}" if "eval_loss" in last else None,
        }
        settings = without_secrets(args.requested)
        return RunPage(
            title=Path(str(args.output_dir)).resolve().name,
            about=card.what_it_is(),
            facts={name: text for name, text in figures.items() if text},
            logs=state.log_history,
            lines=self.told,
            raised=mark.raised,
            states=self.states_by_kind(),
            ledger=trainer.ledger.lines() if trainer.ledger else (),
            settings={name: without_folder(str(value)) for name, value in settings.items() if value not in (None, {})},
            versions=card.versions,
        )

    def states_by_kind(self) -> dict[str, int | None]:
        """The bytes that stay."""
        states = self.states
        return {"weights": states.weights, "gradients": states.gradients, "optimizer": states.optimizer}

    def memory_report(self) -> dict[str, Any]:
        """Peaks, the rehearsed one too, states by category, `tokens_per_second` and the ledger."""
        trainer = self.trainer
        seconds = trainer.step_taker.seconds
        return {
            "peak_bytes": peak_bytes(trainer.args.device),
            "peak_phase": trainer.peak_phase,
            "predicted_bytes": trainer.predicted_bytes,
            "rehearsed_bytes": trainer.rehearsed_bytes,
            "states_bytes": self.states.total,
            "states": self.states_by_kind(),
            "tokens_per_second": trainer.step_taker.tokens / seconds if seconds else None,
            "steps": trainer.state.global_step,
            "ledger": trainer.ledger.to_dict() if trainer.ledger else None,
            "device": str(trainer.args.device),
            "torch": torch.__version__,
        }
