"""The only module that touches JAX's extension points, and the only one that knows its versions.

Everything Phalanx needs beyond JAX's public API stands here: the current trace, traces of our own,
programs whose inputs are found while they are traced, and what JAX can prove about replicas.
Supported: jax 0.10.2 to 0.12. Names under ``jax._src`` carry no promise; a release that moves one
of them breaks this file and no other.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api_util as _api_util
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import parallel as _parallel
from jax._src.lax.control_flow import loops as _loops
from jax.extend import core as _jex
from jax.extend import source_info_util as _source_info
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx.errors import TapeError

REPLICA_AXIS = "replica"
"""Name of the one mesh axis that Phalanx uses."""

Trace: TypeAlias = Any
ConcreteArray: TypeAlias = _array.ArrayImpl
"""The type of arrays that have a value."""
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))
_STDLIB = sysconfig.get_path("stdlib") + os.sep

_source_info.register_exclusion(_PACKAGE)
_traceback_util.register_exclusion(_PACKAGE)


# ---- the current trace ---------------------------------------------------------------------------


def current_trace() -> Trace:
    """The trace that JAX hands every operation of this thread to."""
    return _core.trace_ctx.trace


def set_trace(trace: Trace) -> None:
    """Make `trace` the current one; whoever calls this restores it."""
    _core.trace_ctx.set_trace(trace)


using_trace = _jex.set_current_trace
"""Context manager: operations go to the given trace."""


def is_eager(trace: Trace | None = None) -> bool:
    """True when operations run at once (no transformation and no tape is active)."""
    return _live(trace or current_trace()) is _core.eval_trace


def trace_chain(trace: Trace | None = None) -> Iterator[Trace]:
    """The current trace and those it stands on, innermost first, without the eager floor."""
    link = trace or current_trace()
    while link is not None and link is not _core.eval_trace:
        yield link
        link = getattr(link, "parent_trace", None)


def is_staging(trace: Trace) -> bool:
    """True for a trace that writes a program (jit, scan, cond ...) and computes nothing itself."""
    return isinstance(trace, _pe.DynamicJaxprTrace)


def staged_for(trace: Trace) -> str:
    """What a staging trace is for, in JAX's words: 'jit', 'scan', 'checkpoint / remat' ..."""
    return str(getattr(trace.frame.debug_info, "traced_for", "jit"))  # type: ignore[attr-defined]


def trace_context() -> Hashable:
    """JAX settings that belong to the key of a cached trace (x64, matmul precision ...)."""
    generation = _body_generation.value
    if not generation:
        return _config.trace_context()
    set_body_generation(0)
    try:
        return _config.trace_context()
    finally:
        set_body_generation(generation)


_body_generation = jax.make_user_context(0)


