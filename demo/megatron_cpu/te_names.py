"""CPU stand-ins that give TransformerEngine's parameter names, shapes and attributes.

Import after `cpu_shim.prepare()`. `use_te_names()` makes Megatron's own spec functions, asked for
TransformerEngine, build these modules.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import megatron.core
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.utils import get_pg_size
from torch.nn import functional

_SINCE_0_17 = tuple(int(part) for part in megatron.core.__version__.split(".")[:2]) >= (0, 17)


class CPUNorm(torch.nn.RMSNorm):
    """RMSNorm with the attribute that sequence parallelism looks for."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self.weight, config)


class CPULinear(torch.nn.Module):
    """A linear layer that is replicated on every tensor-parallel rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any = None,
        init_method: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        init_method(self.weight)
        # TransformerEngine marks even the duplicated weight as tensor parallel.
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        _mark(self.weight, config)
        _set_allreduce(self.weight, True)
        self.parallel_mode = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Output and no bias, as Megatron expects it."""
        return functional.linear(x, self.weight), None


class CPULayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and projection in one module."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype)
        )
        _mark(self.layer_norm_weight, config)
        self._eps = config.layernorm_epsilon

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise, then project."""
        normed = functional.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **kwargs)


class CPUGroupedLinear(torch.nn.Module):
    """One weight for each expert, `weight0`, `weight1`, …; cut along `dim` over expert-TP ranks."""

    dim = 0

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        ranks = get_pg_size(pg_collection.expt_tp)
        self.num_gemms = num_gemms
        shape = [output_size, input_size]
        shape[self.dim] //= ranks
        own_gradient = config.expert_model_parallel_size > 1 or (
            _SINCE_0_17 and config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            init_method(weight)
            set_tensor_model_parallel_attributes(weight, True, self.dim, 1)
            _set_allreduce(weight, not own_gradient)
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        """Each expert's rows through its weight."""
        parts = torch.split(x, list(m_splits))
        outputs = [
            functional.linear(part, getattr(self, f"weight{expert}"))
            for expert, part in enumerate(parts)
        ]
        return torch.cat(outputs), None


class CPUGroupedRowLinear(CPUGroupedLinear):
    """The second projection of grouped experts."""

    dim = 1


class CPUSpecProvider(LocalSpecProvider):
    """Megatron's choice of modules, with the stand-ins where TransformerEngine's would be."""

    def linear(self) -> type:
        """The replicated linear layer."""
        return CPULinear

    def fuse_layernorm_and_linear(self) -> bool:
        """TransformerEngine does."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and projection."""
        return CPULayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **_: Any) -> type:
        """RMSNorm, whatever is asked for."""
        del rms_norm, for_qk
        return CPUNorm

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> Any:
        """The experts' module and its parts."""
        del moe_use_legacy_grouped_gemm
        if moe_use_grouped_gemm:
            module: type = TEGroupedMLP
            parts = MLPSubmodules(linear_fc1=CPUGroupedLinear, linear_fc2=CPUGroupedRowLinear)
        else:
            module = SequentialMLP
            parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return functools.partial(module, submodules=parts) if _SINCE_0_17 else (module, parts)


def use_te_names() -> None:
    """Build the stand-ins where Megatron would build TransformerEngine's modules."""
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    specs.TESpecProvider = CPUSpecProvider
    specs.TENorm = CPUNorm
    mla: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    mla.TELinear = CPULinear
    mla.Linear = mla.TEColumnParallelLinear = None
    block: Any = importlib.import_module("megatron.core.transformer.transformer_block")
    block.LayerNormImpl = CPUNorm
    try:  # since 0.19 the norms of Q and KV come from here
        norms: Any = importlib.import_module("megatron.core.transformer.mla_qk_norm_config")
    except ImportError:
        return

    def provider(_implementation: object) -> CPUSpecProvider:
        return CPUSpecProvider()

    norms.get_backend = provider


def _mark(weight: Any, config: Any) -> None:
    """Say that its gradient is to be summed over sequence-parallel ranks."""
    weight.sequence_parallel = config.sequence_parallel


def _set_allreduce(weight: Any, value: bool) -> None:
    """Say whether its gradient is summed over all data-parallel ranks or the experts' own."""
    weight.allreduce = value
