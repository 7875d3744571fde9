"""How fast a writer converts, in ratios: `python benchmarks/writer.py` (about three minutes).

A 3 GiB bf16 version of a mixture-of-experts model (TP2 attention: de-interleaved QKV and
row-parallel projections; EP2 experts: gate and up halves; embeddings) is staged in shared memory,
as producers do, and converted by the real writer service on an in-memory bus, in a process of its
own. Against it, in turn, in the same run:

* plain pwrite of as many bytes into fallocated files, from memory: per CPU-second     aim >= 0.8
* O_DIRECT into two files by two threads, durable: per second                          aim >= 0.8
* safetensors' save_file and fsync of the same tensors in HF form: per second          aim >= 1.3
* the growth of the writer's own memory (not the arena)                              aim <= 200 MiB

Everything is done twice in its process and measured the second time: pages that the machine has
never seen cost several times more than the work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from weightbus.bus.events import publish_event
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.engine_agents.verify import verify_version
from weightbus.producers.chunks import place, plan_chunks, region_bytes
from weightbus.schemas.codec import decode, encode
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import (
    AttemptOpened,
    ChunkReady,
    ChunkTensor,
    LayoutPublished,
    Location,
    ProducerSealed,
    VersionComplete,
    VersionKey,
    VersionOpened,
)
from weightbus.schemas.layout import Layout
from weightbus.schemas.safetensors_format import build_header
from weightbus.tools.waiting import wait_for_outcome
from weightbus.writers.config import WriterConfig
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.service import Writer

MIB, GIB = 2**20, 2**30
RUN = "bench-writer"
ROUNDS = 3
AIMS = {"cpu": 0.8, "direct": 0.8, "save_file": 1.3, "rss_mib": 200.0}
LAYERS, EXPERTS = 9, 32
CONFIG: dict[str, object] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32_000, "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip


def hf_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model in Hugging Face form."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (32_000, 2048),
        "lm_head.weight": (32_000, 2048),
        "model.norm.weight": (2048,),
    }
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        shapes |= {
            f"{base}.input_layernorm.weight": (2048,),
            f"{base}.post_attention_layernorm.weight": (2048,),
            f"{base}.self_attn.q_proj.weight": (4096, 2048),
            f"{base}.self_attn.k_proj.weight": (512, 2048),
            f"{base}.self_attn.v_proj.weight": (512, 2048),
            f"{base}.self_attn.o_proj.weight": (2048, 4096),
            f"{base}.self_attn.q_norm.weight": (128,),
            f"{base}.self_attn.k_norm.weight": (128,),
            f"{base}.mlp.gate.weight": (EXPERTS, 2048),
        }
        for expert in range(EXPERTS):
            shapes |= {
                f"{base}.mlp.experts.{expert}.gate_proj.weight": (768, 2048),
                f"{base}.mlp.experts.{expert}.up_proj.weight": (768, 2048),
                f"{base}.mlp.experts.{expert}.down_proj.weight": (2048, 768),
            }
    return shapes


# ---- what the parent prepares


def make_origin(folder: Path) -> None:
    """An origin whose weights are holes: only headers are read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = hf_shapes()
    header = build_header([(name, "BF16", shape) for name, shape in shapes.items()])
    nbytes = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)


@contextmanager
def staging(name: str) -> Generator[str]:
    """A name for staging files in shared memory; they are removed at the end."""
    try:
        yield name
    finally:
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink()


