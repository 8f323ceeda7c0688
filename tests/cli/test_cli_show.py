"""`lowtide show`: what of a row is context, scored and dropped."""

import argparse
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from lowtide import SFTConfig
from lowtide.cli import show
from lowtide.data.report.row_parts import Part, ShownSegment
from lowtide.data.report.shown_page import ShownRow
from lowtide.option_values import options_of

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {% if loop.last and m.thinking %}{{ m.thinking }} then {% endif %}"
    "{{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
TALK = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c", "reasoning": "d e"},
    {"role": "user", "content": "f"},
    {"role": "assistant", "content": "g h", "reasoning": "i"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder with a tokenizer for which each word is one token, and a generation config."""
    folder = tmp_path_factory.mktemp("model")
    words = ["<unk>", "</s>", "<end>", "user", "assistant", "then", *"abcdefghi"]
    built = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(model, tmp_path, monkeypatch, capsys):
    """Runs the subcommand on a conversation and a text of one turn, and gives the lines that it printed."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (TALK, TALK[:2])))

    def run(*arguments, colours=False) -> list[str]:
        for name, wanted in {"FORCE_COLOR": colours, "NO_COLOR": not colours}.items():
            monkeypatch.setenv(name, "1") if wanted else monkeypatch.delenv(name, raising=False)
        parser = argparse.ArgumentParser()
        show.add_parser(parser.add_subparsers())
        args = parser.parse_args(["show", str(path), "--model", model, *map(str, arguments)])
        assert args.run(args) == 0
        return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    return run


def test_each_segment_has_its_context_and_what_is_scored(run):
    assert run("--assistant_only_loss") == [
        "row 0, segment 1 of 2: 16 tokens: 11 context 5 scored",
        "context: 'user a b <end> assistant c <end> user f <end> assistant'",
        "scored: 'i then g h <end>'",
        "row 0, segment 2 of 2: 5 tokens: 5 scored",
        "goes on behind the first 5 tokens of segment 1, which end with 'user a b <end> assistant'",
        "scored: 'd e then c <end>'",
    ]


def test_a_segment_whose_turn_a_limit_takes_is_dropped_and_one_that_goes_on_from_it_is_not(run):
    lines = run("--assistant_only_loss", "--max_length", 9)
    assert lines[:2] == ["row 0, segment 1 of 2: 16 tokens: 16 dropped", "dropped: 'user a b <end> assistant c <end> "
                         "user f <end> assistant i then g h <end>'"]  # fmt: skip
    assert lines[2:] == [
        "row 0, segment 2 of 2: 5 tokens: 4 scored 1 dropped",
        "goes on behind the first 5 tokens of segment 1, which end with 'user a b <end> assistant'",
        "scored: 'd e then c'",
        "dropped: '<end>'",
    ]
    ends = run("--assistant_only_loss", "--max_length", 6, "--truncation_mode", "keep_end")
    assert [line for line in ends if "goes on" in line] == []


def test_rows_what_is_dropped_and_the_whole(run):
    lines = run("--assistant_only_loss", "--row", 1, "--max_length", 7)
    assert lines[1:] == ["context: 'user a b <end> assistant'", "scored: 'd e'", "dropped: 'then c <end>'"]
    assert len(run("--rows", 2)) == 6


@pytest.fixture
def run_pairs(run, tmp_path):
    """The same on a row of preferences."""

    def run_pairs(row: dict, *arguments) -> list[str]:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        return run(*arguments)

    return run_pairs


ASKED, CHOSEN, REJECTED = TALK[:1], TALK[1:2], [{"role": "assistant", "content": "f"}]
PAIR = {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED}
BEHIND = "goes on behind the first 5 tokens of the prompt, which end with 'user a b <end> assistant'"


def test_the_sides_of_a_pair_go_on_from_the_prompt(run_pairs):
    shown = [
        "row 0, prompt: 5 tokens: 5 context",
        "context: 'user a b <end> assistant'",
        "row 0, chosen: 5 tokens: 5 scored",
        BEHIND,
        "scored: 'd e then c <end>'",
        "row 0, rejected: 2 tokens: 2 scored",
        BEHIND,
        "scored: 'f <end>'",
    ]
    assert run_pairs(PAIR) == run_pairs(PAIR, "--method", "cpo") == shown
    assert run_pairs(PAIR, "--method", "orpo")[1:3] == ["context: 'user'", "scored: 'a b <end> assistant'"]


def test_what_a_limit_drops_of_a_pair(run_pairs):
    lines = run_pairs(PAIR, "--max_length", 8, "--truncation_mode", "keep_end")
    assert lines[1:3] == ["dropped: 'user a'", "context: 'b <end> assistant'"]
    lines = run_pairs(PAIR, "--max_completion_length", 3)
    assert [line for line in lines if line.startswith("dropped")] == ["dropped: 'c <end>'"]
    too_short = run_pairs(PAIR, "--max_length", 5)
    assert [line.split(":")[0] for line in too_short if ": '" in line] == ["dropped"] * 3


def test_a_reward_model_is_read_at_the_end_of_each_side(run_pairs):
    lines = run_pairs(PAIR, "--method", "reward")
    assert [line for line in lines if ": '" in line] == [
        "context: 'user a b <end> assistant'",
        "context: 'd e then c'",
        "scored: '<end>'",
        "context: 'f'",
        "scored: '<end>'",
    ]
    too_long = run_pairs(PAIR, "--method", "reward", "--max_length", 9)
    assert [line.split(":")[0] for line in too_long if ": '" in line] == ["dropped"] * 3
    with pytest.raises(ValueError, match="--truncation_mode is no option of reward, which reads "):
        run_pairs(PAIR, "--method", "reward", "--truncation_mode", "keep_end")


def test_each_turn_of_a_completion_goes_on_from_what_it_is_given_of_the_prompt(run_pairs):
    row = {"prompt": ASKED, "chosen": TALK[1:], "rejected": REJECTED}
    lines = run_pairs(row)
    assert [line for line in lines if line.startswith("row")] == [
        "row 0, prompt: 5 tokens: 5 context",
        "row 0, chosen, segment 1 of 2: 5 tokens: 5 scored",
        "row 0, chosen, segment 2 of 2: 11 tokens: 6 context 5 scored",
        "row 0, rejected: 2 tokens: 2 scored",
    ]
    assert lines[7:9] == ["context: 'c <end> user f <end> assistant'", "scored: 'i then g h <end>'"]
    limited = run_pairs(row, "--max_length", 9)
    assert limited[4:6] == ["scored: 'd e then c'", "dropped: '<end>'"]
    assert limited[8] == "dropped: 'c <end> user f <end> assistant i then g h <end>'"
    cut = run_pairs(row, "--max_prompt_length", 4)
    assert cut[:3] == [
        "row 0, prompt: 5 tokens: 4 context 1 dropped",
        "dropped: 'user'",
        "context: 'a b <end> assistant'",
    ]
    assert [line for line in cut if "segment" in line] == [line for line in lines if "segment" in line]


def test_single_completions_are_shown_with_their_label(run_pairs, caplog):
    lines = run_pairs({"prompt": ASKED, "completion": CHOSEN, "label": False})
    assert lines[2] == "row 0, undesirable completion: 5 tokens: 5 scored"
    assert caplog.text == ""
    apart = run_pairs(PAIR, "--method", "kto")
    assert [line for line in apart if line.startswith("row")] == [
        "row 0, prompt: 5 tokens: 5 context",
        "row 0, desirable completion: 5 tokens: 5 scored",
        "row 0, prompt: 5 tokens: 5 context",
        "row 0, undesirable completion: 2 tokens: 2 scored",
    ]


def test_options_and_their_defaults_are_those_of_a_training(run):
    parser = argparse.ArgumentParser()
    show.add_parser(parser.add_subparsers())
    options = parser.parse_args(["show", "rows", "--model", "m"]).options
    assert options == {name: each for name, each in options_of(SFTConfig).items() if name in show.READ}
    assert options["max_length"].default == 1024
    with pytest.raises(ValueError, match=r"roles_to_train=.* requires assistant_only_loss=True"):
        run("--roles_to_train", "user")
    assert run("--assistant_only_loss", "--max_length", "none") == run("--assistant_only_loss", "--max_length", 1024)


def test_the_parts_are_coloured_on_a_terminal(run):
    text = "\n".join(run("--assistant_only_loss", colours=True))
    assert "\x1b[1;32m" in text
    assert "i then g h <end>" in text


def test_a_page_has_the_parts_coloured_and_escaped(run, tmp_path):
    path = tmp_path / "rows.html"
    assert run("--assistant_only_loss", "--max_length", 15, "--html", path)[-1] == f"Written: {path}"
    page = path.read_text()
    assert '<span class="scored">i then g h</span><span class="dropped">&lt;end&gt;</span>' in page
    assert '<span class="context">user a b &lt;end&gt; assistant' in page
    assert "of segment 1, which end with <code>user a b &lt;end&gt; assistant</code>" in page
    assert "<end>" not in page


def test_a_notebook_shows_a_row_escaped():
    part = Part("scored", 2, "<script>alert(1)</script> & more")
    html = ShownRow(3, [ShownSegment([part])])._repr_html_()
    assert '<span class="scored">&lt;script&gt;alert(1)&lt;/script&gt; &amp; more</span>' in html
    assert html.startswith("<style>")
    assert "<script>" not in html


def test_a_row_that_is_not_there_is_refused(run):
    with pytest.raises(ValueError, match=r"--row 2 .* has the rows 0 to 1"):
        run("--row", 2)
