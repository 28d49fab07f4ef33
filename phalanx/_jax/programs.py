"""Programs whose inputs are found while they are traced."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax.extend import core as _jex

from phalanx._jax.jaxprs import is_literal
from phalanx._jax.traces import current_trace, using_trace
from phalanx._jax.values import is_tracer


def compiling() -> contextlib.AbstractContextManager[None]:
    """`jax.disable_jit` around the block does not reach into it: a program of ours is one operation."""
    return jax.disable_jit(False) if _config.disable_jit.value else contextlib.nullcontext()


def results_are_checked() -> bool:
    """Whether JAX looks for NaNs or infinities in the results of programs; it then wants their arguments again."""
    return bool(_config.debug_nans.value or _config.debug_infs.value)


_ended: weakref.WeakSet[Any] = weakref.WeakSet()
_input_p = _jex.Primitive("phalanx_input")
_input_p.def_abstract_eval(lambda *, aval, index: aval)


class Tracing:
    """A program while its body runs: inputs can be added at any time, from any depth."""

    def __init__(self) -> None:
        self.trace = current_trace()
        self.inputs: list[Any] = []

    def input(self, aval: Any) -> Any:
        """A new input of the program, of type `aval`."""
        with using_trace(self.trace):
            tracer = _input_p.bind(aval=aval, index=len(self.inputs))
        self.inputs.append(tracer)
        return tracer


def is_leaked(value: Any) -> bool:
    """True for a value of a program of ours whose body has ended."""
    return is_tracer(value) and value._trace in _ended


class Program:
    """A traced computation with all its constants turned into inputs; called like a primitive."""

    def __init__(self, name: str, jaxpr: Any, used: list[int], constants: list[Any]) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.used = used
        """Indices of the inputs that the program really takes, in order; its constants follow."""
        self.constants = constants

    @property
    def out_avals(self) -> list[Any]:
        """Types of the outputs."""
        return [v.aval for v in self.jaxpr.jaxpr.outvars]

    def equation(self, args: Sequence[Any]) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Primitive, arguments and parameters of a jit equation that calls the program."""
        n_in, n_out = len(self.jaxpr.jaxpr.invars), len(self.jaxpr.jaxpr.outvars)
        primitive, params = _jit_template(n_in, n_out, jax.sharding.get_abstract_mesh())
        return primitive, args, dict(params, jaxpr=self.jaxpr, name=self.name)

    def bind(self, *args: Any) -> list[Any]:
        """One jit equation in the current trace (or one compiled call when eager)."""
        primitive, _, params = self.equation(args)
        try:
            return list(primitive.bind(*args, **params))
        except _api_util.InternalFloatingPointError as error:  # JAX's word to itself
            raise FloatingPointError(f"invalid value ({error.ty}) encountered in {self.name}") from None

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """`bind` with the values of all inputs that were asked for while tracing."""
        return self.bind(*[inputs[i] for i in self.used], *self.constants)

    def only(self, outputs: slice) -> Program:
        """The part that computes some of the outputs, without side effects."""
        outvars = self.jaxpr.jaxpr.outvars[outputs]
        needed = {v for v in outvars if not is_literal(v)}
        equations = []
        for equation in reversed(self.jaxpr.jaxpr.eqns):
            if needed.intersection(equation.outvars):
                equations.append(equation)
                needed.update(v for v in equation.invars if not is_literal(v))
        debug = self.jaxpr.jaxpr.debug_info.with_unknown_names()
        effects = set().union(*(e.effects for e in equations))
        jaxpr = self.jaxpr.jaxpr.replace(outvars=outvars, eqns=equations[::-1], effects=effects, debug_info=debug)
        return Program(self.name, _jex.ClosedJaxpr(jaxpr, []), self.used, self.constants)

    def without_constants(self) -> Program:
        """The same for other constants of these types, which `bind` is given."""
        return Program(self.name, self.jaxpr, self.used, [])

    @functools.cached_property
    def text(self) -> str:
        """The program in StableHLO: equal texts compute the same."""
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.jaxpr.jaxpr.invars]
        with compiling():
            return str(jax.jit(self.bind, keep_unused=True).lower(*args).as_text())


@functools.lru_cache(maxsize=1024)
def _jit_template(n_in: int, n_out: int, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters of a jit equation of this arity, taken from JAX so that they fit its version."""

    def program(*args: Any) -> list[Any]:
        return [0.0] * n_out

    scalar = jax.ShapeDtypeStruct((), np.float32)
    with compiling():
        outer = jax.make_jaxpr(lambda *args: jax.jit(program)(*args))(*[scalar] * n_in)
    equation = outer.jaxpr.eqns[0]
    return equation.primitive, dict(equation.params)


def trace_program(body: Callable[[Tracing], list[Any]], name: str, function: Any) -> Program:
    """Run `body` once under a new staging trace and return what it computed as a program.

    `function` is the user's, for JAX's messages. Inputs are equations of a primitive that has none of its own;
    taking them out of the program afterwards is what allows finding captures in the one and only run of the body.
    """

    def nullary() -> list[Any]:
        tracing = Tracing()
        try:
            return body(tracing)
        finally:
            _ended.add(tracing.trace)

    while isinstance(function, functools.partial):
        function = function.func
    nullary.__wrapped__ = function  # type: ignore[attr-defined]
    closed = jax.make_jaxpr(nullary)()
    constvars = list(getattr(closed, "constvars", ())) or list(closed.jaxpr.constvars)
    found: dict[int, Any] = {}
    equations = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive is _input_p:
            found[equation.params["index"]] = equation.outvars[0]
        else:
            equations.append(equation)
    used = sorted(found)
    debug = closed.jaxpr.debug_info.with_unknown_names()
    lifted = closed.jaxpr.replace(
        constvars=[], invars=[found[i] for i in used] + constvars, eqns=equations, debug_info=debug
    )
    return Program(name, _jex.ClosedJaxpr(lifted, []), used, list(closed.consts))


def known_calls(jitted: Any) -> int:
    """How many kinds of calls of a jitted function JAX has seen; those pass through C++ alone, without effects."""
    return int(jitted._cache_size())
