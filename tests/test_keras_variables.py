"""Keras's variables follow the rules of ours, wherever they are read and written."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import AggregationRequiredError, FrozenVariableError
from phalanx.keras import _keras

import keras  # isort: skip

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


@pytest.fixture
def strategy():
    return px.Mirrored(jax.devices()[:2])


def dense(**kwargs):
    return keras.Sequential([keras.layers.Dense(2, **kwargs)])


# ---- reading and writing -------------------------------------------------------------------------


def test_a_traced_function_sees_present_values_and_its_updates_are_seen_outside():
    v = keras.Variable(np.ones(2, np.float32))
    add = px.function(lambda x: v.assign_add(x * v))
    add(2.0)
    v.assign(10 * v)
    add(1.0)
    assert v.numpy().tolist() == [60.0, 60.0] and add.trace_count == 1


def test_a_tape_watches_what_is_trainable_when_it_is_read():
    model = dense(kernel_regularizer="l2")
    with px.GradientTape() as tape:  # which builds the model too
        loss = jnp.mean(model(X) ** 2) + sum(model.losses)
    kernel, bias = tape.gradient(loss, model.trainable_variables)

    def loss_of(kernel, bias):
        return jnp.mean((X @ kernel + bias) ** 2) + 0.01 * jnp.sum(kernel**2)

    expected = jax.grad(loss_of, argnums=(0, 1))(*(v.value for v in model.trainable_variables))
    np.testing.assert_allclose(kernel, expected[0], rtol=1e-6)
    np.testing.assert_allclose(bias, expected[1], rtol=1e-6)
    model.layers[0].trainable = False
    with px.GradientTape(persistent=True) as tape:
        loss = jnp.mean(model(X) ** 2)
    assert tape.gradient(loss, model.variables) == [None, None]


def test_a_raw_jit_never_freezes_a_variable_that_takes_part():
    v = keras.Variable(1.0)
    px.function(lambda: v.assign_add(1.0))()
    with pytest.raises(FrozenVariableError, match="variable.*is read inside a program that jax.jit is tracing"):
        jax.jit(lambda: v + 1)()


def test_a_value_that_was_read_stays_as_it_is():
    v = keras.Variable(np.zeros(3, np.float32))
    add = px.function(lambda: v.assign_add(jnp.ones(3)))
    add()
    seen = v.value
    add()
    assert seen.tolist() == [1.0] * 3 and v.numpy().tolist() == [2.0] * 3


def test_keras_own_stateless_scopes_work_on_variables_that_take_part(strategy):
    model = dense()
    with strategy.scope():
        model.build((None, 3))
    expected = np.asarray(model(X))
    trainable = [v * 2 for v in model.trainable_variables]
    np.testing.assert_allclose(jax.jit(lambda t: model.stateless_call(t, [], X)[0])(trainable), 2 * expected, rtol=1e-6)
    assert model.compute_output_shape((None, 3)) == (None, 2)
    np.testing.assert_allclose(model(X), expected, rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_in_replicas_values_merge_as_the_variable_declares(n):
    strategy = px.Mirrored(jax.devices()[:n])
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False, aggregation="sum", name="total")
        mean = keras.Variable(0.0, trainable=False, aggregation="mean", name="mean")
        first = keras.Variable(0, dtype="int32", trainable=False, aggregation="only_first_replica", name="first")
        own = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read", name="own")
        plain = keras.Variable(0.0, name="plain")

    def update():
        i = px.get_replica_context().replica_id
        for v in (total, mean, own):
            v.assign_add(i + 1.0)
        first.assign_add(i + 5)

    for run in (strategy.run, px.function(strategy.run)):
        run(update)
    each = np.arange(1.0, n + 1)
    assert [float(v) for v in (total, mean, own)] == pytest.approx([2 * each.sum(), 2 * each.mean(), 2 * each.sum()])
    assert int(first) == 10
    if n > 1:
        with pytest.raises(AggregationRequiredError, match="'plain' is mirrored"):
            strategy.run(lambda: plain.assign_add(1.0 * px.get_replica_context().replica_id))
    assert float(plain) == 0.0


def test_variables_made_outside_are_moved_to_the_strategy_that_uses_them(strategy):
    model = dense()
    model.build((None, 3))
    before = model.get_weights()
    strategy.run(lambda: model(X))
    assert {d for v in model.variables for d in v.value.devices()} == set(strategy.devices)
    for a, b in zip(model.get_weights(), before):
        np.testing.assert_array_equal(a, b)


def test_variables_and_optimizers_can_be_made_in_the_first_step(strategy):
    kept = []

    def replica_step(x):
        if not kept:
            kept[:] = [dense(), keras.optimizers.Adam(0.1), keras.metrics.Mean()]
        model, optimizer, metric = kept
        with px.GradientTape() as tape:
            loss = jnp.mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        metric.update_state(loss)
        return loss

    step = px.function(lambda x: strategy.reduce("mean", strategy.run(replica_step, (x,))))
    losses = [float(step(jnp.asarray(X))) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert step.trace_count == 2 and int(kept[1].iterations) == 3  # the first trace makes the variables
    assert float(kept[2].result()) == pytest.approx(np.mean(losses), rel=1e-6)


def test_mixed_precision_casts_what_layers_read_and_keeps_what_is_stored(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
        layer.build((None, 3))

    def replica_step(x):
        with px.GradientTape() as tape:
            y = layer(x)
            loss = jnp.sum(y.astype(jnp.float32))
        return y, tape.gradient(loss, layer.kernel)

    y, gradient = px.function(lambda: strategy.run(replica_step, (X,)))()
    assert y.values[0].dtype == jnp.bfloat16 and gradient.values[0].dtype == jnp.float32
    assert layer.kernel.value.dtype == jnp.float32


def test_each_replica_draws_numbers_of_its_own_and_the_first_those_of_one_device(strategy):
    def draws(strategy):
        with strategy.scope():
            generator = keras.random.SeedGenerator(3)
        draw = px.function(lambda: strategy.run(lambda: keras.random.uniform((4,), seed=generator)))
        results = [[np.asarray(part).tolist() for part in strategy.local_results(draw())] for _ in range(2)]
        return generator, results

    generator, two = draws(strategy)
    _, one = draws(px.Mirrored(jax.devices()[:1]))
    assert [step[0] for step in two] == [step[0] for step in one]
    assert len({tuple(part) for step in two for part in step}) == 4
    assert np.asarray(generator.state).tolist() == [3, 2]  # as one device counts
    generator.state.assign(np.asarray(generator.state))  # as loading does
    again, _ = draws(strategy)
    assert [c.value.tolist() for c in phalanx.keras.variables.counterpart(again.state).components] == [
        c.value.tolist() for c in phalanx.keras.variables.counterpart(generator.state).components
    ]


def test_control_flow_of_keras_carries_updates(strategy):
    v = keras.Variable(0.0)

    def body(i):
        v.assign_add(1.0)
        return i + 1

    @px.function
    def step(flag):
        keras.ops.cond(flag, lambda: v.assign(10.0), lambda: v.assign(20.0))
        return keras.ops.while_loop(lambda i: i < 3, body, 0)

    assert int(step(jnp.array(True))) == 3 and float(v) == 13.0
    assert int(step(jnp.array(False))) == 3 and float(v) == 23.0
    total, seen = px.function(lambda: keras.ops.scan(lambda c, x: (c + x, v.assign_add(x)), 0.0, jnp.arange(3.0)))()
    assert float(total) == 3.0 and seen.tolist() == [23.0, 24.0, 26.0] and float(v) == 26.0


def test_recurrent_layers_differentiate_in_eager_code_and_in_replicas(strategy):
    x = np.random.default_rng(1).normal(size=(4, 5, 3)).astype(np.float32)
    layer = keras.layers.LSTM(2)
    layer.build(x.shape)

    def gradients(x):
        with px.GradientTape() as tape:
            loss = jnp.mean(layer(x) ** 2)
        return tape.gradient(loss, layer.trainable_variables)

    trainable = [v.value for v in layer.trainable_variables]
    expected = jax.grad(
        lambda t: jnp.mean(layer.stateless_call(t, [v.value for v in layer.non_trainable_variables], x)[0] ** 2)
    )(trainable)
    eager = gradients(x)
    replicas = px.function(lambda: strategy.reduce("mean", strategy.run(gradients, (x,))))()
    for a, b, c in zip(eager, replicas, expected):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-7)


def test_models_can_be_copied_when_their_variables_take_part(strategy):
    model = dense()
    with strategy.scope():
        model.build((None, 3))
    clone = copy.deepcopy(model.layers[0].kernel)
    model.layers[0].kernel.assign_add(jnp.ones((3, 2)))
    np.testing.assert_allclose(clone.numpy() + 1, model.layers[0].kernel.numpy(), rtol=1e-6)


# ---- Keras's insides -----------------------------------------------------------------------------


def insides():
    """Objects of Keras's, and the private names of theirs that Phalanx uses or overrides."""
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(use_ema=True)
    optimizer.build([variable])
    functional = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    functional.compile(optimizer, "mse")
    epochs = _keras.EpochIterator(np.zeros((2, 3)))
    of_variables = "_value _dtype _initializer _convert_to_tensor _maybe_autocast _deferred_initialize"
    of_models = "_compute_loss _loss_tracker _call_has_training_arg _flatten_layers _initial_epoch _compile_config"
    overridden = "_symbolic_build _get_jax_state _get_metrics_result_or_logs"
    return [
        (variable, of_variables),
        (functional, f"{of_models} {overridden}"),
        (keras.Model(x := keras.Input((3,)), keras.layers.Dense(1)(x)), "_inputs_struct _outputs_struct"),
        (optimizer, "_trainable_variables _model_variables_moving_average _learning_rate"),
        (keras.layers.SimpleRNN(1), "_expected_batch_size"),
        (keras.layers.BatchNormalization(), "_moments"),
        (keras.callbacks.CallbackList(model=functional), "_model"),
        (epochs, "_interrupted_warning _num_batches"),
    ]


