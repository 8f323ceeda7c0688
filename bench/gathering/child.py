"""One rank of `bench.gathering`: writes completions in each of its ways, and prints how long each took."""

import json
import time
from typing import Any

from bench.generation.contestants import COUNT, MOST, SHAPE, asked
from bench.inputs.shapes import build_model
from bench.measuring.arguments import specification
from bench.measuring.processes import MARK

WHOLE, LAYERS, HALF = "whole", "layer by layer", "half its bytes"


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each turn by way, and the tokens of a turn."""
    import torch
    import torch.distributed as dist

    from lowtide.engine.forward import install
    from lowtide.engine.weights.sharded.fully_shard import shard_model, weights_for_writing
    from lowtide.ranks.sharding import Sharding
    from lowtide.rollout.generators.generator import Request, Sampling
    from lowtide.rollout.generators.ragged import RaggedGenerator

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model(SHAPE)
    whole = sum(p.nbytes for p in model.parameters())
    install(model)
    shard_model(model, Sharding(kind="fsdp2", devices=ranks), torch.device("cpu"))
    prompts, lengths = asked()
    own = range(rank, len(prompts), ranks)
    generator = RaggedGenerator(lengths=lambda request, number: lengths[own[request] * COUNT + number])
    requests = [Request(prompts[number], COUNT, seed=number) for number in own]
    gathers = {WHOLE: True, LAYERS: False, HALF: whole // 2}
    seconds: dict[str, list[float]] = {way: [] for way in gathers}
    written: dict[str, list[list[int]]] = {}
    for turn in range(spec["turns"] + 1):
        for way, gather in gathers.items():
            dist.barrier()
            began = time.perf_counter()
            with weights_for_writing(model, gather):
                found = generator.generate(model, requests, Sampling(MOST))
            if turn:  # the first warms up
                seconds[way].append(time.perf_counter() - began)
            written[way] = [each.token_ids for group in found for each in group]
    assert written[WHOLE] == written[LAYERS] == written[HALF], "the ways wrote different tokens"
    return {"tokens": sum(map(len, written[WHOLE])), "seconds": seconds}


if __name__ == "__main__":
    print(MARK + json.dumps(measure(specification(__doc__))), flush=True)
