"""How a scenario of tests/goldens.json is replayed.

The file holds small programs that were really run on TensorFlow 2.21 under ``MirroredStrategy`` with 1,
2 and 4 replicas: what they do (`description`), their `inputs` and what came out (`expect`). A test of
this folder writes the program again on Phalanx, under the scenario's name:

    from goldens.kit import attempt, components, differs, each, replay, runners

    @replay("var_create_callable_initializer")
    def test_initial_value_is_called_once(golden, strategy):
        calls = []
        def initial():
            calls.append(1)
            return [golden.inputs["base"] + len(calls)] * 2
        with strategy.scope():
            v = px.Variable(initial)
        return {"calls": len(calls), "value": v.value, "components": components(v), ...}

What the function returns is compared with the whole of `golden.expect` (see `check`); a function that
returns nothing makes its own assertions, with ``golden.check(actual, "some", "path")`` for parts. It runs
once for each number of replicas; ``@replay(name, x64=True)`` runs it with 64-bit types.

    @differs("strategy_extended_update_in_replica", "unequal components are an error")
    def test_update_with_an_unreduced_argument_is_refused(golden, strategy): ...

is for scenarios that Phalanx answers differently on purpose: the function asserts the better answer, and
docs/differences.md has a row with the scenario's name. tests/goldens/test_complete.py checks both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import phalanx as px

REPLICAS = (1, 2, 4)
RTOL, ATOL = 1e-5, 1e-6


@dataclass(frozen=True)
class Golden:
    """One scenario with one number of replicas."""

    name: str
    group: str
    replicas: int
    description: str
    inputs: Any
    expect: Any = None
    expect_error: Any = None
    tolerance: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None

    @property
    def outcome(self) -> Any:
        """What came out: the results, or the error that the program ended in."""
        return self.expect if self.expect_error is None else {"error": self.expect_error["kind"]}

    def check(self, actual: Any, *path: str | int) -> None:
        """Compare with the outcome, or with the part of it at `path`."""
        expected = self.outcome
        for key in path:
            expected = expected[key]
        check(actual, expected, self.tolerance, "/".join(map(str, (self.name, *path))))


def _load() -> dict[tuple[str, int], Golden]:
    entries = json.loads((Path(__file__).parents[1] / "goldens.json").read_text())
    return {(entry["name"], entry["replicas"]): Golden(**entry) for entry in entries}


GOLDENS = _load()
REPLAYED: dict[str, str] = {}
"""Scenario: the test that replays it."""
DIFFERENT: dict[str, str] = {}
"""Scenario that Phalanx answers differently on purpose: in what."""

Scenario = Callable[[Golden, px.Mirrored], Any]


def replay(name: str, *, x64: bool = False) -> Callable[[Scenario], Callable[..., None]]:
    """Make a test of ``fn(golden, strategy)``: what it returns must be what the scenario expects."""

    def register(fn: Scenario) -> Callable[..., None]:
        _check_new(name)
        REPLAYED[name] = fn.__name__
        return _as_test(name, fn, x64)

    return register


def differs(name: str, reason: str, *, x64: bool = False) -> Callable[[Scenario], Callable[..., None]]:
    """Make a test of ``fn(golden, strategy)``, which asserts the better answer and returns nothing."""

    def register(fn: Scenario) -> Callable[..., None]:
        _check_new(name)
        DIFFERENT[name] = reason
        return _as_test(name, fn, x64)

    return register


def _check_new(name: str) -> None:
    assert (name, 1) in GOLDENS, f"there is no scenario {name!r}"
    assert name not in REPLAYED and name not in DIFFERENT, f"{name} has two tests"


def _as_test(name: str, fn: Scenario, x64: bool) -> Callable[..., None]:
    @pytest.mark.parametrize("replicas", REPLICAS, ids=lambda n: f"{name}-x{n}")
    def test(replicas: int) -> None:
        golden = GOLDENS[name, replicas]
        with jax.enable_x64(True) if x64 else contextlib.nullcontext():
            result = fn(golden, px.Mirrored(jax.devices()[:replicas]))
            if name in DIFFERENT:
                assert result is None, "a test under @differs asserts by itself"
            elif result is not None:
                golden.check(result)

    test.__name__, test.__qualname__ = fn.__name__, fn.__qualname__
    test.__doc__, test.__module__ = fn.__doc__, fn.__module__
    return test


# ---- for the replayed programs -------------------------------------------------------------------


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``, or the exception that it raised: compares with the scenario's ``{"error": kind}``."""
    try:
        return fn(*args)
    except Exception as error:
        return error


