"""AdamW on bfloat16 parameters with the trajectory of float32 masters, without the masters.

Mixed precision keeps each weight twice, as a float32 master and as the bfloat16 copy that the passes use. But the copy
is the upper half of the master, so here the other half is kept in its place: the *remainder*, `bits(master) -
bits(copy)`, which is a signed 16-bit number. A parameter takes 2 (weight) + 2 (remainder) + 8 (moments) = 12 bytes
instead of 14, and its gradient 2 instead of 4. The float32 masters exist for a block of elements at a time.

Exact, bit by bit. Rounding to the nearest even leaves 65,537 remainders: from -0x8000 to 0x8000, since a weight
that is even attracts the ties on both of its sides. The one bit that 16 cannot hold is the sign of the second moment,
which is never negative: where it is set, the remainder reads 0x8000 instead of -0x8000. Other AdamWs take its root, so
`state_dict` takes the signs off and lists their places beside it; the next step puts them back.

The same split is in NVIDIA's Apex (`DistributedFusedAdam`, `store_param_remainders`), which truncates where the passes
would round. Stochastic rounding, the other option, keeps no remainder and is not exact: the float32 result is rounded
up or down at random, so that it is right on average (arXiv 2010.06192). There the moments may be kept in 8 bits too,
see `eight_bit`: 4 bytes a parameter in all.

Between the two is FlashAdamW (FlashOptim, arXiv 2602.23349): 8 bits of remainder, so that masters have 24 bits (see
`masters`), and companded 8-bit moments (see `companding`): 5 bytes a parameter, and 1/8 for scales. Where it differs
from the paper is said there; beside that, parameters of fewer than `LEAST_8BIT` numbers (norms, biases) keep exact
masters and float32 moments: they are few, and a norm's weight near 1 would lose updates below 8e-6. An update below
2^-17 of its weight's power of two is lost in the others, as in the paper.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from lowtide.compat.torch import FakeTensor
from lowtide.memory.optimizers.companding import CompandedMoment
from lowtide.memory.optimizers.eight_bit import EightBitMoment
from lowtide.memory.optimizers.masters import (
    joined_master,
    joined_master_24,
    round_stochastically_,
    split_master_,
    split_master_24_,
)
from lowtide.ops.mapped import let_go
from lowtide.ops.target import in_turn, target_of

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements at a time: on a CPU what the second-level cache holds, on a GPU what keeps it busy."""
REMAINDERS: dict[str, type[EightBitMoment] | None] = {
    "exact": None,
    "8bit": CompandedMoment,
    "stochastic": EightBitMoment,
}
"""What becomes of the bits that bfloat16 has no room for; with it, how moments of 8 bits are kept."""
LEAST_8BIT = 4096
"""Elements from which a parameter's moments are kept in 8 bits where that is asked for, as bitsandbytes does."""


