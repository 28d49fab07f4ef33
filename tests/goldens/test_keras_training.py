"""Group "training" with Keras: layers, losses, metrics and optimizers in loops written by hand.

Its optimizers are replayed by optax elsewhere; here they are Keras's own, once more.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
import phalanx.keras  # before Keras: it chooses the backend
from goldens.kit import GOLDENS, REPLICAS, attempt, check, differs, each, per_replica, replay
from goldens.loop import WEIGHTS, array, replica_number, train

import keras  # isort: skip

pytestmark = pytest.mark.slow


def make_variable(strategy, value, **options):
    with strategy.scope():
        return keras.Variable(array(value), **options)


def components(strategy, variable):
    """The value of each replica's component."""
    return [np.asarray(part) for part in strategy.local_results(variable)]


# ---- losses and metrics --------------------------------------------------------------------------


@replay("train_keras_loss_objects")
def test_loss_objects_give_a_replicas_share(golden, strategy):
    y = array(golden.inputs["y"])

    def values(r):
        predicted = jnp.stack([jnp.stack([0.5 + r / 8.0, 0.0]), jnp.array([0.0, 0.25])])
        reductions = ("sum_over_batch_size", "sum", "mean", None)
        out = {str(name): keras.losses.MeanSquaredError(reduction=name)(y, predicted) for name in reductions}
        weighted = keras.losses.MeanSquaredError()(y, predicted, sample_weight=jnp.array([1.0, 3.0]))
        return {**out, "weighted": weighted}

    inside = strategy.run(lambda: values(replica_number()))
    return {
        "replica": {name: each(strategy, value) for name, value in inside.items()},
        "outside_for_r_0": values(jnp.float32(0.0)),
    }


@replay("train_metrics")
def test_metrics_are_over_all_replicas(golden, strategy):
    with strategy.scope():
        metrics = {
            "mean": keras.metrics.Mean(),
            "weighted_mean": keras.metrics.Mean(),
            "accuracy": keras.metrics.SparseCategoricalAccuracy(),
            "mse": keras.metrics.MeanSquaredError(),
        }
    labels = per_replica(strategy, golden.inputs["labels"], np.int32)
    scores = per_replica(strategy, golden.inputs["scores"])

    def update(labels, scores, shift):
        values = jnp.stack([replica_number() + 1.0, 2.0 * replica_number()]) + shift
        metrics["mean"].update_state(values)
        metrics["weighted_mean"].update_state(values, sample_weight=jnp.array([1.0, 3.0]))
        metrics["accuracy"].update_state(labels, scores)
        metrics["mse"].update_state(scores, jax.nn.one_hot(labels, 3))

    def results():
        return {name: metric.result() for name, metric in metrics.items()}

    step = px.function(lambda *args: strategy.run(update, args=args))
    log = []
    for shift in (0.0, 1.0):
        step(labels, scores, shift)
        log.append(results())
    inside = {name: each(strategy, value) for name, value in strategy.run(results).items()}
    parts = {v.name: components(strategy, v) for v in metrics["mean"].variables}
    for metric in metrics.values():
        metric.reset_state()
    return {"after_update": log, "inside_replica": inside, "mean_components": parts, "after_reset": results()}


@replay("train_metrics_uneven")
def test_metrics_count_each_row_of_uneven_batches(golden, strategy):
    scores, labels = array(golden.inputs["scores"]), np.array(golden.inputs["labels"], np.int32)
    with strategy.scope():
        mean, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()

    def update(scores, labels, valid):
        losses = keras.ops.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        mean.update_state(losses, sample_weight=valid)
        accuracy.update_state(labels, scores, sample_weight=valid)

    step = px.function(lambda element: strategy.run(update, args=element))
    for element in strategy.distribute_dataset((scores, labels), 4, remainder="pad", mask=True):
        step(element)
    return {"mean": mean.result(), "accuracy": accuracy.result()}


# ---- layers --------------------------------------------------------------------------------------


