"""`lowtide chat`: what is said is what transformers' `generate` writes after the whole conversation."""

from __future__ import annotations

import builtins
import shutil
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.cli.after_training import chat
from lowtide.cli.after_training.chat import Chat
from lowtide.cli.after_training.loaded_run import folder_of
from lowtide.cli.main import main
from lowtide.engine.forward import read_next
from lowtide.escaping import shown
from lowtide.rollout.generators import decoding, ragged
from lowtide.rollout.talk import Talk
from tests.rollout.chat_templates import HERMES, HERMES_TEMPLATE

SAID = ["hello", "and then?"]


@pytest.fixture
def says(monkeypatch):
    """What the person says, in their order; then there is no more input."""

    def says(*lines: str) -> None:
        left = iter(lines)

        def line(prompt: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", line)

    return says


def greedy(model, tokenizer, said: list[str], most: int) -> list[str]:
    """The answers of transformers to a conversation whose earlier turns are the tokens that were written."""
    texts, ids = [], []
    for text in said:
        close = "<|im_end|>\n" if ids else ""
        ids += tokenizer(f"{close}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        found = model.generate(torch.tensor([ids]), max_new_tokens=most, do_sample=False, pad_token_id=0)
        texts.append(tokenizer.decode(found[0, len(ids) :]))
        ids = found[0].tolist()
    return texts


def test_the_answers_are_those_of_generate_and_nothing_is_read_twice(talker, says, capsys, monkeypatch):
    says(*SAID, "")
    read: list[int] = []

    def counting(model, token_ids, *rest):
        read.append(len(token_ids))
        return read_next(model, token_ids, *rest)

    for module in (ragged, decoding):
        monkeypatch.setattr(module, "read_next", counting)
    assert main(["chat", str(talker), "--max_new_tokens", "9", "--dtype", "float32", "--device", "cpu"]) == 0
    out = capsys.readouterr().out

    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker), AutoTokenizer.from_pretrained(talker)
    wanted = greedy(model.eval(), tokenizer, SAID, 9)
    assert out == "".join(shown(text) + "\n" for text in wanted)
    header = (
        len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n") - len("<|im_start|><|im_end|><|im_start|>") + 3
    )
    # 1 stop token and a line's end close the first turn; its last token comes with them, since its keys are not held.
    again = header + len(SAID[1]) + 2 + 1
    assert read == [header + len(SAID[0]), *[1] * 8, again, *[1] * 8]


def test_a_system_message_comes_first_and_new_forgets_what_was_said(talker, says, capsys):
    says("hello", "/new", "hello", "/exit", "never")
    words = ["chat", str(talker), "--max-new-tokens", "6", "--dtype", "float32", "--system", "Be brief."]
    assert main(words) == 0
    both = capsys.readouterr().out
    says("hello")
    assert main(words) == 0
    brief = capsys.readouterr().out
    assert both == 2 * brief
    says("hello")
    assert main(words[:-2]) == 0
    assert capsys.readouterr().out != brief


def test_an_adapter_answers(talker, says, capsys, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(talker)
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    says("hello")
    assert main(["chat", str(tmp_path / "adapter"), "--max_new_tokens", "6", "--dtype", "float32"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(talker)
    wanted = greedy(adapted.eval(), tokenizer, ["hello"], 6)
    assert capsys.readouterr().out == shown(wanted[0]) + "\n"
    assert wanted != greedy(AutoModelForCausalLM.from_pretrained(talker).eval(), tokenizer, ["hello"], 6)


def test_the_last_whole_checkpoint_answers_while_the_run_goes_on(talker, says, capsys, tmp_path):
    shutil.copytree(talker, tmp_path / "run" / "checkpoint-5")
    (tmp_path / "run" / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5, "log_history": []}')
    (tmp_path / "run" / "checkpoint-10").mkdir()
    assert folder_of(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-5")
    says("hello")
    assert main(["chat", str(tmp_path / "run"), "--max_new_tokens", "6"]) == 0
    assert "checkpoint-5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all"], "there is no folder 'nowhere/at/all'"),
        (["."], "holds no model, no adapter and no checkpoint"),
        (["{talker}", "--device", "meta"], "--device 'meta' cannot be used here"),
        (["{talker}", "--device", "tpu9"], "--device 'tpu9' cannot be used here"),
        (["{talker}", "--temperature", "-1"], "--temperature=-1 must be at least 0"),
        (["{talker}", "--dtype", "int8"], "dtype"),
        (["{bare}"], "has no chat template"),
        (["{scorer}"], "which gives scores and writes no text"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(talker, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    bare, scorer = tmp_path / "bare", tmp_path / "scorer"
    model = AutoModelForCausalLM.from_pretrained(talker)
    if "{bare}" in words:
        model.save_pretrained(bare)
        tokenizer = AutoTokenizer.from_pretrained(talker)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(bare)
    if "{scorer}" in words:
        model.config.architectures = ["LlamaForSequenceClassification"]
        model.config.save_pretrained(scorer)
    given = [word.format(talker=talker, bare=bare, scorer=scorer) for word in words]
    assert main(["chat", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


class _Held:
    """A loaded run of which only the stop tokens are asked."""

    stop_ids = (2,)
    context = 100


def test_an_interrupt_ends_the_turn_and_a_second_one_everything():
    talk = Chat(_Held(), None, None, None, None)  # type: ignore[arg-type]
    before = signal.getsignal(signal.SIGINT)
    with talk._ends_turns():
        talk._turn = [5]
        signal.raise_signal(signal.SIGINT)
        assert talk._interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_conversation_that_fills_the_context_says_so(talker, says, capsys, monkeypatch):
    says("a" * 300, "again")
    assert main(["chat", str(talker), "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("fills the 256 tokens that the model was made for") == 2
    assert chat.NEW in err


def first_a_call(monkeypatch):
    """The tokens of the first turn are replaced by those of a call; returns the talk, once for each turn."""
    talks = []

    def answered(self, ids):
        talks.append(self)
        said(self, [*self.tokenizer(HERMES)["input_ids"], 2] if len(talks) == 1 else ids)

    said = Talk.answered
    monkeypatch.setattr(Talk, "answered", answered)
    return talks


def test_a_call_is_shown_and_the_next_line_is_what_it_returns(talker, says, capsys, tmp_path, monkeypatch):
    """The model calls a tool in its first turn: the tokens that it writes are replaced."""
    folder = shutil.copytree(talker, tmp_path / "run")
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + HERMES_TEMPLATE)
    file = tmp_path / "tools.json"
    file.write_text('{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}')
    talks = first_a_call(monkeypatch)
    says("2 + 2?", "4", "/exit")
    words = ["chat", str(folder), "--max_new_tokens", "3", "--device", "cpu", "--tools", str(file)]
    assert main(words) == 0
    assert 'It calls add with {"a": 2, "b": 2}: the next line is what that returns.' in capsys.readouterr().err
    assert [each["role"] for each in talks[0].messages] == ["user", "assistant", "tool", "assistant"]
    assert talks[0].messages[2] == {"role": "tool", "name": "add", "content": "4"}
    assert '"description": "Adds."' in talks[0].text


TELLS_OF_TOOLS = "{% if tools %}{{ tools[0].function.description }}{% endif %}"
TOOL = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b
'''


@pytest.mark.parametrize("fails", [False, True])
def test_a_named_function_is_called_and_the_model_reads_what_it_returned(
    fails, talker, says, capsys, tmp_path, monkeypatch
):
    """The model calls it in its first turn: the tokens that it writes are replaced. It goes on without the person."""
    folder = shutil.copytree(talker, tmp_path / "run")
    (folder / "chat_template.jinja").write_text(TELLS_OF_TOOLS + HERMES_TEMPLATE)
    name = f"tools_of_chat_{fails}".lower()
    (tmp_path / f"{name}.py").write_text(TOOL.replace("a + b", "a / 0") if fails else TOOL)
    monkeypatch.chdir(tmp_path)
    talks = first_a_call(monkeypatch)
    says("2 + 2?", "/exit", "never")
    words = ["chat", str(folder), "--max_new_tokens", "3", "--device", "cpu", "--tools", f"{name}.add"]
    assert main(words) == 0
    assert [each["role"] for each in talks[0].messages] == ["user", "assistant", "tool", "assistant"]
    result = "{'error': 'division by zero'}" if fails else "4"
    assert talks[0].messages[2] == {"role": "tool", "name": "add", "content": result}
    assert f'add with {{"a": 2, "b": 2}} {"fails" if fails else "returns"}: {result}' in capsys.readouterr().err
    assert "Adds two numbers." in talks[0].text
    assert result in talks[0].text


def test_a_tool_is_named_once_and_a_function_that_cannot_be_described_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "tools_of_chat.py").write_text(TOOL + "\n\ndef bare(a):\n    return a\n")
    (tmp_path / "add.json").write_text('{"name": "add"}')
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["tools_of_chat.add", "add.json"], "two are called 'add'"),
        (["tools_of_chat.bare"], "'bare' cannot be described"),
        (["tools_of_chat.none"], "tools_of_chat"),
    ):
        assert main(["chat", "no-model", "--tools", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("held", "message"),
    [("{", "is not JSON"), ("[]", "holds no schema"), ('[{"name": 3}]', "entry 0 of"), ('["add"]', "no schema of a")],
)
def test_files_of_tools_that_are_none_are_refused_before_the_model_is_read(held, message, tmp_path, capsys):
    (tmp_path / "tools.json").write_text(held)
    assert main(["chat", "no-model", "--tools", str(tmp_path / "tools.json")]) == 2
    assert message in capsys.readouterr().err
    assert main(["chat", "no-model", "--tools", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in capsys.readouterr().err
