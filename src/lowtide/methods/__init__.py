"""The methods: one declaration each, and this table, which Trainer, planner, command line and docs read."""

from lowtide.methods.bco import BCO
from lowtide.methods.cpo import CPO
from lowtide.methods.dpo import DPO
from lowtide.methods.kto import KTO
from lowtide.methods.method import Method, Objective, RowObjective, TokenObjective
from lowtide.methods.orpo import ORPO
from lowtide.methods.reward import REWARD
from lowtide.methods.sft import SFT

METHODS: dict[str, Method] = {method.name: method for method in (SFT, DPO, KTO, REWARD, ORPO, CPO, BCO)}

__all__ = ["METHODS", "Method", "Objective", "RowObjective", "TokenObjective"]