class CompressedAdamW(Optimizer):
    """`torch.optim.AdamW(fused=True)` on float32 masters, of which bfloat16 parameters are the rounded copies.

    float32 parameters among the others (norms, adapters) are stepped by torch's AdamW as they are.

    Args:
        params: bfloat16 or float32 parameters, or groups of them.
        lr, betas, eps, weight_decay: those of `torch.optim.AdamW`.
        remainder: of the master, beyond the bfloat16 weight. "exact" keeps it, as int16 in the state; a master starts
            at the weight's value, or see `compress_`. "8bit" keeps 8 bits of it, of large parameters. "stochastic"
            does not keep it and rounds stochastically; a parameter's random numbers come from a seed in its state, so
            neither the order of steps nor a resumed run changes them.
        seed: of all random numbers; with it and its number a parameter has the same ones on every rank.
        moment_bits: 32, or 8 beside another remainder than the exact one: the moments of large bfloat16 parameters are
            rounded to 8 bits in blocks, companded where the remainder has 8 bits.

    State of a bfloat16 parameter: `step`, float32 `exp_avg` and `exp_avg_sq` (the sign of which belongs to the
    remainder, until `state_dict` lists in `ties` where it is set), and int16 or int8 `remainder` or the integer `seed`.
    Moments in 8 bits are codes (uint8, int8 for a companded first one) with float32 `exp_avg_scale` and
    `exp_avg_sq_scale`.

    Raises:
        ValueError: a parameter of another dtype or not contiguous, an unknown `remainder` or number of bits, or
            states to be loaded whose moments are 8-bit codes of another kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        remainder: str = "exact",
        moment_bits: int = 32,
        seed: int = 0,
    ):
        kept = {"remainder": remainder, "moment_bits": moment_bits, "seed": seed}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **kept})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for bfloat16 and float32 parameters alone."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["remainder"] not in REMAINDERS:
            raise ValueError(f"remainder is {group['remainder']!r}: choose one of {', '.join(REMAINDERS)}")
        if group["moment_bits"] not in (8, 32) or (group["moment_bits"] == 8 and group["remainder"] == "exact"):
            raise ValueError(
                f"moment_bits={group['moment_bits']} with remainder={group['remainder']!r}: moments have 32 bits, or 8 "
                "beside remainder='8bit' or 'stochastic', since an exact one keeps its last bit in a moment's sign"
            )
        for parameter in group["params"]:
            if parameter.dtype not in (torch.bfloat16, torch.float32) or not parameter.is_contiguous():
                raise ValueError(
                    f"CompressedAdamW steps contiguous bfloat16 and float32 parameters, got one of {parameter.dtype}, "
                    f"shape {tuple(parameter.shape)}, strides {parameter.stride()}: load the model in bfloat16, or "
                    "choose another optimizer"
                )
        self._seed_parameters()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step of every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self._start_state(parameter, group)
                if parameter.dtype == torch.bfloat16:
                    self._step_compressed(parameter, group)
            self._step_plain([parameter for parameter in trained if parameter.dtype != torch.bfloat16], group)
        return loss

    @torch.no_grad()
    def compress_(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Makes float32 parameters bfloat16 ones in place; their masters go on from the float32 values, bit by bit.

        Args:
            parameters: of this optimizer and without state so far; by default all that are float32.
        """
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.float32 or (chosen is not None and id(parameter) not in chosen):
                    continue
                master = parameter.data
                parameter.data = master.to(torch.bfloat16)
                if group["remainder"] != "stochastic":
                    self._split(master, parameter, self._start_state(parameter, group))
                let_go(master)
        self._seed_parameters()

    @torch.no_grad()
    def master(self, parameter: nn.Parameter) -> Tensor:
        """float32, in the parameter's shape: the value that the optimizer goes on from, which the weight is rounded
        from."""
        state = self.state.get(parameter, {})
        if "remainder" not in state:
            return parameter.detach().float()
        _sign_ties(state)
        return _joined(parameter.detach(), state["remainder"], state["exp_avg_sq"])

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and safe for any AdamW: no second moment has a sign, `ties` lists where they were."""
        state_dict = super().state_dict()
        for state in self.state.values():  # which are those in the dict
            _list_ties(state)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the moments to the parameters' dtype; `remainder` and `moment_bits` stay what
        they are here, and moments have the bits that they come in. Takes the states of `torch.optim.AdamW` too: a
        master then starts at the weight's value."""
        own = [{name: group[name] for name in ("remainder", "moment_bits", "seed")} for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": {}})
        numbers = iter([number for group in state_dict["param_groups"] for number in group["params"]])
        for group, kept in zip(self.param_groups, own, strict=True):
            group.update({**kept, "seed": group.get("seed", kept["seed"])})
            for parameter, number in zip(group["params"], numbers, strict=False):
                saved = state_dict["state"].get(number, {})
                _check_moments(saved, kept["remainder"])
                if saved.get("remainder", parameter).dtype != _remainder_dtype(parameter, group):
                    # it is of another kind, or torch's AdamW took it along and stepped since
                    saved = {name: value for name, value in saved.items() if name not in ("remainder", "ties")}
                for name, value in saved.items():
                    self.state[parameter][name] = _loaded(name, value, parameter)
        self._seed_parameters()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _seed_parameters(self) -> None:
        every = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(every):
            if group["remainder"] == "stochastic" and parameter.dtype == torch.bfloat16:
                drawn = random.Random(f"{group['seed']} {number}").getrandbits(62)
                self.state[parameter].setdefault("seed", drawn)

    def _start_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            kind = REMAINDERS[group["remainder"]] if group["moment_bits"] == 8 and _is_large(parameter) else None
            for name in ("exp_avg", "exp_avg_sq"):
                if kind is None:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                else:
                    zeros = kind.zeros(parameter.numel(), parameter.device, signed=name == "exp_avg")
                    state[name], state[f"{name}_scale"] = zeros
        dtype = _remainder_dtype(parameter, group)
        if dtype is not None and "remainder" not in state:
            state["remainder"] = torch.zeros_like(parameter, dtype=dtype)
        return state

    def _split(self, master: Tensor, parameter: Tensor, state: dict[str, Any]) -> None:
        """Splits a master into a parameter and its state, a block at a time."""
        parts = (master, parameter.detach(), state["remainder"], state["exp_avg_sq"])
        for block in zip(*(part.view(-1).split(_block_size(parameter)) for part in parts), strict=True):
            _split_block(*block)

    def _step_plain(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if parameters:
            grads = [cast(Tensor, parameter.grad) for parameter in parameters]
            states = [self.state[parameter] for parameter in parameters]
            exp_avgs, exp_avg_sqs, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            _adamw(parameters, grads, exp_avgs, exp_avg_sqs, steps, group)

    def _step_compressed(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        _sign_ties(state)
        remainder = state["remainder"] if group["remainder"] != "stochastic" else None
        generator = None if remainder is not None else _advance(state, parameter)
        size, kind = _block_size(parameter), REMAINDERS[group["remainder"]] or EightBitMoment
        tensors = [t.reshape(-1).split(size) for t in (parameter.detach(), cast(Tensor, parameter.grad))]
        moments: list[list[EightBitMoment]] = [
            kind.blocks(state["exp_avg"], state.get("exp_avg_scale"), size, signed=True),
            kind.blocks(state["exp_avg_sq"], state.get("exp_avg_sq_scale"), size, signed=False),
        ]
        remainders = [None] * len(moments[0]) if remainder is None else remainder.view(-1).split(size)
        for weight, grad, first, second, rest in in_turn([*zip(*tensors, *moments, remainders, strict=True)]):
            exp_avg, exp_avg_sq = first.read(), second.read()
            master = weight.float() if rest is None else _joined(weight, rest, exp_avg_sq)
            exp_avg_sq.abs_()
            _adamw([master], [grad.float()], [exp_avg], [exp_avg_sq], [state["step"].clone()], group)
            if rest is None:
                round_stochastically_(master, weight, generator)
            else:
                _split_block(master, weight, rest, exp_avg_sq)
            first.write(exp_avg)
            second.write(exp_avg_sq)
        state["step"] += 1


def _adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _is_large(parameter: Tensor) -> bool:
    """Whether a parameter's states are kept in 8 bits where that is asked for."""
    return parameter.dtype == torch.bfloat16 and parameter.numel() >= LEAST_8BIT


def _remainder_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype | None:
    """What the remainder of a parameter's master is kept in; None where there is none."""
    if parameter.dtype != torch.bfloat16 or group["remainder"] == "stochastic":
        return None
    return torch.int8 if group["remainder"] == "8bit" and _is_large(parameter) else torch.int16


def _check_moments(saved: dict[str, Any], remainder: str) -> None:
    """Refuses moments that are codes of another kind than those beside a remainder."""
    codes, kind = saved.get("exp_avg"), REMAINDERS[remainder]
    if codes is None or codes.is_floating_point():
        return
    if kind is None or codes.dtype != kind.code_dtype(signed=True):
        raise ValueError(
            f"the moments to be loaded are 8-bit codes of another optimizer than one with remainder={remainder!r}: "
            "load them where they were saved, or begin without them"
        )


def _block_size(parameter: Tensor) -> int:
    return BLOCK.get(target_of(parameter).kind, BLOCK["cuda"])


def _joined(weight: Tensor, remainder: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The float32 master of a weight, in memory of its own."""
    if remainder.dtype == torch.int8:
        return joined_master_24(weight, remainder)
    return joined_master(weight, remainder, exp_avg_sq)


def _split_block(master: Tensor, weight: Tensor, remainder: Tensor, exp_avg_sq: Tensor) -> None:
    """Undoes `_joined`, to rounding where the remainder has 8 bits."""
    if remainder.dtype == torch.int8:
        split_master_24_(master, weight, remainder)
    else:
        split_master_(master, weight, remainder, exp_avg_sq)


def _list_ties(state: dict[str, Any]) -> None:
    """Takes the signs off the second moment, and keeps their places; they are few."""
    remainder = state.get("remainder")
    if remainder is None or remainder.dtype == torch.int8 or isinstance(remainder, FakeTensor):
        return
    if "ties" not in state:
        state["ties"] = state["exp_avg_sq"].view(-1).signbit().nonzero().view(-1)
        state["exp_avg_sq"].abs_()


def _sign_ties(state: dict[str, Any]) -> None:
    """Undoes `_list_ties`."""
    ties = state.pop("ties", None)
    if ties is not None:
        moment = state["exp_avg_sq"].view(-1)
        moment[ties] = -moment[ties].abs()
        ties.resize_(0)  # a dict that was given out holds it beside the signs


def _advance(state: dict[str, Any], parameter: Tensor) -> torch.Generator:
    """The random numbers of this parameter's next step."""
    state["seed"] += 1
    return torch.Generator(parameter.device).manual_seed(state["seed"])


def _loaded(name: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    kept = name in ("remainder", "ties") or value.dtype in (torch.uint8, torch.int8)
    return value.to(parameter.device, value.dtype if kept else torch.float32)
