"""What is assigned is what is read back, in the variable's own dtype, whoever holds how many components."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, AssignmentError


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 5, -7, 200_000_002])
def test_a_count_spread_over_replicas_reads_back_as_it_was_assigned(n: int, count: int) -> None:
    strategy = px.Mirrored(jax.devices()[:n])
    with strategy.scope():
        total = px.Variable(0, synchronization="on_read", aggregation="sum")
    assert int(total.assign(count)) == count

    def in_merge():
        return px.get_replica_context().merge_call(lambda strategy: total.assign(count + 1).value)

    assert int(strategy.run(in_merge)) == count + 1 == int(total)


def test_a_used_counter_that_a_strategy_adopts_keeps_its_total() -> None:
    counter = px.Variable(0, synchronization="on_read", aggregation="sum")
    counter.assign(10)
    strategy = px.Mirrored(jax.devices()[:2])
    strategy.run(lambda: _add(counter))
    assert int(counter) == 12


def _add(counter: px.Variable) -> None:
    counter.assign_add(1)


def test_the_weak_type_of_a_python_number_never_enters_a_variable() -> None:
    rate = px.Variable(0.5)

    @px.function
    def set_rate(x):
        rate.assign(x)

    set_rate(2.0)
    held = [rate, px.Variable(jnp.asarray(2.0)), px.Variable(0.0).assign(jnp.asarray(1.0)), px.Variable(1)]
    assert [v.value.weak_type for v in held] == [False] * len(held)


@pytest.mark.parametrize(("dtype", "value"), [("uint8", -1), ("uint8", 256), ("int8", np.array(300))])
def test_integers_that_the_dtype_cannot_hold_are_refused(dtype: str, value: object) -> None:
    v = px.Variable(3, dtype=dtype, name="small")
    with pytest.raises(AssignmentError, match=r"Variable 'small' has dtype u?int8, which holds -?\d+ to \d+"):
        v.assign(value)
    assert int(v) == 3


@pytest.mark.parametrize("method", ["set", "multiply", "divide", "min", "max"])
def test_indexed_updates_that_a_sum_would_scale_are_refused_in_replicas(method: str) -> None:
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        v = px.Variable([1.0, 2.0, 3.0], aggregation="sum", name="v")
    with pytest.raises(AggregationRequiredError, match=rf"Variable 'v' has aggregation 'sum': at\[...\].{method}"):
        strategy.run(lambda: getattr(v.at[0], method)(2.0).value)
    assert v.numpy().tolist() == [1.0, 2.0, 3.0]
    assert strategy.run(lambda: v.at[0].add(2.0).value).tolist() == [5.0, 2.0, 3.0]


def test_jacobians_check_how_unconnected_sources_are_answered() -> None:
    x = px.Variable([1.0, 2.0])
    with px.GradientTape(persistent=True) as tape:
        y = x * x
    for call in (tape.jacobian, tape.batch_jacobian, tape.gradient):
        with pytest.raises(ArgumentError, match="unconnected_gradients must be .*'zero', got 'zeros'"):
            call(y, x, unconnected_gradients="zeros")


def test_a_component_works_where_a_number_works() -> None:
    (component,) = px.Variable(3).components
    assert (int(component), float(component), component + 1, list(range(5))[component]) == (3, 3.0, 4, 3)
    assert component == component and not component != component


def test_settings_that_an_optimizer_does_not_have_cannot_be_set() -> None:
    optimizer = px.Optimizer(optax.sgd(0.1))
    with pytest.raises(AttributeError, match="learning_rate"):
        optimizer.learning_rate = 0.5  # type: ignore[attr-defined]


def test_a_per_replica_value_used_as_an_array_says_how_to_reduce_it() -> None:
    losses = px.OneDevice().run(lambda: px.get_replica_context().replica_id + 1.0)
    for use in (lambda: f"{losses:.3f}", lambda: losses.mean(), lambda: losses + 1.0):
        with pytest.raises(ArgumentTypeError, match=r"strategy.reduce\('sum' or 'mean', value\)"):
            use()
    assert f"{losses}" == repr(losses)
