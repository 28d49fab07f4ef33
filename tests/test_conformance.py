"""Every public object in every place where it can be used: one table, and one loop over it.

A new public name needs an entry here and a docstring, or a test below fails.
"""

from __future__ import annotations

import ast
import inspect
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx import errors

PLACES = ("eager", "function", "replica", "merge")
OUTSIDE = ("eager", "function", "merge")

PUBLIC = sorted(
    alias.asname
    for statement in ast.parse(inspect.getsource(px)).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
    if alias.asname and alias.asname not in ("cluster", "errors")
)


class Bench:
    """A strategy and objects that an example may use."""

    def __init__(self, n: int, place: str) -> None:
        self.strategy = px.Mirrored(jax.devices()[:n])
        self.n = n
        self.place = place
        with self.strategy.scope():
            self.kept = {
                "v": px.Variable(3.0, name="v", aggregation="sum"),
                "w": px.Variable(3.0, name="w"),
                "own": px.Variable(0.0, name="own", synchronization="on_read", aggregation="sum"),
                "mean": px.Variable(0.0, name="mean", synchronization="on_read", aggregation="mean"),
                "optimizer": px.Optimizer(optax.sgd(1.0)),
                "guard": px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)), "skip"),
            }
        self.strategy.run(lambda: self.kept["own"].assign(10.0 * px.get_replica_context().replica_id))


class Example(NamedTuple):
    """`call` on a bench gives `expected(n, place)` in `places`, and `refusal` elsewhere."""

    call: Callable[[Bench], Any]
    expected: Callable[[int, str], Any]
    places: tuple[str, ...] = PLACES
    refusal: type[Exception] = errors.StrategyError


def variable(bench: Bench) -> Any:
    v = bench.kept["v"]
    v.assign_add(1.0)
    return v.value


def component(bench: Bench) -> Any:
    return bench.kept["own"].components[-1].value


def per_replica(bench: Bench) -> Any:
    parts = bench.strategy.distribute_values_from_function(lambda context: np.float32(context.replica_id))
    assert isinstance(parts, px.PerReplica)
    assert len(parts) == bench.n
    return bench.strategy.reduce("sum", parts)


def gradient_tape(bench: Bench) -> Any:
    with px.GradientTape() as tape:
        y = bench.kept["w"] * bench.kept["w"]
    return tape.gradient(y, bench.kept["w"])


def forward_accumulator(bench: Bench) -> Any:
    w = bench.kept["w"]
    with px.ForwardAccumulator(w, jnp.float32(2.0)) as accumulator:
        y = w * w
    return accumulator.jvp(y)


def optimizer(bench: Bench) -> Any:
    bench.kept["optimizer"].apply_gradients([(1.0, bench.kept["w"])], reduce=None)
    return bench.kept["w"].value


def cond(bench: Bench) -> Any:
    v = bench.kept["v"]
    return px.cond(v.value > 0.0, lambda: v.assign(7.0).value, lambda: v.value)


def scan(bench: Bench) -> Any:
    own = bench.kept["mean"]
    return px.scan(lambda carry, x: (carry + own.assign(own.value + x).value, x), 0.0, jnp.arange(3.0))[0]


def while_loop(bench: Bench) -> Any:
    own = bench.kept["mean"]
    return px.while_loop(lambda i: i < 3, lambda i: i + own.assign(2.0 + 0.0 * i).value.astype(int), 1)


def strategy_runs(bench: Bench) -> Any:
    return bench.strategy.run(lambda: px.get_replica_context().all_reduce("sum", 2.0))


def replica_context(bench: Bench) -> Any:
    context = px.get_replica_context()
    assert isinstance(context, px.ReplicaContext)
    return context.all_reduce("sum", 1.0 + context.replica_id)


def self_check(bench: Bench) -> Any:
    batches = bench.strategy.distribute_dataset(np.ones(3 * bench.n), batch_size=bench.n)
    return px.self_check(lambda x: bench.strategy.run(lambda x: None, args=(x,)), batches)


