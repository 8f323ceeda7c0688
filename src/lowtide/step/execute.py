"""Runs the acts of a step's plan, one after the other.

What holds between acts is kept here: what was scored, the slopes that a `Join` found, what the layers keep of a long
row, and the random state of each forward without gradients, so that the one with gradients draws the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.engine.heads.head import ScoreOutput
from lowtide.ragged import RaggedBatch
from lowtide.step.chains import Chain
from lowtide.step.cut import Part
from lowtide.step.losses import Loss, Slopes
from lowtide.step.metrics import Totals
from lowtide.step.rank_sync import RankSync, random_state, set_random_state
from lowtide.step_plan import IDLE, Act, Join, Score, StepPlan, Train

Context = Callable[[], contextlib.AbstractContextManager]

TOKENS = "all_tokens"
"""Of the counts of a step: its tokens, scored or not."""


@dataclass(frozen=True)
class Backward:
    """How a step goes backward, and how it meets the other ranks."""

    accumulate: bool = True
    """Gradients of the head go straight to `.grad`; needs a `backward` that scales the loss by `grad_scale` and nothing
    else."""
    backward: Callable[[Tensor], object] = Tensor.backward
    """Called with the loss of each micro-batch."""
    grad_scale: float = 1.0
    """What `backward` multiplies the loss by, as a loss scaler for float16 does. The head forms its gradients in
    forward, and so much larger, so that they do not underflow before."""
    exchange: Callable[[], Callable[[], None]] | None = None
    """Brings the gradients of all ranks together, or makes ready to, and returns what ends that once all ranks came
    through. Without it a wrapper does in the last backward, where the failure of one rank leaves the others waiting."""
    overlap: Context = contextlib.nullcontext
    """Entered for the last forward and backward of a step, in which gradients may be exchanged as they arrive."""
    forgo: Callable[[], None] = lambda: None
    """Called in place of `exchange` by a rank that failed."""
    no_sync: Context = contextlib.nullcontext
    """A wrapper's: entered for all acts in which it exchanges nothing."""
    around_last: Context = contextlib.nullcontext
    """Entered for the last micro-batch, in whose backward every gradient is complete as it arrives."""
    finite: bool = False
    """Stops at a loss that is no number, before ranks exchange."""
    abandon: Callable[[], None] = lambda: None
    """Puts in order what a step that was left in the middle leaves behind, beside gradients."""


