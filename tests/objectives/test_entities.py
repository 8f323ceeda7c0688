"""Precision, recall and F1 of entities, against values that are known and against seqeval where it is installed."""

from __future__ import annotations

import random
import warnings

import pytest

from lowtide.objectives.entities import entities, entity_scores

CASES = {
    "B and I": (["B-PER", "I-PER", "O", "B-LOC"], {("PER", 0, 1), ("LOC", 3, 3)}),
    "neighbours": (["B-PER", "B-PER", "I-PER"], {("PER", 0, 0), ("PER", 1, 2)}),
    "I alone": (["O", "I-PER", "I-PER"], {("PER", 1, 2)}),
    "type changes": (["B-PER", "I-LOC"], {("PER", 0, 0), ("LOC", 1, 1)}),
    "IOBES": (["B-PER", "I-PER", "E-PER", "S-LOC", "O"], {("PER", 0, 2), ("LOC", 3, 3)}),
    "E ends": (["I-PER", "E-PER", "I-PER"], {("PER", 0, 1), ("PER", 2, 2)}),
    "dashes": (["B-a-b", "I-a-b"], {("a-b", 0, 1)}),
    "nothing": ([], set()),
}


@pytest.mark.parametrize("case", CASES)
def test_entities(case: str):
    tags, expected = CASES[case]
    assert entities(tags) == expected


def test_scores_are_of_whole_entities():
    truth = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    guess = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    scores = entity_scores(zip(truth, guess, strict=True))
    assert scores[""] == {"precision": 0.5, "recall": 0.5, "f1": 0.5, "number": 2}
    assert scores["MISC"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 1}
    assert scores["PER"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "number": 1}
    assert entity_scores([(["O"], ["O"])]) == {"": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "number": 0}}


def test_an_entity_does_not_reach_into_the_next_document():
    scores = entity_scores([(["B-PER"], ["B-PER"]), (["I-PER"], ["I-PER"])])
    assert scores[""]["number"] == 2


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_seqeval(seed: int):
    metrics = pytest.importorskip("seqeval.metrics")
    rng = random.Random(seed)
    tags = ["O", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("PER", "LOC", "x-y")), "NOUN", "."]
    truth = [rng.choices(tags, k=rng.randint(1, 30)) for _ in range(30)]
    guess = [[tag if rng.random() < 0.7 else rng.choice(tags) for tag in each] for each in truth]
    scores = entity_scores(zip(truth, guess, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = metrics.classification_report(truth, guess, output_dict=True)
        whole = [getattr(metrics, f"{name}_score")(truth, guess) for name in ("precision", "recall", "f1")]
    assert [scores[""][name] for name in ("precision", "recall", "f1")] == pytest.approx(whole)
    found = {kind: own for kind, own in scores.items() if kind}
    assert found.keys() == {kind for kind in report if not kind.endswith(" avg")}
    for kind, own in found.items():
        theirs = [report[kind][name] for name in ("precision", "recall", "f1-score", "support")]
        assert [*own.values()] == pytest.approx(theirs)
