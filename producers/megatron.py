"""The publisher for Megatron-core: reads the layout off live model chunks, then copies them.

Nothing here communicates between ranks except one number: the attempt, which rank 0 opens and the
others read from torch.distributed's key-value store. There is no collective, neither in the
constructor nor in `publish`, so a rank that is late or dead cannot make the others hang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..schemas.errors import ConfigError, MissingDependencyError
from ..schemas.layout import Layout, ParallelRank
from .agreement import agree_on_attempt
from .attempts import Trainer, origin_of
from .bus_thread import BusSource, bus_thread_of
from .megatron_layout import ChunkRecord, RankRecord, TensorRecord, build_layout
from .megatron_partition import ModelSizes, PartitionRule
from .ownership import ParallelSizes
from .publisher import DEFAULT_STAGING, DEFAULT_TIMES, PublisherTimes, VersionPublisher
from .replicas import DEFAULT_REPLICA_CHECK, ReplicaCheck, ReplicaRounds
from .staging import StagingConfig
from .torch_digest import TorchDigests
from .torch_source import TensorGetter, TorchSource, dtype_code

try:
    import torch
    from megatron.core import parallel_state
except ImportError as missing:
    raise MissingDependencyError(
        f"Megatron-core cannot be imported: {missing}",
        next_step='pip install "weightbus[megatron]"',
    ) from missing

_LAYER_PATH = re.compile(r"(^|\.)layers\.\d+$")
_FLOAT32_BUFFERS = ("router.expert_bias",)
_DERIVED_BUFFERS = ("local_tokens_per_expert",)


class MegatronPublisher(VersionPublisher):
    """Publishes the weights of this rank's model chunks.

    Every rank of the world makes one, with the same arguments (its own chunks), and calls
    `publish` with the same numbers.

    Args:
        model_chunks: this rank's chunks in virtual-stage order; DDP and Float16Module wrappers are
            looked through.
        transformer_config: the model's TransformerConfig.
        hf_checkpoint: folder of the Hugging Face checkpoint that training started from; the
            writers read its config and the names, shapes and dtypes that they must produce.
        run_id: the run.
        bus: a URL, a BusConfig, a factory of a bus, or a BusThread to share.
        staging: the arena.
        attempt: number of this (re)start; None lets rank 0 take the next one.
        family: conversion family; empty means by the checkpoint's `model_type`.
        times: deadlines.
        partition_rules: how tensors of your own modules are cut; they come before the table.
        params_are_gathered: say so when the distributed optimizer gathers parameters lazily
            (`overlap_param_gather`) and you call `start_param_sync(force_sync=True)` before every
            `publish`; without that the parameters are those of the step before.
        replica_check: how many bytes of the tensors that other ranks publish are hashed in each
            version, so that writers notice copies that have drifted; ReplicaCheck(0) for none.

    Raises:
        ConfigError: Megatron is not initialized, or parameters may be stale.
        UnknownPartitionError: nobody can say which part of the whole some tensors are.
        BusUnavailableError: no bus, or rank 0 did not open the attempt in time.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        transformer_config: Any,
        hf_checkpoint: str | Path,
        run_id: str,
        bus: BusSource,
        *,
        staging: StagingConfig = DEFAULT_STAGING,
        attempt: int | None = None,
        family: str = "",
        times: PublisherTimes = DEFAULT_TIMES,
        partition_rules: Sequence[PartitionRule] = (),
        params_are_gathered: bool = False,
        replica_check: ReplicaCheck = DEFAULT_REPLICA_CHECK,
    ) -> None:
        if not params_are_gathered:
            _refuse_stale(model_chunks)
        layout, getters = read_layout(model_chunks, transformer_config, partition_rules)
        producers = torch.distributed.get_world_size()
        trainer = Trainer(run_id, producers, "megatron", origin_of(hf_checkpoint), family)
        trainer.opening(0)  # a run_id that cannot be is refused before anything is opened
        thread, owns = bus_thread_of(bus, connect_timeout_s=times.start_s)
        try:
            agreed = agree_on_attempt(thread, trainer, attempt, times.start_s)
            super().__init__(
                TorchSource(layout, getters),
                thread,
                run_id=run_id,
                attempt=agreed,
                producers=producers,
                staging=staging,
                times=times,
                owns_bus=owns,
                replicas=ReplicaRounds(layout, TorchDigests(layout, getters), replica_check),
            )
        except BaseException:
            if owns:
                thread.close()
            raise