def variables_like(bench: Bench) -> Any:
    kept = bench.kept.setdefault("tree", {})
    kept["tree"] = kept.get("tree") or px.variables_like({"a": np.ones(2, np.float32), "b": None})
    return kept["tree"]["a"].value.sum()


def checkpoint(bench: Bench) -> Any:
    kept = px.Checkpoint(v=bench.kept["v"], step=3)
    kept.step += 1
    return kept.step


def checkpoint_manager(bench: Bench) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        manager = px.CheckpointManager(directory)
        manager.save(px.Checkpoint(own=bench.kept["own"]), step=1)
        return manager.restore_latest(px.Checkpoint(own=bench.kept["own"]))


def auditor(bench: Bench) -> Any:
    auditor = px.Auditor(bench.strategy, every=1)
    auditor.after_step()
    auditor.finish()
    return auditor.audits


def non_finite_guard(bench: Bench) -> Any:
    guard = bench.kept["guard"]
    guard.apply_gradients([(jnp.float32(jnp.nan), bench.kept["w"])], reduce=None)
    guard.apply_gradients([(1.0, bench.kept["w"])], reduce=None)
    return bench.kept["w"].value


def resumable(bench: Bench) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        return sum(step.batch for step in px.resumable(directory, [1, 2], px.Checkpoint(own=bench.kept["own"])))


def settings(bench: Bench) -> None:
    px.strict(True)
    px.strict(False)
    px.run_functions_eagerly(True)
    px.run_functions_eagerly(False)


def adds(start: float, sums: float) -> Callable[[int, str], float]:
    """`sums` counts once for each replica in a replica."""
    return lambda n, place: start + sums * (n if place == "replica" else 1)


def always(value: Any) -> Callable[[int, str], Any]:
    return lambda n, place: value


def abstract(bench: Bench) -> Any:
    with px.abstract():
        v = px.Variable(jnp.ones(2))
    return v.shape[0]


def preflight(bench: Bench) -> Any:
    rows = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    return px.preflight(lambda x: bench.strategy.run(lambda x: x * 2.0, (x,)), rows, topology="cpu:2").bytes.inputs


TABLE: dict[str, Example] = {
    "Auditor": Example(auditor, always(1), ("eager",)),
    "Checkpoint": Example(checkpoint, always(4)),
    "CheckpointManager": Example(checkpoint_manager, always(1), ("eager",)),
    "Component": Example(component, lambda n, place: 10.0 * (n - 1), OUTSIDE),
    "connect": Example(lambda b: px.connect().num_processes, always(1)),
    "ForwardAccumulator": Example(forward_accumulator, always(12.0)),
    "GradientTape": Example(gradient_tape, always(6.0)),
    "Mirrored": Example(lambda b: px.Mirrored(jax.devices()[: b.n]).num_replicas, lambda n, place: n),
    "NonFiniteGuard": Example(non_finite_guard, always(2.0)),
    "OneDevice": Example(lambda b: px.OneDevice("cpu:3").num_replicas, always(1)),
    "Optimizer": Example(optimizer, always(2.0)),
    "PerReplica": Example(per_replica, lambda n, place: sum(range(n)), OUTSIDE),
    "ReplicaContext": Example(
        replica_context, lambda n, place: sum(range(1, n + 1)) if place == "replica" else 1, ("eager", "function", "replica"), AssertionError
    ),
    "Strategy": Example(strategy_runs, lambda n, place: 2.0 * n, ("eager", "function")),
    "TPU": Example(lambda b: px.TPU(), always(None), (), errors.DeviceError),
    "Variable": Example(variable, adds(3.0, 1.0)),
    "abstract": Example(abstract, always(2), ("eager",)),
    "audit": Example(lambda b: px.audit(b.strategy).equal, always(True), ("eager",)),
    "cond": Example(cond, lambda n, place: 7.0 * n if place == "replica" else 7.0),
    "cpu_devices": Example(lambda b: px.cpu_devices(8), always(None)),
    "finite_or_raise": Example(lambda b: px.finite_or_raise(b.kept["w"].value), always(3.0), ("eager",), errors.TracingError),
    "function": Example(lambda b: px.function(lambda x: x * b.kept["w"])(2.0), always(6.0)),
    "get_replica_context": Example(
        lambda b: getattr(px.get_replica_context(), "num_replicas", None), lambda n, place: {"replica": n, "merge": None}.get(place, 1)
    ),
    "get_strategy": Example(lambda b: px.get_strategy().num_replicas, lambda n, place: n if place in ("replica", "merge") else 1),
    "in_cross_replica_context": Example(lambda b: px.in_cross_replica_context(), lambda n, place: place == "merge"),
    "preflight": Example(preflight, always(2 * 3 * 4), ("eager",)),
    "profile": Example(
        lambda b: px.profile(px.function(lambda x: x * b.kept["w"]), [jnp.ones(())], steps=1).steps, always(1), ("eager",)
    ),
    "progress": Example(lambda b: sum(px.progress([1, 2])), always(3)),
    "resumable": Example(resumable, always(3), ("eager",)),
    "run_functions_eagerly": Example(settings, always(None)),
    "scan": Example(scan, always(4.0)),
    "self_check": Example(self_check, always("equal"), ("eager",)),
    "strict": Example(settings, always(None)),
    "variables_like": Example(variables_like, always(2.0)),
    "while_loop": Example(while_loop, always(3)),
}  # fmt: skip


