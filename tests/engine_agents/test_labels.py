import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightbus.engine_agents.labels import label_of, parse_label
from weightbus.schemas.events import VersionKey

TOKENS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True).filter(lambda text: text != "-")


@given(TOKENS, st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_label_names_one_version(run_id: str, attempt: int, weight_version: int):
    key = VersionKey(run_id=run_id, attempt=attempt, weight_version=weight_version)
    assert parse_label(label_of(key)) == key


def test_the_form_is_readable():
    key = VersionKey(run_id="grpo-7b", attempt=2, weight_version=7)
    assert label_of(key) == "grpo-7b/2/v000007"


@pytest.mark.parametrize(
    "label", ["", "default", "7", "000007", "a/b/v1", "a/1/v7", "a.b/1/v000007", "-/1/v000007"]
)
def test_labels_of_others_name_no_version(label: str):
    assert parse_label(label) is None
