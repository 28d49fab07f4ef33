"""`function`: Python code traced once into a compiled program, with variables read and written.

The body runs exactly once per trace. Variables that it reads are found while it runs and become
inputs of the program, so that later calls see their present values.
"""

from __future__ import annotations

import functools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import numpy as np

from phalanx import state
from phalanx._checks import check_flag
from phalanx._concrete import ConcreteFunction
from phalanx._history import History, context_keys
from phalanx._launch import Compiled, Launch
from phalanx._methods import BoundFunction
from phalanx._packs import NO_PACKS, Packs
from phalanx._signature import Call, Signature, identities, is_input
from phalanx._tensorflow import FUNCTION, refuse_arguments
from phalanx._traced import Traced, trace
from phalanx.errors import ArgumentError, ArgumentTypeError, RetraceError, VariableCreationError
from phalanx.variables import Variable

P = ParamSpec("P")
R = TypeVar("R")

_STORM = 10
"""Traces of one function after which it is said once that something is wrong."""

_WARM_UP_CALLS = 2
"""Calls of a function that may trace it while `strict` is on."""

_SHARED_PROGRAMS = 16
"""Executables that a function keeps for rebuilt objects of the same structure."""


class _Settings:
    eager = False
    strict = False


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Run the bodies of all traced functions as plain Python, for debugging.

    Raises:
        ArgumentTypeError: for anything but True and False.

    Example:
        >>> px.run_functions_eagerly(True)
        >>> px.run_functions_eagerly(False)
    """
    check_flag(run_eagerly, "run_functions_eagerly")
    _Settings.eager = run_eagerly


def strict(on: bool = True) -> None:
    """Turn what is merely suspicious into errors.

    That is: tracing a function again after its first two calls, and leaving out rows of a dataset.

    Raises (later, where it happens):
        RetraceError: with the argument that changed, from what to what.
        UnevenBatchError: from `distribute_dataset` with ``remainder="drop"``, when rows are left over.

    Example:
        >>> px.strict(True)
        >>> px.strict(False)
    """
    check_flag(on, "strict")
    _Settings.strict = on


def is_strict() -> bool:
    """Whether `strict` is on."""
    return _Settings.strict


@contextmanager
def not_strict() -> Iterator[None]:
    """`strict` is off in the block, which does on purpose what is suspicious elsewhere."""
    before, _Settings.strict = _Settings.strict, False
    try:
        yield
    finally:
        _Settings.strict = before


class Function(Generic[P, R]):
    """A traced function; made by `px.function`."""

    def __init__(
        self,
        fn: Callable[P, R],
        *,
        donate: bool,
        static_argnames: tuple[str, ...],
        input_signature: Any,
        reduce_retracing: bool,
        instance: weakref.ref[Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options: dict[str, Any] = {
            "donate": donate,
            "static_argnames": static_argnames,
            "input_signature": input_signature,
            "reduce_retracing": reduce_retracing,
        }
        self._donate = donate
        self._instance = instance
        self._signature = Signature(fn, static_argnames, input_signature, reduce_retracing, 1 if instance else 0)
        self.__signature__ = self._signature.of_calls
        self._traces: dict[Hashable, ConcreteFunction] = {}
        self._watches: dict[Hashable, list[Any]] = {}
        """What notices that an object in the key of a trace is gone."""
        self._history = History(self._signature)
        self._shared: list[Compiled] = []
        self._methods: dict[int, tuple[weakref.ref[Any], Function[..., Any]]] = {}
        self._calls = 0
        self.trace_count = 0
        """How often the body has run to be traced."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._signature.name

    def __repr__(self) -> str:
        return f"<px.function {self.name}, {self.trace_count} traces>"

    def __reduce__(self) -> Any:
        # Copies and pickles carry the function and no traces. One that a decorator put in its function's place
        # is found there by name, as functions are.
        module = sys.modules.get(getattr(self._fn, "__module__", ""))
        name = getattr(self._fn, "__qualname__", "")
        try:
            in_place = operator.attrgetter(name)(module)
        except AttributeError:
            in_place = None
        return name if in_place is self else (_remade, (self._fn, self._options))

    # ---- as a method ----

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        entry = self._methods.get(id(instance))
        if entry is None or entry[0]() is not instance:
            try:
                ref = weakref.ref(instance, functools.partial(_drop, self._methods, id(instance)))
            except TypeError:
                raise ArgumentTypeError(
                    f"{self.name}: a method of {type(instance).__name__} cannot be traced, because its instances take"
                    " no weak references (a class with __slots__). Add '__weakref__' to __slots__."
                ) from None
            method = Function(self._fn, instance=ref, **self._options)
            method._shared = self._shared  # objects of the same structure run the same program
            entry = (ref, method)
            self._methods[id(instance)] = entry
        return BoundFunction(entry[1], instance)

    # ---- calling ----

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._calls += 1
        bound = self._signature.bind(args, kwargs)
        if _Settings.eager:
            return self._body()(*bound[0], **bound[1])  # type: ignore[no-any-return]
        call = self._signature.split(*bound)
        concrete = self._traces.get(self._key(call))
        if concrete is None:
            with state.tracing(self.name):
                concrete = self._traces.get(self._key(call)) or self._new_trace(call)
        return concrete._run(call.inputs)  # type: ignore[no-any-return]

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Trace for these arguments (arrays or ``jax.ShapeDtypeStruct``) without calling.

        Raises:
            ArgumentTypeError: as a call would.
        """
        call = self._signature.split(*self._signature.bind(*_examples(args, kwargs)))
        with state.tracing(self.name):
            return self._traces.get(self._key(call)) or self._new_trace(call)

    def _body(self) -> Callable[..., Any]:
        if self._instance is None:
            return self._fn
        instance = self._instance()
        assert instance is not None, "the bound function keeps its instance alive"
        return functools.partial(self._fn, instance)

    def _key(self, call: Call) -> Hashable:
        return (call.structure, call.keys, *context_keys())

    # ---- tracing ----

    def _new_trace(self, call: Call) -> ConcreteFunction:
        self._check_strict(call)
        traced, created = self._trace(call)
        self._adopt_captures(traced)
        concrete = ConcreteFunction(traced, call.without_values(), self._signature, self._launch)
        if traced.belongs_to_a_trace:
            return concrete
        known = list(identities(call.keys))
        traced.borrow([identity.value for identity in known if isinstance(identity.value, Variable)])
        self._history.add(call, self.trace_count, created)
        key = self._key(call)
        self._traces[key] = concrete
        self._warn_of_storm()
        for identity in known:
            watch = identity.watch(functools.partial(_forget, weakref.ref(self), key))
            self._watches.setdefault(key, []).append(watch)
        return concrete

    def _trace(self, call: Call) -> tuple[Traced, Sequence[Variable]]:
        """A trace, and the variables that one before it created: the body runs again to use them."""
        traced = self._trace_once(call)
        if not traced.births:
            return traced, ()
        place = state.top().base
        if traced.initial:
            if not place.is_eager:
                return traced, ()
            self._initialise(traced, call)
        again = self._trace_once(call)
        if again.births:
            lines = ", ".join(f"{v.label} at {v._created_at}" for v in again.births)
            raise VariableCreationError(
                f"{self.name} creates variables each time it runs ({lines}); a traced function may create them the"
                " first time only. Create them outside, or keep them: `if self.v is None: self.v = px.Variable(...)`."
            )
        return again, traced.births

    def _trace_once(self, call: Call) -> Traced:
        self.trace_count += 1
        parent = state.top()
        return trace(
            self._body(),
            call.arguments,
            call.input_types,
            self.name,
            lambda tracing: state.TraceFrame(parent, tracing),
        )

    def _initialise(self, traced: Traced, call: Call) -> None:
        """Give variables born in the trace their initial values; nothing else of it takes effect."""
        with state.lifted_out():
            program = traced.program.only(slice(traced.n_results + len(traced.written), None))
            if not all(variable.has_storage for variable, _ in traced.captures):
                for variable, aval in zip(traced.initial, program.out_avals):
                    variable._replace(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
                return
            values = program(traced.inputs(call.inputs, lambda capture: state.borrow(capture[0])))
            for variable, value in zip(traced.initial, values):
                variable._replace(variable._placed(value))

    @staticmethod
    def _adopt_captures(traced: Traced) -> None:
        """Variables made outside the scope move to the strategy that runs in the same program."""
        if traced.strategy is not None and state.top().is_eager:
            for variable, _ in traced.captures:
                traced.strategy.adopt(variable)

    def _launch(self, traced: Traced) -> Launch:
        packs = NO_PACKS
        if self._donate and not traced.calls_back and not traced.borrows:
            packs = Packs([variable for variable, _ in traced.captures], traced.written)
        return Launch(self._compiled(traced, packs), traced, packs)

    def _compiled(self, traced: Traced, packs: Packs) -> Compiled:
        for compiled in self._shared:
            if compiled.fits(traced, self._donate, packs):
                return compiled
        compiled = Compiled(traced, self._donate, packs)
        if compiled.calls_back:  # it fits no other trace
            return compiled
        self._shared.insert(0, compiled)
        del self._shared[_SHARED_PROGRAMS:]
        return compiled

    # ---- explaining ----

    def explain_retraces(self) -> str:
        """What changed from trace to trace: which argument, from what to what; or that variables were created.

        Example:
            >>> @px.function
            ... def double(x):
            ...     return 2 * x
            >>> _ = double(jnp.ones(2)), double(jnp.ones(3))
            >>> print(double.explain_retraces())
            double: traced 2 times.
            trace 2: argument 'x': float32[2] -> float32[3]
        """
        return "\n".join([f"{self.name}: traced {self.trace_count} times.", *self._history.lines()])

    def _check_strict(self, call: Call) -> None:
        if _Settings.strict and self._history.count and self._calls > _WARM_UP_CALLS:
            raise RetraceError(
                f"{self.name} would be traced again after warm-up ({self._history.difference(call)}), and px.strict is"
                " on. Pad or drop uneven batches, or call it once with each shape first."
            )

    def _warn_of_storm(self) -> None:
        if self._history.count == _STORM:
            warnings.warn(
                f"{self.name} has been traced for {_STORM} kinds of arguments, which is slow. Last change:"
                f" {self._history.last_difference()}. See {self.name}.explain_retraces().",
                stacklevel=4,
            )

    # ---- looking inside ----

    def untraced(self) -> Function[..., Any]:
        """The same function with no traces yet, to look at what it would compile to and leave this one alone."""
        return Function(self._fn, instance=self._instance, **self._options)

    @property
    def donates(self) -> bool:
        """Whether its programs reuse the buffers of variables that they write."""
        return self._donate

    def traced(self, *args: Any, **kwargs: Any) -> tuple[Traced, Call]:
        """One more trace for these arguments, which is not kept."""
        call = self._signature.split(*self._signature.bind(args, kwargs))
        with state.tracing(self.name):
            return self._trace(call)[0], call

    @property
    def known_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Types of arguments that it takes: by its signature, or in its last trace where none of them is static."""
        if self._signature.example is not None:
            return self._signature.example, {}
        calls = [concrete._call for concrete in self._traces.values()]
        if not calls or not all(map(is_input, calls[-1].leaves)):
            return None
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in calls[-1].keys]  # type: ignore[attr-defined]
        return jax.tree.unflatten(calls[-1].structure, types)  # type: ignore[no-any-return]

    @property
    def open_sizes(self) -> list[str]:
        """The arguments of which `input_signature` leaves a size open."""
        return self._signature.open_sizes

    def label_of_input(self, call: Call, index: int) -> str:
        """How messages call one of the inputs of a call."""
        places = [i for i, leaf in enumerate(call.leaves) if is_input(leaf)]
        return self._signature.label(call.structure, places[index])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's lowered program (``jax.stages.Lowered``) for these arguments."""
        return self.get_concrete_function(*args, **kwargs).lower()

    def cost(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """XLA's estimate for one call: ``"flops"`` and ``"bytes accessed"``."""
        analysis = self.lower(*args, **kwargs).compile().cost_analysis() or {}
        if isinstance(analysis, (list, tuple)):
            analysis = analysis[0]
        return {k: float(v) for k, v in analysis.items() if k in ("flops", "bytes accessed")}


def _remade(fn: Callable[..., Any], options: dict[str, Any]) -> Function[..., Any]:
    return Function(fn, **options)


def _drop(methods: dict[int, Any], key: int, _: weakref.ref[Any]) -> None:
    methods.pop(key, None)


def _forget(owner: weakref.ref[Any], key: Hashable) -> None:
    function = owner()
    if function is not None:
        function._traces.pop(key, None)
        function._watches.pop(key, None)


def _examples(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """ShapeDtypeStructs as arrays of that type which hold nothing."""

    def example(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not isinstance(leaf.dtype, np.dtype):  # random keys
            return jax.numpy.zeros(leaf.shape, leaf.dtype)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # one element, whatever the shape

    args, kwargs = jax.tree.map(example, (args, kwargs))
    return args, kwargs


@overload
def function(fn: Callable[P, R], /) -> Function[P, R]: ...


@overload
def function(
    fn: None = None,
    /,
    *,
    donate: bool = True,
    static_argnames: str | Sequence[str] = (),
    input_signature: Sequence[Any] | None = None,
    reduce_retracing: bool = False,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...


def function(
    fn: Any = None,
    /,
    *,
    donate: bool = True,
    static_argnames: str | Sequence[str] = (),
    input_signature: Sequence[Any] | None = None,
    reduce_retracing: bool = False,
    **unknown: Any,
) -> Any:
    """Trace a Python function into a compiled program that may read and write variables.

    Arrays and Python numbers are traced; bools, strings, None, functions and other objects are static.
    There is one trace for each combination of shapes, dtypes, static values and context. Bodies may use
    tapes, `strategy.run`, other traced functions and `px.scan`, `px.cond`, `px.while_loop`.

    Args:
        fn: the function; without it a decorator is returned.
        donate: reuse the buffers of variables that the body writes (values that you hold are safe).
        static_argnames: names of arguments to treat as static although they are numbers.
        input_signature: one ``jax.ShapeDtypeStruct`` (or pytree of them) per argument; calls are converted
            to it or refused. A symbolic size (``jax.export.symbolic_shape("rows, 3")``) stands for any (each
            size is a trace of its own).
        reduce_retracing: let Python numbers and arrays of the same dtype share a trace.
        unknown: refused. For parameters of ``tf.function`` that have no meaning here the error says what to do.

    Raises (from calls):
        ArgumentTypeError: for an unhashable static argument, or arguments that miss the signature.
        TracingError: when the body needs the value of a traced array.
        VariableCreationError: when the body creates variables on every call.

    Example:
        >>> total = px.Variable(0.0)
        >>> @px.function
        ... def add(x):
        ...     total.assign_add(x)
        ...     return total.value
        >>> float(add(2.0)), float(add(3.0)), add.trace_count
        (2.0, 5.0, 1)

    Semantics follow ``tf.function`` (TensorFlow 2.21); see docs/differences.md.
    """
    refuse_arguments("px.function", unknown, FUNCTION)
    check_flag(donate, "px.function: donate")
    check_flag(reduce_retracing, "px.function: reduce_retracing")
    names = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
    if not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise ArgumentTypeError(f"static_argnames must be names of arguments, got {static_argnames!r:.60}.")
    names = tuple(names)
    if input_signature is not None and not isinstance(input_signature, (list, tuple)):
        raise ArgumentTypeError(
            f"input_signature must be a list with one entry per argument, got {input_signature!r:.60}."
        )
    if input_signature is not None and names:
        raise ArgumentError("input_signature and static_argnames cannot be combined.")

    def decorate(f: Callable[P, R]) -> Function[P, R]:
        if isinstance(f, (classmethod, staticmethod)):
            raise ArgumentTypeError(
                f"px.function is applied to a {type(f).__name__}. Write the decorators the other way round:"
                f" @{type(f).__name__} above, @px.function below."
            )
        if not callable(f):
            raise ArgumentTypeError(f"px.function takes a function, got {type(f).__name__} {f!r:.60}.")
        return Function(
            f,
            donate=donate,
            static_argnames=names,
            input_signature=input_signature,
            reduce_retracing=reduce_retracing,
        )

    return decorate if fn is None else decorate(fn)
