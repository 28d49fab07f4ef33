"""Every public call with every kind of wrong value: an error that names the argument, and nothing half-applied."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import PhalanxError

OTHERS = "object function type mapping nested ragged empty_list"
NUMBERS = "complex nan inf negative float bool integer scalar"
ARRAYS = "empty matrix large int_array vector"


def anything(*args: Any, **kwargs: Any) -> None:
    """A function that takes what comes."""


class Anything:
    """A class that takes what comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def values(bench: Bench) -> dict[str, Any]:
    """What is given for an argument."""
    return {
        "none": None,
        "text": "text",
        "bytes": b"bytes",
        "object": object(),
        "function": anything,
        "type": Anything,
        "ragged": [[1.0], [1.0, 2.0]],
        "mapping": {"a": 1.0},
        "nested": {"a": [1.0, {"b": "text"}]},
        "unsortable": {1: 1.0, "a": 2.0},
        "empty_list": [],
        "set": {1.0},
        "strings": np.array(["a", "b", "c"]),
        "objects": np.array([None, None, None]),
        "dates": np.array(["2020-01-01"] * 3, "datetime64[D]"),
        "record": np.zeros(3, [("a", "f4")]),
        "key": jax.random.key(0),
        "huge_int": 10**40,
        "complex": 1j,
        "nan": float("nan"),
        "inf": float("inf"),
        "negative": -1,
        "integer": 2,
        "float": 1.5,
        "bool": True,
        "scalar": np.float32(2.0),
        "empty": np.zeros((0,), np.float32),
        "matrix": np.ones((2, 2), np.float32),
        "large": np.zeros((300, 200), np.float32),
        "int_array": np.arange(3),
        "vector": np.arange(3, dtype=np.float32),
        "foreign_parts": bench.foreign.distribute_values_from_function(lambda c: np.zeros(3, np.float32)),
    }


class Bench:
    """Objects to call, and the variables that no error may change."""

    def __init__(self) -> None:
        self.strategy = px.Mirrored(jax.devices()[:2])
        self.foreign = px.Mirrored(jax.devices()[2:4])
        with self.strategy.scope():
            self.v = px.Variable([1.0, 2.0, 3.0], name="v", aggregation="mean")
            self.own = px.Variable([1.0, 2.0, 3.0], name="own", synchronization="on_read", aggregation="sum")
        self.optimizer = px.Optimizer(optax.adam(0.1))
        self.optimizer.build([self.v])
        self.parts = self.strategy.distribute_values_from_function(lambda c: np.ones(3, np.float32))
        self.double = px.function(lambda x: x if x is None else jax.tree.map(lambda leaf: leaf, x))
        with px.GradientTape(persistent=True) as self.tape:
            self.y = self.v * 2.0
        with px.ForwardAccumulator(self.v, jnp.ones(3)) as self.accumulator:
            self.z = self.v * 2.0

    def state(self) -> list[Any]:
        return [np.asarray(c) for v in (self.v, self.own, *self.optimizer.variables) for c in v.components]


class Call(NamedTuple):
    """A call with one argument open: the words that name it in an error, and the values that are fine."""

    run: Callable[[Bench, Any], Any]
    named: str
    fine: str = ""


def in_replica(use: Callable[[Bench, Any, Any], Any]) -> Callable[[Bench, Any], Any]:
    return lambda b, x: b.strategy.run(lambda: use(b, px.get_replica_context(), x) and None)


def at_index(b: Bench, x: Any) -> Any:
    return b.v.at[x].set(1.0)


def recorded(b: Bench, use: Callable[[px.GradientTape], Any]) -> Any:
    with px.GradientTape(persistent=True) as tape:
        use(tape)


