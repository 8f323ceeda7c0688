"""Values drawn for every option of every method: a config is made, or one error names the option. A share trains."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.option_values import Option, options_of
from tests.support.marks import slow_but
from tests.support.matrix.matrix import COMMON, classes, make
from tests.support.matrix.matrix_models import TRAINERS

NOT_TRAINED = {
    "torch_compile": "takes a minute",
    "torch_compile_backend": "takes a minute",
    "torch_compile_mode": "takes a minute",
    "push_to_hub": "needs the network",
    "full_determinism": "changes the process for later tests",
    "ddp_backend": "of several ranks",
    "local_rank": "of several ranks",
    "use_cpu": "chooses another device",
    "desirable_weight": "a weight of 2^64 overflows gradients, and the message is of these",
    "undesirable_weight": "likewise",
    "beta": "likewise, at 1e30",
    "alpha": "likewise: p^-21 overflows",
    "dataloader_num_workers": "starts processes",
    "output_dir": "writes there",
    "memory_report": "writes there",
    "activation_offloading_dir": "writes there",
    "memory_budget": "plans",
    "num_train_epochs": "trains long",
    "gradient_accumulation_steps": "divides the batch of the tests' trainers, down to no rows",
}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**64]),
    st.floats(-2, 2),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]),
    st.sampled_from(["", "none", "auto", "true", "1", "0.5", "steps", "{}", "[1]", "x" * 500, "\N{SNOWMAN}", "\0"]),
    st.lists(st.one_of(st.integers(-1, 3), st.just("x")), max_size=2),
    st.dictionaries(st.sampled_from(["x", "use_reentrant"]), st.booleans(), max_size=1),
    st.sampled_from([object, b"x", (1, 2), {1}, 1j]),
)
TRAINED_SHARE = 40
"""Of so many values that a config takes, one is trained with."""


def values(option: Option | None) -> st.SearchStrategy[Any]:
    """Values near those that an option takes, and any others."""
    if option is None:
        return ANYTHING
    near = [st.just(option.default)]
    if option.choices:
        near.append(st.sampled_from(option.choices))
    if option.range is not None:
        edges = (option.range.least, option.range.most, option.range.above, option.range.below, option.range.also)
        near += [st.just(edge) for edge in edges if edge is not None]
    return st.one_of(*near, ANYTHING)


def check_names(error: Exception, name: str, value: Any) -> None:
    """A message says which option it is about; the older and the newer name of one are the same."""
    if not any(each in str(error) for each in (name, name.replace("activation_", "gradient_"))):
        pytest.fail(f"{name}={value!r} is not named by {type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["DPO"], TRAINERS))
def test_every_value_of_every_option_is_taken_or_refused_by_name(kind, tmp_path):
    _, config = classes(kind)
    options = options_of(config)
    fields = [name for name, each in config.__dataclass_fields__.items() if each.init]
    taken = 0

    @settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data):
        nonlocal taken
        for name in fields:
            value = data.draw(values(options.get(name)))
            given = {**COMMON, "output_dir": str(tmp_path), "max_steps": 1, name: value}
            try:
                config(**given)
            except (ValueError, TypeError) as error:
                check_names(error, name, value)
                continue
            taken += 1
            if taken % TRAINED_SHARE == 0 and name not in NOT_TRAINED:
                trained(kind, given, name)

    check()


def trained(kind: str, given: dict[str, Any], name: str) -> None:
    """One step of a tiny model, or one error."""
    try:
        trainer = make(kind, **{**given, "max_steps": 1})
        trainer.train()
    except (ValueError, TypeError) as error:
        check_names(error, name, given[name])
        return
    assert trainer.state.global_step == 1