def test_what_is_used_of_keras_insides_is_there():
    """A release of Keras that moves one of these breaks phalanx.keras."""
    for owner, names in insides():
        for name in names.split():
            assert hasattr(owner, name), f"{type(owner).__name__}.{name}"
    model = keras.Model
    expected = {
        _keras.loss.reduce_weighted_values: ["values", "sample_weight", "mask", "reduction", "dtype"],
        _keras.core.cond: ["pred", "true_fn", "false_fn"],
        _keras.core.scan: ["f", "init", "xs", "length", "reverse", "unroll"],
        _keras.core.while_loop: ["cond", "body", "loop_vars", "maximum_iterations"],
        keras.layers.BatchNormalization._moments: ["self", "inputs", "mask"],
        keras.layers.RNN.call: ["self", "sequences", "initial_state", "mask", "training"],
        keras.metrics.Mean.update_state: ["self", "values", "sample_weight"],
        keras.optimizers.Optimizer.apply: ["self", "grads", "trainable_variables"],
        keras.optimizers.LossScaleOptimizer.apply: ["self", "grads", "trainable_variables"],
        model._symbolic_build: ["self", "iterator", "data_batch"],
        model._get_metrics_result_or_logs: ["self", "logs"],
        model._compute_loss: ["self", "x", "y", "y_pred", "sample_weight", "training"],
        model.make_train_function: ["self", "force"],
        model.make_test_function: ["self", "force"],
        model.make_predict_function: ["self", "force"],
    }
    for function, names in expected.items():
        assert list(inspect.signature(function).parameters) == names, function
    wanted = ["trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"]
    state = [*inspect.signature(model._get_jax_state).parameters]
    assert state == ["self", *wanted, "purge_model_variables"]