def stage(folder: Path, arena: str) -> int:
    """Fill a staging file for each rank and note the events; returns the staged bytes."""
    layouts = list(described_layouts(Parallel(tp=2, ep=2, etp=1), CONFIG, "qwen3_moe"))
    key = VersionKey(run_id=RUN, attempt=1, weight_version=0)
    events: list[Any] = [VersionOpened(version=key, producers=len(layouts))]
    total = 0
    for layout in layouts:
        (folder / f"layout-{layout.producer.rank}.json").write_bytes(layout.to_bytes())
        staged = _stage_rank(layout, key, arena)
        events += staged
        total += staged[-1].nbytes
    (folder / "events").write_bytes(b"".join(_framed(encode(event)) for event in events))
    return total


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _stage_rank(layout: Layout, key: VersionKey, arena: str) -> list[Any]:
    rank = layout.producer.rank
    placed = place((i, t.nbytes) for i, t in enumerate(layout.tensors) if t.owned)
    data: Any = np.random.default_rng(rank).integers(0, 2**16, region_bytes(placed) // 2, np.uint16)
    data[(data & 0x7F80) == 0x7F80] = 0  # neither NaN nor Inf
    view = memoryview(data).cast("B")
    Path(f"/dev/shm/{arena}-{rank}").write_bytes(view)
    events: list[Any] = []
    for number, chunk in enumerate(plan_chunks(placed)):
        first, last = chunk.tensors[0], chunk.tensors[-1]
        tensors = tuple(
            ChunkTensor(
                index=one.index, offset=one.offset - first.offset, length=one.length,
                digest=digest_of(view[one.offset : one.end]),
            )
            for one in chunk.tensors
        )  # fmt: skip
        location = Location(
            uri=f"shm://{arena}-{rank}", offset=first.offset, length=last.end - first.offset
        )
        events.append(
            ChunkReady(version=key, rank=rank, chunk=number, location=location, tensors=tensors)
        )
    nbytes = sum(one.length for one in placed)
    sealed = ProducerSealed(
        version=key, rank=rank, chunks=len(events), tensors=len(placed), nbytes=nbytes
    )
    return [*events, sealed]


# ---- the children, each a process


def staged(folder: Path) -> tuple[list[Layout], bytes]:
    """What the parent has prepared."""
    layouts = [Layout.from_bytes(path.read_bytes()) for path in sorted(folder.glob("layout-*"))]
    return layouts, (folder / "events").read_bytes()


async def convert(folder: Path, *, durable: bool) -> dict[str, float]:
    """Two versions through the real service; the second is measured."""
    layouts, raw = staged(folder)
    server = MemoryServer()
    bus = await MemoryBus.connect(server)
    await publish_event(
        bus,
        AttemptOpened(
            run_id=RUN, attempt=1, nonce="n", producers=len(layouts), naming="megatron",
            origin=str(folder / "origin"),
        ),
    )  # fmt: skip
    for layout in layouts:
        await bus.put_blob(layout.digest(), layout.to_bytes())
        await publish_event(
            bus,
            LayoutPublished(
                run_id=RUN, attempt=1, rank=layout.producer.rank, layout_digest=layout.digest(),
                tensors=len(layout.tensors), nbytes=layout.owned_bytes,
            ),
        )  # fmt: skip
    config = WriterConfig(
        run_id=RUN, index=0, count=1, root=folder / "out", durable=durable,
        max_shard_bytes=GIB,
    )  # fmt: skip
    writer = Writer(await MemoryBus.connect(server), config)
    task = asyncio.create_task(writer.run())
    numbers: dict[str, float] = {}
    for version in (0, 1):
        with Peak() as peak:
            cpu, wall = _cpu_s(), time.perf_counter()
            await _publish(bus, raw, version)
            key = VersionKey(run_id=RUN, attempt=1, weight_version=version)
            done = await wait_for_outcome(bus, key, timeout_s=120)
        grown = max(numbers.get("rss_mib", 0.0), peak.mib - peak.before)
        looked_at = max(numbers.get("shared_mib", 0.0), _shared_mib())
        numbers = {
            "cpu_s": _cpu_s() - cpu,
            "wall_s": time.perf_counter() - wall,
            "rss_mib": grown,
            "shared_mib": looked_at,
        }
        if version == 0:
            shutil.rmtree(done.directory)
        else:
            _check(done, folder)
    await writer.stop()
    await task
    shutil.rmtree(folder / "out")
    return numbers


async def _publish(bus: MemoryBus, raw: bytes, version: int) -> None:
    at = 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        event: Any = decode(raw[at + 4 : at + 4 + length])
        key = event.version.model_copy(update={"weight_version": version})
        await publish_event(bus, event.model_copy(update={"version": key}))
        at += 4 + length


def _check(done: VersionComplete, folder: Path) -> None:
    checked = folder / "checked"
    if not checked.exists():  # once per run
        verify_version(Path(done.directory), done.manifest_digest, threads=2)
        checked.touch()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def _memory_mib() -> float:
    """The process's own memory: without the producers' pages, which it only looks at."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def _shared_mib() -> float:
    """The producers' pages that are mapped: they count in VmRSS, and are nobody's but theirs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)["RssShmem"].split()[0]) / 1024


class Peak:
    """The highest memory while it watches, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.before = self.mib = _memory_mib()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.01):
            self.mib = max(self.mib, _memory_mib())


def pwrite(folder: Path, nbytes: int) -> dict[str, float]:
    """Plain pwrite of 1 MiB at a time from a large touched buffer into fallocated files."""
    source = memoryview(bytearray(os.urandom(MIB)) * 512)
    cpu, wall = _cpu_s(), time.perf_counter()
    for number in range(-(-nbytes // GIB)):
        size = min(GIB, nbytes - number * GIB)
        file = os.open(folder / f"plain-{number}", os.O_WRONLY | os.O_CREAT)
        os.posix_fallocate(file, 0, size)
        for at in range(0, size, MIB):
            begin = at % len(source)
            os.pwrite(file, source[begin : begin + min(MIB, size - at)], at)
        os.close(file)
    numbers = {"cpu_s": _cpu_s() - cpu, "wall_s": time.perf_counter() - wall}
    for path in folder.glob("plain-*"):
        path.unlink()
    return numbers


def direct(folder: Path, nbytes: int) -> dict[str, float]:
    """O_DIRECT into two fallocated files, one thread each: what the disk can take."""

    def one(number: int) -> None:
        block = mmap.mmap(-1, 8 * MIB)
        block.write(os.urandom(MIB) * 8)
        size = nbytes // 2 // len(block) * len(block)
        file = os.open(folder / f"direct-{number}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(file, 0, size)
        for at in range(0, size, len(block)):
            os.pwrite(file, block, at)
        os.fdatasync(file)
        os.close(file)
        block.close()

    threads = [threading.Thread(target=one, args=(number,)) for number in (0, 1)]
    wall = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = {"wall_s": time.perf_counter() - wall}
    for path in folder.glob("direct-*"):
        path.unlink()
    return numbers


def save(folder: Path) -> dict[str, float]:
    """Safetensors' save_file and fsync, a file of a GiB after the other, tensors in HF form."""
    files: list[dict[str, Any]] = [{}]
    size = 0
    for name, shape in hf_shapes().items():
        tensor = np.ones(shape, np.float16)  # as large as bf16, which numpy lacks
        if size + tensor.nbytes > GIB:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.nbytes
    wall = time.perf_counter()
    for number, tensors in enumerate(files):
        path = folder / f"saved-{number}"
        save_file(tensors, path)
        file = os.open(path, os.O_RDWR)
        os.fsync(file)
        os.close(file)
    numbers = {"wall_s": time.perf_counter() - wall}
    for path in folder.glob("saved-*"):
        path.unlink()
    return numbers