CALLS: dict[str, Call] = {
    "Variable(x)": Call(lambda b, x: px.Variable(x, name="w"), "'w': initial_value", f"{NUMBERS} {ARRAYS} key empty_list"),
    "Variable(dtype)": Call(lambda b, x: px.Variable(1.0, name="w", dtype=x), "dtype", "none scalar foreign_parts"),
    "Variable(name)": Call(lambda b, x: px.Variable(1.0, name=x), "name", "none text"),
    "Variable(trainable)": Call(lambda b, x: px.Variable(1.0, trainable=x), "trainable", "none bool"),
    "Variable(aggregation)": Call(lambda b, x: px.Variable(1.0, aggregation=x), "aggregation"),
    "Variable(synchronization)": Call(lambda b, x: px.Variable(1.0, synchronization=x), "synchronization"),
    "Variable(constraint)": Call(lambda b, x: px.Variable(1.0, constraint=x), "constraint", "none function type"),
    "assign": Call(lambda b, x: b.v.assign(x), "'v'", "int_array vector"),
    "assign_add": Call(lambda b, x: b.v.assign_add(x), "'v'", "int_array vector"),
    "assign_sub to own": Call(lambda b, x: b.own.assign_sub(x), "'own'"),
    "assign in a replica": Call(in_replica(lambda b, c, x: b.v.assign(x) is None), "'v'", "int_array vector"),
    "assign own in a replica": Call(in_replica(lambda b, c, x: b.own.assign(x) is None), "'own'", "int_array vector"),
    "at[x].set": Call(at_index, "'v'.*at", "none negative integer bool int_array"),
    "at[0].set(x)": Call(lambda b, x: b.v.at[0].set(x), "'v'", "nan inf negative integer float bool scalar"),
    "at[0].add(x)": Call(lambda b, x: b.v.at[0].add(x), "'v'", "nan inf negative integer float bool scalar"),
    "function(f)": Call(lambda b, x: px.function(x)(1.0), "px.function takes a function", "type function"),
    "function(static_argnames)": Call(lambda b, x: px.function(static_argnames=x)(lambda text: text)("a"), "static_argnames", "text empty_list"),
    "function(input_signature)": Call(lambda b, x: px.function(input_signature=x)(lambda y: y)(1.0), "input_signature", "none"),
    "function(donate)": Call(lambda b, x: px.function(donate=x)(lambda: 1)(), "donate", "bool"),
    "function(reduce_retracing)": Call(lambda b, x: px.function(reduce_retracing=x)(lambda: 1)(), "reduce_retracing", "bool"),
    "traced function": Call(lambda b, x: b.double(x), "argument 'x'", f"{NUMBERS} {ARRAYS} none text bytes object function type mapping nested ragged empty_list key foreign_parts"),
    "run(fn)": Call(lambda b, x: b.strategy.run(x), "strategy.run", "type function"),
    "run(args)": Call(lambda b, x: b.strategy.run(lambda *a: None, args=x), "args", "empty_list ragged"),
    "run(kwargs)": Call(lambda b, x: b.strategy.run(lambda **k: None, kwargs=x), "kwargs", "none mapping nested"),
    "run(args=(x,))": Call(lambda b, x: b.strategy.run(lambda y: None, args=(x,)), "'args'|a PerReplica of", f"{NUMBERS} {ARRAYS} none text bytes object function type mapping nested ragged empty_list key"),
    "reduce(op)": Call(lambda b, x: b.strategy.reduce(x, b.parts), "op"),
    "reduce(value)": Call(lambda b, x: b.strategy.reduce("sum", x), "reduce", f"{NUMBERS} {ARRAYS} mapping ragged empty_list none"),
    "reduce(axis)": Call(lambda b, x: b.strategy.reduce("sum", b.parts, axis=x), "axis", "none negative"),
    "gather(value)": Call(lambda b, x: b.strategy.gather(x, 0), "gather|a PerReplica of", f"{NUMBERS} {ARRAYS} {OTHERS} none text bytes strings objects dates record huge_int key set"),
    "gather(axis)": Call(lambda b, x: b.strategy.gather(b.parts, x), "axis", "negative"),
    "local_results": Call(lambda b, x: b.strategy.local_results(x), "local_results", f"{NUMBERS} {ARRAYS} none text bytes object function type mapping nested ragged empty_list set strings objects dates record key huge_int"),
    "container_of": Call(lambda b, x: b.strategy.container_of(x), "container_of"),
    "update(variable)": Call(lambda b, x: b.strategy.update(x, lambda v: None), "update"),
    "update(fn)": Call(lambda b, x: b.strategy.update(b.v, x), "update", "function type"),
    "update(args)": Call(lambda b, x: b.strategy.update(b.v, lambda v, *a: None, args=x), "args", "empty_list ragged"),
    "update(kwargs)": Call(lambda b, x: b.strategy.update(b.v, lambda v, **k: None, kwargs=x), "kwargs", "none mapping nested"),
    "values from a function": Call(lambda b, x: b.strategy.distribute_values_from_function(x), "distribute_values_from_function", "function"),
    "values of a function": Call(lambda b, x: b.strategy.distribute_values_from_function(lambda c: x), "distribute_values_from_function", f"{NUMBERS} {ARRAYS} key mapping ragged empty_list none foreign_parts"),
    "Mirrored": Call(lambda b, x: px.Mirrored(x), "evice", "none"),
    "Mirrored([x])": Call(lambda b, x: px.Mirrored([x]), "device"),
    "OneDevice": Call(lambda b, x: px.OneDevice(x), "device", "none"),
    "cpu_devices": Call(lambda b, x: px.cpu_devices(x), "cpu_devices"),
    "strict": Call(lambda b, x: px.strict(x), "strict", "bool"),
    "run_functions_eagerly": Call(lambda b, x: px.run_functions_eagerly(x), "run_functions_eagerly", "bool"),
    "GradientTape(persistent)": Call(lambda b, x: px.GradientTape(persistent=x), "persistent", "bool"),
    "GradientTape(watch)": Call(lambda b, x: px.GradientTape(watch_accessed_variables=x), "watch_accessed_variables", "bool"),
    "watch": Call(lambda b, x: recorded(b, lambda tape: tape.watch(x)), "watch", "empty_list none foreign_parts key"),
    "gradient(target)": Call(lambda b, x: b.tape.gradient(x, b.v), "target", "key foreign_parts"),
    "gradient(sources)": Call(lambda b, x: b.tape.gradient(b.y, x), "source", "empty_list key foreign_parts"),
    "gradient(output_gradients)": Call(lambda b, x: b.tape.gradient(b.y, b.v, output_gradients=x), "output_gradients", "none vector int_array"),
    "gradient(unconnected)": Call(lambda b, x: b.tape.gradient(b.y, b.v, unconnected_gradients=x), "unconnected_gradients"),
    "jacobian(target)": Call(lambda b, x: b.tape.jacobian(x, b.v), "target", "key foreign_parts"),
    "jacobian(sources)": Call(lambda b, x: b.tape.jacobian(b.y, x), "source", "empty_list key foreign_parts"),
    "batch_jacobian(source)": Call(lambda b, x: b.tape.batch_jacobian(b.y, x), "source"),
    "ForwardAccumulator(primals)": Call(lambda b, x: px.ForwardAccumulator(x, jnp.ones(3)), "primal"),
    "ForwardAccumulator(tangents)": Call(lambda b, x: px.ForwardAccumulator(b.v, x), "tangent", "vector int_array"),
    "jvp(target)": Call(lambda b, x: b.accumulator.jvp(x), "target", "empty_list none key foreign_parts"),
    "jvp(unconnected)": Call(lambda b, x: b.accumulator.jvp(b.z, x), "unconnected_gradients"),
    "Optimizer": Call(lambda b, x: px.Optimizer(x), "Optimizer takes an optax"),
    "build": Call(lambda b, x: px.Optimizer(optax.sgd(1.0)).build(x), "build", "empty_list empty"),
    "build([x])": Call(lambda b, x: b.optimizer.build([x]), "build"),
    "apply_gradients": Call(lambda b, x: b.optimizer.apply_gradients(x), "apply_gradients"),
    "apply_gradients(x, v)": Call(lambda b, x: b.optimizer.apply_gradients([(x, b.v)]), "'v'", "vector int_array"),
    "apply_gradients(g, x)": Call(lambda b, x: b.optimizer.apply_gradients([(1.0, x)]), "apply_gradients"),
    "apply_gradients(reduce)": Call(lambda b, x: b.optimizer.apply_gradients([(np.ones(3), b.v)], reduce=x), "reduce", "none"),
    "apply in a replica": Call(in_replica(lambda b, c, x: b.optimizer.apply_gradients([(x, b.v)], reduce="mean")), "'v'", "vector int_array"),
    "cond(pred)": Call(lambda b, x: px.cond(x, lambda: 1, lambda: 2), "pred", f"{NUMBERS}"),
    "cond(true_fun)": Call(lambda b, x: px.cond(True, x, lambda: 2), "cond", "type function"),
    "cond result": Call(lambda b, x: px.function(lambda p: px.cond(p > 0, lambda: x, lambda: 2.0))(1.0), "cond", "float nan inf integer negative scalar complex"),
    "while_loop(init_val)": Call(lambda b, x: px.while_loop(lambda c: c[0] < 0, lambda c: c, (0, x)), "init_val|while_loop", f"{NUMBERS} {ARRAYS} key mapping ragged empty_list none foreign_parts"),
    "while_loop(cond_fun)": Call(lambda b, x: px.while_loop(x, lambda i: i, 0), "while_loop"),
    "while_loop answer": Call(lambda b, x: px.while_loop(lambda i: x, lambda i: i, 0) if not np.isscalar(x) else None, "while_loop", f"{NUMBERS} text bytes huge_int"),
    "scan(f)": Call(lambda b, x: px.scan(x, 0, jnp.ones(2)), "scan"),
    "scan(init)": Call(lambda b, x: px.scan(lambda c, y: (c, y), x, jnp.ones(2)), "init|scan", f"{NUMBERS} {ARRAYS} key mapping ragged empty_list none foreign_parts"),
    "scan(xs)": Call(lambda b, x: px.scan(lambda c, y: (c, y), 0, x), "scan", "empty matrix large int_array vector foreign_parts"),
    "scan(length)": Call(lambda b, x: px.scan(lambda c, y: (c, y), 0, None, length=x), "length", "integer"),
    "scan(reverse)": Call(lambda b, x: px.scan(lambda c, y: (c, y), 0, jnp.ones(2), reverse=x), "reverse", "bool"),
    "scan(unroll)": Call(lambda b, x: px.scan(lambda c, y: (c, y), 0, jnp.ones(2), unroll=x), "unroll", "bool integer huge_int"),
    "all_reduce(op)": Call(in_replica(lambda b, c, x: c.all_reduce(x, 1.0)), "op"),
    "all_reduce(value)": Call(in_replica(lambda b, c, x: [c.all_reduce("sum", x)]), "all_reduce", f"{NUMBERS} {ARRAYS} mapping ragged empty_list none"),
    "all_gather(value)": Call(in_replica(lambda b, c, x: [c.all_gather(x)]), "all_gather", f"{ARRAYS} empty_list none"),
    "all_gather(axis)": Call(in_replica(lambda b, c, x: [c.all_gather(jnp.ones(2), x)]), "axis", "negative"),
    "broadcast(value)": Call(in_replica(lambda b, c, x: [c.broadcast(x)]), "broadcast", f"{NUMBERS} {ARRAYS} key mapping ragged empty_list none"),
    "broadcast(replica_id)": Call(in_replica(lambda b, c, x: [c.broadcast(1.0, x)]), "replica_id"),
    "merge_call(fn)": Call(in_replica(lambda b, c, x: [c.merge_call(x)]), "merge_call", "function type"),
    "merge_call(args)": Call(in_replica(lambda b, c, x: [c.merge_call(lambda s, *a: None, args=x)]), "args", "empty_list ragged"),
    "self_check(step)": Call(lambda b, x: px.self_check(x, []), "step|got 0 elements"),
    "self_check(batches)": Call(lambda b, x: px.self_check(print, x), "batches"),
    "self_check(rtol)": Call(lambda b, x: px.self_check(lambda e: None, [b.parts], rtol=x), "rtol", "float integer inf scalar huge_int"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_named_and_changes_nothing(name):
    call, bench = CALLS[name], Bench()
    before, problems = bench.state(), []
    for kind, value in values(bench).items():
        fine = kind in call.fine.split()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call.run(bench, value)
        except PhalanxError as error:
            if fine:
                problems.append(f"{kind}: refused although fine: {error}")
            elif not re.search(f"{call.named}|holds one value per replica", str(error)):
                problems.append(f"{kind}: {type(error).__name__} does not name {call.named}: {str(error)[:150]}")
            for a, b in zip(before, bench.state()):
                np.testing.assert_array_equal(a, b, err_msg=f"{kind} changed a variable")
        except Exception as error:
            problems.append(f"{kind}: {type(error).__name__}: {str(error)[:150]}")
        else:
            if not fine:
                problems.append(f"{kind}: taken without a word")
            before = bench.state()
        px.strict(False)
        px.run_functions_eagerly(False)
    assert not problems, "\n".join(problems)
