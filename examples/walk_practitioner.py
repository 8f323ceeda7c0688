"""A practitioner's walk: a CSV with columns of its own becomes a model that is talked with, evaluated and exported, and
that llama.cpp serves.

In an empty folder, without a network, in some seconds: `python examples/walk_practitioner.py`. What is not installed
(`pip install gguf xllamacpp`) is left out, and said.
"""

import csv
import json
import shlex
from importlib.util import find_spec
from pathlib import Path

from commands import lowtide
from tiny import questions, save_model

QUESTION, ANSWER = "User Question", "Bot Answer"
TRAINING = "--chat_template_path chatml --max_steps 40 --learning_rate 3e-3 --per_device_train_batch_size 16"
HERE = "--use_cpu true --report_to none --disable_tqdm true"
SAID = "sort 3 1 2"


def write(path: str, rows: list[dict[str, str]]) -> None:
    """A CSV as a spreadsheet of a country with decimal commas writes it."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow([QUESTION, ANSWER])
        writer.writerows([row["instruction"], row["output"]] for row in rows)


def served(path: str, message: str, tokens: int) -> str:
    """What llama.cpp answers to a message, greedily, with keys and values in float32."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup, settings.cpuparams.n_threads = path, 256, False, 1
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    messages = [{"role": "user", "content": message}]
    asked = {"messages": messages, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
    found = xllamacpp.Server(settings).handle_chat_completions(asked)
    return (json.loads(found) if isinstance(found, str) else found)["choices"][0]["message"]["content"]


rows = questions(400)
write("answers.csv", rows[:360])
write("held_out.csv", rows[360:])
save_model(Path("model"), [f"{row['instruction']} {row['output']}" for row in rows])

refused = lowtide(f"check sft --model model --dataset answers.csv {TRAINING}", status=2).out
assert QUESTION in refused, refused  # which columns there are, and what they may be
assert ANSWER in refused, refused
columns = shlex.quote(json.dumps({"question": QUESTION, "answer": ANSWER}))
lowtide(f"check sft --model model --dataset answers.csv --columns {columns} {TRAINING}")
lowtide(f"sft --model model --dataset answers.csv --columns {columns} --output_dir run {TRAINING} {HERE}")

answer = lowtide("chat run --temperature 0 --max_new_tokens 12 --dtype float32", typed=f"{SAID}\n").out.strip()
print(f"{SAID}: {answer}")
losses = json.loads(lowtide("evaluate run --data held_out.csv --beside model --device cpu --json").out)["data"]
for name, found in losses.items():
    print(f"{name}: loss {found['held_out']['loss']:.3f}")
trained, base = (found["held_out"]["loss"] for found in losses.values())
assert trained < base

if find_spec("gguf") is None:
    print("left out: lowtide export and llama.cpp, since gguf is not installed (pip install gguf)")
else:
    lowtide("export run --gguf f32 --output run.gguf")
    if find_spec("xllamacpp") is None:
        print("left out: llama.cpp, since xllamacpp is not installed (pip install xllamacpp)")
    else:
        from_llama = served("run.gguf", SAID, 12).strip()
        print(f"llama.cpp, {SAID}: {from_llama}")
        assert from_llama == answer
