"""The only module that touches JAX's extension points, and the only one that knows its versions.

Everything Phalanx needs beyond JAX's public API stands here: the current trace, traces of our own,
programs whose inputs are found while they are traced, and what JAX can prove about replicas.
Supported: jax 0.10.2 to 0.12. Names under ``jax._src`` carry no promise; a release that moves one
of them breaks this file and no other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import linear_util as _lu
from jax._src import mesh as _mesh
from jax._src import traceback_util as _traceback_util
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax.extend import core as _jex
from jax.extend import source_info_util as _source_info
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REPLICA_AXIS = "replica"
"""Name of the one mesh axis that Phalanx uses."""

Trace: TypeAlias = Any
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
    return (trace or current_trace()) is _core.eval_trace


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
    and return the list of its outputs.
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

    def _run(self, operation: Operation, args: list[Any]) -> list[Any]:
        with using_trace(self.parent_trace):
            if self.observer.wants(args):
                return self.observer.observe(operation, args)
            return operation(*args)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        outs = self._run(Operation(primitive, params), list(tracers))
        return outs if primitive.multiple_results else outs[0]

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        return self._run(CustomOperation(primitive, dict(params, subfuns=(f,))), list(tracers))

    process_shard_map = process_call

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self._run(CustomJvpOperation(primitive, dict(params, subfuns=(fun, jvp))), list(tracers))

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._run(CustomVjpOperation(primitive, dict(params, subfuns=(fun, fwd, bwd))), list(tracers))


class Operation:
    """One primitive with its parameters: a function from arrays to a list of arrays."""

    __slots__ = ("params", "primitive")

    def __init__(self, primitive: Any, params: dict[str, Any]) -> None:
        self.primitive = primitive
        self.params = params

    def __call__(self, *args: Any) -> list[Any]:
        outs = self.primitive.bind(*args, **self.params)
        return list(outs) if self.primitive.multiple_results else [outs]

    def lifted(self, *args: Any) -> list[Any]:
        """The operation on arguments some of which vary although it was made for invariant ones."""
        if self.primitive.name not in ("jit", "pjit"):
            return self(*_alike(args) if len(args) > 1 else args)
        closed = self.params["jaxpr"]
        made_for = [v.aval for v in closed.jaxpr.invars]
        same = all(aval_varies(a) == varies(x) for a, x in zip(made_for, args))
        if same and not _has(closed.jaxpr, frozenset((_CUSTOM_VJP,))):
            return self(*args)
        return _replay_lifted(closed, args)

    @property
    def is_lift(self) -> bool:
        """True for JAX's cast from invariant to varying: the identity on values."""
        return self.primitive.name in ("pvary", "pcast")

    def key(self) -> Hashable | None:
        """Equal for operations that compute the same; None when the parameters do not hash."""
        key = (self.primitive, tuple(self.params.items()))
        try:
            hash(key)
        except TypeError:
            return None
        return key


class CustomOperation(Operation):
    """A custom_jvp, custom_vjp or call primitive: binding it again lets JAX's own rules apply."""

    __slots__ = ()

    def __call__(self, *args: Any) -> list[Any]:
        trace = current_trace()
        with _jex.take_current_trace():
            avals = tuple(_core.typeof(x) for x in args)
            return list(self.primitive.bind_with_trace(trace, tuple(args), avals, dict(self.params)))

    def lifted(self, *args: Any) -> list[Any]:
        return self(*args)

    @property
    def is_lift(self) -> bool:
        return False

    def key(self) -> Hashable | None:
        return None


class CustomJvpOperation(CustomOperation):
    """A custom_jvp: JAX takes note of which of function and rule ran, and of the types that they got."""

    __slots__ = ()

    def __call__(self, *args: Any) -> list[Any]:
        for subfun in self.params["subfuns"]:
            for store in filter(None, subfun.stores):
                store.reset()  # the last run counts; JAX refuses notes of two
        return super().__call__(*args)


_CUSTOM_VJP = "custom_vjp_call"


