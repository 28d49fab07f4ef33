"""Compiled programs and their eager calls, which update variables all at once or not at all."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._compiling import compile_first
from phalanx._explain import why_not_run
from phalanx._interrupts import HeldBack
from phalanx._packs import NO_PACKS, Packs, sharding_of, stored_arrays
from phalanx.variables import Variable

if TYPE_CHECKING:
    from phalanx._traced import Traced

_owned = attrgetter("_owned")
_AT_ONCE = nullcontext()
_previous: list[Any] = []
"""One result of the last step with collectives on a CPU."""


class Compiled:
    """A program compiled for eager calls; shared by traces whose programs are equal.

    It takes three lists of arrays: the values that it replaces (their buffers are reused), which are those of packs
    and of single variables; the arguments and what else it uses, packs last; and the constants of the trace. It
    gives the new values of packs, then those of single variables, in the same order, and then the results: JAX lets
    a new value take the buffer of the first given away that has its type, and XLA copies what it takes from another.
    """

    def __init__(self, traced: Traced, donate: bool, packs: Packs = NO_PACKS) -> None:
        self._program = program = traced.program.without_constants()
        self.signature = _signature(traced, donate, packs)
        self.calls_back = traced.calls_back
        """Whether it calls Python functions. They may raise, so nothing is given away and the end is waited for."""
        given_away = set(traced.written) if donate and not self.calls_back else set()
        captured = [i - traced.n_args for i in program.used if i >= traced.n_args]
        alone = [i for i in captured if traced.captures[i][0] not in packs.places]
        self.args = [i for i in program.used if i < traced.n_args]
        """Which arguments the program uses."""
        self.donated = [i for i in alone if traced.captures[i][0] in given_away]
        """Which captures of a trace are given single, those whose buffers are reused."""
        self.kept = [i for i in alone if traced.captures[i][0] not in given_away]
        self.written = _single(traced, packs, self.donated)
        """Which of the variables that a trace writes get their new values single."""
        self.n_new = packs.n_updated + len(self.written)
        """Outputs that are new values."""
        self.smallest_out = self._smallest_out(traced, packs)
        flat = self._flat(traced, packs)
        flat.__name__ = program.name
        shardings = self._out_shardings(traced, packs)
        self.run = jax.jit(flat, donate_argnums=(0,), out_shardings=shardings)
        self.run_keeping = jax.jit(flat, out_shardings=shardings)
        """The same, and nothing is given away; compiled only where it is called."""
        self.is_compiled = False

    def _flat(self, traced: Traced, packs: Packs) -> Callable[..., list[Any]]:
        program, n_args, n_results = self._program, traced.n_args, traced.n_results
        single = [*(n_args + i for i in self.donated), *self.args, *(n_args + i for i in self.kept)]
        position = {i: n for n, i in enumerate(single, packs.n_updated)}
        sources = [position[i] if i in position else packs.places[traced.captures[i - n_args][0]] for i in program.used]
        places = list(map(packs.places.get, traced.written))
        single_outs = [*(n_results + i for i in self.written)]
        layouts, n_updated = [pack.layout for pack in packs.all], packs.n_updated

        def flat(donated: list[Any], kept: list[Any], constants: list[Any]) -> list[Any]:
            arrays = [*donated, *kept]
            packed = [*arrays[:n_updated], *arrays[n_updated + len(single) :]]
            parts = [layout.split(array) for layout, array in zip(layouts, packed)]
            values = [arrays[i] if isinstance(i, int) else parts[i[0]][i[1]] for i in sources]
            outs = program.bind(*values, *constants)
            for place, value in zip(places, outs[n_results:]):
                if place is not None:
                    parts[place[0]][place[1]] = value
            joined = [layout.join(new) for layout, new in zip(layouts[:n_updated], parts)]
            return [*joined, *(outs[i] for i in single_outs), *outs[:n_results], *outs[n_results + len(places) :]]

        return flat

    def _smallest_out(self, traced: Traced, packs: Packs) -> slice:
        """Where the smallest of the arrays that it gives is, which to keep costs least."""
        sizes, n = [aval.size for aval in traced.program.out_avals], traced.n_results
        new = [*(pack.layout.size for pack in packs.updated), *(sizes[n + i] for i in self.written)]
        given = [*new, *sizes[:n], *sizes[n + len(traced.written) :]]
        smallest = given.index(min(given)) if given else 0
        return slice(smallest, smallest + 1)

    def _out_shardings(self, traced: Traced, packs: Packs) -> list[Any]:
        packed = [pack.sharding for pack in packs.updated]
        single = [sharding_of(traced.written[i]) for i in self.written]
        return packed + single + [None] * (traced.n_results + len(traced.initial))

    def fits(self, other: Traced, donate: bool, packs: Packs) -> bool:
        """True when this program computes the same as another trace's; Python functions are not compared."""
        if self.calls_back or _signature(other, donate, packs) != self.signature:
            return False
        return self._program.text == other.program.text


