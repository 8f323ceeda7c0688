"""lm-eval on the ragged engine: the numbers of lm-eval's own Hugging Face backend."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.main import main
from lowtide.engine.probe import probe
from lowtide.rollout.generators.ragged import RaggedGenerator

pytest.importorskip("lm_eval.models.huggingface", reason="needs the eval extra (lm-eval)")

WORDS = ["the", "tide", "comes", "in", "and", "goes", "out,", "leaving", "a line", "of", "weed", "; then", "it turns."]


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


def loaded(talker):
    return AutoModelForCausalLM.from_pretrained(talker).eval(), AutoTokenizer.from_pretrained(talker)


def backends(talker, *, tokens: int = 300, shares: bool = True, **options):
    """(lm-eval's own, the ragged one) of one model."""
    from lm_eval.models.huggingface import HFLM

    from lowtide.cli.after_training.ragged_lm import RaggedLM

    plain, tokenizer = loaded(talker)
    theirs = HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=4, **options)
    model, _ = loaded(talker)
    found = probe(model)
    assert found.shares_prefixes
    if not shares:
        found = SimpleNamespace(shares_prefixes=False, isolated=True)
    return theirs, RaggedLM(model, tokenizer, found, RaggedGenerator(tokenizer), tokens, **options)


def asked(*pairs):
    return [SimpleNamespace(args=pair) for pair in pairs]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("most", [256, 40])
def test_log_probs_and_greedy_flags_are_those_of_the_plain_backend(talker, shares, most):
    draw = random.Random(0)
    contexts = [words(draw, count) for count in (1, 4, 9, 14)]
    pairs = [(c, " " + words(draw, n)) for c in contexts for n in (1, 2, 3)] + [("", "alone"), ("x ", "spaced")]
    theirs, ours = backends(talker, shares=shares, max_length=most)
    # One continuation is what greedy decoding writes.
    ids = theirs.tokenizer("go", return_tensors="pt")["input_ids"]
    likeliest = int(theirs.model(ids).logits[0, -1].argmax())
    requests = [(("", ""), ids[0].tolist(), [likeliest])]
    for (got, flag), (wanted, their_flag) in zip(
        [*ours.loglikelihood(asked(*pairs), disable_tqdm=True), *ours._loglikelihood_tokens(requests)],
        [*theirs.loglikelihood(asked(*pairs), disable_tqdm=True), *theirs._loglikelihood_tokens(requests)],
        strict=True,
    ):
        assert got == pytest.approx(wanted, abs=1e-4)
        assert flag == their_flag
    assert ours._loglikelihood_tokens(requests)[0][1] is True


def test_a_context_is_computed_once_for_its_choices_and_forwards_keep_their_limit(talker, monkeypatch):
    from lowtide.cli.after_training import ragged_lm

    _, ours = backends(talker, tokens=60)
    sizes, own = [], ragged_lm.score

    def seen(model, batch, *rest, **named):
        sizes.append(batch.tokens)
        return own(model, batch, *rest, **named)

    monkeypatch.setattr(ragged_lm, "score", seen)
    requests = [(("", ""), [5] * 30, [7, n]) for n in range(5)] + [(("", ""), [6] * 20, [8] * 5)]
    ours._loglikelihood_tokens(requests)
    assert sizes == [40, 25]
    assert ours.computed_tokens == 30 + 5 * 2 + 20 + 5
    sizes.clear()
    ours.tokens_per_batch = 34
    ours._loglikelihood_tokens(requests)
    assert sizes == [34, 34, 32, 25]


def test_a_context_is_encoded_once_for_its_choices(talker, monkeypatch):
    _, ours = backends(talker)
    encoded, own = [], ours.tokenizer.encode

    def seen(text, **named):
        encoded.append(text)
        return own(text, **named)

    monkeypatch.setattr(ours.tokenizer, "encode", seen)
    ours.loglikelihood(asked(*[("the tide", f" {word}") for word in "abcd"]), disable_tqdm=True)
    assert encoded.count("the tide") == 1
    assert len(encoded) == 5


def test_rolling_log_probs_and_texts(talker):
    theirs, ours = backends(talker, max_length=48)
    text = words(random.Random(1), 20)
    [got], [wanted] = (lm.loglikelihood_rolling(asked((text,)), disable_tqdm=True) for lm in (ours, theirs))
    assert got == pytest.approx(wanted, abs=2e-4)
    requests = asked(*[(c, {"until": ["\n"], "max_gen_toks": 9, "do_sample": False}) for c in ("the tide", "a", text)])
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)
    with pytest.raises(ValueError, match="a task generates with num_beams, which is not known here"):
        ours.generate_until(asked(("a", {"until": [], "num_beams": 3})))


@pytest.mark.slow
def test_the_command_gives_the_accuracies_of_the_plain_backend(talker, tmp_path, capsys):
    import lm_eval
    from lm_eval.tasks import TaskManager

    draw = random.Random(2)
    rows = [
        {"question": words(draw, 6), "choices": [" " + words(draw, n) for n in (1, 2, 3)], "gold": draw.randrange(3)}
        for _ in range(20)
    ]
    (tmp_path / "tide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tide.yaml").write_text(
        "task: tide\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'tide.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{question}}'\n"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    output = tmp_path / "found.json"
    words_given = ["--tasks", "tide", "--include_path", str(tmp_path), "--output", str(output), "--dtype", "float32"]
    assert main(["evaluate", str(talker), *words_given]) == 0
    assert "tide" in capsys.readouterr().out
    theirs, _ = backends(talker)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    wanted = lm_eval.simple_evaluate(theirs, tasks=["tide"], task_manager=manager, bootstrap_iters=0)
    got = json.loads(output.read_text())["tasks"][str(talker)]["tide"]
    for name in ("acc,none", "acc_norm,none"):
        assert got[name] == pytest.approx(wanted["results"]["tide"][name])
    assert main(["evaluate", str(talker), "--tasks", "tied", "--include_path", str(tmp_path)]) == 2
    assert "there is no task 'tied'; did you mean 'tide'?" in capsys.readouterr().err
