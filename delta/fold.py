"""One tensor through a chain of deltas: base verified, blobs applied, result verified, written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..schemas.digest import PREFIX, Hasher, digest_of
from ..schemas.errors import DeltaBaseError, DeltaChecksumError, DeltaTensorError, WeightbusError
from ..schemas.hf_folder import FolderTensor
from ..schemas.manifest import Extent
from .buffers import U8
from .checksums import checksum
from .codecs import codec_of
from .disk import read_exactly, write_exactly
from .files import Delta, DeltaEntry

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorJob:
    """What is to be done with one tensor of the base.

    Args:
        base: its file and header entry.
        chain: the blobs to apply, oldest first.
        expected: the base's digests where somebody recorded them.
        target: the open file that takes it at the base's offset; None verifies only.
    """

    base: FolderTensor
    chain: Sequence[DeltaEntry]
    expected: Sequence[Extent] | None
    target: int | None


def chains_of(
    base: Mapping[str, FolderTensor], deltas: Sequence[Delta]
) -> dict[str, list[DeltaEntry]]:
    """The blobs of each tensor; those before a whole tensor are left out.

    Raises:
        DeltaTensorError: the base lacks a tensor or has another shape or dtype; all are listed.
        DeltaBaseError: two deltas do not follow each other.
    """
    chains: dict[str, list[DeltaEntry]] = {}
    wrong: list[str] = []
    for delta in deltas:
        for name, entry in delta.entries.items():
            held = base.get(name)
            if held is None:
                wrong.append(f"{name} is not in the base")
                continue
            have = (held.entry.dtype, held.entry.shape)
            if entry.dtype is not None and (entry.dtype, entry.shape) != have:
                wrong.append(f"{name} is {have} in the base and {entry.dtype, entry.shape} here")
            before = chains.get(name, [])
            if before and entry.base is not None and before[-1].checksum == entry.checksum:
                _check_link(before[-1], entry)
            chains[name] = [*([] if entry.method == "whole" else before), entry]
    if wrong:
        raise DeltaTensorError(
            f"{len(wrong)} tensors do not fit the base: " + "; ".join(sorted(wrong)[:10]),
            next_step="take a full version: the base is of another model",
        )
    return chains


def _check_link(first: DeltaEntry, second: DeltaEntry) -> None:
    if first.new != second.base:
        raise DeltaBaseError(
            f"tensor {first.name} does not follow: {first.new} became {second.base}",
            where={"tensor": first.name, "first": first.path, "second": second.path},
            next_step="the deltas are of two lineages: take a full version",
        )


def rebuild(job: TensorJob, base_fd: int) -> Extent:
    """Do one tensor; its bytes and xxh3-128 in the new version.

    Raises:
        DeltaBaseError: the base has other bytes than recorded or than the delta was made from.
        DeltaFormatError: a blob that is not what its encoding says.
        DeltaChecksumError: the result is not the announced tensor.
    """
    if not job.chain:
        return _copy(job, base_fd)
    entry = job.base.entry
    data = np.empty(entry.nbytes, np.uint8)
    read_exactly(base_fd, data.data, entry.offset)
    _check_base(job, data)
    for blob in job.chain:
        try:
            _apply(job, data, blob)
        except WeightbusError as error:
            error.where.setdefault("tensor", blob.name)
            error.where.setdefault("file", blob.path)
            raise
    last = job.chain[-1]
    found = checksum(last.checksum, data)
    if found != last.new:
        raise DeltaChecksumError(
            f"tensor {last.name} became {found}, announced is {last.new}",
            where={"tensor": last.name, "file": last.path},
            next_step="the base or the delta is wrong: take a full version",
        )
    if job.target is not None:
        write_exactly(job.target, data.data, entry.offset)
    digest = PREFIX + found if last.checksum == "xxh3-128" else digest_of(data.data)
    return Extent(length=entry.nbytes, digest=digest)


def _apply(job: TensorJob, data: U8, entry: DeltaEntry) -> None:
    blob = np.empty(entry.nbytes, np.uint8)
    fd = os.open(entry.path, os.O_RDONLY)
    try:
        read_exactly(fd, blob.data, entry.offset)
    finally:
        os.close(fd)
    if entry.method != "whole":
        codec_of(entry.method).apply_in_place(data, blob, job.base.entry.dtype)
        return
    if blob.size != data.size:
        raise DeltaTensorError(
            f"the whole tensor has {blob.size} bytes, the base's {data.size}",
            next_step="take a full version",
        )
    data[:] = blob


def _check_base(job: TensorJob, data: U8) -> None:
    at = 0
    for extent in job.expected if job.expected is not None else ():
        found = digest_of(data[at : at + extent.length].data)
        if found != extent.digest:
            raise base_differs(job.base, found, extent.digest)
        at += extent.length
    first = job.chain[0]
    if first.base is not None:
        found = checksum(first.checksum, data)
        if found != first.base and first.method != "whole":
            raise base_differs(job.base, found, first.base)


def _copy(job: TensorJob, base_fd: int) -> Extent:
    entry = job.base.entry
    block = memoryview(bytearray(min(BLOCK_BYTES, entry.nbytes)))
    whole, at = Hasher(), entry.offset
    extents = job.expected
    if extents is None or len(extents) == 1:
        extents = (Extent(length=entry.nbytes, digest=PREFIX + "0" * 32),)
    for extent in extents:
        part, end = Hasher(), at + extent.length
        while at < end:
            view = block[: min(len(block), end - at)]
            read_exactly(base_fd, view, at)
            whole.update(view)
            if len(extents) > 1:
                part.update(view)
            if job.target is not None:
                write_exactly(job.target, view, at)
            at += len(view)
        if len(extents) > 1 and part.digest() != extent.digest:
            raise base_differs(job.base, part.digest(), extent.digest)
    if job.expected is not None and len(job.expected) == 1:
        wanted = job.expected[0].digest
        if whole.digest() != wanted:
            raise base_differs(job.base, whole.digest(), wanted)
    return Extent(length=entry.nbytes, digest=whole.digest())


def base_differs(base: FolderTensor, found: str, wanted: str) -> DeltaBaseError:
    """The error of a base whose bytes are not those of its version."""
    return DeltaBaseError(
        f"tensor {base.entry.name} of the base has {found}, it should have {wanted}",
        where={"tensor": base.entry.name, "file": base.file},
        next_step="the base was changed or is of another lineage: seed it from a full version",
    )