class Execution:
    """One plan on its way.

    Args:
        parts: the micro-batches of the plan, and an empty one after them where it has acts of that.
        losses: that are added up.
        sync: is told what runs, for the report of a failure.
        totals: takes in the metrics of the first loss, and tokens.
    """

    def __init__(
        self, plan: StepPlan, parts: Sequence[Part], losses: Sequence[Loss], sync: RankSync, totals: Totals
    ) -> None:
        self.plan, self.parts, self.losses, self.sync, self.totals = plan, parts, losses, sync, totals
        self.device = parts[0].batch.token_ids.device
        self.found: list[Tensor] = []
        """Losses whose sum is that of the step; `joined` is that of a loss of the whole batch instead."""
        self.joined: Tensor | None = None
        self._chains: dict[int, Chain] = {}
        self._random: dict[tuple[int, int, int], list[Tensor]] = {}
        self._outputs: dict[int, list[Any]] = {}
        """Of a micro-batch, what its pieces gave so far."""
        self._referred: dict[tuple[int, int], Tensor | None] = {}
        self._slopes: dict[tuple[int, int], Slopes] = {}

    @property
    def loss(self) -> Tensor:
        """Of the step, so scaled that its mean over ranks is the loss of the whole batch."""
        return torch.stack(self.found).sum() if self.joined is None else self.joined

    def run(self, acts: Sequence[Act], backward: Backward) -> None:
        """Runs acts; those from `plan.last` on as the last of the step."""
        before = acts[: max(len(acts) - (len(self.plan.acts) - self.plan.last), 0)]
        with backward.no_sync():
            for act in before:
                self._take(act, backward)
        quiet = contextlib.nullcontext() if backward.exchange is None else backward.no_sync()
        with quiet, backward.around_last():
            for act in acts[len(before) :]:
                with backward.overlap() if act is self.plan.acts[-1] else contextlib.nullcontext():
                    self._take(act, backward)

    def score(self, acts: Sequence[Act], backward: Backward) -> None:
        """Runs acts before those with gradients."""
        with backward.no_sync():
            for act in acts:
                self._take(act, backward)

    def _take(self, act: Act, backward: Backward) -> None:
        loss = self.losses[act.term]
        with loss.models.adapter_of(loss.objective):
            match act:
                case Score():
                    self._score(act, loss)
                case Join():
                    self._join(act, loss)
                case Train():
                    self._train(act, backward)

    # -- without gradients -------------------------------------------------------------------------------------------

    def _score(self, act: Score, loss: Loss) -> None:
        part, chain = self.parts[act.part], self._chain(act.part)
        self._note(act, "forward")
        if act.reads and act.piece == 0:
            self._referred[act.part, act.term] = loss.referred(part)
        run = loss.scored if act.reads else loss.models.unscored
        with self._drawing(act):
            output = chain.score(act.piece, run, keeps=act.keeps)
        if act.part == IDLE or not act.reads:
            self._chains.pop(IDLE, None)
            return
        outputs = self._outputs.setdefault(act.part, [])
        outputs.append(output)
        if len(outputs) == len(part.pieces):
            del self._outputs[act.part]
            if not act.keeps:
                del self._chains[act.part]
            if part.batch.scores or self.plan.loss_over == "row":
                referred = self._referred.pop((act.part, act.term))
                loss.read(act.part, part.batch, part.joined(outputs), referred)

    def _join(self, act: Join, loss: Loss) -> None:
        over_ranks = self.plan.loss_over == "step"
        slopes, found = loss.join(self.device, over_ranks=over_ranks)
        self._slopes |= {(part, act.term): each for part, each in slopes.items()}
        if over_ranks:
            self.joined = found
        else:
            self.found.append(found)

    # -- with gradients ----------------------------------------------------------------------------------------------

    def forward(self, act: Train) -> ScoreOutput:
        """What the model gives for what an act trains on, with gradients."""
        loss, part, key = self.losses[act.term], self.parts[act.part], (act.part, act.term)
        self._note(act, "forward")
        if self.plan.loss_over != "step" and key not in self._slopes and len(part.pieces) == 1:
            self._referred[key] = loss.referred(part)
        with self._drawing(act):
            return loss.forward(self.batch(act))

    def loss_of(self, act: Train, output: ScoreOutput) -> Tensor:
        """What goes backward of it."""
        loss, part, key = self.losses[act.term], self.parts[act.part], (act.part, act.term)
        referred, idle = self._referred.pop(key, None), act.part == IDLE
        if idle:
            found = output.nothing if output.loss is None else output.loss
        elif key in self._slopes:
            found = self._slopes[key].product(output, part.pieces[act.piece].scores)
        elif self.plan.loss_over == "step":
            found = output.nothing
        else:
            found = loss.of_output(part.read(act.piece), output, referred)
        if output.aux_loss is not None:  # of an idle rank too, whose backward then asks for weights as the others' does
            share = 0.0 if idle else part.batch.tokens * loss.ranks / loss.counts[TOKENS]
            found = found + loss.objective.aux_coefficient * output.aux_loss * share
        return found

    def begin_backward(self, act: Train) -> None:
        """All that go on from a piece went backward: what its layers keep for them is dropped."""
        self._note(act, "backward")
        self._chain(act.part).forget(act.piece)

    def end(self, act: Train, output: ScoreOutput | None) -> None:
        """Once it went backward.

        Args:
            output: for the metrics; None where another rank has it.
        """
        key, part = (act.part, act.term), self.parts[act.part]
        outputs = self._outputs.setdefault(act.part, [])
        outputs.append(output if output is None or len(part.pieces) == 1 else output.map(Tensor.detach))
        if len(outputs) < len(part.pieces):
            return
        del self._outputs[act.part]
        self._chains.pop(act.part, None)
        self._slopes.pop(key, None)
        if act.term == 0 and output is not None:
            self.totals.take_in(part.joined(outputs[::-1]), part.batch)

    def add(self, act: Train, loss: Tensor) -> None:
        """Takes in the loss of what an act trained on, unless it is known of the whole row."""
        if (act.part, act.term) not in self._slopes:
            self.found.append(loss)

    def _train(self, act: Train, backward: Backward) -> None:
        self.begin_backward(act)
        output = self.forward(act)
        loss = self.loss_of(act, output)
        self._note(act, "backward")
        backward.backward(loss)
        self.add(act, loss.detach())
        self.end(act, output)

    # -- inside ------------------------------------------------------------------------------------------------------

    def batch(self, act: Score | Train) -> RaggedBatch:
        """What the forward of an act sees."""
        return self._chain(act.part).batch(act.piece)

    def _chain(self, number: int) -> Chain:
        if number not in self._chains:
            self._chains[number] = Chain(self.parts[number], self.losses[0].models.place())
        return self._chains[number]

    def _note(self, act: Score | Train, phase: str) -> None:
        number = act.part if act.part != IDLE else len(self.plan.micro_batches)
        self.sync.micro_batch, self.sync.part, self.sync.phase = number, self.parts[act.part].read(act.piece), phase

    @contextlib.contextmanager
    def _drawing(self, act: Score | Train) -> Iterator[None]:
        """Around a forward: one that was run before draws what it drew then."""
        key = act.term, act.part, act.piece
        before = self._random.get(key)
        if before is None:
            if type(act) is Score and act.part != IDLE:
                self._random[key] = random_state(self.device)
            yield
            return
        now = random_state(self.device)
        set_random_state(before, self.device)
        try:
            yield
        finally:
            set_random_state(now, self.device)
        if type(act) is Train:
            del self._random[key]


def schedules(acts: Sequence[Act]) -> Iterator[Sequence[Act]]:
    """Acts with gradients that follow one another, as many as have one loss; each other act by itself."""
    for term, group in itertools.groupby(acts, lambda act: act.term if type(act) is Train else None):
        found = list(group)
        yield from [found] if term is not None else [[act] for act in found]
