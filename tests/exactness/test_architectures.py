"""Every architecture: ragged equals padded, in log-probabilities and in the gradient of every parameter.

The wanted values come from `reference`, which is the model's own padded eager forward; the model is then prepared
by lowtide and run on the same weights. Segments are longer and shorter than the sliding windows, down to one
token. Gradients are those of a sum with random weights, so that no two scores can stand in for each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowtide.engine.forward import install, score
from lowtide.engine.layers.mixers import chunks_of, mixers
from lowtide.engine.probe import probe
from lowtide.ops.logits.linear_logprobs import TokenStats
from lowtide.ragged import RaggedBatch
from lowtide.score_rules import IGNORE
from tests.support.marks import slow_but
from tests.support.models.architectures import (
    FIRST_TOKEN,
    PADDED,
    RAGGED,
    RECURRENT,
    TYPICAL,
    TYPICAL_OF_ALL,
    TYPICAL_RECURRENT,
    VOCAB,
    build,
)
from tests.support.references.recurrences import compute_by_definition
from tests.support.references.reference import gradient_errors, gradients, reference_logprobs

TOLERANCE = 1e-5
OF_STATES = 1e-4
"""The same of gradients where layers carry states, which transformers rounds as much: it is closer where both
compute in float64 (`test_recurrent_layers_in_float64`)."""
UNPADDED = RAGGED | RECURRENT
WITHOUT_EXPERTS = [name for name, (_, given) in RECURRENT.items() if not any("experts" in each for each in given)]
"""Products of experts are float32 at most."""


@dataclass(frozen=True)
class Case:
    """A ragged batch, and the same tokens as plain rows."""

    batch: RaggedBatch
    rows: list[list[int]]
    scored: list[slice]
    """Of each row's log-probabilities those that the batch scores; end to end they are in its order."""

    def reference(self, model: PreTrainedModel) -> Tensor:
        logprobs = reference_logprobs(model, self.rows)
        return torch.cat([values[part] for values, part in zip(logprobs, self.scored, strict=True)])


def draw(generator: torch.Generator, length: int) -> list[int]:
    return torch.randint(FIRST_TOKEN, VOCAB, (length,), generator=generator).tolist()


def separate() -> Case:
    """Six segments that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(1)
    rows = [draw(generator, length) for length in (13, 1, 2, 9, 17, 5)]
    return Case(RaggedBatch.from_segments(rows), rows, [slice(None)] * len(rows))


def shared() -> Case:
    """Three prompts with three, two and one completions; the tokens of the first prompt are scored too."""
    generator = torch.Generator().manual_seed(2)
    segments, labels, prefix, row, rows, scored = [], [], [], [], [], []
    for number, (prompt_length, lengths) in enumerate([(11, (4, 1, 9)), (3, (2, 8)), (1, (1,))]):
        prompt, own = draw(generator, prompt_length), len(segments)
        segments.append(prompt)
        labels.append(prompt if number == 0 else [IGNORE] * prompt_length)
        prefix.append(-1)
        row.append(number)
        for length in lengths:
            completion = draw(generator, length)
            segments.append(completion)
            labels.append(completion)
            prefix.append(own)
            row.append(number)
            rows.append(prompt + completion)
            # What is scored of the first prompt is scored once, though every completion repeats it here.
            first = number == 0 and len(rows) == 1
            scored.append(slice(0 if first else prompt_length - 1, None))
    return Case(RaggedBatch.from_segments(segments, labels, prefix=prefix, row=row), rows, scored)


def rounds() -> Case:
    """A conversation that is gone on from after some of its tokens, twice, and at its end; of the first only what is
    after the last of these is scored, so that each row's scores end it."""
    generator = torch.Generator().manual_seed(4)
    whole, lengths, cuts = draw(generator, 15), (6, 3, 10), (5, 12, 15)
    own = [draw(generator, length) for length in lengths]
    segments = [whole, *own]
    labels = [[IGNORE] * 12 + whole[12:], *own]
    batch = RaggedBatch.from_segments(segments, labels, prefix=[-1, *((0, cut) for cut in cuts)], row=[0] * 4)
    rows = [whole, *(whole[:cut] + each for cut, each in zip(cuts, own, strict=True))]
    return Case(batch, rows, [slice(11, None), *(slice(cut - 1, None) for cut in cuts)])