def set_body_generation(number: int) -> None:
    """Let JAX find only bodies that it traced under this number in this place.

    JAX keeps what it traced of a function given to `lax.scan`, `cond`, `checkpoint` ... by the function's
    identity, together with the traced values that the function closed over at the time.
    """
    _body_generation._obj.set_local(number)


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Run the block eagerly, whatever is being traced around it.

    Inside `shard_map` the axis names and the manual mesh are contexts of their own: without
    resetting them, eager operations would be typed as if they ran on one replica.
    """
    axis_env = _core.trace_ctx.axis_env
    with using_trace(_core.eval_trace):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            with _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh):
                yield
        finally:
            _core.trace_ctx.set_axis_env(axis_env)


class OperationTrace(_core.Trace):  # type: ignore[misc]
    """A trace that runs every operation on its parent and lets an observer watch it.

    The observer is asked ``wants(args)``; if so ``observe(operation, args)`` must run the operation
    and return the list of its outputs. Without an observer it changes nothing.
    """

    __slots__ = ("observer", "parent_trace")

    def __init__(self, parent: Trace, observer: Any) -> None:
        super().__init__()
        self.parent_trace = parent
        self.observer = observer
        self.requires_low = parent.requires_low  # type: ignore[misc]

    def stage_value(self, val: Any) -> Any:
        # Without the parent's word numpy values become JAX's literal type, which few libraries take.
        return self.parent_trace.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        observer = self.observer
        if observer is None:
            return self.parent_trace.process_primitive(primitive, tracers, params)
        if primitive not in _WITHOUT_BODIES:
            primitive, tracers, params = _open_closures(observer, primitive, tracers, params)
        if not observer.wants(tracers):
            return self.parent_trace.process_primitive(primitive, tracers, params)
        with using_trace(self.parent_trace):
            if primitive.name == "stop_gradient":  # an identity whose result, where nothing flows, is a new value
                return alias(tracers[0])
            outs = observer.observe(Operation(primitive, params), list(tracers))
        return outs if primitive.multiple_results else outs[0]

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        return self._custom(primitive, (f,), tracers, params)

    def process_shard_map(self, primitive: Any, f: Any, tracers: Any, /, **params: Any) -> Any:
        # As one finished equation, with what `f` closes over among its inputs.
        shapes: list[Any] = []

        def staged(tracing: Tracing) -> list[Any]:
            inputs = [tracing.input(_core.typeof(x)) for x in tracers]
            outs = CustomOperation(primitive, (f,), params).bind(*inputs)
            shapes.append(outs)
            return list(outs)

        with using_trace(self.parent_trace):
            program = trace_program(staged, "shard_map", f)
        args = [*(tracers[i] for i in program.used), *program.constants]
        return shapes[0].update(self.process_primitive(*program.equation(args)))

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self._custom(primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._custom(primitive, (fun, fwd, bwd), tracers, params)

    def _custom(self, primitive: Any, functions: tuple[Any, ...], tracers: Any, params: dict[str, Any]) -> Any:
        observer, args = self.observer, list(tracers)
        if observer is not None:
            check = _NoClosures(observer, functions[0], args)
            functions = tuple(f.wrap(_checked, (check,), None) for f in functions)
        operation = CustomOperation(primitive, functions, params)
        with using_trace(self.parent_trace):
            if observer is not None and observer.wants(args):
                return observer.observe(operation, args)
            return operation(*args)


def _checked(f: Any, check: _NoClosures, *args: Any) -> Any:
    with using_trace(OperationTrace(current_trace(), check.given(args))):
        return f(*args)


class _ThreadTraces(threading.local):
    def __init__(self) -> None:
        self.eager: list[OperationTrace] = []
        """One trace for each depth of observers in eager code."""


_thread_traces = _ThreadTraces()


def observe_operations(observer: Any) -> OperationTrace:
    """Put a trace with this observer on top of the current one.

    JAX makes the current trace part of its cache keys. So in eager code the same few objects are used
    again and again: a new one each time would add entries to JAX's caches and never find them.
    """
    close_traces()
    parent, chain = current_trace(), _thread_traces.eager
    if not is_eager(parent) and parent not in chain:
        trace = OperationTrace(parent, observer)
    else:
        depth = 0 if is_eager(parent) else chain.index(parent) + 1
        if depth == len(chain):
            chain.append(OperationTrace(parent, None))
        trace = chain[depth] if chain[depth].observer is None else OperationTrace(parent, None)
        trace.observer = observer
    set_trace(trace)
    return trace


def close_traces() -> None:
    """Take traces that have lost their observer off the top."""
    set_trace(_live(current_trace()))


def _live(trace: Trace) -> Trace:
    while isinstance(trace, OperationTrace) and trace.observer is None:
        trace = trace.parent_trace
    return trace


class _NoClosures:
    """Refuses what JAX's custom rules cannot see: watched values that their functions close over."""

    def __init__(self, observer: Any, fun: Any, args: Sequence[Any]) -> None:
        self._observer = observer
        self._fun = fun
        self._given = args

    def given(self, args: Sequence[Any]) -> _NoClosures:
        """The check for a call with these arguments."""
        return _NoClosures(self._observer, self._fun, [*self._given, *args])

    def wants(self, args: Sequence[Any]) -> bool:
        if self._observer.wants([x for x in args if not any(x is given for given in self._given)]):
            raise TapeError(
                f"{getattr(self._fun, '__name__', 'a function')} at {user_line()} has a derivative of its own"
                " (jax.custom_jvp or jax.custom_vjp), which is about its arguments only; but it uses a watched value"
                " that it closes over: a variable, or something computed from one. Pass it as an argument."
            )
        return False