class Launch:
    """A compiled program on the variables of one of its traces."""

    def __init__(self, compiled: Compiled, traced: Traced, packs: Packs) -> None:
        self._compiled = compiled
        self._traced = traced
        self._packs = packs
        self._variables = None if traced.borrows else self._sorted()
        self._owned_at = -1
        """How much had been lent when all the variables that this replaces were owned."""
        self._all_in_c = False
        """Whether the last call went through none of JAX's Python code."""

    def _sorted(self) -> tuple[list[Variable], list[Variable], list[Variable]]:
        captures, compiled = self._traced.captures, self._compiled
        donated = [captures[i][0] for i in compiled.donated]
        kept = [captures[i][0] for i in compiled.kept]
        written = self._traced.written
        return donated, kept, [written[i] for i in compiled.written]

    def lower(self) -> Any:
        """JAX's lowered program."""
        donated, kept, _ = self._variables or self._sorted()
        types = [self._traced.input_types[i] for i in self._compiled.args]
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in types]
        with state.turn(), state.lock:
            return self._compiled.run.lower(*self._inputs(args, stored_arrays(donated), kept))

    def __call__(self, args: Sequence[Any]) -> Any:
        """Run; the variables take their new values all at once or not at all."""
        traced = self._traced
        variables = self._variables or self._sorted()
        outs: list[Any] = []
        run = self._run_keeping if self._compiled.calls_back or _jax.results_are_checked() else self._run
        used = list(map(args.__getitem__, self._compiled.args))
        with state.turn(), _jax.compiling():
            if traced.in_order:
                _wait_for_previous()
            try:
                if not self._compiled.is_compiled:
                    self._compile(used, run, *variables)
                run(used, outs, *variables)
            except (TypeError, ValueError, jax.errors.UnexpectedTracerError) as error:
                better = why_not_run(traced.program.name, traced, args, error)
                if better is None:
                    raise
                raise better from error
        return traced.results(outs[0][self._compiled.n_new :])

    def _compile(self, args: list[Any], run: Any, *variables: list[Variable]) -> None:
        donated, kept, _ = variables
        if any(map(_jax.is_tracer, args)):  # values that were kept from another trace; the call refuses them
            return
        with state.lock:
            inputs = self._inputs(args, stored_arrays(donated), kept)
        jitted = self._compiled.run_keeping if run == self._run_keeping else self._compiled.run
        compile_first(self._traced.program.name, jitted, inputs, args)
        self._compiled.is_compiled = True

    def _run_keeping(self, args: list[Any], outs: list[Any], *variables: list[Variable]) -> None:
        """Nothing is given away: after an error it is needed, and the functions called back may read it meanwhile."""
        donated, kept, written = variables
        with state.lock:
            inputs = self._inputs(args, stored_arrays(donated), kept)
        with HeldBack(), state.calling_back():  # so that no handler keeps the second from ending
            result = self._compiled.run_keeping(*inputs)
            jax.block_until_ready(result)
        with state.lock:
            outs.append(result)
            self._commit(outs, written, owned=False)

    def _inputs(self, args: list[Any], values: list[Any], kept: list[Variable]) -> tuple[Any, ...]:
        updated = [pack.take() for pack in self._packs.updated]
        read = [pack.take() for pack in self._packs.read]
        return [*updated, *values], [*args, *stored_arrays(kept), *read], self._traced.program.constants

    def _run(self, args: list[Any], outs: list[Any], *variables: list[Variable]) -> None:
        donated, kept, written = variables
        with state.lock:
            owned = self._owned_at == state.Lending.times or all(map(_owned, written))
            values = stored_arrays(donated)
            if not owned:
                # Somebody may hold these very arrays: they must stay as they are, so copies are given away.
                values = [x if v._owned else jnp.copy(x) for v, x in zip(donated, values)]
            self._run_at_once(self._inputs(args, values, kept), outs, written, owned)

    def _run_at_once(self, inputs: tuple[Any, ...], outs: list[Any], written: list[Variable], owned: bool) -> None:
        commit = functools.partial(self._commit, outs, written, owned)
        # An exception from outside may fall between any two bytecodes. Running and keeping the outputs is one
        # C call, and whatever happens after it, the variables get them before the exception leaves.
        run = self._compiled.run
        known = _jax.known_calls(run)
        try:
            with _AT_ONCE if self._all_in_c else HeldBack():
                try:
                    outs.extend(map(run, *([x] for x in inputs)))
                finally:
                    commit()
        except BaseException:
            commit()
            raise
        self._all_in_c = 0 < known == _jax.known_calls(run)

    def _commit(self, outs: list[Any], written: list[Variable], owned: bool) -> None:
        if not outs:
            return
        for pack, array in zip(self._packs.updated, outs[0]):
            pack.give(array)
        state.set_all(written, "_stored", outs[0][self._packs.n_updated : self._compiled.n_new])
        if not owned:
            state.set_all(written, "_owned", itertools.repeat(True))
        self._owned_at = state.Lending.times
        if self._traced.in_order:
            _previous[:] = outs[0][self._compiled.smallest_out]


