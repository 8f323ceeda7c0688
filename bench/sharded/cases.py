"""What `bench.sharded` trains, who does, and what is to be reached."""

from bench.sharded.child import APART
from bench.sharded.ranks import Case

CONTESTANTS = ("trl", "lowtide", APART)
LEAST_SPEED, MOST_MEMORY = 2.5, 0.4
"""What is to be reached against TRL."""
CASES = {
    "SFT, FSDP2": Case("sft", "fsdp2"),
    "DPO, FSDP2": Case("dpo", "fsdp2"),
    "SFT, ZeRO-3": Case("sft", "zero3"),
    "DPO, ZeRO-3": Case("dpo", "zero3"),
    "SFT, FSDP2, 4 ranks": Case("sft", "fsdp2", ranks=4),
}
