"""A step as a program for a target: traced with the strategy's replicas on devices that need not be here."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from phalanx import _jax, state
from phalanx._conversion import is_key
from phalanx._explain import why_not_traced
from phalanx._launch import Compiled
from phalanx._methods import BoundFunction
from phalanx._signature import Call
from phalanx._traced import Traced
from phalanx.distribute.strategy import Strategy
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError
from phalanx.function import Function
from phalanx.preflight.operations import size_of
from phalanx.preflight.targets import Target
from phalanx.variables import Variable


@dataclass(frozen=True)
class Entry:
    """One input of a program."""

    kind: str
    """params, slots, inputs or constants."""
    name: str
    shape: tuple[int, ...]
    """On one device."""
    whole_shape: tuple[int, ...]
    """Of all devices' parts together."""
    dtype: Any
    replicated: bool
    donated: bool = False
    created_at: str = ""

    @property
    def bytes(self) -> int:
        """On one device, without padding."""
        return size_of(self.shape, self.dtype)


@dataclass(frozen=True)
class Program:
    """A step, ready to be compiled."""

    name: str
    lowered: _jax.Lowered
    entries: list[Entry]
    """In the order of the program's inputs; those that it does not use are left out."""
    jaxpr: Any
    num_devices: int
    global_batch: int | None
    symbolic: list[str] = field(default_factory=list)
    """Arguments whose sizes the function leaves open."""

    @property
    def rows_per_device(self) -> int | None:
        """Of the batch."""
        return None if self.global_batch is None else max(1, self.global_batch // self.num_devices)


# ---- steps with variables ------------------------------------------------------------------------


class SliceFrame(state.EagerFrame):
    """The floor of a program for another number of replicas: variables have types, and components for each of these."""

    def type_of(self, variable: Variable) -> Any:
        if variable._stored is None:
            return super().type_of(variable)
        shape = (variable.num_components, *variable.shape) if variable.per_replica else variable.shape
        return _jax.local_aval(shape, variable.dtype, varying=False)


class VariableStep:
    """A function that reads and writes variables, with example arguments."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strategy: Strategy | None,
    ) -> None:
        self._keep_alive = fn
        self._function = _untraced(fn)
        self.name = self._function.name
        self._leaves, self._structure = jax.tree.flatten((args, kwargs), is_leaf=is_per_replica)
        parts = [leaf for leaf in self._leaves if is_per_replica(leaf)]
        self.strategy = strategy or next((p.strategy for p in parts), None) or state.context().strategy
        self.rows = next((r for r in map(_rows, self._leaves) if r is not None), None)
        """Of the global batch, in the example arguments."""
        self._context = state.context()
        """The scope that it is looked at in, which is that of later looks too."""
        self._settled = False
        self._whole = False
        """Whether the function takes the arrays among its arguments whole, outside of ``strategy.run``."""

    def prepare(self, target: Target, global_batch: int | None = None) -> Program:
        """The program for a target.

        Raises:
            UnevenBatchError: when the batch does not divide by the replicas.
        """
        self.settle()
        rows = global_batch or self.rows
        strategy = self.strategy
        if strategy is None:
            with state.pushed(state.ContextFrame(state.top(), self._context)):
                return self._lowered(self._trace(rows, 1), target, rows)
        devices = target.devices
        self._check_divides(rows, len(devices), target)
        with strategy.on_other_devices(devices):
            frame = SliceFrame()
            frame.context = self._context
            with state.pushed(frame):
                return self._lowered(self._trace(rows, len(devices)), target, rows)

    def settle(self) -> None:
        """Trace where the variables are, once: those that the first call creates come into being as they would then."""
        if self._settled:
            return
        n, rows = 1 if self.strategy is None else self.strategy.num_replicas, self.rows
        if self.strategy is not None and rows is not None:
            rows = n * max(1, rows // n)
        with state.pushed(state.ContextFrame(state.top(), self._context)):
            traced = self._trace(rows, n).traced
            self.strategy = self.strategy or traced.strategy
            self._function._adopt_captures(traced)
        self._settled = True

    def _trace(self, rows: int | None, n: int) -> _Trace:
        splits = None if self._whole else self.strategy
        examples = [_Example(leaf, self.rows, rows, splits, n) for leaf in self._leaves]
        args, kwargs = jax.tree.unflatten(self._structure, [e.value for e in examples])
        try:
            traced, call = self._function.traced(*args, **kwargs)
        except ArgumentTypeError:  # for one, that it computes with what would be split
            if all(e.stacked is None or is_per_replica(leaf) for e, leaf in zip(examples, self._leaves)):
                raise
            self._whole = True
        else:
            split = {id(e.stacked) for e in examples if e.stacked is not None}
            return _Trace(traced, call, [id(x) in split for x in call.inputs])
        return self._trace(rows, n)

    def _check_divides(self, rows: int | None, n: int, target: Target) -> None:
        if rows is not None and rows % n:
            nearest = " and ".join(str(n * parts) for parts in (rows // n, rows // n + 1) if parts)
            raise UnevenBatchError(
                f"preflight: a global batch of {rows} rows does not divide by the {n} replicas of {target.label}. The nearest"
                f" that do: {nearest}."
            )

    def _lowered(self, trace: _Trace, target: Target, rows: int | None) -> Program:
        traced, call = trace.traced, trace.call
        compiled = Compiled(traced, self._function.donates)
        inputs = _Inputs(traced.strategy)
        labels = [re.sub(r"\[<flat index 0>\]", "", self._function.label_of_input(call, i)) for i in compiled.args]

        def of_variable(i: int, donated: bool) -> Any:
            v = traced.captures[i][0]
            shape = (v.num_components, *v.shape) if v.per_replica else v.shape
            kind = "slots" if v.is_slot else "params"
            entry = {"kind": kind, "name": v.name, "donated": donated, "created_at": v._created_at}
            return inputs.add(shape, v.dtype, v.per_replica, entry)

        donated = [of_variable(i, True) for i in compiled.donated]
        arguments = [
            inputs.add(t.shape, t.dtype, trace.split[i], {"kind": "inputs", "name": label}, weak=t.weak_type)
            for i, label in zip(compiled.args, labels)
            for t in [traced.input_types[i]]
        ]
        kept = [of_variable(i, False) for i in compiled.kept]
        constants = [
            inputs.add(c.shape, c.dtype, False, {"kind": "constants", "name": "an array that the function closes over"})
            for c in traced.program.constants
        ]
        args = (donated, [*arguments, *kept], constants)
        n = 1 if traced.strategy is None else len(traced.strategy.devices)
        # JAX counts the devices of the inputs, of which there may be none.
        lowered = replace(_lower(self.name, compiled.run, args, target), num_devices=n)
        return Program(
            name=self.name,
            lowered=lowered,
            entries=[inputs.entries[i] for i in lowered.kept_inputs],
            jaxpr=traced.program.jaxpr,
            num_devices=n,
            global_batch=rows,
            symbolic=self._function.open_sizes,
        )


@dataclass(frozen=True)
class _Trace:
    traced: Traced
    call: Call
    split: list[bool]
    """Which inputs have a part for each replica."""


class _Example:
    """One argument for tracing: of the right type, and without memory."""

    def __init__(self, leaf: Any, rows: int | None, wanted: int | None, strategy: Strategy | None, n: int) -> None:
        self.value = leaf
        self.stacked: Any = None
        """The array of all replicas' parts."""
        if is_per_replica(leaf):
            shape = leaf.shape
            if shape and rows:
                shape = (leaf.stacked.shape[0] * shape[0] * (wanted or rows) // rows // n, *shape[1:])
            self._split(n, shape, leaf.dtype, leaf.strategy)
        elif _is_array(leaf):
            shape = tuple(leaf.shape)
            has_rows = bool(shape) and shape[0] == rows
            if has_rows:
                shape = (wanted or rows, *shape[1:])
            if has_rows and strategy is not None:
                self._split(n, (shape[0] // n, *shape[1:]), leaf.dtype, strategy)
            else:
                self.value = _zeros(shape, leaf.dtype)

    def _split(self, n: int, shape: tuple[int, ...], dtype: Any, strategy: Strategy) -> None:
        self.stacked = _zeros((n, *shape), dtype)
        self.value = PerReplica(self.stacked, strategy)


class _Inputs:
    """The inputs of a program, as they are listed."""

    def __init__(self, strategy: Strategy | None) -> None:
        self._strategy = strategy
        self.entries: list[Entry] = []

    def add(self, shape: Any, dtype: Any, split: bool, entry: dict[str, Any], weak: bool = False) -> Any:
        """Note one; returns its type."""
        strategy = self._strategy
        local = (1, *shape[1:]) if split else tuple(shape)
        replicated = strategy is not None and len(strategy.devices) > 1 and not split
        self.entries.append(Entry(shape=local, whole_shape=tuple(shape), dtype=dtype, replicated=replicated, **entry))
        sharding = None if strategy is None else strategy.sharding(per_replica=split)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)


def _untraced(fn: Callable[..., Any]) -> Function[..., Any]:
    if isinstance(fn, (BoundFunction, Function)):
        return fn.untraced()  # type: ignore[no-any-return]
    return Function(fn, donate=True, static_argnames=(), input_signature=None, reduce_retracing=False)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def _rows(leaf: Any) -> int | None:
    """Rows over all replicas, where the leaf has some."""
    if is_per_replica(leaf):
        return leaf.stacked.shape[0] * leaf.shape[0] if leaf.shape else None
    return int(leaf.shape[0]) if _is_array(leaf) and leaf.shape else None


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    if is_key(dtype):
        return jnp.zeros(shape, dtype)
    return np.broadcast_to(np.zeros((), dtype), shape)  # one element, whatever the shape


# ---- plain JAX -----------------------------------------------------------------------------------


class JittedStep:
    """A function that `jax.jit` made, with example arguments."""

    strategy = None

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._fn = fn
        self._args, self._kwargs = args, kwargs
        self.name = getattr(fn, "__name__", "function")
        # Weights come first as JAX programs are written, and the batch last.
        arguments = reversed([*args, *kwargs.values()])
        self.rows = next((r for a in arguments for r in map(_rows, jax.tree.leaves(a)) if r is not None), None)

    def prepare(self, target: Target, global_batch: int | None = None) -> Program:
        """The program for a target: with the arguments' shardings, on a mesh of its devices."""
        wanted = global_batch or self.rows
        leaves, structure = jax.tree.flatten((self._args, self._kwargs))
        mesh = next((m for m in map(_mesh_of, leaves) if m is not None), None)
        if mesh is not None:
            mesh = _on_target(mesh, target)
        n = 1 if mesh is None else mesh.size
        types = [self._type(leaf, mesh, wanted) if _is_array(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, types)
        lowered, traced, donated = _lower_jitted(self.name, self._fn, args, kwargs, target)
        if lowered.num_devices > target.num_devices:
            raise ArgumentError(
                f"preflight: {self.name} is written for {lowered.num_devices} devices, and {target.label} has"
                f" {target.num_devices}."
            )
        n = lowered.num_devices
        entries = [
            Entry("inputs", name, _local_shape(t), tuple(t.shape), t.dtype, _is_replicated(t) and n > 1, donated=d)
            for t, d, name in zip(jax.tree.leaves((args, kwargs)), donated, _paths((args, kwargs)))
        ]
        return Program(
            name=self.name,
            lowered=lowered,
            entries=[entries[i] for i in lowered.kept_inputs],
            jaxpr=traced.jaxpr,
            num_devices=n,
            global_batch=wanted,
        )

    def _type(self, leaf: Any, mesh: Any, wanted: int | None) -> Any:
        shape = tuple(leaf.shape)
        if shape and shape[0] == self.rows:
            shape = (wanted, *shape[1:])
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        placed = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=placed)


def _mesh_of(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _on_target(mesh: Any, target: Target) -> Any:
    n = target.num_devices
    sizes, names = mesh.axis_sizes, mesh.axis_names
    if mesh.size != n:
        if len(sizes) > 1:
            raise ArgumentError(
                f"preflight: the arguments are split over a mesh of {dict(zip(names, sizes))}, and {target.label} has {n}"
                " devices. Give them shardings over a jax.sharding.AbstractMesh of that size."
            )
        sizes = (n,)
    return AbstractMesh(sizes, names, axis_types=mesh.axis_types)


def _local_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))


def _is_replicated(leaf: Any) -> bool:
    return leaf.sharding is None or bool(leaf.sharding.is_fully_replicated)


def _paths(tree: Any) -> list[str]:
    return [f"argument {jax.tree_util.keystr(path[1:])}" for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _lower_jitted(name: str, fn: Any, args: Any, kwargs: Any, target: Target) -> Any:
    with _lowering(name):
        traced = fn.trace(*args, **kwargs)
        lowered = _jax.lower_traced(traced, _platform(target))
    donated = [info.donated for info in jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))]
    return lowered, traced, donated


# ---- lowering ------------------------------------------------------------------------------------


def _lower(name: str, jitted: Any, args: Sequence[Any], target: Target) -> _jax.Lowered:
    with _lowering(name):
        return _jax.lower_traced(jitted.trace(*args), _platform(target))


@contextmanager
def _lowering(name: str) -> Iterator[None]:
    """Without JAX's warning of buffers that are donated in vain, which the report has too; with errors of our own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        try:
            yield
        except (ValueError, TypeError, NotImplementedError) as error:
            raise _refused(name, error) from error


def _platform(target: Target) -> str | None:
    return None if target.present else target.platform


def _refused(name: str, error: Exception) -> Exception:
    better = why_not_traced(name, error)
    if better is not None:
        return better
    text = str(error).partition("\n")[0]
    if "device" in text or "mesh" in text.lower():
        return ArgumentError(
            f"preflight: {name} names devices that are here, and cannot be compiled for others: {text} Use a"
            " jax.sharding.AbstractMesh in it, or a strategy."
        )
    return ArgumentTypeError(f"preflight: {name} cannot be lowered at {_jax.line_of_error(error)}: {text}")