def _single(traced: Traced, packs: Packs, donated: Sequence[int]) -> list[int]:
    """Which written variables are in no pack: first those whose values are given away, in the order of these."""
    number = {v: i for i, v in enumerate(traced.written) if v not in packs.places}
    return list(dict.fromkeys([*(number[traced.captures[i][0]] for i in donated), *number.values()]))


def _signature(traced: Traced, donate: bool, packs: Packs) -> Any:
    """Equal for programs that may be equal."""
    jaxpr = traced.program.jaxpr.jaxpr
    avals = tuple(v.aval for v in jaxpr.invars), tuple(v.aval for v in jaxpr.outvars)
    written = {v: i for i, v in enumerate(traced.written)}
    roles = tuple((written.get(v), packs.places.get(v)) for v, _ in traced.captures)
    layouts = tuple(pack.layout for pack in packs.all), packs.n_updated, tuple(map(packs.places.get, traced.written))
    shardings = tuple(map(sharding_of, traced.written))
    strategy = traced.strategy and traced.strategy.key
    return (
        avals,
        tuple(traced.program.used),
        traced.n_args,
        roles,
        layouts,
        shardings,
        strategy,
        len(jaxpr.eqns),
        donate,
    )


# ---- steps in flight -----------------------------------------------------------------------------


def in_order(ordered: bool, run: Callable[[], list[Any]]) -> list[Any]:
    """Run now, or after the previous step where several in flight would block each other.

    On a CPU the replicas of several steps share one pool of threads; with jax 0.10 their collectives
    wait for each other for ever and the process is aborted.
    """
    with state.turn():
        if ordered:
            _wait_for_previous()
        outs = run()
        if ordered:
            _previous[:] = _smallest(outs)
        return outs


def _wait_for_previous() -> None:
    for x in _previous:
        if not x.is_deleted():
            x.block_until_ready()
    _previous.clear()


def _smallest(outs: list[Any]) -> list[Any]:
    arrays = [x for x in outs if isinstance(x, jax.Array) and not _jax.is_tracer(x)]
    return [min(arrays, key=lambda x: x.size)] if arrays else []
