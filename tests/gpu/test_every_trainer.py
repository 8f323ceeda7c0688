"""Each trainer on CUDA: the losses and weights of a CPU."""

import pytest

from tests.support.matrix.matrix import check_equal, make, watched

KINDS = (
    "SFT", "DPO", "KTO", "Reward", "ORPO", "CPO", "BCO", "GKD", "Pretrain", "Seq2Seq",
    "MaskedLM", "ReplacedTokenDetection", "TokenClassification", "SequenceClassification",
    "GRPO", "RLOO", "OnlineDPO", "PPO",
)  # fmt: skip
ON_CUDA = {"use_cpu": False, "bf16": False, "tf32": False}
PLAIN = {"optim": "sgd", "learning_rate": 0.05}
"""AdamW makes steps of the signs of gradients, and so of those that are rounding alone."""
WITHIN = 2e-3
DRAWN = ("MaskedLM", "ReplacedTokenDetection")
"""Which draw by the device's own generator."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DRAWN])
def test_numbers_are_those_of_a_cpu(kind: str):
    on_cpu, on_gpu = (watched(make(kind, **PLAIN, **where)) for where in ({}, ON_CUDA))
    assert on_gpu.trainer.model.device.type == "cuda"
    check_equal(on_gpu, on_cpu, bits=False, within=WITHIN)


@pytest.mark.parametrize("kind", DRAWN)
def test_losses_fall_where_each_device_draws_its_own(kind: str):
    on_cpu, on_gpu = (watched(make(kind, **where)) for where in ({}, ON_CUDA))
    apart = abs(on_gpu.losses[-1] - on_cpu.losses[-1])
    assert on_gpu.losses[-1] < on_gpu.losses[0]
    assert apart < 0.3 * (on_cpu.losses[0] - on_cpu.losses[-1])


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GKD"])
@pytest.mark.parametrize("budget", [None, 24], ids=["whole", "in pieces"])
def test_evaluation_is_that_of_a_cpu(kind: str, budget: int | None):
    options = {**PLAIN, "eval_strategy": "no", "tokens_per_microbatch": budget}
    found = []
    for where in ({}, ON_CUDA):
        trainer = make(kind, **options, **where)
        watched(trainer)
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=WITHIN)