_WITHOUT_BODIES: set[Any] = set()
"""Primitives that were seen to have no jaxprs among their parameters."""

_closed_over: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
_opened: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def _open_closures(observer: Any, primitive: Any, args: Any, params: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The same operation with watched arrays that a jitted function closes over among its arguments.

    In eager code what is closed over is a plain array, which `jax.jit` keeps as a constant of its program; all other
    operations with bodies take such arrays as arguments already.
    """
    bodies = list(_core.jaxprs_in_params(params))
    if not bodies:
        _WITHOUT_BODIES.add(primitive)
    closed = params.get("jaxpr")
    constants = list(getattr(closed, "consts", ()))
    if constants and observer.wants(constants):
        if closed not in _opened:
            _opened[closed] = _with_constants_as_inputs(closed, str(params.get("name", primitive)))
        return _open_closures(observer, *_opened[closed].equation([*constants, *args]))
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


class Operation:
    """One primitive with its parameters: a function from arrays to a list of arrays."""

    __slots__ = ("params", "primitive")

    def __init__(self, primitive: Any, params: dict[str, Any]) -> None:
        self.primitive = primitive
        self.params = params

    def __call__(self, *args: Any) -> list[Any]:
        if self.params.get("inline") and not is_eager():
            # As JAX does it in a program; most functions of jnp ask for it.
            return list(_jex.jaxpr_as_fun(self.params["jaxpr"])(*args))
        outs = self.primitive.bind(*args, **self.params)
        return list(outs) if self.primitive.multiple_results else [outs]

    def key(self) -> Hashable | None:
        """Equal for operations that compute the same, without keeping jaxprs alive; None when there is none."""
        key = (self.primitive, *self.params, *map(_without_jaxprs, self.params.values()))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    @staticmethod
    def of(key: Any) -> Operation:
        """The operation with this key, for as long as somebody else keeps its jaxprs."""
        primitive, *items = key
        names, values = items[: len(items) // 2], items[len(items) // 2 :]
        return Operation(primitive, dict(zip(names, map(_with_jaxprs, values))))


class CustomOperation(Operation):
    """A custom_jvp, custom_vjp or call primitive: binding it again lets JAX's own rules apply."""

    __slots__ = ()

    def __init__(self, primitive: Any, functions: tuple[Any, ...], params: dict[str, Any]) -> None:
        super().__init__(primitive, dict(params, subfuns=functions))

    def __call__(self, *args: Any) -> list[Any]:
        return list(self.bind(*args))

    def bind(self, *args: Any) -> Any:
        """Outputs in the container that JAX's caller expects."""
        for function in self.params["subfuns"]:
            for store in filter(None, getattr(function, "stores", ())):
                store.reset()  # JAX takes note of which of function and rule ran, and refuses notes of two runs
        trace = current_trace()
        with _jex.take_current_trace():
            avals = tuple(_core.typeof(x) for x in args)
            return self.primitive.bind_with_trace(trace, tuple(args), avals, dict(self.params))

    def key(self) -> Hashable | None:
        return None


_Jaxpr = (_core.Jaxpr, _jex.ClosedJaxpr)


class _Reference(weakref.ref):  # type: ignore[type-arg]
    """A jaxpr that is not kept alive."""

    __slots__ = ()


class _References(tuple[Any, ...]):
    """A tuple some of whose items are references, after its type."""

    __slots__ = ()


def zero_outputs(pullback: Any) -> list[bool]:
    """Which outputs of the function that `jax.vjp` differentiated have no derivative but zero."""
    return list(pullback.fun.args[1])


def pulled_to(pullback: Any, outputs: Sequence[bool]) -> list[bool]:
    """To which inputs cotangents of these outputs (without those of `zero_outputs`) come back."""
    linear = pullback.jaxpr
    _, used = _pe.dce_jaxpr(getattr(linear, "jaxpr", linear), list(outputs))
    return list(used[-pullback.in_tree.num_leaves :])


def reaches(operation: Operation, args: Sequence[Any], mask: Sequence[bool]) -> list[bool]:
    """Which outputs of the operation are computed from arguments that `mask` marks."""
    closed = jax.make_jaxpr(operation)(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    found = []
    for out in jaxpr.outvars:
        _, used = _pe.dce_jaxpr(jaxpr, [other is out for other in jaxpr.outvars])
        found.append(any(u and m for u, m in zip(used[-len(args) :], mask)))
    return found


def _without_jaxprs(value: Any) -> Any:
    if isinstance(value, _Jaxpr):
        return _Reference(value)
    if isinstance(value, tuple) and any(isinstance(item, (*_Jaxpr, tuple)) for item in value):
        return _References((type(value), *map(_without_jaxprs, value)))
    return value


def _with_jaxprs(value: Any) -> Any:
    if isinstance(value, _Reference):
        return value()
    if isinstance(value, _References):
        make, *items = value
        items = list(map(_with_jaxprs, items))
        return make(*items) if hasattr(make, "_fields") else make(items)
    return value


class OperationCache:
    """What was made for operations, by their keys; let go when the jaxpr of one is."""

    def __init__(self, make: Callable[..., Any], size: int = 4096) -> None:
        self._make = make
        self._size = size
        self._entries: dict[Hashable, tuple[Any, list[Any]]] = {}

    def get(self, key: Any, *rest: Hashable) -> Any:
        """``make(key, *rest)``, made once."""
        full = (key, *rest)
        entry = self._entries.get(full)
        if entry is None:
            entries = self._entries
            refs = [weakref.ref(ref(), lambda _: entries.pop(full, None)) for part in key for ref in _references(part)]
            entry = self._entries[full] = (self._make(key, *rest), refs)
            while len(self._entries) > self._size:
                self._entries.pop(next(iter(self._entries)), None)
        return entry[0]


def _references(key: Any) -> Iterator[Any]:
    if isinstance(key, _Reference):
        yield key
    elif isinstance(key, _References):
        for item in key:
            yield from _references(item)


# ---- identity and aliases ------------------------------------------------------------------------


def is_tracer(value: Any) -> bool:
    """True for a value of a program that is being traced."""
    return isinstance(value, _core.Tracer)


def is_leaked(value: Any) -> bool:
    """True for a value of a program of ours whose body has ended."""
    return is_tracer(value) and value._trace in _ended


def _same_buffers(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_same_buffers(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if not isinstance(x, jax.Array):
        return jnp.asarray(x)
    buffers: Any = x
    return _array.ArrayImpl(x.aval, x.sharding, buffers._arrays, committed=buffers._committed, _skip_checks=True)


_alias_p = _jex.Primitive("phalanx_alias")
_alias_p.def_impl(_same_buffers)
_alias_p.def_abstract_eval(lambda aval: aval)
_ad.deflinear(_alias_p, lambda ct: [ct])
_batching.defvectorized(_alias_p)
_mlir.register_lowering(_alias_p, lambda ctx, x: [x])


def alias(x: Any) -> Any:
    """The same value and the same buffers as a new object (operations are told apart by identity)."""
    return _same_buffers(x) if is_eager() and not is_tracer(x) else _alias_p.bind(x)


_read_again_p = _jex.Primitive("phalanx_read_again")
_read_again_p.def_impl(lambda stored, entry: stored)
_read_again_p.def_abstract_eval(lambda stored, entry: stored)
_ad.defjvp(_read_again_p, None, lambda tangent, stored, entry: tangent)
_batching.defbroadcasting(_read_again_p)
_mlir.register_lowering(_read_again_p, lambda ctx, stored, entry: [stored])


def read_again(stored: Any, entry: Any) -> Any:
    """`stored`, a new value of a variable that a program was given as `entry`; its gradient is that of `entry`."""
    return _read_again_p.bind(stored, entry)


def register_array_like(cls: type, read: Callable[[Any], Any]) -> None:
    """Let JAX's functions take instances of `cls` wherever they take an array.

    `__jax_array__` alone is refused by everything jitted, and a pytree node would make `jax.tree.map`
    see the value where users want the object itself.
    """

    def shard(xs: Sequence[Any], *rest: Any) -> Any:
        return _pxla.shard_arg_handlers[type(read(xs[0]))]([read(x) for x in xs], *rest)

    _core.pytype_aval_mappings[cls] = lambda x: _core.typeof(read(x))
    _dtypes.canonicalize_value_handlers[cls] = read
    _pxla.shard_arg_handlers[cls] = shard


# ---- programs ------------------------------------------------------------------------------------


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


# ---- replicas ------------------------------------------------------------------------------------


def in_replica_trace() -> bool:
    """True while a program for the replica axis is being traced."""
    return REPLICA_AXIS in getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())


def varies(value: Any) -> bool:
    """True when JAX cannot prove that `value` is the same on every replica."""
    return aval_varies(jax.typeof(value))


def aval_varies(aval: Any) -> bool:
    """`varies` of a type."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind is not None and REPLICA_AXIS in kind.varying


def lift(value: Any) -> Any:
    """`value` typed as varying, so that gradients with respect to it stay local to the replica."""
    return value if varies(value) else jax.lax.pcast(value, REPLICA_AXIS, to="varying")


_settle_number_type = _loops._promote_weak_typed_input


def _settle_carry(value: Any, before: Any, after: Any) -> tuple[Any, bool]:
    """The start of a carry in the type that the body gives back.

    JAX's `scan` and `while_loop` do it for the types of Python numbers, and refuse a carry that starts with the
    same value on all replicas (zeros, most often) and becomes the replica's own. Here it starts as its own.
    """
    value, changed = _settle_number_type(value, before, after)
    if in_replica_trace() and aval_varies(after) and not varies(value):
        return lift(value), True
    return value, changed


_loops._promote_weak_typed_input = _settle_carry


def typed_as(aval: Any, value: Any) -> Any:
    """`value` typed as varying or not, as `aval` is, whatever it is in truth: see `local_gradients`."""
    if aval_varies(aval):
        return lift(value)
    return _typed_invariant_p.bind(value) if varies(value) else value


def all_gather(value: Any, axis: int, *, stacked: bool) -> Any:
    """The parts of all replicas side by side, typed as the same on every replica."""
    return jax.lax.all_gather(lift(value), REPLICA_AXIS, axis=axis, tiled=not stacked, to="invarying")


@functools.lru_cache(maxsize=4096)
def _local_aval(shape: tuple[int, ...], dtype: Any, weak_type: bool, varying: bool, mesh: Any) -> Any:
    def example() -> Any:
        x = jax.lax.full(shape, 0, dtype) if not jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.empty(shape, dtype)
        return jax.lax.pcast(x, REPLICA_AXIS, to="varying") if varying else x

    aval = jax.make_jaxpr(example)().out_avals[0]
    return aval.update(weak_type=weak_type)


def local_aval(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False, varying: bool) -> Any:
    """The type of a value on one replica; needs the replica axis in scope."""
    return _local_aval(tuple(shape), dtype, weak_type, varying, jax.sharding.get_abstract_mesh())


def type_of(value: Any) -> Any:
    """The type of `value` as an input of a program: the same on whatever devices it lies."""
    aval = value.aval if type(value) is ConcreteArray else jax.typeof(value)
    if in_replica_trace():
        return local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=aval_varies(aval))
    return _without_mesh(aval)


@functools.lru_cache(maxsize=4096)
def _without_mesh(aval: Any) -> Any:
    mesh = aval.sharding.mesh
    return aval if mesh.empty or not mesh.are_all_axes_auto else aval.update(sharding=None)


def on_replicas(mesh: Mesh, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over the replica axis, with the checks that prove what is invariant."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


COLLECTIVES = frozenset(
    "psum psum_invariant phalanx_sum_of_one pmax pmin ppermute pgather all_gather all_gather_invariant all_gather_reduced"
    " all_to_all reduce_scatter psum_scatter ragged_all_to_all".split()
)
"""Operations in which the replicas wait for each other."""


def has_collective(jaxpr: Any) -> bool:
    """True when the replicas wait for each other somewhere in the jaxpr."""
    return _has(jaxpr, COLLECTIVES)


def has_callback(jaxpr: Any) -> bool:
    """True when Python functions, which may raise, are called from the compiled program."""
    # All but this one are effects of the program.
    return bool(jaxpr.effects) or _has(jaxpr, frozenset(("pure_callback",)))


def _has(jaxpr: Any, names: frozenset[str]) -> bool:
    return any(
        equation.primitive.name in names or any(_has(inner, names) for inner in inner_jaxprs(equation))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among an operation's parameters: bodies, branches, called functions."""
    return list(_core.jaxprs_in_params(equation.params))


def split_scan(equation: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """One value per input of a `scan`, as those of its constants, its carry and its rows."""
    params = equation.params
    if "ft_in" in params:  # since jax 0.12
        consts, carry, rows = params["ft_in"].update(list(values)).unpack()
        return list(consts), list(carry), list(rows)
    start, stop = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(values[:start]), list(values[start:stop]), list(values[stop:])


def is_literal(atom: Any) -> bool:
    """True for a constant that stands in the jaxpr itself."""
    return isinstance(atom, _jex.Literal)


def line_of(equation: Any) -> str:
    """'file.py:12' of the user's line that an operation comes from."""
    return re.sub(r"(:\d+):\d+ \(.*\)$", r"\1", _source_info.summarize(equation.source_info))


# ---- gradients local to a replica ----------------------------------------------------------------

_local = jax.make_user_context(False)


_sum_of_one_p = _jex.Primitive("phalanx_sum_of_one")
_sum_of_one_p.def_abstract_eval(
    lambda aval: local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=False)
)
_ad.deflinear(_sum_of_one_p, lambda ct: [lift(ct)])
_batching.defvectorized(_sum_of_one_p)
_mlir.register_lowering(_sum_of_one_p, lambda ctx, x: [x])


def sum_of_one(value: Any) -> Any:
    """The sum over the replicas when there is one: its varying value, typed as the same on all.

    XLA's CPU compiler keeps a psum of one and copies the value.
    """
    return _sum_of_one_p.bind(value)


@contextlib.contextmanager
def local_gradients() -> Iterator[None]:
    """What JAX transposes in the block are gradients of this replica's own target.

    JAX differentiates the sum over the replicas. To the gradient with respect to a value that is the same on all
    of them it adds up what each replica says, where the value is cast to varying; and what is said about an
    all-reduced value it takes for the same everywhere. A tape in a replica wants neither. The transposes of these
    casts and reductions are therefore replaced: after a cast the cotangent is typed as invariant, as JAX's rules
    want it, but stays the replica's own; before a reduction the cotangents of all replicas are added up, since a
    replica's value enters the targets of all of them. Rules of `jax.custom_vjp`, written for one device, may give a
    varying cotangent for an invariant argument, which JAX's checks would refuse.
    """
    with _local(True), _config.disable_bwd_checks(True):
        yield


def local_lift(value: Any) -> Any:
    """`lift` for a value that is the replica's own whatever its type says: a cotangent, a tangent."""
    return value if varies(value) else _local_lift_p.bind(value)


def _cast(name: str, varying: bool, transpose: Callable[[Any], Any]) -> Any:
    """A primitive that changes the type of a value and nothing else."""

    def of_cotangent(ct: Any) -> list[Any]:
        if not _local.value:
            raise TapeError(
                "The gradient that a tape in a replica took, with respect to an array that is the same on all replicas,"
                " is differentiated again by something outside that replica's tapes (jax.grad, or a tape around"
                " strategy.run). Use a px.Variable instead of the array, or a second px.GradientTape in the replica."
            )
        return [transpose(ct)]

    primitive = _jex.Primitive(name)
    primitive.def_abstract_eval(
        lambda aval: local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=varying)
    )
    _ad.deflinear(primitive, of_cotangent)
    _batching.defvectorized(primitive)
    _mlir.register_lowering(primitive, lambda ctx, x: [x])
    return primitive


_typed_invariant_p = _cast("phalanx_typed_invariant", False, local_lift)
_local_lift_p = _cast("phalanx_local_lift", True, _typed_invariant_p.bind)


def _replace_transpose(primitive: Any, local: Callable[..., Any]) -> None:
    original = _ad.primitive_transposes[primitive]

    def transpose(ct: Any, x: Any, **params: Any) -> Any:
        axes = params.get("axes", params.get("axis_name"))
        if not _local.value or type(ct) is _ad.Zero or REPLICA_AXIS not in (axes or ()):
            return original(ct, x, **params)
        return local(original, ct, x, **params)

    _ad.primitive_transposes[primitive] = transpose


def _transpose_lift(original: Any, ct: Any, x: Any, **params: Any) -> Any:
    return [_typed_invariant_p.bind(ct)]


def _transpose_reduction(original: Any, ct: Any, x: Any, **params: Any) -> Any:
    return original(jax.lax.psum(local_lift(ct), REPLICA_AXIS), x, **params)


_replace_transpose(_core.pvary_p, _transpose_lift)
_replace_transpose(_parallel.psum_invariant_p, _transpose_reduction)
_replace_transpose(_parallel.all_gather_invariant_p, _transpose_reduction)


# ---- devices -------------------------------------------------------------------------------------


def replica_mesh(devices: Sequence[Any]) -> Mesh:
    """A one-axis mesh over the devices, in their order."""
    return Mesh(np.array(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def split(mesh: Mesh) -> NamedSharding:
    """Axis 0 is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))


def span(devices: Sequence[Any]) -> str:
    """Short names of devices: 'cpu:0-3', 'gpu:1', 'cpu:2,0'."""
    ids = [d.id for d in devices]
    in_a_row = ids == list(range(ids[0], ids[0] + len(ids))) and len(ids) > 1
    return f"{devices[0].platform}:" + (f"{ids[0]}-{ids[-1]}" if in_a_row else ",".join(map(str, ids)))


def backend_started() -> bool:
    """True once JAX has opened its devices; settings about them come too late then."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


# ---- several processes ---------------------------------------------------------------------------

_POLL_MS = 200


class Roundtable:
    """Where processes tell each other something, round by round, over JAX's coordination service.

    It does not go through the devices, so that it never stands between the collectives of two steps. The
    first process collects what the others say and tells them all of it.
    """

    def __init__(self, name: str, processes: Sequence[int], timeout: float) -> None:
        self._name = name
        self._processes = list(processes)
        self._timeout = timeout
        self._round = 0

    def tell(self, value: str, stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """Say `value` and hear what each process says in this round, in the order of the processes.

        Raises:
            TimeoutError: naming the process that did not come.
            InterruptedError: when ``stopped()`` became true meanwhile.
        """
        number = self._round
        first, *others = self._processes
        if jax.process_index() != first:
            self._say(value)
            return list(json.loads(self._hear(number, "all", first, stopped)))
        said = [value, *(self._hear(number, str(process), process, stopped) for process in others)]
        self._say(json.dumps(said))
        _distributed.global_state.client.key_value_delete(f"{self._name}/{number - 1}")  # all have read that by now
        return said

    def leave(self, value: str) -> None:
        """Say a last word, which the others hear in the round that they are in."""
        first = self._processes[0]
        self._say(json.dumps([value] * len(self._processes)) if jax.process_index() == first else value)

    def _say(self, value: str) -> None:
        me, client = jax.process_index(), _distributed.global_state.client
        client.key_value_set(f"{self._name}/{self._round}/{'all' if me == self._processes[0] else me}", value)
        self._round += 1

    def _hear(self, number: int, key: str, process: int, stopped: Callable[[], bool]) -> str:
        client = _distributed.global_state.client
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            if stopped():
                raise InterruptedError
            try:
                return str(client.blocking_key_value_get(f"{self._name}/{number}/{key}", _POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise TimeoutError(f"process {process} cannot be reached any more: {error}") from error
        raise TimeoutError(f"process {process} did not come within {self._timeout:.0f} s")


# ---- the user's line -----------------------------------------------------------------------------


@functools.cache
def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return False
    path = os.path.abspath(filename)
    in_library = path.startswith(_STDLIB) and "site-packages" not in path
    return not (in_library or path.startswith((_PACKAGE + os.sep, _JAX + os.sep)))


def line_of_error(error: BaseException) -> str:
    """'file.py:12' of the innermost of the user's lines that an error passed through."""
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return lines[-1] if lines else user_line()


def user_line() -> str:
    """'file.py:12' of the innermost frame that is neither ours nor JAX's nor Python's own."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown line>"
