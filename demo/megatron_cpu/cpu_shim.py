"""Real Megatron-core on a CPU and gloo: the few CUDA-only calls are sent to the CPU.

`prepare()` must run before anything else imports Megatron. It replaces functions of torch and of
Megatron in this process and is meant for tests and the demo, on one machine, with tiny models.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
_prepared: list[bool] = []


def prepare() -> None:
    """Make Megatron-core importable and usable in this process; idempotent."""
    if _prepared:
        return
    _prepared.append(True)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron warns about the absence of apex, TransformerEngine and CUDA at every import.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    _replace_torch_compile()
    _replace_cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _replace_rng()
        _repair_megatron()
        _replace_uneven_collectives()


def _replace_torch_compile() -> None:
    # Megatron compiles helpers while it is imported: 10 of 14 seconds on two cores.
    torch.compile = _same


def _same(function: Any = None, **_: Any) -> Any:
    return function if callable(function) else _same


def _nothing(*_: Any, **__: Any) -> None: ...


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _replace_cuda() -> None:
    cuda: Any = torch.cuda

    def current_device() -> torch.device:
        return _CPU

    def passive(*_: Any, **__: Any) -> _Passive:
        return _Passive()

    def stay(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    cuda.current_device = current_device
    cuda.synchronize = _nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = _rng_state
    cuda.Stream = cuda.Event = _Passive
    cuda.current_stream = passive
    cuda.stream = contextlib.nullcontext
    tensor: Any = torch.Tensor
    tensor.cuda = stay
    namespace: Any = torch
    for name in _FACTORIES:
        setattr(namespace, name, _on_cpu(getattr(torch, name)))
    # Megatron's optimizer tells half from full precision by the names of CUDA tensor types.
    plain_type: Callable[..., Any] = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str) and not args and not kwargs:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensor.type = cuda_type


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory for which `device="cuda"` means the CPU."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


class _Passive:
    """A stream or event that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Self:
        return self

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Passive)

    def __hash__(self) -> int:
        return 0


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _replace_rng() -> None:
    # The tracker keeps the same states, in the CPU's generator.
    random = _module("tensor_parallel.random")
    random._get_cuda_rng_state = _rng_state  # noqa: SLF001
    random._set_cuda_rng_state = _set_rng_state  # noqa: SLF001


def _repair_megatron() -> None:
    """Small repairs for a build without TransformerEngine."""
    moe_utils = _module("transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1: NameError in the router
        moe_utils.te_general_gemm = None
    mla = _module("transformer.multi_latent_attention")
    if not isinstance(mla.TELinear, type):  # isinstance(..., TELinear) with TELinear None
        mla.TELinear = type("NoTELinear", (), {})
    _module("models.backends").DotProductAttention = _mla_attention()

    def keep(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # Split sizes otherwise stay tensors when they are not on a GPU.
    _module("transformer.moe.token_dispatcher").maybe_move_tensor_to_cpu = keep


def _mla_attention() -> type:
    base: Any = _module("transformer.dot_product_attention").DotProductAttention

    class CPUDotProductAttention(base):
        """Megatron's own attention, which does not know that MLA's values have another width."""

        def __init__(
            self,
            *args: Any,
            k_channels: int | None = None,
            v_channels: int | None = None,
            **kwargs: Any,
        ) -> None:
            del k_channels
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return CPUDotProductAttention


def _replace_uneven_collectives() -> None:
    """Gloo gathers equal sizes only; token counts of experts are not: use all-to-all for those."""
    mappings = _module("tensor_parallel.mappings")
    even_gather = mappings._gather_along_first_dim  # noqa: SLF001
    even_scatter = mappings._reduce_scatter_along_first_dim  # noqa: SLF001

    def gather(
        tensor: torch.Tensor, group: Any, output_split_sizes: Any = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(tensor, group)
        sizes = [int(size) for size in output_split_sizes]
        out = tensor.new_empty([sum(sizes), *tensor.shape[1:]])
        copies = tensor.contiguous().repeat(group.size(), *[1] * (tensor.dim() - 1))
        torch.distributed.all_to_all_single(
            out, copies, sizes, [tensor.shape[0]] * group.size(), group=group
        )
        return out

    def scatter(
        tensor: torch.Tensor, group: Any, input_split_sizes: Any = None, *_: Any, **__: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(tensor, group)
        sizes = [int(size) for size in input_split_sizes]
        mine = sizes[group.rank()]
        out = tensor.new_empty([mine * group.size(), *tensor.shape[1:]])
        torch.distributed.all_to_all_single(
            out, tensor.contiguous(), [mine] * group.size(), sizes, group=group
        )
        return out.view(group.size(), mine, *tensor.shape[1:]).sum(0)

    mappings._gather_along_first_dim = gather  # noqa: SLF001
    mappings._reduce_scatter_along_first_dim = scatter  # noqa: SLF001
