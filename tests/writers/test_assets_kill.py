"""A process that is killed while it copies an asset; origins that were made in another order."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from weightbus.schemas.digest import digest_of
from weightbus.schemas.manifest import Asset
from weightbus.writers.assets import AssetSource, copy_asset, list_assets

NAMES = ["b.json", "a.json", "sub/z.txt", "sub/deep/y.txt", "Z.json", "sub.txt"]
DATA = bytes(range(256)) * 12_000  # three blocks

# Copies an asset like a writer and dies by SIGKILL at its third read, or just before the rename.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from weightbus.writers import assets

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

source, out, scratch, moment = sys.argv[1:]
if moment == "rename":
    Path.replace = die
else:
    real, reads = assets._read, []
    def third(*arguments):
        reads.append(1)
        return die() if len(reads) == 3 else real(*arguments)
    assets._read = third
made = assets.AssetSource(Path(source), "sub/tokenizer.json")
assets.copy_asset(made, Path(out), Path(scratch), durable=False)
"""


@pytest.mark.parametrize("older", [None, b"of an older try"])
@pytest.mark.parametrize("moment", ["read", "rename"])
def test_a_kill_leaves_nothing_half_where_the_file_is_looked_for(
    moment: str, older: bytes | None, tmp_path: Path
) -> None:
    source, out, scratch = (tmp_path / name for name in ("source", "out", "scratch"))
    source.write_bytes(DATA)
    out.mkdir()
    scratch.mkdir()
    path = out / "sub" / "tokenizer.json"
    if older is not None:
        path.parent.mkdir()
        path.write_bytes(older)
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, source, out, scratch, moment],
        check=False, timeout=60, capture_output=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (path.read_bytes() if path.exists() else None) == older
    assert all(left.name.startswith(".") for left in scratch.iterdir())
    # The next committer does it again.
    asset = AssetSource(source, "sub/tokenizer.json")
    made = copy_asset(asset, out, scratch, durable=False)
    assert made == Asset(path=asset.path, nbytes=len(DATA), digest=digest_of(DATA))
    assert path.read_bytes() == DATA


def test_the_order_does_not_depend_on_how_the_folder_was_filled(tmp_path: Path) -> None:
    def filled(folder: Path, names: list[str]) -> list[Asset]:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        out, scratch = (tmp_path / f"{folder.name}-{use}" for use in ("out", "scratch"))
        out.mkdir()
        scratch.mkdir()
        return [copy_asset(one, out, scratch, durable=False) for one in list_assets(folder)]

    one = filled(tmp_path / "one", NAMES)
    assert one == filled(tmp_path / "two", NAMES[::-1])
    assert [asset.path for asset in one] == sorted(NAMES)
