"""The files of the next version: built tensor by tensor on a few threads, then made durable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..schemas.errors import DeltaBaseError, DeltaChecksumError, DeltaError
from ..schemas.hf_folder import FolderTensor
from ..schemas.manifest import Extent
from ..schemas.safetensors_format import read_header
from .disk import read_exactly, write_exactly
from .files import DeltaEntry
from .fold import TensorJob, rebuild


def build_files(
    tensors: Mapping[str, FolderTensor],
    chains: Mapping[str, Sequence[DeltaEntry]],
    expected: Mapping[str, Sequence[Extent]] | None,
    work: Path,
    *,
    threads: int,
    every_file: bool,
) -> tuple[dict[str, Extent], list[str]]:
    """Write the base's files with the changes into the folder `work`.

    Args:
        tensors: the base.
        chains: the blobs of each changed tensor.
        expected: the base's digests, where they are known.
        work: takes the files, under the base's names.
        threads: tensors at the same time.
        every_file: also files without a change; else those are only verified.

    Returns:
        each tensor's digest in the new version; the files that were written.

    Raises:
        DeltaBaseError, DeltaChecksumError: all tensors of one kind are listed in one error.
        DeltaFormatError: a blob that is not what its encoding says.
        OSError: the disk does not take it.
    """
    changed = {tensors[name].file for name in chains}
    paths = sorted({tensor.file for tensor in tensors.values()})
    written = [path for path in paths if every_file or path in changed]
    with contextlib.ExitStack() as stack:
        sources = {path: _opened(stack, path, os.O_RDONLY) for path in paths}
        targets: dict[Path, int] = {}
        for path in written:
            targets[path] = _opened(stack, work / path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            _copy_header(path, sources[path], targets[path])
        jobs = [
            TensorJob(
                tensor,
                chains.get(name, ()),
                expected.get(name) if expected is not None else None,
                targets.get(tensor.file),
            )
            for name, tensor in tensors.items()
        ]
        jobs.sort(key=lambda job: job.base.entry.nbytes, reverse=True)
        digests = _run(jobs, sources, threads)
        for fd in targets.values():
            os.fdatasync(fd)
    return digests, [path.name for path in written]


def _run(
    jobs: Sequence[TensorJob], sources: Mapping[Path, int], threads: int
) -> dict[str, Extent]:  # fmt: skip
    def one(job: TensorJob) -> Extent | DeltaBaseError | DeltaChecksumError:
        try:
            return rebuild(job, sources[job.base.file])
        except (DeltaBaseError, DeltaChecksumError) as error:
            return error

    with ThreadPoolExecutor(threads, thread_name_prefix="weightbus-delta") as pool:
        results = list(pool.map(one, jobs))
    for kind in (DeltaBaseError, DeltaChecksumError):
        _raise_all([result for result in results if isinstance(result, kind)])
    return {
        job.base.entry.name: result
        for job, result in zip(jobs, results, strict=True)
        if isinstance(result, Extent)
    }


def _raise_all(errors: Sequence[DeltaError]) -> None:
    if not errors:
        return
    first = errors[0]
    if len(errors) > 1:
        names = sorted(str(error.where.get("tensor")) for error in errors)
        what = f"{first.what}; {len(errors)} tensors are wrong: {', '.join(names[:20])}"
        raise type(first)(what, where=first.where, next_step=first.next_step)
    raise first


def _opened(stack: contextlib.ExitStack, path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    stack.callback(os.close, fd)
    return fd


def _copy_header(path: Path, source: int, target: int) -> None:
    size = os.fstat(source).st_size
    if size:
        os.posix_fallocate(target, 0, size)
    start = read_header(path)[1]
    header = memoryview(bytearray(start))
    read_exactly(source, header, 0)
    write_exactly(target, header, 0)
