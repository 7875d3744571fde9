"""The tiny models' sizes, and which ranks hold them. Neither torch nor Megatron here."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeAlias, get_args

Kind: TypeAlias = Literal["qwen3", "qwen3moe", "mla", "mla_yarn"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Nothing is square and no two sizes are equal by accident, so a mixed-up rule shows."""

    hidden: int = 64
    heads: int = 4
    kv_groups: int = 2
    head_dim: int = 32
    ffn: int = 96
    vocab: int = 320
    layers: int = 4
    moe_ffn: int = 48
    experts: int = 4
    q_lora: int = 24
    kv_lora: int = 16
    qk_nope: int = 16
    qk_rope: int = 8
    v_head: int = 16
    shared_ffn: int = 48

    @property
    def padded_vocab(self) -> int:
        """Megatron's vocabulary. The same for every tp, so that training is the same, too."""
        return -(-self.vocab // 128) * 128


TINY = TinySizes()


@dataclass(frozen=True, slots=True)
class TinyRun:
    """One tiny model on some ranks: what the command lines of the demo programs say.

    Attributes:
        kind: architecture.
        tp, pp, vpp, ep, etp: parallel sizes; `vpp` 0 means no virtual stages, `etp` 0 means tp.
        sp: sequence parallelism (experts with tp > 1 need it).
        spec: `local` for Megatron's own modules, `te` for TransformerEngine's names.
        grouped: experts in one module.
        tied: the output layer is the embedding.
        mtp: multi-token-prediction layers.
        bf16: parameters in bfloat16.
    """

    kind: Kind = "qwen3"
    tp: int = 1
    pp: int = 1
    vpp: int = 0
    ep: int = 1
    etp: int = 0
    sp: bool = False
    spec: Literal["local", "te"] = "local"
    grouped: bool = False
    tied: bool = False
    mtp: int = 0
    bf16: bool = False

    @property
    def expert_tp(self) -> int:
        """Expert-tensor-parallel ranks."""
        return self.etp if self.etp else self.tp

    @property
    def chunks(self) -> int:
        """Model chunks on each rank."""
        return max(1, self.vpp)

    @property
    def moe(self) -> bool:
        """Whether it has routed experts."""
        return self.kind != "qwen3"

    def arguments(self) -> list[str]:
        """The command line that `from_arguments` reads."""
        words: list[str] = []
        for entry in fields(self):
            value: object = getattr(self, entry.name)
            if isinstance(value, bool):
                words += [f"--{entry.name}"] if value else []
            else:
                words += [f"--{entry.name}", str(value)]
        return words

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Declare the options of a run."""
        choices = {"kind": KINDS, "spec": ("local", "te")}
        for entry in fields(cls):
            default: Any = entry.default
            if isinstance(default, bool):
                parser.add_argument(f"--{entry.name}", action="store_true")
            else:
                parser.add_argument(
                    f"--{entry.name}",
                    type=type(default),
                    default=default,
                    choices=choices.get(entry.name),
                )

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> Self:
        """Read a run off parsed arguments."""
        return cls(**{entry.name: getattr(namespace, entry.name) for entry in fields(cls)})
