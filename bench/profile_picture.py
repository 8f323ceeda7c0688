"""`python -m bench.profile_picture`: the picture of docs/profile.md, which is that of `lowtide profile`.

DPO of llama-22m with random weights, on generated pairs of the lengths of GSM8K's, two steps of 4 pairs on a CPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.docs.chart_docs import FOLDER
from bench.inputs.shapes import SHAPES, build_model
from bench.inputs.tokenizer import load_tokenizer, tokenizer_for
from bench.measuring.processes import OFFLINE, ROOT
from bench.planning_time.rows import pairs

PICTURE = FOLDER / "profile.png"
ROWS = 64
OPTIONS = ("--steps", "2", "--per_device_train_batch_size", "4", "--use_cpu", "--bf16", "false")


def main(argv: list[str] | None = None) -> int:
    """Profiles the run, and keeps its picture."""
    argparse.ArgumentParser(prog="python -m bench.profile_picture", description=__doc__).parse_args(argv)
    rows = pairs(ROWS)
    with tempfile.TemporaryDirectory(prefix="lowtide-profile-") as name:
        folder = Path(name)
        model = folder / "llama-22m"
        build_model(SHAPES[model.name]).save_pretrained(model)
        load_tokenizer(tokenizer_for(rows)).save_pretrained(model)
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        command = [sys.executable, "-m", "lowtide", "profile", "dpo", "--model", model.name]
        command += ["--dataset", "pairs.jsonl", *OPTIONS, "--output_dir", "profile"]
        environment = {**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, cwd=folder, env=environment, check=True)
        shutil.copyfile(folder / "profile" / "profile.png", PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
