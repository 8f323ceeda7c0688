"""What to do where a run does not fit: every way out that the command line has, with what it would leave of the
weights.

The bytes are arithmetic on those of the weights, and no trace: 16 bits in place of 32 are half, 4 bits with their
scales (QLoRA, arXiv 2305.14314: a float32 scale for each 64 weights) 4.5 of 32.
"""

from __future__ import annotations

from lowtide.memory.allocators.measure import bytes_text
from lowtide.planner.answers.assumptions import stored_dtype
from lowtide.planner.candidate import PlannedRun

FOUR_BITS = 4.5
"""Of a weight, its share of a scale included."""


def ways_out(run: PlannedRun, weights: int, *, exact: bool) -> tuple[str, ...]:
    """What a user may write, each with what it does; those that train the same model first.

    Args:
        run: that does not fit.
        weights: bytes of its weights.
        exact: whether settings that change the numbers were left out.
    """
    found, names = [], vars(run.config({}))
    bits = 8 * stored_dtype(run).itemsize
    half, four = bytes_text(weights * 16 // bits), bytes_text(int(weights * FOUR_BITS / bits))
    adapters, quantized = run.peft_config is not None, run.quantization_config is not None
    if exact:
        found.append("--lossy lets the plan choose among settings that change the numbers, and names what they change")
    if bits > 16 and adapters and not quantized:
        found.append(f"--dtype bfloat16 stores the frozen weights in 16 bits ({half})")
    if adapters and not quantized:
        found.append(f"--load_in_4bit stores them in 4 bits (QLoRA, some {four})")
    if adapters and run.cluster is None and not run.requested.get("base_weights"):
        if not quantized:
            found.append("--base_weights stream brings in a layer of them at a time, in the dtype of the model's files")
        elif run.device.kind == "cpu":
            found.append("--base_weights stream brings in a layer of them at a time, from a temporary file")
    if not adapters:
        if bits > 16:
            found.append(f"--optim adamw_compressed or adamw_stochastic trains weights in 16 bits ({half})")
            found.append("--optim adamw_stochastic_8bit, its moments in 8 bits too")
            found.append("--dtype bfloat16 alone, in which small updates are lost")
        found.append(f"--use_peft --dtype bfloat16 trains a LoRA adapter on frozen weights in 16 bits ({half})")
        found.append(f"--use_peft --load_in_4bit trains one on weights in 4 bits (QLoRA, some {four})")
    if run.device.kind == "cuda" and run.cluster is None:
        name = run.device.name if run.device.listed else "NAME"
        found.append(f"--devices 2x{name} shares it between GPUs, or between GPUs and their host's memory")
    if "max_length" in names:
        found.append("--max_length or fewer tokens in a row, where activations are most")
    found.append(f"lowtide gpus {run.method.name} --model ... shows which devices this run fits")
    return tuple(found)
