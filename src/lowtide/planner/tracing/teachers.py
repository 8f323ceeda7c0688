"""The teacher of a run that distils: another model, which is traced whole beside the student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from lowtide.engine.forward import causal_model
from lowtide.engine.weights.loading import DTYPES
from lowtide.engine.weights.model_init import config_init
from lowtide.planner.tracing.described_model import DescribedModel, config_of_model
from lowtide.run.teachers import teacher_init


@dataclass(frozen=True)
class DescribedTeacher:
    """What a teacher is made from."""

    config: PretrainedConfig
    dtype: torch.dtype | None
    """Of its weights; None for the student's."""
    quantization_config: Any = None
    named: Mapping[str, DescribedTeacher] = field(default_factory=dict)
    """Several by name, of which this is the first; empty where there is one."""

    @classmethod
    def of(cls, teacher: Any, options: Any) -> DescribedTeacher | None:
        """The teacher that is given, else the one that a run's options name; None without either.

        Args:
            teacher: a model, its config, a path or hub name of it, or what describes it already.
            options: a config, or options by name.

        Raises:
            ValueError: there is no model under the name.
        """
        if isinstance(teacher, DescribedTeacher):
            return teacher
        given = options if isinstance(options, Mapping) else vars(options)
        if teacher is None:
            teacher = given.get("teacher_model_names_or_paths") or given.get("teacher_model_name_or_path")
        if teacher is None:
            return None
        if isinstance(teacher, Mapping):
            named = {name: cls.of(each, given) for name, each in teacher.items()}
            found = {name: each for name, each in named.items() if each is not None}
            return replace(next(iter(found.values())), named=found) if found else None
        if isinstance(teacher, nn.Module):
            inner: Any = causal_model(teacher)
            return cls(inner.config, inner.dtype)
        init = teacher_init(given)
        config = config_of_model(teacher, **config_init(init))
        dtype: Any = init.get("dtype")
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.float32
        return cls(config, DTYPES.get(dtype, dtype), init.get("quantization_config"))

    @property
    def each(self) -> list[DescribedTeacher]:
        """All of them."""
        return [*self.named.values()] or [self]

    def made(self, student: torch.dtype) -> nn.Module | dict[str, nn.Module]:
        """It on tensors without memory, or all of them by name."""
        if self.named:
            return {name: cast(nn.Module, each.made(student)) for name, each in self.named.items()}
        described = self.model(student)
        return described.of_layers(described.layers)

    def model(self, student: torch.dtype) -> DescribedModel:
        """The teacher, beside a student with weights of this dtype."""
        return DescribedModel(self.config, self.dtype or student, quantization_config=self.quantization_config)
