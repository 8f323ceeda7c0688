"""Results that are known from before, against what torch says each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import LlamaConfig

import lowtide
from lowtide.compat.torch import without_modes
from lowtide.planner.answers.row_lengths import rows_of
from lowtide.planner.devices import device_named
from lowtide.planner.tracing import fake_run, known_results
from lowtide.planner.tracing.fake_run import FakeRun
from lowtide.planner.tracing.known_results import KnownResults
from lowtide.planning import method_of
from tests.support.marks import slow_or_sweep

aten = torch.ops.aten
DESCRIBED = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test begins and ends with nothing known."""
    known_results.KNOWN.clear()
    yield
    known_results.KNOWN.clear()


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    """The mode whose tensors are asked about."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


class Asked:
    """An operation that counts how often torch is asked."""

    def __init__(self, func: Any) -> None:
        self.func, self.times = func, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self.func(*args, **kwargs)


def form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


CASES: dict[str, Callable[[], tuple]] = {
    "sum": lambda: (aten.add.Tensor, (torch.empty(4, 1), torch.empty(3))),
    "product": lambda: (aten.mm.default, (torch.empty(4, 5), torch.empty(5, 3))),
    "cast": lambda: (aten._to_copy.default, (torch.empty(4, 5).t(),), {"dtype": torch.bfloat16}),
    "several": lambda: (aten.max.dim, (torch.empty(4, 5), 1)),
    "statistics": lambda: (aten.native_layer_norm.default, (torch.empty(4, 5), [5], None, None, 1e-5)),
    "made": lambda: (aten.empty.memory_format, ([3, 4],), {"device": torch.device("cpu"), "pin_memory": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_known_result_has_the_form_and_a_storage_of_its_own(case, fake):
    run = KnownResults(fake)
    func, args, *rest = CASES[case]()
    asked, kwargs = Asked(func), rest[0] if rest else {}
    first, second = run(asked, args, kwargs), run(asked, args, kwargs)
    assert asked.times == 1
    assert type(first) is type(second)
    both = zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
    for one, other in both:
        assert isinstance(other, FakeTensor)
        assert form(one) == form(other)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_a_view_is_in_the_storage_of_what_it_is_of(fake):
    run, func = KnownResults(fake), Asked(aten.slice.Tensor)
    run(func, (torch.empty(8, 5), 0, 2, 6), {})
    base = torch.empty(8, 5)
    view = run(func, (base, 0, 2, 6), {})
    assert func.times == 1
    assert (view.shape, view.storage_offset()) == ((4, 5), 10)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_a_view_may_be_of_another_dtype(fake):
    run, func = KnownResults(fake), Asked(aten.view.dtype)
    run(func, (torch.empty(8, dtype=torch.bfloat16), torch.int16), {})
    base = torch.empty(8, dtype=torch.bfloat16)
    view = run(func, (base, torch.int16), {})
    assert func.times == 1
    assert (view.shape, view.dtype) == ((8,), torch.int16)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


def test_what_is_looked_up_in_a_table_with_values_has_none(fake):
    run, func = KnownResults(fake), Asked(aten.index_select.default)
    with without_modes():
        table = torch.arange(5.0)
    codes = torch.empty(3, dtype=torch.int32)
    first, second = run(func, (table, 0, codes), {}), run(func, (table, 0, codes), {})
    assert func.times == 1
    assert isinstance(second, FakeTensor)
    assert form(first) == form(second)


def test_random_numbers_have_no_values_of_a_generator(fake):
    run, func = KnownResults(fake), Asked(aten.randint.generator)
    options = {"generator": torch.Generator(), "device": torch.device("cpu"), "pin_memory": False}
    first, second = run(func, (9, [4]), options), run(func, (9, [4]), options)
    assert func.times == 1
    assert form(first) == form(second)


def test_parts_are_in_one_storage(fake):
    run, func = KnownResults(fake), Asked(aten.split.Tensor)
    run(func, (torch.empty(8, 5), 4), {})
    base = torch.empty(8, 5)
    parts = run(func, (base, 4), {})
    assert func.times == 1
    assert [part.storage_offset() for part in parts] == [0, 20]
    assert {part.untyped_storage()._cdata for part in parts} == {base.untyped_storage()._cdata}


def test_what_is_changed_in_place_is_given_back(fake):
    run, func = KnownResults(fake), Asked(aten.add_.Tensor)
    run(func, (torch.empty(4), torch.empty(4)), {})
    changed = torch.empty(4)
    assert run(func, (changed, torch.empty(4)), {}) is changed
    assert func.times == 1


def test_numbers_that_are_equal_may_be_of_other_kinds(fake):
    run, counts = KnownResults(fake), torch.zeros(3, dtype=torch.int64)
    assert run(aten.mul.Tensor, (counts, 2), {}).dtype == torch.int64
    assert run(aten.mul.Tensor, (counts, 2.0), {}).dtype == torch.float32
    assert run(aten.mul.Tensor, (counts > 0, True), {}).dtype == torch.bool
    assert run(aten.mul.Tensor, (counts > 0, 1), {}).dtype == torch.int64


def test_the_dtype_that_torch_takes_by_default_counts(fake):
    run = KnownResults(fake)
    options = {"device": torch.device("cpu"), "pin_memory": False}
    assert run(aten.empty.memory_format, ([3],), options).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert run(aten.empty.memory_format, ([3],), options).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_changes_its_argument_s_form_is_asked_each_time(fake):
    run, func = KnownResults(fake), Asked(aten.resize_.default)
    for _ in range(2):
        small = torch.empty(2)
        assert run(func, (small, [9]), {}).shape == (9,)
    assert func.times == 2


def test_what_has_values_is_asked_each_time(fake):
    run, func = KnownResults(fake), Asked(aten.add.Tensor)
    for _ in range(2):
        run(func, (torch.empty(()), torch.tensor(1.0)), {})  # a number that torch keeps
    assert func.times == 2


def test_operations_of_others_are_asked_each_time(fake):
    func = Asked(torch.ops.prims.convert_element_type.default)
    for _ in range(2):
        KnownResults(fake)(func, (torch.empty(3), torch.float16), {})
    assert func.times == 2


OPTIONS: tuple[dict, ...] = ({}, {"bf16": True, "tokens_per_microbatch": 48}, {"optim": "adafactor"})
CELLS = [(device, options) for device in ("cpu", "H100-80GB") for options in OPTIONS]


@pytest.mark.parametrize(("device", "options"), slow_or_sweep(CELLS, CELLS[::2]), ids=str)
def test_a_trace_is_the_same_where_all_is_asked_anew(options, device, tmp_path, monkeypatch):
    def events() -> list[tuple]:
        args = lowtide.DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
        rows = Dataset.from_list(rows_of([(8, 24, 16)] * 4))
        traced = FakeRun(method_of(args), args, DESCRIBED, rows, prepared=True).traced(device_named(device))
        return [(b and (b.size, b.category, b.layer), *rest) for b, *rest in traced.events]

    first, known = events(), events()
    monkeypatch.setattr(fake_run, "KnownResults", lambda _fake: None)
    assert first == known == events()
