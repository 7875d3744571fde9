"""Training steps and reference logits of the tiny models, through Megatron's own schedules."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from ...producers.megatron import read_layout, unwrap
from .models import build_chunks
from .sizes import TINY, TinyRun, TinySizes
from .values import cut_whole, value_of

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
MICROBATCHES = 4


class TinyTrainer:
    """A tiny model with Megatron's DDP and optimizer; its first weights are a function of names.

    Args:
        run: architecture and ranks (`start_ranks` has been called).
        sizes: the model's sizes.
        learning_rate: of Adam; large, so that one step moves every logit.
        seed: of the training data.
    """

    def __init__(
        self,
        run: TinyRun,
        sizes: TinySizes = TINY,
        *,
        learning_rate: float = 1e-2,
        seed: int = 0,
    ) -> None:
        self.run, self.sizes = run, sizes
        self.config, models = build_chunks(run, sizes)
        set_values_by_name(models, self.config)
        if run.bf16:
            models = [Float16Module(self.config, model) for model in models]
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False)
        self.chunks: list[Any] = [
            DistributedDataParallel(
                self.config, ddp, model, disable_bucketing=bool(stage) or run.pp > 1
            )
            for stage, model in enumerate(models)
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        self._optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=learning_rate,
                weight_decay=0.0,
                bf16=run.bf16,
                params_dtype=self.config.params_dtype,
                use_distributed_optimizer=False,
            ),
            self.chunks,
        )
        self._data = torch.Generator().manual_seed(seed)

    def step(self, length: int = 16, batch: int = 2) -> None:
        """One optimizer step on random tokens; the same tokens on every rank."""
        tokens = torch.randint(
            0, self.sizes.vocab, (MICROBATCHES, batch, length + 1), generator=self._data
        )
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(list(tokens[:, :, :-1]), list(tokens[:, :, 1:]))
        self._optimizer.step()

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Logits of the whole vocabulary, on the last stage; None elsewhere.

        Args:
            tokens: [batch, length], the same on every rank; length is a multiple of tp with
                sequence parallelism.

        Returns:
            [batch, length, vocab] in float32.
        """
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), self._without_mtp():
            found: list[torch.Tensor] = self._run([tokens] * MICROBATCHES, None)
        if not found:
            return None
        return gather_vocabulary(found[0])[..., : self.sizes.vocab].float()

    @contextmanager
    def _without_mtp(self) -> Generator[None]:
        """Megatron cannot run a model with MTP layers without labels; logits do not need them."""
        models: list[Any] = [unwrap(chunk) for chunk in self.chunks]
        kept = [(model, model.mtp_process) for model in models]
        layers, self.config.mtp_num_layers = self.config.mtp_num_layers, None
        try:
            for model in models:
                model.mtp_process = False
            yield
        finally:
            self.config.mtp_num_layers = layers
            for model, process in kept:
                model.mtp_process = process

    def _run(self, inputs: list[torch.Tensor], labels: list[torch.Tensor] | None) -> Any:
        batch, length = inputs[0].shape
        # Each virtual stage reads the data from its own beginning.
        iterators = [
            iter(list(zip(inputs, labels or [None] * len(inputs), strict=True)))
            for _ in self.chunks
        ]
        return get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(inputs),
            seq_length=length,
            micro_batch_size=batch,
            forward_only=labels is None,
            collect_non_loss_data=labels is None,
        )


def set_values_by_name(models: list[Any], config: Any) -> None:
    """Give every parameter the value that belongs to its global name."""
    layout, getters = read_layout(models, config)
    with torch.no_grad():
        for tensor, getter in zip(layout.tensors, getters, strict=True):
            whole = value_of(tensor.name, tensor.whole_shape, _DTYPES[tensor.dtype])
            getter().copy_(cut_whole(whole, tensor.part))


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """Put the tensor-parallel parts of [..., vocab / tp] together on every rank."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, -1)


def _forward(data: Iterator[Any], model: Any) -> tuple[Any, Any]:
    tokens, labels = next(data)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).tril() < 0.5
    output = model(tokens, positions, mask, labels=labels)

    def loss(result: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return result
        mean = result.float().mean()
        return mean, {"loss": mean.detach()}

    return output, loss
