"""What an operation's functions close over: constants to JAX, which a tape may watch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from jax._src import core as _core
from jax.extend import core as _jex

from phalanx._jax.jaxprs import inner_jaxprs
from phalanx._jax.lines import user_line
from phalanx._jax.programs import Program
from phalanx.errors import TapeError

WITHOUT_BODIES: set[Any] = set()
"""Primitives that were seen to have no jaxprs among their parameters."""

_closed_over: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_opened: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


class NoClosures:
    """Refuses what JAX's custom rules cannot see: watched values that their functions close over."""

    def __init__(self, observer: Any, fun: Any, args: Sequence[Any]) -> None:
        self._observer = observer
        self._fun = fun
        self._given = args

    def given(self, args: Sequence[Any]) -> NoClosures:
        """The check for a call with these arguments."""
        return NoClosures(self._observer, self._fun, [*self._given, *args])

    def wants(self, args: Sequence[Any]) -> bool:
        if self._observer.wants([x for x in args if not any(x is given for given in self._given)]):
            raise TapeError(
                f"{getattr(self._fun, '__name__', 'a function')} at {user_line()} has a derivative of its own"
                " (jax.custom_jvp or jax.custom_vjp), which is about its arguments only; but it uses a watched value"
                " that it closes over: a variable, or something computed from one. Pass it as an argument."
            )
        return False


def open_closures(observer: Any, primitive: Any, args: Any, params: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The same operation with watched arrays that a jitted function closes over among its arguments.

    In eager code what is closed over is a plain array, which `jax.jit` keeps as a constant of its program; all other
    operations with bodies take such arrays as arguments already.
    """
    bodies = list(_core.jaxprs_in_params(params))
    if not bodies:
        WITHOUT_BODIES.add(primitive)
    closed = params.get("jaxpr")
    constants = list(getattr(closed, "consts", ()))
    if constants and observer.wants(constants):
        if closed not in _opened:
            _opened[closed] = _with_constants_as_inputs(closed, str(params.get("name", primitive)))
        return open_closures(observer, *_opened[closed].equation([*constants, *args]))
    if observer.wants([x for body in bodies for x in _constants_within(body)]):
        raise TapeError(
            f"{params.get('name', primitive)} at {user_line()}: a function under jax.jit, in a body that JAX traces,"
            " closes over a value that a tape watches, which it takes for a constant. Pass the value as an argument."
        )
    return primitive, args, params


def _constants_within(jaxpr: Any) -> list[Any]:
    """Constants of jitted functions that are called anywhere in the jaxpr."""
    found = _closed_over.get(jaxpr)
    if found is None:
        found = []
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found += getattr(equation.params.get("jaxpr"), "consts", ())
            for inner in inner_jaxprs(equation):
                found += _constants_within(inner)
        _closed_over[jaxpr] = found
    return found


def _with_constants_as_inputs(closed: Any, name: str) -> Program:
    constvars = list(getattr(closed, "constvars", ())) or list(closed.jaxpr.constvars)
    debug = closed.jaxpr.debug_info.with_unknown_names()
    invars = [*constvars, *closed.jaxpr.invars]
    jaxpr = closed.jaxpr.replace(constvars=[], invars=invars, debug_info=debug)
    return Program(name, _jex.ClosedJaxpr(jaxpr, []), list(range(len(invars))), [])
