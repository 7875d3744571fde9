"""`--megatron-to-hf-mode raw|bridge`: one option that chooses how a trainer publishes.

`raw` publishes this rank's own shards and lets the writers convert (nothing is gathered in the
trainer). `bridge` publishes what an exporter such as Megatron-Bridge has gathered and converted.
The peers of either mode are imported only when it is chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ..schemas.errors import ConfigError
from .bus_thread import BusSource
from .publisher import DEFAULT_STAGING, DEFAULT_TIMES, PublisherTimes, VersionPublisher
from .staging import Policy, StagingConfig

if TYPE_CHECKING:
    from .bridge_source import Export

Mode: TypeAlias = Literal["raw", "bridge"]
MODES: tuple[Mode, ...] = get_args(Mode)


def make_publisher(
    mode: str,
    model_chunks: Sequence[Any],
    transformer_config: Any,
    hf_checkpoint: str | Path,
    run_id: str,
    bus: BusSource,
    *,
    export: Export | None = None,
    family: str = "",
    staging: StagingConfig = DEFAULT_STAGING,
    attempt: int | None = None,
    times: PublisherTimes = DEFAULT_TIMES,
    params_are_gathered: bool = False,
) -> VersionPublisher:
    """The publisher of a Megatron trainer in the given mode; both publish the same versions.

    Args:
        mode: `raw` or `bridge`.
        model_chunks: this rank's model chunks in virtual-stage order.
        transformer_config: the model's TransformerConfig (raw mode reads sizes from it).
        hf_checkpoint: the checkpoint that training started from.
        run_id: the run.
        bus: a URL, a BusConfig, a factory of a bus, or a BusThread to share.
        export: bridge mode's exporter; None loads Megatron-Bridge's AutoBridge for the checkpoint.
        family: conversion family, in raw mode.
        staging: the arena.
        attempt: None takes the run's next one.
        times: deadlines.
        params_are_gathered: as for MegatronPublisher.

    Raises:
        ConfigError: another mode, or an option that the mode does not have.
        MissingDependencyError: the mode's peers are not installed.
        WeightbusError: as MegatronPublisher and BridgePublisher.
    """
    if mode == "raw":
        if export is not None:
            raise ConfigError(
                "raw mode has no exporter: the writers convert",
                next_step="leave `export` out, or use --megatron-to-hf-mode bridge",
            )
        from .megatron import MegatronPublisher  # noqa: PLC0415 - a heavy peer

        return MegatronPublisher(
            model_chunks,
            transformer_config,
            hf_checkpoint,
            run_id,
            bus,
            staging=staging,
            attempt=attempt,
            family=family,
            times=times,
            params_are_gathered=params_are_gathered,
        )
    if mode != "bridge":
        raise ConfigError(
            f"unknown mode {mode!r}", next_step=f"use --megatron-to-hf-mode {' or '.join(MODES)}"
        )
    if family:
        raise ConfigError(
            f"bridge mode converts in the trainer, the family {family!r} would not be used",
            next_step="leave `family` out, or use --megatron-to-hf-mode raw",
        )
    from .bridge import BridgePublisher, export_with_bridge, load_bridge  # noqa: PLC0415

    if export is None:
        export = export_with_bridge(load_bridge(hf_checkpoint), model_chunks)
    return BridgePublisher(
        export, hf_checkpoint, run_id, bus, staging=staging, attempt=attempt, times=times
    )


def add_weightbus_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare weightbus's options on the parser of a Megatron-style training script.

    An option that the script has already (`--hf-checkpoint`, `--megatron-to-hf-mode`) stays the
    script's.
    """
    group = parser.add_argument_group("weightbus")
    default = StagingConfig()
    policies: tuple[Policy, ...] = get_args(Policy)
    _add(
        group,
        "--megatron-to-hf-mode",
        choices=MODES,
        default="raw",
        help="raw: publish shards, writers convert; bridge: Megatron-Bridge gathers and converts",
    )
    _add(group, "--hf-checkpoint", help="the Hugging Face checkpoint that training starts from")
    _add(group, "--weightbus-url", help="NATS server, such as nats://nats:4222")
    _add(group, "--weightbus-run-id", help="letters, digits, _ and -")
    _add(group, "--weightbus-attempt", type=int, help="number of this (re)start; default: the next")
    _add(group, "--weightbus-family", default="", help="conversion family, in raw mode")
    _add(group, "--weightbus-staging-folder", type=Path, help="default: shared memory")
    _add(group, "--weightbus-staging-slots", type=int, default=default.slots)
    _add(group, "--weightbus-staging-policy", choices=policies, default=default.policy)
    _add(group, "--weightbus-staging-wait-s", type=float, default=default.wait_timeout_s)


def publisher_from_arguments(
    arguments: argparse.Namespace,
    model_chunks: Sequence[Any],
    transformer_config: Any,
    *,
    export: Export | None = None,
    times: PublisherTimes = DEFAULT_TIMES,
    params_are_gathered: bool = False,
) -> VersionPublisher:
    """`make_publisher` by the options of `add_weightbus_arguments`.

    Raises:
        ConfigError: the URL, the run_id or the checkpoint was not given, or as `make_publisher`.
    """
    needed = {
        "--weightbus-url": arguments.weightbus_url,
        "--weightbus-run-id": arguments.weightbus_run_id,
        "--hf-checkpoint": arguments.hf_checkpoint,
    }
    missing = [option for option, value in needed.items() if not value]
    if missing:
        raise ConfigError(
            f"publishing needs {', '.join(missing)}", next_step="give them to the training script"
        )
    return make_publisher(
        arguments.megatron_to_hf_mode,
        model_chunks,
        transformer_config,
        arguments.hf_checkpoint,
        arguments.weightbus_run_id,
        arguments.weightbus_url,
        export=export,
        family=arguments.weightbus_family,
        staging=StagingConfig(
            folder=arguments.weightbus_staging_folder,
            slots=arguments.weightbus_staging_slots,
            policy=arguments.weightbus_staging_policy,
            wait_timeout_s=arguments.weightbus_staging_wait_s,
        ),
        attempt=arguments.weightbus_attempt,
        times=times,
        params_are_gathered=params_are_gathered,
    )


def _add(group: Any, option: str, **settings: Any) -> None:
    try:
        group.add_argument(option, **settings)
    except argparse.ArgumentError:
        return  # the training script has it already
