"""Small inputs that would take all memory or time are refused, and named."""

import gzip
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from transformers import LlamaConfig

from lowtide.cli.endings import UsageError
from lowtide.cli.training.launch import launch_command
from lowtide.cli.training.run_file import read_run_file
from lowtide.compat.templates import jinja, jinja_sizes
from lowtide.compat.templates.jinja import ends_within
from lowtide.data.encode import chat
from lowtide.data.formats.reading import ChatSample, RowPlace
from lowtide.data.sources import json_lines
from lowtide.data.sources.load import load_rows
from lowtide.data.sources.places import check_place
from lowtide.engine.weights.load_errors import check_layers
from lowtide.engine.weights.sharded.shard_files import missing_shards
from lowtide.engine.weights.weight_files import read_json
from lowtide.parsing import parse_json, parse_yaml
from lowtide.process.environment import set_environment
from lowtide.scripts import rows as scripts_rows
from lowtide.trainers.checkpoints.soundness import Damage, _trainer_state

MOST = 1 << 20
"""Characters that a template may make here."""
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("lines", [1, 3])
def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch, streaming, lines):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "train.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for _ in range(lines - 1):
            file.write(json.dumps({"text": "a" * 900}) + "\n")
        file.write(json.dumps({"text": "a" * 2000}) + "\n")
    with pytest.raises(ValueError, match=rf"train.jsonl.gz, line {lines}: more than"):
        load_rows(path, streaming=streaming)


def test_lines_that_are_long_enough_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MOST_LINE_BYTES", 1000)
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * 900}) + "\n" for _ in range(20)))
    assert len(load_rows(path)) == 20


def test_a_shard_of_billions_names_some_that_are_missing(tmp_path):
    (tmp_path / "shard-00001-of-9999999999.safetensors").touch()
    assert missing_shards(tmp_path)[0] == "shard-00002-of-9999999999.safetensors"
    assert len(missing_shards(tmp_path)) < 100


@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]", "[" * 3000 + "]" * 3000, "? [1, 2]\n: 3", "{{a: 1}: 2}"])
def test_yaml_that_grows_or_has_keys_that_are_none_is_an_error_of_yaml(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)
    assert parse_yaml("a: &x [1]\nb: *x\n") == {"a": [1], "b": [1]}


@pytest.mark.parametrize("text", [LAUGHS, "[" * 3000 + "]" * 3000, "? [1, 2]\n: 3", "a: &a [*a]"])
def test_run_and_launcher_files_that_are_so_are_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"run\.yaml"):
        read_run_file(path, {})
    with pytest.raises(UsageError, match=r"run\.yaml"):
        launch_command(["sft"], {"accelerate_config": str(path)})


