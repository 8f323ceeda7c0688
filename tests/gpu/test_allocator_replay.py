"""The replay of the caching allocator against the allocator itself: a recorded history of a training step.

In a process of its own, whose allocator has given nothing yet, and which reads the setting when torch is imported.
"""

import json
import os
import subprocess
import sys

from lowtide.memory.allocators.settings import NAME, OLDER_NAMES
from lowtide.planner.allocators.cuda_allocator import MIN_BLOCK, CudaAllocator

RECORD = """
import json, torch
torch.cuda.memory._record_memory_history(context=None)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)] * 4).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for tokens in (300, 1000, 2500, 700, 2600):
    model(torch.randn(tokens, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = torch.empty(tokens * 3000, device="cuda")  # until the next one is there
(history,) = [trace for trace in torch.cuda.memory._snapshot()["device_traces"] if trace]
print(json.dumps({
    "history": [(each["action"], each["addr"], each["size"]) for each in history],
    "allocated": torch.cuda.max_memory_allocated(),
    "reserved": torch.cuda.max_memory_reserved(),
}))
"""


def test_the_replay_reserves_what_the_allocator_did():
    environment = {name: value for name, value in os.environ.items() if name not in OLDER_NAMES}
    environment[NAME] = "expandable_segments:True"
    done = subprocess.run([sys.executable, "-c", RECORD], env=environment, capture_output=True, text=True, check=True)
    recorded = json.loads(done.stdout.splitlines()[-1])
    allocator, held, allocated, reserved = CudaAllocator(), 0, 0, 0
    for action, address, size in recorded["history"]:
        if action == "alloc":
            allocator.born(address, size)
            held += -(-size // MIN_BLOCK) * MIN_BLOCK
        elif action == "free_completed":
            allocator.died(address)
            held -= -(-size // MIN_BLOCK) * MIN_BLOCK
        allocated, reserved = max(allocated, held), max(reserved, allocator.held)
    assert allocated == recorded["allocated"]
    assert reserved == recorded["reserved"]