def each(strategy: px.Strategy, value: Any) -> list[Any]:
    """What each replica holds of a result of `strategy.run`: one entry per replica, also for an equal value."""
    if isinstance(value, px.PerReplica):
        return list(value.values)
    return [value] * strategy.num_replicas


def components(variable: px.Variable) -> list[Any]:
    """The value of each replica's component."""
    return [np.asarray(component) for component in variable.components]


def per_replica(strategy: px.Strategy, values: Any, dtype: Any = np.float32) -> px.PerReplica:
    """``values[r]`` on replica r."""
    return strategy.distribute_values_from_function(lambda context: np.asarray(values[context.replica_id], dtype))


def runners(strategy: px.Strategy) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`strategy.run` called eagerly, and called inside a traced function."""

    def in_function(fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        return px.function(lambda a, k: strategy.run(fn, args=a, kwargs=k))(tuple(args), kwargs or {})

    return strategy.run, in_function


# ---- comparing -----------------------------------------------------------------------------------

_ONLY_FAILS = ("AttributeError", "AssertionError")
"""Accidents of TensorFlow's code: that the step fails is what counts."""

_KINDS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
    "KeyError": KeyError,
    "IndexError": IndexError,
    "InvalidArgumentError": ValueError,
    "OperatorNotAllowedInGraphError": TypeError,
    **dict.fromkeys(_ONLY_FAILS, Exception),
}


def check(actual: Any, expected: Any, tolerance: Mapping[str, Any] | None = None, where: str = "") -> None:
    """Assert that a result is what a scenario expects.

    Floats agree within `tolerance` (rtol 1e-5, atol 1e-6 by default); integers, booleans, strings, None,
    lengths and keys agree exactly, and a float is no integer; arrays are read as nested lists, variables by
    their value, `PerReplica` as the list of its parts. ``{"error": kind}`` stands for an exception of that kind.
    """
    if isinstance(expected, dict) and isinstance(expected.get("error"), str):
        kind = _KINDS[expected["error"].partition(" ")[0]]
        assert isinstance(actual, Exception), f"{where}: expected {kind.__name__}, got {actual!r}"
        assert isinstance(actual, kind), f"{where}: expected {kind.__name__}, got {type(actual).__mro__}: {actual}"
        return
    if isinstance(actual, Exception):
        raise AssertionError(f"{where}: expected {expected!r}, raised {actual!r}") from actual
    actual = _plain(actual)
    if isinstance(expected, dict):
        assert isinstance(actual, Mapping), f"{where}: expected a dict, got {actual!r}"
        assert sorted(map(str, actual)) == sorted(expected), f"{where}: keys {list(actual)}, expected {list(expected)}"
        for key, value in actual.items():
            check(value, expected[str(key)], tolerance, f"{where}/{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, (list, tuple)), f"{where}: expected {expected!r}, got {actual!r}"
        assert len(actual) == len(expected), f"{where}: expected {expected!r}, got {actual!r}"
        for i, (a, e) in enumerate(zip(actual, expected)):
            check(a, e, tolerance, f"{where}/{i}")
    elif isinstance(expected, float) or expected in ("nan", "inf", "-inf"):
        assert type(actual) is float, f"{where}: expected the float {expected!r}, got {actual!r}"
        limits = {key: value for key, value in (tolerance or {}).items() if key in ("rtol", "atol")}
        np.testing.assert_allclose(actual, float(expected), **{"rtol": RTOL, "atol": ATOL, **limits}, err_msg=where)
    else:
        assert type(actual) is type(expected) and actual == expected, f"{where}: expected {expected!r}, got {actual!r}"


def _plain(value: Any) -> Any:
    """Arrays and what holds them as nested lists of Python numbers."""
    if isinstance(value, px.PerReplica):
        return list(value.values)
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, (jax.Array, np.ndarray, np.generic, px.Variable, px.Component)):
        array = np.asarray(value)
        return array.astype(np.float64).tolist() if array.dtype.kind in "fV" else array.tolist()
    return value