CASES: dict[str, Callable[[], Case]] = {"separate": separate, "shared": shared, "rounds": rounds}


@pytest.fixture(autouse=True)
def several_chunks() -> Iterator[None]:
    """Of recurrences: the segments are shorter than a chunk of real runs."""
    with chunks_of(4):
        yield


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def weights_of(case: Case) -> Tensor:
    return torch.randn(case.batch.scores, generator=torch.Generator().manual_seed(3))


def assert_equal_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    errors = gradient_errors(got, wanted)
    far = {name: error for name, error in errors.items() if not error < tolerance}
    assert far == {}


def assert_exact(
    model: PreTrainedModel,
    case: Case,
    prepare: Callable[[PreTrainedModel], object],
    padding_free: bool = True,
    tolerance: float | None = None,
) -> None:
    """Compares the model as it is with the same model after `prepare`."""
    weights = weights_of(case)
    wanted = case.reference(model).to(model.dtype)
    wanted_gradients = gradients(model, wanted @ weights.to(model.dtype))

    prepare(model)
    got = score(model, case.batch, padding_free=padding_free).scored

    assert got is not None
    torch.testing.assert_close(got, wanted, atol=tolerance or TOLERANCE, rtol=0)
    tolerance = tolerance or (OF_STATES if mixers(model) else TOLERANCE)
    assert_equal_gradients(gradients(model, got @ weights.to(model.dtype)), wanted_gradients, tolerance)


@pytest.mark.parametrize("name", slow_but([*TYPICAL, *TYPICAL_RECURRENT], UNPADDED))
def test_ragged_equals_padded(name: str, case: Case):
    assert_exact(build(name), case, install)


@pytest.mark.parametrize("name", slow_but([*TYPICAL, *TYPICAL_RECURRENT], UNPADDED))
def test_ragged_equals_padded_with_checkpointing(name: str, case: Case):
    def prepare(model: PreTrainedModel) -> None:
        install(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})

    assert_exact(build(name), case, prepare)


@pytest.mark.parametrize("name", slow_but(TYPICAL_RECURRENT, WITHOUT_EXPERTS))
def test_recurrent_layers_in_float64(name: str, case: Case, monkeypatch: pytest.MonkeyPatch):
    """Against the definition of each recurrence, token by token. Norms and rotations stay in float32."""
    model = build(name).double()
    compute_by_definition(model, monkeypatch)
    assert_exact(model, case, install, tolerance=2e-6)


@pytest.mark.parametrize("name", slow_but(TYPICAL_OF_ALL, UNPADDED | PADDED))
def test_padded_path_is_the_plain_computation(name: str, case: Case):
    assert_exact(build(name), case, partial(install, padding_free=False), padding_free=False)


@pytest.mark.parametrize("name", slow_but(TYPICAL_OF_ALL, UNPADDED | PADDED))
def test_padded_path_holds_after_the_probe(name: str, case: Case):
    """The probe leaves the ragged attention installed; a padded batch has no plan, and must pass through it."""
    assert_exact(build(name), case, probe, padding_free=False)


@pytest.mark.parametrize("name", slow_but([*TYPICAL_OF_ALL, *TYPICAL_RECURRENT], UNPADDED | PADDED))
def test_probe_tells_which_models_run_ragged(name: str):
    found = probe(build(name))
    assert (found.isolated, found.shares_prefixes) == (name in UNPADDED, name in UNPADDED)


@pytest.mark.parametrize("accumulate", [False, True], ids=["returned", "in_place"])
@pytest.mark.parametrize("name", slow_but([*TYPICAL, *TYPICAL_RECURRENT], UNPADDED))
def test_loss_known_in_forward_gives_the_same_gradients(name: str, accumulate: bool):
    """The mean negative log-likelihood of supervised fine-tuning."""
    case, model = separate(), build(name)
    wanted = -case.reference(model).mean()
    wanted_gradients = gradients(model, wanted)

    def nll(stats: TokenStats) -> Tensor:
        return -stats.logprobs

    install(model)
    output = score(model, case.batch, loss=nll, factor=1 / case.batch.scores, accumulate=accumulate)

    assert output.loss is not None
    torch.testing.assert_close(output.loss, wanted, atol=TOLERANCE, rtol=0)
    tolerance = OF_STATES if mixers(model) else TOLERANCE
    assert_equal_gradients(gradients(model, output.loss), wanted_gradients, tolerance)
