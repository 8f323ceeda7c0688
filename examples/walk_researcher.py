"""A researcher's walk: a loss, a reward, a memory technique and a method of his own (`my_ideas.py`), trained with by
their paths, and each held against what is built in.

In an empty folder, without a network, in some seconds: `python examples/walk_researcher.py`.
"""

import json
import math
from pathlib import Path

from commands import lowtide

from lowtide.demo.data import make_questions
from lowtide.demo.model import save
from lowtide.demo.preferences import pair_rows

HERE = (
    "--model model --use_cpu true --report_to none --disable_tqdm true --save_strategy no --max_steps 2 "
    "--logging_steps 1 --per_device_train_batch_size 4"
)


def write(path: str, rows: list[dict]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def logged(run: str, name: str) -> list[float]:
    """A metric of each step of a run."""
    lines = map(json.loads, Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line[name] for line in lines if name in line]


def alike(run: str, other: str) -> bool:
    """Whether two runs have the same losses, but for rounding."""
    pairs = zip(logged(run, "loss"), logged(other, "loss"), strict=True)
    return all(math.isclose(*each, rel_tol=1e-6) for each in pairs)


save(Path("model"), seed=0)
asked = make_questions(10, seed=0)[0][:16]
write("texts.jsonl", [{"messages": each.messages} for each in asked])
write("pairs.jsonl", [row for each in asked for row in pair_rows(each)])
write("prompts.jsonl", [{"prompt": each.messages[:1]} for each in asked])

lowtide(f"dpo --dataset pairs.jsonl --output_dir dpo {HERE}")
lowtide(f"dpo --dataset pairs.jsonl --output_dir own-loss --loss_type my_ideas.logistic {HERE}")
assert alike("own-loss", "dpo")
print(f"my_ideas.logistic: losses {logged('own-loss', 'loss')}, those of DPO")

lowtide(
    "grpo --dataset prompts.jsonl --output_dir own-reward --reward_funcs my_ideas.brief --num_generations 2 "
    f"--max_completion_length 8 {HERE}"
)
rewards = logged("own-reward", "rewards/brief/mean")
assert rewards == logged("own-reward", "reward")
assert max(rewards) <= 0
print(f"my_ideas.brief: rewards {rewards}")

lowtide(f"sft --dataset texts.jsonl --output_dir sft {HERE}")
lowtide(f"my_ideas.FOCAL --dataset texts.jsonl --output_dir own-method --gamma 0 {HERE}")
assert alike("own-method", "sft")
print(f"my_ideas.FOCAL with gamma=0: losses {logged('own-method', 'loss')}, those of SFT")

lowtide(f"my_ideas.FOCAL --dataset texts.jsonl --output_dir own-technique --techniques my_ideas.HALVES {HERE}")
assert "not exact: what backward reads is rounded" in Path("own-technique", "report.html").read_text(encoding="utf-8")
print(f"my_ideas.HALVES: losses {logged('own-technique', 'loss')}")
