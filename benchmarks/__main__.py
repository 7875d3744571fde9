"""Every benchmark in turn: `python -m benchmarks [NAME …]`, or `make bench` (about six minutes).

First the machine, the disk and the commit, without which no figure means anything.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("[a-z]*.py")))


def commit() -> str:
    """The commit of this checkout, and whether something in it was changed."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(FOLDER), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    if not name:
        return "no git checkout"
    return name + (", with changes" if git("status", "--porcelain") else "")


def processor() -> str:
    """The processor's name, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> str:
    """What the figures were taken on."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    load = os.getloadavg()[0]
    return (
        f"machine: {os.cpu_count()} x {processor()}, {memory_gib:.0f} GiB, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}\n"
        f"folder:  {Path.cwd()}, {free_gib:.0f} GiB free; load before the start {load:.1f}\n"
        f"commit:  {commit()}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names: list[str] = parser.parse_args().names
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    print(machine(), flush=True)
    failed: list[str] = []
    for name in names if names else NAMES:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py")], check=False)
        print(f"   ({time.monotonic() - began:.0f} s)", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
