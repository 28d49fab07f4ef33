"""The comparison behind all replays notices what it has to notice."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from goldens.kit import check

EQUAL = [
    (jnp.float32(0.1), 0.1),
    (1.0 + 5e-6, 1.0),
    (np.int32(3), 3),
    (jnp.array([True, False]), [True, False]),
    (np.dtype("float32"), "float32"),
    ({"a": (1, "x"), "b": None}, {"a": [1, "x"], "b": None}),
    (float("nan"), "nan"),
    (float("-inf"), "-inf"),
    (ValueError(), {"error": "ValueError", "message": "another text"}),
    (UnicodeError(), {"error": "InvalidArgumentError (raised by the op when it runs; ValueError-like)"}),
    (KeyError(), {"error": "AttributeError"}),
]

DIFFERENT = [
    (jnp.float32(0.10001), 0.1),
    (3, 3.0),
    (3.0, 3),
    (True, 1),
    (1, True),
    (jnp.array([1.0, 2.0]), [1.0, 2.0, 3.0]),
    (jnp.array(1.0), [1.0]),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1, "b": 2}, {"a": 1}),
    (None, 0),
    (float("nan"), 1.0),
    (1.0, "nan"),
    (float("inf"), "-inf"),
    (TypeError(), {"error": "ValueError"}),
    (ValueError(), 1.0),
    (1.0, {"error": "ValueError"}),
]


@pytest.mark.parametrize(("actual", "expected"), EQUAL, ids=repr)
def test_check_accepts_equal_results(actual, expected):
    check(actual, expected)


@pytest.mark.parametrize(("actual", "expected"), DIFFERENT, ids=repr)
def test_check_refuses_different_results(actual, expected):
    with pytest.raises(AssertionError):
        check(actual, expected)


def test_check_widens_its_limits_by_the_tolerance_of_the_scenario_only():
    check(1.001, 1.0, {"rtol": 1e-2, "why": "accumulated rounding"})
    with pytest.raises(AssertionError):
        check(1.001, 1.0)