class CustomVjpOperation(CustomOperation):
    """A custom_vjp: its rule must give cotangents of the arguments' types, which knows the call only."""

    __slots__ = ()

    def lifted(self, *args: Any) -> list[Any]:
        fun, fwd, bwd = self.params["subfuns"]
        return CustomOperation(self.primitive, dict(self.params, subfuns=(fun, fwd, _lifted_rule(bwd))))(*args)


def _lifted_rule(bwd: Any) -> Any:
    """The backward rule of a custom_vjp for arguments that all vary; it gives cotangents that do."""
    rule = _lu.wrap_init(bwd.f, debug_info=bwd.debug_info)
    for transform, arguments in reversed(bwd.transforms):
        if arguments and isinstance(arguments[0], jax.tree_util.PyTreeDef):  # JAX's check against the arguments' types
            tree, avals, *options = arguments
            varying = tuple(local_aval(a.shape, a.dtype, weak_type=a.weak_type, varying=True) for a in avals)
            rule, arguments = rule.wrap(_lift_results, (), None), (tree, varying, *options)
        rule = rule.wrap(transform, arguments, None)
    return rule


def _lift_results(rule: Callable[..., Any], *args: Any) -> Any:
    return jax.tree.map(lambda ct: lift(ct) if isinstance(ct, jax.Array) else ct, rule(*args))


def _alike(args: Sequence[Any]) -> list[Any]:
    return [lift(x) for x in args] if any(map(varies, args)) else list(args)


def _replay_lifted(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr whose types say 'invariant' on values that vary."""
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, args))
    constvars = list(getattr(closed, "constvars", ())) or list(closed.jaxpr.constvars)
    values.update(zip(constvars, closed.consts))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jex.Literal) else values[atom]

    for equation in closed.jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        kind = CustomVjpOperation if equation.primitive.name == _CUSTOM_VJP else Operation
        operation = kind(equation.primitive, equation.primitive.get_bind_params(equation.params))
        outs = inputs if operation.is_lift and varies(inputs[0]) else operation.lifted(*inputs)
        values.update(zip(equation.outvars, outs))
    return [read(atom) for atom in closed.jaxpr.outvars]


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
    return _alias_p.bind(x)


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

    def bind(self, *args: Any) -> list[Any]:
        """One jit equation in the current trace (or one compiled call when eager)."""
        n_in, n_out = len(self.jaxpr.jaxpr.invars), len(self.jaxpr.jaxpr.outvars)
        primitive, params = _jit_template(n_in, n_out, jax.sharding.get_abstract_mesh())
        return list(primitive.bind(*args, **dict(params, jaxpr=self.jaxpr, name=self.name)))

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
        return jax.jit(self.bind, keep_unused=True).lower(*args).as_text()


@functools.lru_cache(maxsize=1024)
def _jit_template(n_in: int, n_out: int, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """Parameters of a jit equation of this arity, taken from JAX so that they fit its version."""

    def program(*args: Any) -> list[Any]:
        return [0.0] * n_out

    scalar = jax.ShapeDtypeStruct((), np.float32)
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
    """How many kinds of calls of a jitted function pass through C++ alone, as far as was seen."""
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
    """The type of `value` as an input of a program: the same wherever it lies, as far as XLA places what it computes."""
    aval = jax.typeof(value)
    if in_replica_trace():
        return local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=aval_varies(aval))
    mesh = aval.sharding.mesh
    return aval if mesh.empty or not mesh.are_all_axes_auto else aval.update(sharding=None)


def on_replicas(mesh: Mesh, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over the replica axis, with the checks that prove what is invariant."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin ppermute pgather all_gather all_gather_invariant all_gather_reduced"
    " all_to_all reduce_scatter psum_scatter ragged_all_to_all".split()
)
"""Operations in which the replicas wait for each other."""


_CALLBACKS = frozenset(("io_callback", "pure_callback", "debug_callback"))


def has_collective(jaxpr: Any) -> bool:
    """True when the replicas wait for each other somewhere in the jaxpr."""
    return _has(jaxpr, COLLECTIVES)


def has_callback(jaxpr: Any) -> bool:
    """True when Python functions, which may raise, are called from the compiled program."""
    return _has(jaxpr, _CALLBACKS)


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
