"""The methods: one declaration each, and this table, which Trainer, planner, command line and docs read."""

from lowtide.methods.method import Method, Objective
from lowtide.methods.sft import SFT

METHODS: dict[str, Method] = {method.name: method for method in (SFT,)}

__all__ = ["METHODS", "Method", "Objective"]
