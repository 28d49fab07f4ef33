"""What people ran into when they trained Keras models on several devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, ArgumentTypeError

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def model(*layers, seed=1):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def on(n, model):
    return px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))


@pytest.mark.parametrize("n", [1, 4])
def test_gradients_are_summed_over_the_replicas_whatever_the_optimizer(n):
    """Weights and slots after 1 and after 6 steps are those of one device."""
    for optimizer in ("SGD", "Adam", "AdamW", "Lion"):
        make = getattr(keras.optimizers, optimizer)
        plain, view = model(), on(n, model())
        for epochs in (1, 5):
            for m in (plain, view):
                if epochs == 1:
                    m.compile(make(0.01), "mse")
                m.fit(X, Y, batch_size=24, epochs=epochs, shuffle=False, verbose=0)
            for a, b in zip([*plain.weights, *plain.optimizer.variables], [*view.weights, *view.optimizer.variables]):
                np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 4])
def test_a_penalty_counts_once_and_is_all_that_is_left_when_the_data_term_is_zero(n):
    view = on(n, model(keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1))))
    view.compile(keras.optimizers.SGD(1.0), loss=lambda y, p: 0.0 * jnp.sum(p, -1))
    view.build((None, 3))
    before = view.layers[0].kernel.numpy()
    view.fit(X, Y, batch_size=24, verbose=0)
    np.testing.assert_allclose(view.layers[0].kernel.numpy(), before - 0.2 * before, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 4])
def test_freezing_and_unfreezing_take_effect_at_the_next_fit(n):
    view = on(n, model(keras.layers.Dense(4)))
    view.compile(keras.optimizers.SGD(0.1), "mse")
    view.fit(X, Y, verbose=0)
    frozen = view.layers[0]
    frozen.trainable = False
    before = frozen.get_weights(), view.layers[1].get_weights()
    view.fit(X, Y, verbose=0)
    assert all((a == b).all() for a, b in zip(frozen.get_weights(), before[0]))
    assert any((a != b).any() for a, b in zip(view.layers[1].get_weights(), before[1]))
    frozen.trainable = True
    view.fit(X, Y, verbose=0)
    assert any((a != b).any() for a, b in zip(frozen.get_weights(), before[0]))


@pytest.mark.parametrize("n", [1, 4])
def test_a_frozen_batch_normalisation_uses_and_keeps_its_statistics(n):
    norm = keras.layers.BatchNormalization()
    view = on(n, model(norm))
    view.compile(keras.optimizers.SGD(0.1), "mse")
    view.fit(X, Y, verbose=0)
    norm.trainable = False
    before = norm.moving_mean.numpy()
    view.fit(X, Y, verbose=0)
    np.testing.assert_array_equal(norm.moving_mean.numpy(), before)


class Counted(keras.layers.Dense):
    """Counts how often it is called to train, which is when a training step is traced."""

    calls = 0

    def call(self, inputs, training=None):
        self.calls += bool(training)
        return super().call(inputs)


def fit(m):
    return m.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]


def assert_same_weights(view, plain):
    for a, b in zip(view.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 4])
def test_a_model_that_is_frozen_after_compile_trains_as_one_that_was_compiled_after_it(n):
    """With one new trace at the next fit; unfrozen and compiled again, all of it trains."""
    plain, view = model(Counted(4)), on(n, model(Counted(4)))
    for m in (plain, view):
        m.build((None, 3))
    view.set_weights(plain.get_weights())
    for m in (plain, view):
        m.compile(keras.optimizers.SGD(0.05), "mse")
    first = view.layers[0]
    np.testing.assert_allclose(fit(view), fit(plain), rtol=1e-5)
    for trainable in (False, True):
        for m in (plain, view):
            m.layers[0].trainable = trainable
            if m is plain or trainable:
                m.compile(keras.optimizers.SGD(0.05), "mse")
        before, calls = first.get_weights(), first.calls
        np.testing.assert_allclose(fit(view), fit(plain), rtol=1e-5)
        assert first.calls == calls + 1
        assert all((a == b).all() for a, b in zip(first.get_weights(), before)) is not trainable
        np.testing.assert_allclose(fit(view), fit(plain), rtol=1e-5)
        assert first.calls == calls + 1
        assert_same_weights(view, plain)


@pytest.mark.parametrize("n", [1, 4])
def test_a_frozen_batch_normalisation_trains_the_rest_on_its_statistics(n):
    """These are those of all rows, so that replicas see what one device sees."""
    plain, view = (model(keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()) for _ in range(2))
    view = on(n, view)
    statistics = [rng.normal(size=4), rng.uniform(0.5, 2, 4)]
    for m in (plain, view):
        m.build((None, 3))
        m.layers[1].set_weights([np.ones(4), np.zeros(4), *statistics])
        m.layers[1].trainable = False
        m.compile(keras.optimizers.SGD(0.05), "mse")
    view.set_weights(plain.get_weights())
    np.testing.assert_allclose([fit(view), fit(view)], [fit(plain), fit(plain)], rtol=1e-5)
    assert_same_weights(view, plain)
    for have, want in zip(view.layers[1].get_weights()[2:], statistics):
        np.testing.assert_array_equal(have, want.astype(np.float32))


@pytest.mark.parametrize("n", [1, 4])
def test_gradients_of_a_scaled_loss_are_unscaled_and_a_forgotten_scale_is_an_error(n):
    strategy = px.Mirrored(jax.devices()[:n])

    def trained(optimizer, scale):
        with strategy.scope():
            w = keras.Variable(np.ones(3, np.float32))
            optimizer = optimizer()

        def replica_step(x):
            with px.GradientTape() as tape:
                loss = jnp.sum((x @ w) ** 2) / 24
                loss = optimizer.scale_loss(loss) if scale else loss
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])

        (batch,) = strategy.distribute_dataset(X, batch_size=24)
        px.function(lambda batch: strategy.run(replica_step, (batch,)))(batch)
        return w.numpy()

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)

    expected = trained(lambda: keras.optimizers.SGD(0.1), scale=False)
    np.testing.assert_allclose(trained(scaled, scale=True), expected, rtol=1e-5)
    np.testing.assert_allclose(
        trained(lambda: keras.optimizers.SGD(0.1, loss_scale_factor=8.0), scale=True), expected, rtol=1e-5
    )
    with pytest.raises(ArgumentError, match=r"no loss was scaled.*optimizer.scale_loss\(loss\)"):
        trained(scaled, scale=False)


def test_variables_without_a_gradient_are_left_out():
    used, unused = keras.Variable(1.0), keras.Variable(1.0)
    with px.GradientTape() as tape:
        loss = used * 2.0
    grads = tape.gradient(loss, [used, unused])
    assert float(grads[0]) == 2.0 and grads[1] is None
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients(zip(grads, [used, unused]))
    assert (float(used), float(unused)) == (pytest.approx(0.8), 1.0)


@pytest.mark.parametrize("n", [1, 4])
def test_columns_of_strings_are_refused_at_the_border(n):
    view = on(n, model())
    view.compile("sgd", "mse")
    words = np.array(["a", "b"] * 12)
    with pytest.raises(ArgumentTypeError, match=r"x\['text'\] is not numeric .*Turn it into numbers"):
        view.fit({"text": words, "x": X}, Y, verbose=0)


class Listens(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def test_metrics_are_fetched_for_those_who_look_at_them(monkeypatch):
    """Else an epoch fetches its logs once, at its end, and no step waits for the device."""
    view = on(2, model())
    view.compile("sgd", "mse")
    view.fit(X, Y, batch_size=8, verbose=0)
    array, fetched = type(jnp.ones(2)), []
    to_host = array.__array__
    monkeypatch.setattr(array, "__array__", lambda a, *args, **kwargs: fetched.append(a) or to_host(a, *args, **kwargs))
    view.fit(X, Y, batch_size=4, verbose=0)
    assert len(fetched) <= 2
    callback = Listens()
    history = view.fit(X, Y, batch_size=4, verbose=0, callbacks=[callback]).history
    assert len(callback.losses) == 6 and callback.losses[-1] == history["loss"][0]


def test_the_uses_of_a_traced_step_do_not_grow_when_a_model_is_built_anew_each_epoch():
    strategy = px.Mirrored(jax.devices()[:2])

    @px.function
    def step(holder, batch):
        def replica_step(x):
            with px.GradientTape() as tape:
                loss = jnp.mean(holder.model(x) ** 2)
            weights = holder.model.trainable_variables
            holder.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        return strategy.reduce("mean", strategy.run(replica_step, (batch,)))

    class Holder:
        def __init__(self):
            keras.utils.set_random_seed(1)  # layers draw the seeds of their weights when they are made
            with strategy.scope():
                self.model = model(keras.layers.Dense(4))
                self.model.build((None, 3))
                self.optimizer = keras.optimizers.SGD(0.1)
                self.optimizer.build(self.model.trainable_variables)

    (batch,) = strategy.distribute_dataset(X, batch_size=24)
    losses = [float(step(Holder(), batch)) for _ in range(4)]
    programs = step._shared
    assert len(set(losses)) == 1 and len(programs) == 1