@replay("train_keras_layers_custom_loop")
def test_layers_optimizer_and_metric_in_a_loop_by_hand(golden, strategy):
    o = golden.inputs
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(o["lr"], epsilon=o["epsilon"])
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.set_weights([array(o[name]) for name in WEIGHTS])
    rows = array(o["x"]), np.array(o["labels"], np.int32)
    data = strategy.distribute_dataset(rows, o["global_batch"], remainder="pad", mask=True)

    def replica(x, labels, valid):
        with px.GradientTape() as tape:
            logits = model(x, training=True)
            losses = keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            loss = (losses * valid).sum() / o["global_batch"]
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        accuracy.update_state(labels, logits, sample_weight=valid)
        return loss

    step = px.function(lambda element: strategy.reduce("sum", strategy.run(replica, args=element)))
    losses = [step(element) for element in itertools.islice(itertools.cycle(data), 6)]
    weights = dict(zip(WEIGHTS, model.get_weights()))
    return {"losses": losses, "accuracy": accuracy.result(), "final_weights": weights}


def _train_normalised(golden, strategy, **options):
    o = golden.inputs
    with strategy.scope():
        norm = keras.layers.BatchNormalization(momentum=0.9, epsilon=0.001, **options)
        norm.build((None, 4))
        optimizer = keras.optimizers.SGD(o["lr"])
    W, b, V = (make_variable(strategy, o[name], name=name) for name in ("W", "b", "V"))
    weights = [W, b, V, norm.gamma, norm.beta]
    data = strategy.distribute_dataset((array(o["x"]), array(o["y"])), o["global_batch"])

    def replica(x, y):
        with px.GradientTape() as tape:
            h = jnp.tanh(norm(x @ W + b, training=True))
            loss = ((h @ V - y) ** 2).sum() / o["global_batch"]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = px.function(lambda element: strategy.reduce("sum", strategy.run(replica, args=element)))
    losses = [step(element) for element in itertools.islice(itertools.cycle(data), o["steps"])]
    predicted = strategy.run(lambda x: jnp.tanh(norm(x @ W + b, training=False)) @ V, args=(array(o["x"][:3]),))
    moving = {"moving_mean": norm.moving_mean, "moving_variance": norm.moving_variance}
    return {
        "losses": losses,
        **{name: np.asarray(v.value) for name, v in zip(("W", "b", "V", "gamma", "beta"), weights)},
        **{
            name: {"cross_read": np.asarray(v.value), "components": components(strategy, v)}
            for name, v in moving.items()
        },
        "inference_on_first_3_rows": each(strategy, predicted),
    }


@differs("train_batch_norm_keras", "moving statistics are the mean over the replicas")
def test_batch_norm_with_statistics_of_each_replica(golden, strategy):
    out = _train_normalised(golden, strategy)
    for name in ("losses", "W", "b", "V", "gamma", "beta"):
        golden.check(out[name], name)
    moving = {}
    for name in ("moving_mean", "moving_variance"):
        moving[name] = np.mean(golden.expect[name]["components"], 0)
        check(out[name], {"cross_read": moving[name].tolist(), "components": [moving[name].tolist()] * golden.replicas})
    W, b, V, gamma, beta = (np.array(golden.expect[name]) for name in ("W", "b", "V", "gamma", "beta"))
    normed = (np.array(golden.inputs["x"][:3]) @ W + b - moving["moving_mean"]) / np.sqrt(
        moving["moving_variance"] + 0.001
    )
    check(out["inference_on_first_3_rows"], [(np.tanh(normed * gamma + beta) @ V).tolist()] * golden.replicas)


@replay("train_batch_norm_keras_synchronized")
def test_synchronized_batch_norm(golden, strategy):
    return {"result": _train_normalised(golden, strategy, synchronized=True)}


# ---- Keras's optimizers, which optax replays elsewhere -------------------------------------------


def _train_with(golden, strategy, optimizer, **options):
    weights = [make_variable(strategy, golden.inputs[name], name=name) for name in WEIGHTS]

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))

    out = train(golden, strategy, apply, weights=weights, **options)
    return {**out, "iterations": int(optimizer.iterations)}