def test_json_that_is_nested_deeply_is_no_json(tmp_path):
    text = "[" * 3000 + "]" * 3000
    with pytest.raises(json.JSONDecodeError, match="nested too deeply"):
        parse_json(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        read_json(tmp_path / "config.json")
    (tmp_path / "train.jsonl").write_text('{"text": ' + text + "}\n")
    with pytest.raises(ValueError, match=r"train.jsonl, line 1"):
        load_rows(tmp_path / "train.jsonl")


DEEP = "[" * 100_000 + "1" + "]" * 100_000


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
@pytest.mark.parametrize(
    "text",
    [
        '{"text": "a"}\n{"text": ' + DEEP + "}\n",
        '{"text": "a"}\n{"text": ' + '{"a":' * 100_000 + "1" + "}" * 100_001 + "\n",
        '{"text": "a"}\n{"text": ' + DEEP.replace("[", "[\n") + "}\n",
        '{"text": "a"}\n{"text": ' + '["]",\n' * 100_000 + "1" + "]" * 100_000 + "}\n",
        '{"text": "a"}\n' + '{"a": [{}\n,' * 100_000 + "1" + "]}" * 100_000 + "\n",
    ],
    ids=["lists", "objects", "over lines", "behind texts", "whole at the end of lines"],
)
def test_rows_that_are_nested_too_deeply_are_refused_with_the_line(tmp_path, text, suffix):
    path = tmp_path / f"train{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    with pytest.raises(ValueError, match=r"train.json[l.gz]*, line \d+: .*nested more than 64 deep"):
        load_rows(path)


def test_brackets_within_texts_and_many_messages_are_no_depth(tmp_path):
    message = {"role": "user", "content": "[[{" * 100 + '\\"[' * 100}
    rows = [{"messages": [message] * 100}, {"messages": [message]}]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(load_rows(path)) == rows


@pytest.mark.parametrize("content", ["[]", "3", "{}", '{"_data_files": 3}'])
def test_a_saved_dataset_whose_state_is_none_is_refused(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as one"):
        load_rows(tmp_path)


@pytest.mark.parametrize("layers", [10**9, -1])
def test_a_model_of_impossible_layers_is_refused(layers):
    with pytest.raises(ValueError, match=f"num_hidden_layers={layers}, and a model has 0 to 10,000"):
        check_layers(LlamaConfig(num_hidden_layers=layers), "m")


def test_what_is_no_file_is_no_mistyped_name(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, said in (("rows.jsonl", "a link to nothing"), ("pipe.jsonl", "neither a file nor a folder")):
        with pytest.raises(FileNotFoundError, match=f"{name}' is {said}"):
            check_place(tmp_path / name)


@pytest.mark.parametrize("name", ["A=B", "A\0B"])
def test_a_variable_that_cannot_be_set_is_named(name):
    with pytest.raises(ValueError, match=r"run\.yaml: env: 'A.*' cannot be set"):
        set_environment({name: "x"}, "run.yaml")


def test_a_step_beyond_the_run_is_damage(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 10**15, "max_steps": 10}))
    with pytest.raises(Damage, match="beyond the 10 steps"):
        _trainer_state(path)
    path.write_text(json.dumps({"global_step": 10, "max_steps": 10}))
    _trainer_state(path)


def test_what_takes_too_long_is_ended():
    def wait() -> None:
        with ends_within(0.2):
            for _ in range(3000):
                time.sleep(0.01)

    with pytest.raises(ValueError, match="loops without end"):
        wait()


TRACED = """
import sys
from lowtide.compat.templates.jinja import ends_within

def ended(seconds, rounds):
    try:
        with ends_within(seconds):
            for _ in range(rounds):
                pass
    except ValueError:
        pass

ended(60, 1)
ended(0.1, 10**12)
sys.settrace(lambda *given: None)
ended(60, 1)
"""


@pytest.mark.slow
def test_what_is_traced_runs_after_a_template():
    """In Python 3.11 a traced call never begins where an exception that never came is awaited in a thread."""
    subprocess.run([sys.executable, "-c", TRACED], check=True, timeout=100)


def test_nothing_is_raised_once_the_watch_is_over():
    ended = 0
    for number in range(40):
        try:
            with ends_within(0.004):
                time.sleep(0.0005 * number)
        except ValueError:
            ended += 1
    for _ in range(20):
        time.sleep(0.001)
    assert 0 < ended < 40


LAUGHING = "{% set ns = namespace(x=['ha']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
HOSTILE_TEMPLATES = {
    "{% for i in range(10**9) %}x{% endfor %}": "can't render",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "loops without end",
    "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(50) }}": "loops without",
    "{{ 'x' * 10**10 }}": "more than 67,108,864",
    "{{ [1] * 10**10 }}": "more than 67,108,864",
    "{{ 'x'.encode() * 10**10 }}": "more than 67,108,864",
    "{{ 9 ** (10 ** 9) }}": "digits",
    "{{ (9 ** 9999) ** 9999 }}": "digits",
    "{{ 1 | round(10 ** 9) }}": "digits",
    "{{ '%9999999999d' % 1 }}": "to a width",
    "{{ '%*d' % (10 ** 10, 1) }}": "to a width",
    "{{ '%9999999999d' | format(1) }}": "to a width",
    "{{ '{:9999999999d}'.format(1) }}": "to a width",
    "{{ '{:{w}}'.format(1, w=10**10) }}": "to a width",
    "{{ '{:{w}}'.format_map({'w': 10**10}) }}": "to a width",
    "{{ ('%s' * 99999) % ((['x' * 99999] * 99999) | list) }}": "characters",
    "{{ 'x' | center(10**10) }}": "`center`",
    "{{ 'x'.center(10**10) }}": "`center`",
    "{{ 'x'.ljust(10**10) }}": "`ljust`",
    "{{ 'x'.rjust(10**10) }}": "`rjust`",
    "{{ 'x'.zfill(10**10) }}": "`zfill`",
    "{{ ['x'] | map('center', 10**10) | list }}": "`center`",
    "{{ ('\t' * 9999).expandtabs(10**9) }}": "`expandtabs`",
    "{{ 'x\ny' | indent(10**10) }}": "`indent`",
    "{{ ('x\n' * 99999) | indent('y' * 99999) }}": "`indent`",
    "{{ ('x' * 99999) | wordwrap(1, wrapstring='y' * 99999) }}": "`wordwrap`",
    "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}": "`replace`",
    "{{ ('x' * 99999).replace('', 'y' * 99999) }}": "`replace`",
    "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}": "`translate`",
    "{{ range(99999) | join('y' * 99999) }}": "`join`",
    "{{ range(99999) | map('string') | join('y' * 99999) }}": "`join`",
    "{{ ('y' * 99999).join(['a'] * 99999) }}": "`join`",
    "{{ [1] | tojson(indent=10**10) }}": "`tojson`",
    "{{ ([1] * 99999) | tojson(separators=('y' * 99999, ':')) }}": "`tojson`",
    "{{ [1] | batch(10**10, 0) | list }}": "`batch`",
    "{{ [1] | slice(10**10) | list }}": "`slice`",
    "{{ (5).to_bytes(10**10) }}": "`to_bytes`",
    "{{ lipsum(10**9) }}": "`lipsum`",
    "{{ lipsum(min=10**9, max=10**9 + 1) }}": "`lipsum`",
    LAUGHING + "{{ ns.x }}": "more than",
    LAUGHING + "{{ ns.x | tojson }}": "more than",
    LAUGHING.replace("[ns.x, ns.x]", "ns.x + ns.x"): "`[+]`",
    LAUGHING.replace("[ns.x, ns.x]", "dict(a=ns.x, b=ns.x)"): "more than",
    LAUGHING.replace("[ns.x, ns.x]", "ns.x ~ ns.x"): "more than 67,108,864",
    LAUGHING.replace("{% set ns.x = [ns.x, ns.x] %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"): "67,108,864",
    "{% set x = 'y' * 9999999 %}{% for i in range(99) %}{{ x }}{% endfor %}": "more than 67,108,864",
}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(jinja, "TEMPLATE_SECONDS", 0.5)
    monkeypatch.setattr(jinja_sizes, "MOST_CHARACTERS", MOST)


@pytest.mark.parametrize("template", HOSTILE_TEMPLATES)
def test_a_template_that_has_no_end_is_refused_with_the_row(tokenizer, impatient, template, monkeypatch):
    what = HOSTILE_TEMPLATES[template].replace("67,108,864", f"{MOST:,}")
    if what.startswith("`"):  # found by its size, which a busy machine may take more than half a second to come to
        monkeypatch.setattr(jinja, "TEMPLATE_SECONDS", 60)
    template = "{% if messages[0].content == 'bad' %}" + template + "{% endif %}{{ messages[0].content }}"
    rows = [ChatSample([{"role": "user", "content": text}]) for text in ("good", "bad")]
    encoder = chat.ChatEncoder(tokenizer, template=template)
    with pytest.raises(ValueError, match=rf"row 5 .*(?s:.*){what}"):
        encoder.encode(rows, RowPlace("data.jsonl", [4, 5]))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def in_a_thread(call):
    """What a call raises in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(call).exception(timeout=60)
    assert error is not None
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("marks", ["", "{% generation %}a{% endgeneration %}"])
def test_a_template_that_loops_is_ended_in_any_thread_and_by_any_caller(tokenizer, impatient, marks):
    talk = [{"role": "user", "content": "a"}]
    calls = {"return_assistant_tokens_mask": True, "return_dict": True} if marks else {"tokenize": False}
    for run in (in_a_thread, lambda call: call()):
        with pytest.raises(ValueError, match="loops without end"):
            run(lambda: tokenizer.apply_chat_template(talk, chat_template=marks + ENDLESS, **calls))
        with pytest.raises(ValueError, match="loops without end"):
            run(lambda: scripts_rows.apply_chat_template({"messages": talk}, tokenizer, chat_template=ENDLESS))


@pytest.mark.slow
def test_a_template_that_was_compiled_before_is_limited_too():
    script = (
        "from transformers.utils import chat_template_utils as utils\n"
        "render = lambda: utils.render_jinja_template([[]], chat_template=\"{{ 'x' * 10**8 }}\")\n"
        "render()\n"
        "import lowtide.scripts.rows\n"
        "try: render()\n"
        "except Exception as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "the template makes more than 67,108,864 characters" in ran.stdout, ran.stderr


def test_a_template_that_multiplies_within_reason_is_rendered(tokenizer):
    template = (
        "{{ '=' * 3 }}{{ 2 ** 3 }}{{ '%03d' % 7 }}{{ 7 % 4 }}{{ '**%s**' % 12345678 }}{{ 'a' ~ 1 ~ none }}"
        "{{ '{:>3}|{x}'.format(1, x=23456789) }}{{ {'a': [1]} | tojson(indent=1) | replace('\n', '') }}"
        "{{ [1, (2, 3)] | join(', ') }}{% for a, b in [(1, 2)] %}{{ a + b }}{{ loop.length }}{% endfor %}"
    )
    encoder = chat.ChatEncoder(tokenizer, template=template)
    [ids] = encoder.encode([ChatSample([{"role": "user", "content": "a"}])], RowPlace("data.jsonl", [0]))
    assert tokenizer.decode(ids) == ("===80073**12345678**a1None  1|23456789" + '{ "a": [  1 ]}' + "1, (2, 3)31")


ENDLESS_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("by_turns", [False, True])
def test_a_template_without_end_is_rendered_once(tokenizer, impatient, by_turns):
    """Checks of a template come before the rows, and each of them would wait as long."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "b", "tool_calls": [call]}
    sample = ChatSample([{"role": "user", "content": "a"}, said])
    before = time.monotonic()
    with pytest.raises(ValueError, match=r"data.jsonl, row 0 .* can't render .* loops without end"):
        chat.ChatEncoder.for_rows(sample, tokenizer, ENDLESS_LOOP, "data.jsonl", by_turns=by_turns)
    assert time.monotonic() - before < 2 * jinja.TEMPLATE_SECONDS
