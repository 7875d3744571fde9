"""What the README and the pages say can be typed, and their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from weightbus.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _commands() -> list[str]:
    found: list[str] = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            match = re.match(r"(?: {4}|\$ )(weightbus .+?)\s*(?:#.*)?$", line)
            if match is not None and not match[1].endswith("\\"):
                found.append(match[1])
    return found


def test_there_are_commands_to_check() -> None:
    assert len(_commands()) >= 8


@pytest.mark.parametrize("line", _commands())
def test_every_command_in_the_pages_parses(line: str) -> None:
    command: Any = typer.main.get_command(app)
    parent: Any = None
    words = line.split()[1:]
    while hasattr(command, "get_command"):
        parent = command.context_class(command, parent=parent)
        found = command.get_command(parent, words[0])
        assert found is not None, f"no command {words[0]!r}"
        command, words = found, words[1:]
    command.make_context(command.name, words, parent=parent)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_begins_with_three_sentences_and_has_two_make_commands() -> None:
    text = (ROOT / "README.md").read_text()
    first = text.split("\n\n")[1]
    assert len(re.findall(r"[a-z)]\.(?:\s|$)", first)) == 3
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in text
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_readmes_python_uses_real_names() -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    compile(code, "README.md", "exec")
    # In a process of its own: importing torch warns, and here warnings are errors.
    check = "from weightbus.producers.megatron import MegatronPublisher as P; P.publish; P.close"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_command_line_imports_nothing_heavy() -> None:
    check = "import sys, weightbus.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", check], check=True, timeout=60, capture_output=True, text=True
    )
    heavy = {"torch", "megatron", "transformers", "sglang", "numba", "ml_dtypes"}
    assert not heavy & set(done.stdout.split())