def _scenarios(start):
    return sorted({name for name, _ in GOLDENS if name.startswith(start)})


OPTIMIZERS = [name for name in _scenarios("train_optimizer_") if "optimizer" in GOLDENS[name, 1].inputs]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_keras(name):
    golden, strategy = GOLDENS[name, 2], px.Mirrored(jax.devices()[:2])
    options = dict(golden.inputs["optimizer"])
    golden.check(_train_with(golden, strategy, getattr(keras.optimizers, options.pop("class"))(**options)))


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("option", ["global_clipnorm", "clipnorm", "clipvalue"])
def test_clipping_in_optimizers_of_keras_is_that_of_one_replica(option, replicas):
    golden, strategy = GOLDENS[f"train_optimizer_{option}", 1], px.Mirrored(jax.devices()[:replicas])
    optimizer = keras.optimizers.SGD(golden.inputs["lr"], **{option: golden.inputs[option]})
    golden.check(_train_with(golden, strategy, optimizer))


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_gradient_accumulation_in_optimizers_of_keras(replicas, traced):
    golden = GOLDENS["train_keras_gradient_accumulation", replicas]
    strategy = px.Mirrored(jax.devices()[:replicas])
    optimizer = keras.optimizers.SGD(golden.inputs["lr"], gradient_accumulation_steps=2)
    golden.check(_train_with(golden, strategy, optimizer, traced=traced), "b_eager")


@pytest.mark.parametrize("replicas", REPLICAS)
def test_moving_averages_in_optimizers_of_keras(replicas):
    golden = GOLDENS["train_keras_ema", replicas]
    strategy = px.Mirrored(jax.devices()[:replicas])
    optimizer = keras.optimizers.SGD(golden.inputs["lr"], use_ema=True, ema_momentum=golden.inputs["ema_momentum"])
    out = _train_with(golden, strategy, optimizer)
    averages = [np.asarray(v.value) for v in optimizer.variables if "average" in v.name]
    golden.check({**out, "averages": dict(zip(WEIGHTS, averages, strict=True))}, "result")


@pytest.mark.parametrize("replicas", REPLICAS)
def test_uneven_batches_with_optimizers_of_keras(replicas):
    golden, strategy = GOLDENS["train_uneven_batches", replicas], px.Mirrored(jax.devices()[:replicas])
    golden.check(_train_with(golden, strategy, keras.optimizers.SGD(0.1)))


def test_schedules_of_keras():
    golden, strategy = GOLDENS["train_schedule_exponential", 2], px.Mirrored(jax.devices()[:2])
    o = golden.inputs
    schedule = keras.optimizers.schedules.ExponentialDecay(o["initial"], o["decay_steps"], o["decay_rate"])
    optimizer = keras.optimizers.SGD(schedule)
    out = _train_with(golden, strategy, optimizer)
    golden.check({**out, "rates": [schedule(i) for i in range(10)], "rate_now": optimizer.learning_rate})


def test_learning_rate_of_keras_set_by_hand(strategy):
    golden = GOLDENS["train_learning_rate_by_hand", strategy.num_replicas]
    w, optimizer = make_variable(strategy, golden.inputs["w"]), keras.optimizers.SGD(0.1)
    log = []
    for step in range(6):
        if step in (2, 4):
            optimizer.learning_rate = {2: 0.5, 4: 0.0}[step]
        strategy.run(lambda: optimizer.apply_gradients([((replica_number() + 1.0) / strategy.num_replicas, w)]))
        log.append({"w": np.asarray(w.value), "rate": np.asarray(optimizer.learning_rate)})
    golden.check({"steps": log, "components": components(strategy, w)})


