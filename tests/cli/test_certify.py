"""`weightbus certify`: the verdict on a described layout, for people, programs and scripts."""

from pathlib import Path

import pytest
from support.cli_commands import weightbus

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
TIED = str(CONFIGS / "qwen2.5-0.5b.json")


async def test_a_mapping_that_holds() -> None:
    done = await weightbus("certify", TIED, "--parallel", "tp=2,pp=3", "--json")
    assert done.status == 0, done.err
    report = done.json()
    assert (report["ok"], report["family"]) == (True, "qwen2")
    assert report["differences"] == []
    screen = await weightbus("certify", TIED, "--parallel", "tp=2,pp=3")
    assert "holds" in screen.out


async def test_a_mapping_that_is_refused_lists_why(tmp_path: Path) -> None:
    done = await weightbus("certify", TIED, "--parallel", "tp=2", "--family", "llama")
    assert done.status == 1
    assert "REFUSED" in done.out
    assert "self_attn.q_proj.bias" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/config.json", "--parallel", "tp=1"], "OriginError"),
        ([TIED, "--parallel", "tp=banana"], "ConfigError"),
        ([TIED, "--parallel", "tp=3"], "ConfigError"),
        ([TIED], "ConfigError"),
        ([TIED, "--parallel", "tp=1", "--family", "nobody"], "UnknownFamilyError"),
    ],
)
async def test_what_cannot_be_certified_is_named(arguments: list[str], message: str) -> None:
    done = await weightbus("certify", *arguments)
    assert done.status == 1
    assert message in done.err
    assert "Traceback" not in done.err
