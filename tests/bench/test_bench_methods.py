"""The tables of the benchmarks: their names are real ones, their rows fit, and both libraries count the same tokens."""

import importlib
import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from bench.compare.__main__ import Run, parse
from bench.compare.child import reference_for, teacher_for
from bench.compare.methods import METHODS, tokens_of_completion, tokens_of_pair
from bench.compare.tables import vocabulary_verdict
from bench.inputs.generated import LONGEST
from bench.inputs.rows import CASES, Row
from bench.inputs.shapes import SHAPES, Shape, build_model, build_reward_model, parameter_counts
from bench.vocabulary.child import most_allocated

PREFERENCES = ("dpo", "kto", "reward")
TINY = Shape(
    SHAPES["llama-22m"].config | {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    device="cpu",
    dtype="float32",
)


@pytest.mark.parametrize("name", METHODS)
def test_names_of_a_method_resolve(name: str):
    method = METHODS[name]
    assert CASES[name].keys() == {"gsm8k", "longtail"}
    assert {"trl", "lowtide"} <= method.contestants.keys()
    for contestant in method.contestants.values():
        if contestant.package != "lowtide":
            pytest.importorskip("trl")
        package = importlib.import_module(contestant.package)
        flags = getattr(package, method.config).__dataclass_fields__
        assert contestant.flags.keys() <= flags.keys()
        assert hasattr(package, method.trainer)
        assert contestant.against is None or contestant.against in method.contestants


def words(row: Row, *columns: str) -> int:
    return sum(len(message["content"].split()) for column in columns for message in row[column])


def real_share(lengths: list[list[int]], batch: int = 8) -> float:
    """Which share of padded batches is real: each answer is padded to the batch's longest, with its prompt."""
    batches = [list(chain(*lengths[start : start + batch])) for start in range(0, len(lengths), batch)]
    return sum(map(sum, batches)) / sum(len(each) * max(each) for each in batches)


@pytest.mark.parametrize("case", ["gsm8k", "longtail"])
@pytest.mark.parametrize("method", PREFERENCES)
def test_preference_rows_fit_and_are_the_same_every_time(method: str, case: str):
    rows = CASES[method][case].rows()
    assert len(rows) == 160
    assert json.dumps(rows) == json.dumps(CASES[method][case].rows())
    answers = ("completion",) if method == "kto" else ("chosen", "rejected")
    lengths = [[words(row, "prompt", answer) for answer in answers] for row in rows]
    assert max(map(max, lengths)) <= LONGEST
    if method == "kto":
        assert {row["label"] for row in rows} == {True, False}
    else:
        assert all(row["chosen"] != row["rejected"] for row in rows)
    if case == "longtail":
        assert max(map(max, lengths)) > 0.8 * LONGEST
        assert 0.35 < real_share(lengths) < 0.5


def test_tokens_are_those_of_both_sides_however_a_library_keeps_the_prompt():
    apart = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6]}
    whole = {"chosen_ids": [1, 2, 3, 4, 5], "rejected_ids": [1, 2, 3, 6]}
    assert tokens_of_pair(apart) == tokens_of_pair(whole) == 9
    assert tokens_of_completion({"prompt_ids": [1, 2], "completion_ids": [3], "KL_completion_ids": [4, 5]}) == 3


def test_only_trl_is_given_a_reference_and_only_where_there_is_one():
    model = build_model(TINY)
    given = reference_for(METHODS["dpo"], METHODS["dpo"].contestants["trl"], model)["ref_model"]
    assert given is not model
    assert given.lm_head.weight.equal(model.lm_head.weight)
    assert reference_for(METHODS["dpo"], METHODS["dpo"].contestants["lowtide"], model) == {}
    assert reference_for(METHODS["reward"], METHODS["reward"].contestants["trl"], model) == {}


def test_a_reward_model_has_one_value_in_place_of_the_head():
    policy, rewards = build_model(TINY), build_reward_model(TINY, pad_token_id=3)
    assert rewards.score.weight.shape == (1, 16)
    assert rewards.config.pad_token_id == 3
    everything, multiplied = parameter_counts(rewards)
    assert everything == parameter_counts(policy)[0] - policy.lm_head.weight.numel() + 16
    assert multiplied == everything - policy.lm_head.weight.numel()


def test_all_methods_run_unless_some_are_named(capsys: pytest.CaptureFixture):
    assert parse(["--shapes", "llama-22m"]).method == list(METHODS)
    options = parse(["--method", "dpo", "kto", "--contestants", "trl", "lowtide"])
    assert options.method == ["dpo", "kto"]
    assert Run("kto", "llama-22m", options).contestants == ["trl", "lowtide"]
    with_room = ["trl-no-recomputation", "lowtide-auto"]
    assert Run("dpo", "llama-22m", parse([])).contestants == ["trl", "lowtide", *with_room, "lowtide-precompute"]
    with pytest.raises(SystemExit):
        parse(["--method", "dpo", "kto", "--contestants", "lowtide-precompute"])
    assert "'lowtide-precompute' is none of kto's" in capsys.readouterr().err


def test_the_vocabularies_are_compared_by_what_tensors_hold():
    small, large = ({"vocabulary": size, "tensors_above_states_bytes": 100} for size in (32_000, 256_000))
    assert vocabulary_verdict([small, large]).startswith("reached: 1.00x")
    assert "8x the vocabulary" in vocabulary_verdict([small, large])
    assert vocabulary_verdict([small, large | {"tensors_above_states_bytes": 120}]).startswith("NOT reached: 1.20x")


def test_most_allocated_is_the_peak_of_tensors_made_since_the_start(tmp_path: Path):
    held = torch.zeros(1 << 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        first, second = torch.zeros(1 << 18), torch.zeros(1 << 18)
        del first
        third = held[: 1 << 18] + second
        del second, third
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert 2 << 20 <= most_allocated(tmp_path / "trace.json") < (2 << 20) + 4096


def test_both_libraries_are_given_a_teacher_where_there_is_one():
    method = METHODS["gkd"]
    for contestant in method.contestants.values():
        teacher = teacher_for(method, contestant, TINY)["teacher_model"]
        assert teacher.config.num_hidden_layers == 2
        assert not teacher.lm_head.weight.equal(build_model(TINY).lm_head.weight)
    assert teacher_for(METHODS["sft"], METHODS["sft"].contestants["trl"], TINY) == {}
