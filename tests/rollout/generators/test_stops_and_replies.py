"""How completions end, and how they go on after a reply."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowtide.rollout.generators.generator import Completion, Request, Sampling
from lowtide.rollout.generators.ragged import RaggedGenerator
from lowtide.rollout.generators.stops import Stops
from lowtide.rollout.generators.transformers import TransformersGenerator
from tests.support.runs.generating import prompt, some_requests, token_ids, writer

GENERATORS = [RaggedGenerator, TransformersGenerator]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, but for a few pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges = [("E", "N"), ("EN", "D"), ("a", "b")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    inner = Tokenizer(models.BPE(vocab, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def bytes_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """A token for each byte, without merges."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(letter) for piece, _ in letters for letter in piece]


@pytest.mark.parametrize("text", ["END", "</s>", "ü€", "🌊!", " a b"])
def test_stop_strings_end_with_the_token_that_completes_them(tokenizer: PreTrainedTokenizerFast, text: str):
    stops = Stops(Sampling(1, stop_strings=(text,)), tokenizer)
    tokens = bytes_of(tokenizer, "over and ünder 🌊 " + text)

    ended = [stops.at_end(tokens[: count + 1]) for count in range(len(tokens))]

    assert ended == [False] * (len(tokens) - 1) + [True]


def test_stop_strings_are_found_inside_of_tokens_but_not_before_the_turn(tokenizer: PreTrainedTokenizerFast):
    stops = Stops(Sampling(1, stop_strings=("N",)), tokenizer)
    end = tokenizer.convert_tokens_to_ids("END")

    assert stops.at_end([*bytes_of(tokenizer, "the "), end])
    assert not stops.at_end([end, *bytes_of(tokenizer, "x")], start=1)
    assert not stops.at_end([*bytes_of(tokenizer, "x")] * 40)


@pytest.mark.parametrize("generator", GENERATORS)
def test_completions_end_at_stop_tokens(generator: type):
    model, stop = writer(), tuple(range(3, 12))

    got = generator().generate(model, some_requests(), Sampling(25, stop_ids=stop))

    rows = [row for group in got for row in group]
    for row in rows:
        inside = [token in stop for token in row.token_ids]
        assert not any(inside[:-1])
        assert row.finish == ("stop" if inside[-1] else "length")
        assert len(row.token_ids) == 25 or row.finish == "stop"
        assert all(row.written)
        assert len(row.logprobs) == len(row.plain_logprobs) == len(row.written) == len(row.token_ids)
    assert "stop" in {row.finish for row in rows}


@pytest.mark.parametrize("generator", GENERATORS)
def test_completions_end_at_stop_strings(generator: type, tokenizer: PreTrainedTokenizerFast):
    model = writer(vocab_size=len(tokenizer))
    free = RaggedGenerator().generate(model, [Request(prompt(5), 3)], Sampling(20, temperature=0))
    text = tokenizer.decode(free[0][0].token_ids[6:9])

    sampling = Sampling(20, temperature=0, stop_strings=(text,))
    got = generator(tokenizer).generate(model, [Request(prompt(5), 3)], sampling)

    assert [row.token_ids for row in got[0]] == [free[0][0].token_ids[:9]] * 3
    assert [row.finish for row in got[0]] == ["stop"] * 3


def answering(request: int, number: int, completion: Completion) -> list[int] | None:
    """Three tokens, twice; then it is over."""
    turns = completion.written.count(False) // 3
    return None if turns == 2 else [20 + turns, 30, 4]


@pytest.mark.parametrize("generator", GENERATORS)
def test_replies_are_appended_and_the_policy_goes_on(generator: type):
    model, stop = writer(), tuple(range(3, 30))
    sampling = Sampling(40, temperature=0, stop_ids=stop)

    got = generator().generate(model, some_requests(), sampling, answering)

    for request, group in zip(some_requests(), got, strict=True):
        for row in group:
            tokens = list(request.prompt_ids)
            for token, written in zip(row.token_ids, row.written, strict=True):
                if written:
                    with torch.no_grad():
                        assert token == int(model.eval()(torch.tensor([tokens])).logits[0, -1].argmax())
                tokens.append(token)
            if row.finish == "stop":
                assert row.written.count(False) == 6
            first = next(place for place, token in enumerate(row.token_ids) if token in stop)
            assert row.token_ids[first + 1 : first + 4] == [20, 30, 4]
            assert row.written[first : first + 4] == [True, False, False, False]
    assert {row.finish for group in got for row in group} >= {"stop"}


@pytest.mark.parametrize("generator", GENERATORS)
def test_each_token_is_heard_as_it_is_written_and_a_turn_can_be_ended_with_it(generator: type):
    model, heard = writer(), {}
    free = generator().generate(model, some_requests(), Sampling(12, temperature=0))

    def hears(request: int, number: int, token: int) -> bool:
        heard.setdefault((request, number), []).append(token)
        return len(heard[request, number]) % 5 == 0

    got = generator().generate(model, some_requests(), Sampling(12, temperature=0), answering, hears)

    for request, group in enumerate(got):
        for number, row in enumerate(group):
            written = [token for token, own in zip(row.token_ids, row.written, strict=True) if own]
            assert heard[request, number] == written
            assert row.written == [True] * 5 + [False] * 3 + [True] * 4
            assert row.token_ids[:5] == free[request][number].token_ids[:5]
            assert row.finish == "length"
    ended = generator().generate(model, some_requests(), Sampling(12, temperature=0), None, lambda *_: True)
    assert {(len(row.token_ids), row.finish) for group in ended for row in group} == {(1, "stop")}


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_reply_is_cut_where_the_completion_is_full(generator: type):
    model, everything = writer(), tuple(range(101))

    got = generator().generate(
        model, [Request(prompt(4), 2)], Sampling(5, stop_ids=everything), lambda *_: [7, 8, 9, 10, 11, 12]
    )

    assert [row.token_ids[1:] for row in got[0]] == [[7, 8, 9, 10]] * 2
    assert [row.written for row in got[0]] == [[True, False, False, False, False]] * 2
    assert [row.finish for row in got[0]] == ["length"] * 2


@pytest.mark.slow
def test_replies_do_not_change_what_others_write():
    model, stop = writer(), tuple(range(3, 12))
    sampling = Sampling(30, stop_ids=stop)

    def reply(request: int, number: int, completion: Completion) -> list[int] | None:
        return answering(request, number, completion) if request == 1 else None

    got = token_ids(RaggedGenerator().generate(model, some_requests(), sampling, reply))
    plain = token_ids(RaggedGenerator().generate(model, some_requests(), sampling))
    alone = token_ids(
        RaggedGenerator().generate(model, some_requests()[1:2], sampling, lambda _, *rest: answering(1, *rest))
    )
    budgeted = RaggedGenerator(tokens_per_generation_batch=120).generate(model, some_requests(), sampling, reply)
    assert [row for n, row in enumerate(got) if n != 1] == [row for n, row in enumerate(plain) if n != 1]
    assert got[1] == alone[0]
    assert token_ids(budgeted) == got