def child(what: str, folder: Path, nbytes: int) -> None:
    """Run one contestant and print its numbers."""
    match what:
        case "convert":
            numbers = asyncio.run(convert(folder, durable=False))
        case "durable":
            numbers = asyncio.run(convert(folder, durable=True))
        case "pwrite":
            numbers = [pwrite(folder, nbytes) for _ in range(2)][-1]
        case "direct":
            numbers = [direct(folder, nbytes) for _ in range(2)][-1]
        case _:
            numbers = [save(folder) for _ in range(2)][-1]
    print(json.dumps(numbers))


def measure(what: str, folder: Path, nbytes: int) -> dict[str, float]:
    """One contestant in a process of its own; the disk is quiet before."""
    os.sync()
    command = [sys.executable, __file__, "--child", what, str(folder), str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Prepare, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, metavar=("WHAT", "FOLDER", "BYTES"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    arguments = parser.parse_args()
    if arguments.child is not None:
        what, folder, nbytes = arguments.child
        child(what, Path(folder), int(nbytes))
        return
    with (
        tempfile.TemporaryDirectory(prefix=".bench-writer-", dir=arguments.folder) as on_disk,
        staging(f"weightbus-{Path(on_disk).name.strip('.')}") as arena,
    ):
        folder = Path(on_disk).resolve()
        make_origin(folder / "origin")
        nbytes = stage(folder, arena)
        contestants = ("convert", "pwrite", "durable", "direct", "save_file")
        rounds = [
            {what: measure(what, folder, nbytes) for what in contestants}
            for _ in range(arguments.rounds)
        ]
    report(rounds, nbytes)


def report(rounds: list[dict[str, dict[str, float]]], nbytes: int) -> None:
    """Medians of ratios that were taken in one round each."""
    print(f"a version of {nbytes / GIB:.2f} GiB, {len(rounds)} rounds in turn, medians")
    for what, number in (("convert", "cpu_s"), ("pwrite", "cpu_s"), ("durable", "wall_s"),
                         ("direct", "wall_s"), ("save_file", "wall_s")):  # fmt: skip
        rates = [nbytes / 1e9 / round_[what][number] for round_ in rounds]
        unit = "GB per CPU-second" if number == "cpu_s" else "GB/s, durable"
        spread = f"({min(rates):.2f} to {max(rates):.2f})"
        print(f"  {what:10} {statistics.median(rates):6.2f} {unit}  {spread}")
    ratios = {
        "cpu": [r["pwrite"]["cpu_s"] / r["convert"]["cpu_s"] for r in rounds],
        "direct": [r["direct"]["wall_s"] / r["durable"]["wall_s"] for r in rounds],
        "save_file": [r["save_file"]["wall_s"] / r["durable"]["wall_s"] for r in rounds],
    }
    names = {
        "cpu": "converted and hashed, per CPU-second / plain pwrite",
        "direct": "durable rate / O_DIRECT",
        "save_file": "durable rate / save_file + fsync",
    }
    for key, values in ratios.items():
        median = statistics.median(values)
        verdict = "ok" if median >= AIMS[key] else "MISSED"
        print(f"{names[key]}: {median:.2f} (aim >= {AIMS[key]})  {verdict}")
    runs = [r[what] for r in rounds for what in ("convert", "durable")]
    growth = max(run["rss_mib"] for run in runs)
    shared = max(run["shared_mib"] for run in runs)
    verdict = "ok" if growth <= AIMS["rss_mib"] else "MISSED"
    aim = f"(aim <= {AIMS['rss_mib']:.0f})"
    print(f"growth of the writer's own memory: {growth:.0f} MiB {aim}  {verdict}")
    print(f"  besides, {shared:.0f} MiB of the producers' arena are mapped: VmRSS counts them too")


if __name__ == "__main__":
    main()