@pytest.mark.parametrize(("traced", "build"), [(False, False), (True, False), (True, True)])
def test_optimizers_of_keras_make_their_state_when_they_are_first_used(strategy, traced, build):
    golden = GOLDENS["train_optimizer_not_built", strategy.num_replicas]
    o = golden.inputs
    w, optimizer = make_variable(strategy, o["w"]), keras.optimizers.SGD(o["lr"], momentum=o["momentum"])
    if build:
        optimizer.build([w])

    def step():
        strategy.run(lambda: optimizer.apply_gradients([((replica_number() + 1.0) / strategy.num_replicas, w)]))

    step = px.function(step) if traced else step
    step()
    step()
    golden.check(components(strategy, w), "c_built_then_traced")


def test_optimizers_of_keras_in_every_context(strategy):
    golden, n = GOLDENS["train_optimizer_contexts", strategy.num_replicas], strategy.num_replicas

    def outcome(use, **options):
        w = make_variable(strategy, golden.inputs["w"])
        use(keras.optimizers.SGD(golden.inputs["lr"]), w)
        return components(strategy, w)

    def cross(gradient):
        def use(optimizer, w):
            with strategy.scope():
                optimizer.apply_gradients([(gradient, w)])

        return use

    check(outcome(cross(jnp.float32(2.0))), [0.8] * n)
    golden.check(outcome(cross(per_replica(strategy, [r + 1.0 for r in range(n)]))), "c_made_outside")
    inside = outcome(
        lambda optimizer, w: strategy.run(lambda: optimizer.apply_gradients([(replica_number() + 1.0, w)]))
    )
    golden.check(inside, "c_made_outside")
    golden.check(outcome(lambda optimizer, w: optimizer.apply_gradients([(jnp.float32(2.0), w)])), "d_used_outside")


def test_missing_gradients_and_optimizers_of_keras(strategy):
    golden = GOLDENS["train_none_gradients", strategy.num_replicas]
    a, b, c = (make_variable(strategy, value, name=name) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    optimizer, n = keras.optimizers.SGD(0.1), strategy.num_replicas

    def applied(*pairs):
        strategy.run(lambda: optimizer.apply_gradients([(g and g(), v) for g, v in pairs]))
        return "ok"

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        one = applied((None, a), (lambda: (replica_number() + 1.0) / n, b))
    golden.check(
        {
            "one_none": one,
            "after": {"a": components(strategy, a), "b": components(strategy, b)},
            "both_none": attempt(applied, (None, a), (None, b)),
            "unknown_variable": attempt(applied, (replica_number, c)),
        }
    )


def test_constraints_and_optimizers_of_keras(strategy):
    golden, n = GOLDENS["train_constraint_applied_by_optimizer", strategy.num_replicas], strategy.num_replicas
    w = make_variable(strategy, golden.inputs["w"])
    w.constraint = lambda value: jnp.maximum(value, 0.0)
    optimizer, log = keras.optimizers.SGD(golden.inputs["lr"]), []
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(jnp.ones(3) * (replica_number() + 1.0) / n, w)]))
        log.append(components(strategy, w))
    golden.check({"components_after_step": log})


@pytest.mark.parametrize(("name", "options"), [("a_sgd", (0.5,)), ("b_momentum", (0.1, 0.9))])
def test_looked_up_rows_and_optimizers_of_keras(strategy, name, options):
    golden, n = GOLDENS["train_embedding_sparse_gradients", strategy.num_replicas], strategy.num_replicas
    o = golden.inputs
    weights = [make_variable(strategy, o[key]) for key in "Ew"]
    optimizer, losses = keras.optimizers.SGD(*options), []

    def replica(ids, y):
        E, w = weights
        with px.GradientTape() as tape:
            loss = ((jnp.take(E, ids, axis=0) @ w - y[:, None]) ** 2).sum() / 8.0
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = px.function(lambda *rows: strategy.reduce("sum", strategy.run(replica, args=rows)))
    for i in range(6):
        ids, y = (np.array(o[key][i % 2]).reshape(n, -1) for key in ("ids", "y"))
        losses.append(step(per_replica(strategy, ids, np.int32), per_replica(strategy, y)))
    golden.check(losses, name, "losses")
    for key, variable in zip("Ew", weights):
        golden.check(np.asarray(variable.value), name, key)