def in_place(bench: Bench, call: Callable[[Bench], Any], traced: bool) -> Any:
    """Call in the bench's place, which itself is part of a traced function or not."""
    merge = lambda: px.get_replica_context().merge_call(lambda s: call(bench))  # noqa: E731
    ways = {
        "eager": lambda: call(bench),
        "function": lambda: px.function(lambda: call(bench))(),
        "replica": lambda: bench.strategy.run(lambda: call(bench)),
        "merge": lambda: bench.strategy.run(merge),
    }
    return px.function(ways[bench.place])() if traced else ways[bench.place]()


@pytest.mark.parametrize("traced", [False, True], ids=["called", "in_function"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_every_public_object_works_where_it_makes_sense_and_is_refused_elsewhere(place, n, traced):
    for name, example in TABLE.items():
        bench = Bench(n, place)
        if ("function" if traced and place == "eager" else place) not in example.places:
            with pytest.raises(example.refusal):
                in_place(bench, example.call, traced)
            continue
        result = in_place(bench, example.call, traced)
        if isinstance(result, px.PerReplica):
            assert len({float(x) for x in result.values}) == 1, name
            result = result.values[0]
        result = result if isinstance(result, (str, bool, type(None))) else float(result)
        assert result == example.expected(n, place), (name, place, n)


# ---- errors --------------------------------------------------------------------------------------


def cause(name: str, strategy: px.Strategy) -> None:
    """Do what raises the error of that name."""
    with strategy.scope():
        v = px.Variable([1.0, 2.0], name="v")
    number = px.Variable(1.0)
    parts = strategy.distribute_values_from_function(lambda context: np.ones(2, np.float32))
    double = px.function(lambda x: 2 * x)
    causes: dict[str, Callable[[], Any]] = {
        "AggregationRequiredError": lambda: strategy.run(
            lambda: v.assign(v.value * px.get_replica_context().replica_id)
        ),
        "ArgumentError": lambda: px.Variable(1.0, aggregation="average"),
        "ArgumentTypeError": lambda: px.GradientTape(persistent=1),
        "AssignmentError": lambda: v.assign(jnp.ones(3)),
        "AssignmentTypeError": lambda: v.assign(jnp.ones(2, complex)),
        "CompilationError": lambda: px.function(
            lambda x: jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct((), jnp.float32))(x)
        )(1.0),
        "CheckpointError": lambda: unwritable(v),
        "ClusterError": lambda: px.cluster.Explicit(2, 0),
        "DeviceError": lambda: px.OneDevice("cpu:1000"),
        "FrozenVariableError": lambda: jax.jit(lambda: v * 2.0)(),
        "NonFiniteError": lambda: px.finite_or_raise(jnp.array([1.0, jnp.inf]), "the loss"),
        "PhalanxError": lambda: raise_(errors.PhalanxError("the base class is raised by nothing else")),
        "ReplicaDivergenceError": lambda: v.assign(parts),
        "RetraceError": lambda: [px.strict(True), *(double(jnp.ones(i)) for i in range(4))],
        "StrategyError": lambda: strategy.run(lambda: strategy.run(lambda: None)),
        "TapeError": lambda: px.GradientTape().watch(number),
        "TracingError": lambda: strategy.run(lambda: float(v.value[0])),
        "UnevenBatchError": lambda: strategy.distribute_dataset(np.ones(5), batch_size=5),
        "VariableCreationError": lambda: px.function(lambda: px.Variable(1.0).value)(),
        "VariableWriteError": lambda: jax.vmap(lambda x: number.assign(x).value)(jnp.ones(2)),
    }
    causes[name]()


def unwritable(v: px.Variable) -> None:
    manager = px.CheckpointManager("/dev/null/run")
    manager.save(px.Checkpoint(v=v), step=1)
    manager.wait()


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_a_cause_and_fits_a_builtin(name):
    kind = getattr(errors, name)
    with pytest.raises(kind) as caught:
        cause(name, px.Mirrored(jax.devices()[:2]))
    assert type(caught.value) is kind
    assert isinstance(caught.value, errors.PhalanxError)
    assert len(str(caught.value)) > 30, "says what happened"
    if name != "PhalanxError":
        assert isinstance(caught.value, (ValueError, TypeError, RuntimeError))


# ---- nothing is missing --------------------------------------------------------------------------


def test_every_public_name_is_in_the_table():
    assert sorted(TABLE) == PUBLIC
    assert sorted(errors.__all__) == sorted(n for n, x in vars(errors).items() if inspect.isclass(x))


def function_of(routine: Any) -> Any:
    """The Python function behind a method, property or context manager."""
    return inspect.unwrap(routine.fget if isinstance(routine, property) else routine)


def members(name: str) -> dict[str, Any]:
    """The public methods and properties of a class."""
    return {
        f"{name}.{attribute}": value
        for attribute, value in inspect.getmembers_static(getattr(px, name))
        if not attribute.startswith("_")
        and inspect.isroutine(function_of(value))
        and getattr(function_of(value), "__module__", "").startswith("phalanx")
    }


CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(px, name))]
METHODS = {routine: name for cls in reversed(CLASSES) for name, routine in members(cls).items()}
ROUTINES = {name: getattr(px, name) for name in PUBLIC if name not in CLASSES} | {n: r for r, n in METHODS.items()}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_object_has_a_docstring_with_an_example(name):
    text = inspect.getdoc(getattr(px, name)) or ""
    assert "Example:" in text
    assert ">>>" in text


@pytest.mark.parametrize("name", ROUTINES)
def test_every_method_has_a_docstring_and_says_what_it_raises(name):
    text = inspect.getdoc(ROUTINES[name])
    assert text, f"{name} has no docstring"
    body = ast.parse(textwrap.dedent(inspect.getsource(function_of(ROUTINES[name]))))
    if any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(body)):
        assert "Raises" in text, f"{name} raises and does not say so"


@pytest.mark.parametrize("name", [name for name in CLASSES if "__init__" in vars(getattr(px, name))])
def test_a_class_says_what_its_constructor_raises(name):
    constructor = getattr(px, name).__init__
    body = ast.parse(textwrap.dedent(inspect.getsource(constructor)))
    if any(isinstance(node, ast.Raise) for node in ast.walk(body)):
        assert "Raises" in inspect.getdoc(getattr(px, name))


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_has_a_docstring(name):
    assert len(getattr(errors, name).__doc__) > 30