def read_layout(
    model_chunks: Sequence[torch.nn.Module],
    transformer_config: Any,
    partition_rules: Sequence[PartitionRule] = (),
) -> tuple[Layout, list[TensorGetter]]:
    """What this rank holds, and how to get each tensor.

    Raises:
        ConfigError: Megatron's parallel state is not initialized.
        UnknownPartitionError, LayoutError: as `megatron_layout.build_layout`.
    """
    if not (torch.distributed.is_initialized() and parallel_state.model_parallel_is_initialized()):
        raise ConfigError(
            "Megatron's parallel state is not initialized",
            next_step="call parallel_state.initialize_model_parallel(...) before the publisher",
        )
    chunks: list[ChunkRecord] = []
    getters: list[TensorGetter] = []
    vocab: int | None = None
    for wrapped in model_chunks:
        model = unwrap(wrapped)
        record, own = _read_chunk(model)
        chunks.append(record)
        getters += own
        size: object = getattr(model, "vocab_size", None)
        vocab = size if isinstance(size, int) else vocab
    layout = build_layout(
        chunks,
        _rank_record(transformer_config),
        _sizes(transformer_config, vocab),
        partition_rules,
    )
    return layout, getters


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, Float16Module and the like: wrappers keep it as `module`."""
    inner: object = getattr(module, "module", None)
    while isinstance(inner, torch.nn.Module):
        module, inner = inner, getattr(inner, "module", None)
    return module


def _read_chunk(model: torch.nn.Module) -> tuple[ChunkRecord, list[TensorGetter]]:
    records: list[TensorRecord] = []
    getters: list[TensorGetter] = []
    numbers: dict[str, int] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        number: object = getattr(module, "layer_number", None)
        if _LAYER_PATH.search(path) is not None and isinstance(number, int):
            numbers[path] = number
        for leaf, tensor in _own_tensors(module):
            if id(tensor) in seen:
                continue  # one parameter under two names in one chunk: the first name counts
            seen.add(id(tensor))
            name = f"{path}.{leaf}" if path else leaf
            # Float16Module narrows this buffer when it wraps the model, Megatron widens it again
            # before its first use: it is float32 whenever it matters.
            wide = name.endswith(_FLOAT32_BUFFERS)
            records.append(
                TensorRecord(
                    name,
                    dtype_code(name, torch.float32 if wide else tensor.dtype),
                    tuple(tensor.shape),
                    shared=getattr(tensor, "shared", False) is True,
                )
            )
            getters.append(_getter(module, leaf))
    record = ChunkRecord(
        tuple(records),
        numbers,
        pre_process=getattr(model, "pre_process", True) is True,
        tied=getattr(model, "share_embeddings_and_output_weights", False) is True,
    )
    return record, getters


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of this very module, then the buffers that belong into a checkpoint."""
    yield from module.named_parameters(recurse=False)
    transient: set[str] = getattr(module, "_non_persistent_buffers_set", set[str]())
    for name, buffer in module.named_buffers(recurse=False):
        if name not in transient and name not in _DERIVED_BUFFERS:
            yield name, buffer


def _getter(module: torch.nn.Module, leaf: str) -> TensorGetter:
    return lambda: getattr(module, leaf)


def _rank_record(config: Any) -> RankRecord:
    state: Any = parallel_state  # untyped, and its getters may say None before initialization
    ep, ep_rank = (
        state.get_expert_model_parallel_world_size(),
        state.get_expert_model_parallel_rank(),
    )
    experts: int = getattr(config, "num_moe_experts", None) or 0
    return RankRecord(
        coordinates=ParallelRank(
            rank=torch.distributed.get_rank(),
            tp_rank=state.get_tensor_model_parallel_rank(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            ep_rank=ep_rank,
            etp_rank=state.get_expert_tensor_parallel_rank(),
            dp_rank=state.get_data_parallel_rank(with_context_parallel=True),
        ),
        sizes=ParallelSizes(
            tp=state.get_tensor_model_parallel_world_size(),
            dp=state.get_data_parallel_world_size(with_context_parallel=True),
            ep=ep,
            etp=state.get_expert_tensor_parallel_world_size(),
            edp=state.get_expert_data_parallel_world_size(),
        ),
        edp_rank=state.get_expert_data_parallel_rank(),
        first_expert=ep_rank * (experts // ep),
    )


def _sizes(config: Any, vocab: int | None) -> ModelSizes:
    mla = bool(getattr(config, "multi_latent_attention", False))
    return ModelSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_groups=config.num_query_groups,
        head_dim=config.kv_channels,
        ffn=config.ffn_hidden_size,
        gated=bool(config.gated_linear_unit),
        attention_gate=bool(getattr(config, "attention_output_gate", False)),
        moe_ffn=config.moe_ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size,
        q_lora=config.q_lora_rank if mla else None,
        kv_lora=config.kv_lora_rank if mla else None,
        qk_nope=config.qk_head_dim if mla else None,
        qk_rope=config.qk_pos_emb_head_dim if mla else None,
        v_head=config.v_head_dim if mla else None,
        padded_vocab=vocab,
    )


def _refuse_stale(model_chunks: Sequence[torch.nn.Module]) -> None:
    lazy = any(
        getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False)
        for chunk in model_chunks
    )
    if lazy:
        raise ConfigError(
            "the distributed optimizer gathers parameters lazily (overlap_param_gather): after a "
            "step they are still the old ones",
            next_step="call start_param_sync(force_sync=True) on every chunk before publish() and "
            "pass params_are_gathered=True",
        )