def test_all_that_is_used_of_keras_insides_is_in_that_list():
    known = {name for _, names in insides() for name in names.split()}
    used, own = set(), {"_of_phalanx", "_phalanx_variable", "_struct"}  # the last one: the end of two names
    for path in Path(phalanx.__file__).parent.rglob("*.py"):
        of_keras = path.parent.name == "keras"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif isinstance(node, ast.alias):
                own.add((node.asname or node.name).rpartition(".")[2])
            elif isinstance(node, ast.Attribute):
                is_made = isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"
                (own if is_made else used if of_keras else set()).add(node.attr)
            elif isinstance(node, ast.Constant) and of_keras:
                used.add(str(node.value))
    private = {name for name in used if re.fullmatch(r"_[a-z]\w*", name)}
    assert private - own <= known


def run(program, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)


def test_phalanx_alone_does_not_import_keras():
    result = run("import sys, phalanx as px; px.function(lambda: 1.0)(); assert 'keras' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_models_that_were_built_before_phalanx_came_take_part():
    program = """
import keras
layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
layer.build((None, 2))
import jax.numpy as jnp, phalanx as px
step = px.function(lambda: layer(jnp.ones((1, 2))))
before = float(step()[0, 0])
layer.kernel.assign(10 * layer.kernel)
assert (before, float(step()[0, 0]), step.trace_count) == (2.0, 20.0, 1)
"""
    result = run(program, KERAS_BACKEND="jax")
    assert result.returncode == 0, result.stderr


def test_another_backend_is_refused_with_the_way_out():
    program = "import keras.config, sys; keras.config.backend = lambda: 'torch'; import phalanx as px; px.function(lambda: 1.0)(); import phalanx.keras"
    result = run(program, KERAS_BACKEND="jax")
    assert (
        "needs Keras's JAX backend, and Keras runs on 'torch'" in result.stderr and "KERAS_BACKEND=jax" in result.stderr
    )


def test_an_old_keras_is_refused_with_the_version_that_is_needed():
    program = "import keras; keras.__version__ = '3.11.4'; import phalanx.keras"
    result = run(program, KERAS_BACKEND="jax")
    assert result.returncode == 1
    assert "ImportError: phalanx.keras needs Keras 3.12 or newer, found 3.11.4." in result.stderr
    newer = run(program.replace("3.11.4", "4.0.0"), KERAS_BACKEND="jax")
    assert newer.returncode == 0, newer.stderr
