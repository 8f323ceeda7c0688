"""An engineer's walk: logs, signals, exit statuses and JSON of the package as it is installed.

In an empty folder, without a network, in some seconds, with the Python that lowtide is installed for: `python
examples/walk_engineer.py`.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from commands import lowtide

from lowtide.demo.data import make_questions
from lowtide.demo.model import save

RUN = """# lowtide sft --config run.yaml
model: model
dataset: texts.jsonl
output_dir: run
max_steps: 100000
lr_scheduler_type: constant
logging_steps: 1
per_device_train_batch_size: 4
use_cpu: true
report_to: none
"""
SECONDS = 120


def trained(*words: str, stops: signal.Signals | None = None) -> tuple[int, str]:
    """The exit status of a training in a process of its own, and its standard error; stopped once it has logged."""
    print(
        "$ lowtide sft --config run.yaml", *words, *([f"# {stops.name} after some steps"] if stops else []), flush=True
    )
    command = [sys.executable, "-m", "lowtide", "sft", "--config", "run.yaml", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + SECONDS
        while stops is not None and process.poll() is None and not Path("run", "metrics.jsonl").exists():
            assert time.monotonic() < end, "no step was logged"
            time.sleep(0.05)
        if stops is not None:
            process.send_signal(stops)
        _, said = process.communicate(timeout=SECONDS)
    return process.returncode, said


save(Path("model"), seed=0)
asked = make_questions(10, seed=0)[0][:16]
Path("texts.jsonl").write_text("".join(json.dumps({"messages": each.messages}) + "\n" for each in asked))
Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": each.messages[:1]}) + "\n" for each in asked[:2]))
Path("run.yaml").write_text(RUN)

assert json.loads(lowtide("check run.yaml --json").out)["ok"]
lowtide("check run.yaml --learning_rate fast", status=2)
fits = json.loads(lowtide("check run.yaml --memory --device cpu --budget 8GiB --json").out)["memory"]
assert json.loads(lowtide("check run.yaml --memory --device cpu --budget 1MiB --json", status=1).out)["ok"] is False

status, said = trained(stops=signal.SIGTERM)
assert status == 143, (status, said)
assert "\r" not in said, said
assert "step 1/100000: loss" in said, said
(checkpoint,) = Path("run").glob("checkpoint-*")
step = int(checkpoint.name.split("-")[1])
assert str(checkpoint) in said
assert f"{step:,} of 100,000" in Path("run", "report.html").read_text()
print(f"stopped with status {status} after step {step}, and {checkpoint} was written")

status, said = trained("--resume_from_checkpoint", "latest", "--max_steps", str(step + 2))
assert status == 0, said
assert f"step {step + 1}/{step + 2}: loss" in said, said
assert f"step {step}/" not in said, said
steps = [json.loads(line)["step"] for line in Path("run", "metrics.jsonl").read_text().splitlines()]
print(f"resumed, and ended after step {steps[-1]}")

found = json.loads(lowtide("evaluate run --data texts.jsonl --device cpu --json").out)
print(f"evaluated: loss {found['data']['run']['texts']['loss']:.3f}")
words = "generate run --prompts prompts.jsonl --output answers.jsonl --max_new_tokens 4 --device cpu --json"
written = json.loads(lowtide(words).out)
assert written["completions"] == len(Path("answers.jsonl").read_text().splitlines()) == 2
print(f"generated: {written['now']['tokens']} tokens, predicted peak of the training {fits['peak_bytes'] >> 20} MiB")
