"""The error tree: the drawing is the code, and messages carry what, where and what next."""

import inspect
import pickle
import re

import pytest
from weightbus.schemas import errors


def _drawn() -> dict[str, str]:
    """Class name -> base name, from the drawing in the module docstring."""
    tree: dict[str, str] = {}
    bases = ["WeightbusError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r" {4}((?:│   |    )*)[├└]── (\w+)", line)
        if match is not None:
            level = len(match[1]) // 4
            tree[match[2]] = bases[level]
            bases[level + 1 :] = [match[2]]
    return tree


def _classes() -> list[type[errors.WeightbusError]]:
    return [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.WeightbusError) and value is not errors.WeightbusError
    ]


def test_the_drawing_shows_every_class_under_its_base() -> None:
    assert {kind.__name__: kind.__bases__[0].__name__ for kind in _classes()} == _drawn()


def test_the_drawing_says_which_errors_a_retry_helps() -> None:
    text = errors.__doc__ or ""
    drawn = set(re.findall(r"── (\w+) [^\n]*\(retry helps\)", text))
    assert {kind.__name__ for kind in _classes() if kind.retryable} == drawn


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_a_process_boundary(kind: type[errors.WeightbusError]) -> None:
    error = kind("it broke", where={"tensor": "a.b", "rank": 0}, next_step="mend it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "it broke [tensor=a.b, rank=0] Next: mend it"
    assert copy.where == {"tensor": "a.b", "rank": 0}
