"""A function body traced once, and the ways of calling what came out.

The program takes the arguments and the variables that the body read; it gives the results and the
new values of the variables that the body wrote. Called eagerly it runs compiled, with the written
variables' buffers donated; under a tape, a JAX transformation or inside another program it is one
equation.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from phalanx import _jax, state
from phalanx._checks import as_array, take_apart
from phalanx._explain import leaked, why_not_traced
from phalanx._launch import in_order
from phalanx._signature import NUMBERS, is_input
from phalanx.errors import ArgumentTypeError
from phalanx.variables import Component, Variable


class Traced:
    """A program together with the variables that it reads and writes."""

    def __init__(
        self,
        program: _jax.Program,
        input_types: Sequence[Any],
        frame: state.TraceFrame,
        rebuild: Callable[[list[Any]], Any],
        n_results: int,
    ) -> None:
        self.program = program
        self.input_types = list(input_types)
        self.n_args = len(self.input_types)
        self.n_results = n_results
        self._captures: list[Any] = list(frame.captures)
        self._written: list[Any] = list(frame.written)
        self.borrows = False
        self.written_at = dict(frame.written)
        self.births = list(frame.births)
        self.initial = list(frame.initial)
        self.strategy = frame.strategy
        self.in_order = frame.in_order
        self._rebuild = rebuild

    @property
    def captures(self) -> list[state.Capture]:
        """The variables that become inputs, after the arguments."""
        return [(_alive(v), lifted) for v, lifted in self._captures] if self.borrows else self._captures

    @property
    def written(self) -> list[Variable]:
        """The variables whose new values the program gives, after its results."""
        return list(map(_alive, self._written)) if self.borrows else self._written

    def borrow(self, variables: Sequence[Variable]) -> None:
        """Do not keep these alive: they are arguments, so whoever calls has them."""
        refs = {v: weakref.ref(v) for v in variables}
        self.borrows = any(v in refs for v, _ in self._captures) or any(v in refs for v in self._written)
        self._captures = [(refs.get(v, v), lifted) for v, lifted in self._captures]
        self._written = [refs.get(v, v) for v in self._written]
        self.written_at.clear()

    @functools.cached_property
    def calls_back(self) -> bool:
        """Whether the program calls Python functions."""
        return _jax.has_callback(self.program.jaxpr)

    @property
    def belongs_to_a_trace(self) -> bool:
        """Whether values of an enclosing trace are part of it, so that it is of no use later."""
        return bool(self.initial) or any(map(_jax.is_tracer, self.program.constants))

    def inputs(self, args: Sequence[Any], load: Callable[[state.Capture], Any]) -> list[Any]:
        """The program's inputs: arguments, then captured variables."""
        return [*args, *map(load, self.captures)]

    def results(self, outs: list[Any]) -> Any:
        """What the body returned."""
        return self._rebuild(outs[: self.n_results])

    def split(self, outs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Results, new values of the written variables, traced initial values."""
        n, w = self.n_results, len(self.written)
        return self.results(outs), outs[n : n + w], outs[n + w :]

    def call_in_place(self, args: Sequence[Any]) -> Any:
        """Call as one equation of whatever is being traced or recorded."""
        place = state.top().base
        with place.turn():
            with place.lock:
                inputs = self.inputs(args, state.load_for_call)
            if place.is_eager:
                outs = in_order(self.in_order, lambda: self.program(inputs))
            else:
                outs = self.program(inputs)
                place.note_use(self.strategy)
            result, written, initial = self.split(outs)
            with place.lock:
                place.store_all(dict(zip(self.written, written)))
                for variable, value in zip(self.initial, initial):
                    place.created(variable, value)
        return result


def _alive(variable: Any) -> Any:
    return variable() if isinstance(variable, weakref.ref) else variable


def trace(
    body: Callable[..., Any],
    arguments: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    input_types: Sequence[Any],
    name: str,
    make_frame: Callable[[_jax.Tracing], state.TraceFrame],
) -> Traced:
    """Run `body` once as the body of a program."""
    made: list[Any] = []

    def program_body(tracing: _jax.Tracing) -> list[Any]:
        frame = make_frame(tracing)
        inputs = [tracing.input(aval) for aval in input_types]
        args, kwargs = arguments(inputs)
        with state.pushed(frame):
            state.renew_bodies()
            results, rebuild = split_results(body(*args, **kwargs), name)
        made[:] = [frame, rebuild, len(results)]
        return [*results, *(frame.values[v] for v in frame.written), *frame.initial.values()]

    try:
        program = _jax.trace_program(program_body, name, body)
    except Exception as error:
        better = why_not_traced(name, error)
        if better is None:
            raise
        raise better from error
    finally:
        state.renew_bodies()
    if any(map(_jax.is_leaked, program.constants)):
        raise leaked(name)
    frame, rebuild, n_results = made
    return Traced(program, input_types, frame, rebuild, n_results)


def split_results(result: Any, name: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a result, and how to build the result around others."""
    if inspect.iscoroutine(result) or inspect.isgenerator(result):
        result.close()
        raise ArgumentTypeError(
            f"{name} returns a {type(result).__name__}: its body has not run and would run outside the trace. Write a"
            " plain function, and return a list or tuple instead of using yield."
        )
    leaves, structure = take_apart(result, f"{name}: its result")
    leaves = [leaf.value if isinstance(leaf, (Variable, Component)) else leaf for leaf in leaves]
    dynamic = [is_input(leaf) for leaf in leaves]
    static = [None if d else leaf for d, leaf in zip(dynamic, leaves)]
    arrays = [
        as_array(leaf, f"the result of {name}") if isinstance(leaf, NUMBERS) else leaf
        for leaf, d in zip(leaves, dynamic)
        if d
    ]

    def rebuild(outs: list[Any]) -> Any:
        rest = iter(outs)
        return jax.tree.unflatten(structure, [next(rest) if d else s for d, s in zip(dynamic, static)])

    return arrays, rebuild
