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
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from jaxtyping import BFloat16, Float32, Int16
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

from lowtide.compat.torch import FakeTensor
from lowtide.memory.optimizers.eight_bit import EightBitMoment, moment_blocks, zeros_8bit
from lowtide.ops.target import target_of

BLOCK = {"cpu": 1 << 17, "cuda": 1 << 23}
"""Elements at a time: on a CPU what the second-level cache holds, on a GPU what keeps it busy."""
TIE = 0x8000
"""Half of the distance between two bfloat16 numbers, counted in float32 numbers."""
REMAINDERS = ("exact", "stochastic")
LEAST_8BIT = 4096
"""Elements from which a parameter's moments are kept in 8 bits where that is asked for, as bitsandbytes does."""


class CompressedAdamW(Optimizer):
    """`torch.optim.AdamW(fused=True)` on float32 masters, of which bfloat16 parameters are the rounded copies.

    float32 parameters among the others (norms, adapters) are stepped by torch's AdamW as they are.

    Args:
        params: bfloat16 or float32 parameters, or groups of them.
        lr, betas, eps, weight_decay: those of `torch.optim.AdamW`.
        remainder: of the master, beyond the bfloat16 weight. "exact" keeps it, as int16 in the state; a master starts
            at the weight's value, or see `compress_`. "stochastic" does not keep it and rounds stochastically; a
            parameter's random numbers come from a seed in its state, so neither the order of steps nor a resumed run
            changes them.
        seed: of all random numbers; with it and its number a parameter has the same ones on every rank.
        moment_bits: 32, or 8 beside a stochastic remainder: the moments of large bfloat16 parameters are rounded to 8
            bits in blocks.

    State of a bfloat16 parameter: `step`, float32 `exp_avg` and `exp_avg_sq` (the sign of which belongs to the
    remainder, until `state_dict` lists in `ties` where it is set), and int16 `remainder` or the integer `seed`. Moments
    in 8 bits are uint8 codes with float32 `exp_avg_scale` and `exp_avg_sq_scale`.

    Raises:
        ValueError: a parameter of another dtype or not contiguous, an unknown `remainder` or number of bits.
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
                "beside remainder='stochastic', since an exact remainder keeps its last bit in a moment's sign"
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
                if group["remainder"] == "exact":
                    state = self._start_state(parameter, group)
                    split_master_(master, parameter.data, state["remainder"], state["exp_avg_sq"])
        self._seed_parameters()

    @torch.no_grad()
    def master(self, parameter: nn.Parameter) -> Tensor:
        """float32, in the parameter's shape: the value that the optimizer goes on from, which the weight is rounded
        from."""
        state = self.state.get(parameter, {})
        if "remainder" not in state:
            return parameter.detach().float()
        _sign_ties(state)
        return joined_master(parameter.detach(), state["remainder"], state["exp_avg_sq"])

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
                stepped_since = saved.get("remainder", parameter).is_floating_point()  # torch's AdamW took it along
                if kept["remainder"] != "exact" or stepped_since:
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
            few = group["moment_bits"] == 8 and parameter.dtype == torch.bfloat16 and parameter.numel() >= LEAST_8BIT
            for name in ("exp_avg", "exp_avg_sq"):
                if few:
                    state[name], state[f"{name}_scale"] = zeros_8bit(parameter.numel(), parameter.device)
                else:
                    state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        if parameter.dtype == torch.bfloat16 and group["remainder"] == "exact" and "remainder" not in state:
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state

    def _step_plain(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if parameters:
            grads = [cast(Tensor, parameter.grad) for parameter in parameters]
            states = [self.state[parameter] for parameter in parameters]
            exp_avgs, exp_avg_sqs, steps = ([s[name] for s in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            _adamw(parameters, grads, exp_avgs, exp_avg_sqs, steps, group)

    def _step_compressed(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        _sign_ties(state)
        remainder = state["remainder"] if group["remainder"] == "exact" else None
        generator = None if remainder is not None else _advance(state, parameter)
        size = BLOCK.get(target_of(parameter).kind, BLOCK["cuda"])
        tensors = [t.reshape(-1).split(size) for t in (parameter.detach(), cast(Tensor, parameter.grad))]
        moments: list[list[EightBitMoment]] = [
            moment_blocks(state["exp_avg"], state.get("exp_avg_scale"), size, signed=True),
            moment_blocks(state["exp_avg_sq"], state.get("exp_avg_sq_scale"), size, signed=False),
        ]
        remainders = iter(() if remainder is None else remainder.view(-1).split(size))
        for weight, grad, first, second in zip(*tensors, *moments, strict=True):
            rest, exp_avg, exp_avg_sq = next(remainders, None), first.read(), second.read()
            master = weight.float() if rest is None else joined_master(weight, rest, exp_avg_sq)
            exp_avg_sq.abs_()
            _adamw([master], [grad.float()], [exp_avg], [exp_avg_sq], [state["step"].clone()], group)
            if rest is None:
                round_stochastically_(master, weight, generator)
            else:
                split_master_(master, weight, rest, exp_avg_sq)
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


def joined_master(
    weight: BFloat16[Tensor, " *shape"], remainder: Int16[Tensor, " *shape"], exp_avg_sq: Float32[Tensor, " *shape"]
) -> Float32[Tensor, " *shape"]:
    """The master, in memory of its own."""
    bits = weight.float().view(torch.int32)
    bits += remainder
    bits.sub_(exp_avg_sq.view(torch.int32) >> 31, alpha=2 * TIE)  # the shift gives -1 for a sign, else 0
    return bits.view(torch.float32)


def split_master_(
    master: Float32[Tensor, " *shape"],
    weight: BFloat16[Tensor, " *shape"],
    remainder: Int16[Tensor, " *shape"],
    exp_avg_sq: Float32[Tensor, " *shape"],
) -> None:
    """Splits the master into weight, remainder and the sign of the second moment. NaN stays NaN, whatever remains."""
    weight.copy_(master)
    left = master.view(torch.int32) - weight.float().view(torch.int32)
    remainder.copy_(left)  # 0x8000 wraps to -0x8000
    exp_avg_sq.copysign_(0.5 - (left == TIE).float())


def round_stochastically_(
    master: Float32[Tensor, " *shape"], weight: BFloat16[Tensor, " *shape"], generator: torch.Generator | None
) -> None:
    """The weight becomes one of the two neighbours of the master, each the likelier the nearer it is."""
    noise = torch.randint(2 * TIE, master.shape, generator=generator, dtype=torch.int32, device=master.device)
    upper = (noise + master.view(torch.int32)) >> 16
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))
    weight.masked_fill_(master.isnan(), torch.nan)


def _list_ties(state: dict[str, Any]) -> None:
    """Takes the signs off the second moment, and keeps their places; they are few."""
    if "remainder" in state and "ties" not in state and not isinstance(state["exp_avg_sq"], FakeTensor):
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
    kept = name in ("remainder", "ties") or value.dtype == torch.uint8
    return value.to(parameter.device, value.dtype if kept else torch.float32)
