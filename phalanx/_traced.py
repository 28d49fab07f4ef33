"""A function body traced once, and the ways of calling what came out.

The program takes the arguments and the variables that the body read; it gives the results and the
new values of the variables that the body wrote. Called eagerly it runs compiled, with the written
variables' buffers donated; under a tape, a JAX transformation or inside another program it is one
equation.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._explain import why_not_run, why_not_traced
from phalanx._signature import NUMBERS, is_input
from phalanx.errors import ArgumentTypeError, TracingError
from phalanx.variables import Component, Variable

dispatch_lock = threading.RLock()
"""Held while variables' buffers are collected, donated and replaced."""

_drain: Callable[[Any], Any] = functools.partial(collections.deque, maxlen=0)
_previous: list[Any] = []
"""One result of the last step with collectives on a CPU."""


class Traced:
    """A program together with the variables that it reads and writes."""

    def __init__(
        self,
        program: _jax.Program,
        n_args: int,
        frame: state.TraceFrame,
        rebuild: Callable[[list[Any]], Any],
        n_results: int,
    ) -> None:
        self.program = program
        self.n_args = n_args
        self.captures = list(frame.captures)
        self.written = list(frame.written)
        self.written_at = dict(frame.written)
        self.births = list(frame.births)
        self.initial = list(frame.initial)
        self.strategy = frame.strategy
        self.in_order = frame.in_order
        self._rebuild = rebuild
        self._n_results = n_results

    def inputs(self, args: Sequence[Any], load: Callable[[state.Capture], Any]) -> list[Any]:
        """The program's inputs: arguments, then captured variables."""
        return [*args, *map(load, self.captures)]

    def split(self, outs: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Results, new values of the written variables, traced initial values."""
        n, w = self._n_results, len(self.written)
        return self._rebuild(outs[:n]), outs[n : n + w], outs[n + w :]

    def call_in_place(self, args: Sequence[Any]) -> Any:
        """Call as one equation of whatever is being traced or recorded."""
        frame = state.top()
        place = frame.base
        inputs = self.inputs(args, state.load_for_call)
        if place.is_eager:
            outs = in_order(self.in_order, lambda: self.program(inputs))
        else:
            outs = self.program(inputs)
            place.note_use(self.strategy)
        result, written, initial = self.split(outs)
        for variable, value in zip(self.written, written):
            place.store(variable, value)
        for variable, value in zip(self.initial, initial):
            place.created(variable, value)
        return result


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
        program = _jax.trace_program(program_body, name)
    except Exception as error:
        better = why_not_traced(name, error)
        if better is None:
            raise
        raise better from error
    finally:
        state.renew_bodies()
    frame, rebuild, n_results = made
    return Traced(program, len(input_types), frame, rebuild, n_results)


def split_results(result: Any, name: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays of a result, and how to build the result around others."""
    leaves, structure = jax.tree.flatten(result)
    leaves = [leaf.value if isinstance(leaf, (Variable, Component)) else leaf for leaf in leaves]
    for leaf in leaves:
        if inspect.iscoroutine(leaf) or inspect.isgenerator(leaf) or inspect.isasyncgen(leaf):
            raise ArgumentTypeError(
                f"{name} returns a {type(leaf).__name__}: its body has not run and would run outside the trace. Write a"
                " plain function, and return a list or tuple instead of using yield."
            )
    dynamic = [is_input(leaf) for leaf in leaves]
    static = [None if d else leaf for d, leaf in zip(dynamic, leaves)]
    arrays = [jnp.asarray(leaf) if isinstance(leaf, NUMBERS) else leaf for leaf, d in zip(leaves, dynamic) if d]

    def rebuild(outs: list[Any]) -> Any:
        rest = iter(outs)
        return jax.tree.unflatten(structure, [next(rest) if d else s for d, s in zip(dynamic, static)])

    return arrays, rebuild


class Compiled:
    """A program compiled for eager calls; shared by traces whose programs are equal."""

    def __init__(self, traced: Traced, donate: bool) -> None:
        program, n_args = traced.program, traced.n_args
        self.program = program
        self.donated = _donated(traced) if donate else frozenset()
        """Positions among the program's inputs whose buffers the call may reuse."""
        order = [*program.used]
        donated = [i for i in order if i - n_args in self.donated]
        kept = [i for i in order if i - n_args not in self.donated]
        self._donated_inputs, self._kept_inputs = donated, kept
        self.signature = program_signature(traced, self.donated)
        sizes = [aval.size for aval in program.out_avals]
        smallest = sizes.index(min(sizes)) if sizes else 0
        self._smallest_out = slice(smallest, smallest + 1)

        def flat(donated_values: list[Any], kept_values: list[Any], constants: list[Any]) -> list[Any]:
            values = dict(zip(donated, donated_values)) | dict(zip(kept, kept_values))
            return program.bind(*[values[i] for i in order], *constants)

        flat.__name__ = program.name
        self._jit = jax.jit(flat, donate_argnums=(0,), out_shardings=_out_shardings(traced))

    def fits(self, other: Traced, donate: bool) -> bool:
        """True when this program computes the same as another trace's."""
        donated = _donated(other) if donate else frozenset()
        if program_signature(other, donated) != self.signature:
            return False
        return _text(self.program) == _text(other.program)

    def arrange(self, inputs: list[Any], constants: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Inputs in the order of the compiled function."""
        return [inputs[i] for i in self._donated_inputs], [inputs[i] for i in self._kept_inputs], constants

    def lower(self, inputs: list[Any], constants: list[Any]) -> Any:
        """JAX's lowered program."""
        return self._jit.lower(*self.arrange(inputs, constants))

    def __call__(self, traced: Traced, args: Sequence[Any]) -> Any:
        """Run on the variables of `traced`, which take their new values all at once or not at all."""
        try:
            return self._run(traced, args)
        except (ValueError, jax.errors.UnexpectedTracerError) as error:
            better = why_not_run(self.program.name, traced, args, error)
            if better is None:
                raise
            raise better from error

    def _run(self, traced: Traced, args: Sequence[Any]) -> Any:
        with dispatch_lock:
            inputs = self._collect(traced, args)
            arranged = self.arrange(inputs, traced.program.constants)
            outs: list[Any] = []
            commit = functools.partial(_commit, traced, outs)
            # An interrupt may fall between any two bytecodes. Running and keeping the outputs is one
            # C call, and whatever happens after it the variables get them before the exception leaves.
            try:
                try:
                    _wait_for_previous(traced.in_order)
                    outs.extend(map(self._jit, *([x] for x in arranged)))
                finally:
                    commit()
            except BaseException:
                commit()
                raise
            if traced.in_order:
                _previous[:] = outs[0][self._smallest_out]
            return traced.split(outs[0])[0]

    def _collect(self, traced: Traced, args: Sequence[Any]) -> list[Any]:
        inputs = [*args]
        for i, (variable, _) in enumerate(traced.captures):
            stored = variable._stored
            if stored is None:
                raise TracingError(f"{variable.label} has no value yet.")
            # Somebody may hold this very array: it must stay as it is, so a copy is given away.
            inputs.append(stored if variable._owned or i not in self.donated else jnp.copy(stored))
        return inputs


def _commit(traced: Traced, outs: list[Any]) -> None:
    if outs:
        # Builtins only: one C call, so that all variables take their values or none does.
        _drain(map(setattr, traced.written, itertools.repeat("_stored"), outs[0][traced._n_results :]))
        _drain(map(setattr, traced.written, itertools.repeat("_owned"), itertools.repeat(True)))


def _donated(traced: Traced) -> frozenset[int]:
    written = set(traced.written)
    return frozenset(i for i, (variable, _) in enumerate(traced.captures) if variable in written)


def program_signature(traced: Traced, donated: frozenset[int]) -> Any:
    """Equal for programs that may be equal."""
    jaxpr = traced.program.jaxpr.jaxpr
    avals = tuple(v.aval for v in jaxpr.invars), tuple(v.aval for v in jaxpr.outvars)
    shardings = tuple(_sharding(v) for v in traced.written)
    return avals, tuple(traced.program.used), donated, len(jaxpr.eqns), shardings, traced.n_args


def _text(program: _jax.Program) -> str:
    if not hasattr(program, "text"):
        program.text = _jax.program_text(program)  # type: ignore[attr-defined]
    return program.text  # type: ignore[attr-defined, no-any-return]


def _sharding(variable: Variable) -> Any:
    return None if variable.strategy is None else variable.strategy.sharding(per_replica=variable.per_replica)


def _out_shardings(traced: Traced) -> list[Any]:
    n_initial = len(traced.initial)
    return [None] * traced._n_results + [_sharding(v) for v in traced.written] + [None] * n_initial


# ---- steps in flight -----------------------------------------------------------------------------


def in_order(ordered: bool, run: Callable[[], list[Any]]) -> list[Any]:
    """Run now, or after the previous step where several in flight would block each other.

    On a CPU the replicas of several steps share one pool of threads; with jax 0.10 their collectives
    wait for each other for ever and the process is aborted.
    """
    with dispatch_lock:
        _wait_for_previous(ordered)
        outs = run()
        if ordered:
            _previous[:] = _smallest(outs)
        return outs


def _wait_for_previous(ordered: bool) -> None:
    if ordered:
        for x in _previous:
            if not x.is_deleted():
                x.block_until_ready()
        _previous.clear()


def _smallest(outs: list[Any]) -> list[Any]:
    arrays = [x for x in outs if isinstance(x, jax.Array) and not _jax.is_tracer(x)]
    return [min(arrays, key=lambda x: x.size)] if arrays else []
