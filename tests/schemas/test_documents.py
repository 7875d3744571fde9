"""The checked-in documents are the models', and the AsyncAPI addresses are the real subjects."""

import re
from pathlib import Path

from support.events import small_events
from weightbus.bus.documents import CHANNELS, asyncapi, render
from weightbus.bus.subjects import parse_subject, subject_of

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def test_the_checked_in_documents_are_current() -> None:
    on_disk = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert on_disk == render(), "run: make schemas"


def test_every_event_is_sent_on_the_address_of_exactly_one_channel() -> None:
    for event in small_events():
        subject = subject_of(event)
        fits = [
            name
            for name, (address, events, _) in CHANNELS.items()
            if re.fullmatch(
                re.sub(r"{\w+}", r"[A-Za-z0-9_-]+", address).replace(".", r"\."), subject
            )
            and type(event) in events
        ]
        assert len(fits) == 1, (subject, fits)


def test_references_point_to_something() -> None:
    document = asyncapi()
    text = render()["asyncapi.json"]
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', text):
        at = document
        for step in reference.split("/"):
            at = at[step]
    for reference in re.findall(r'"\$ref": "\./([^"]+)"', text):
        assert (FOLDER / reference).is_file()


def test_event_subjects_parse_back() -> None:
    for event in small_events():
        if event.kind == "engine-report":
            continue
        parsed = parse_subject(subject_of(event))
        assert (parsed.run_id, parsed.attempt) == ("run-1", 2)
        assert parsed.weight_version == (7 if hasattr(event, "version") else None)
