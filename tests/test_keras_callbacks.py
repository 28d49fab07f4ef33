"""Keras's callbacks do on replicas what they do in plain Keras; see tests/test_keras_fit.py for most of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras

import keras  # isort: skip
from keras import callbacks, layers, optimizers  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 3)).astype("float32")  # batches of 8, 8 and 6 rows; the last one does not divide by four
Y = (X @ rng.normal(size=(3, 2)) + 0.5).astype("float32")
IN_ORDER: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}


def plain(optimizer: Any = None) -> Any:
    """Everything has a name: files and logs are told apart by these."""
    keras.utils.set_random_seed(1)
    inside = [keras.Input((3,)), layers.Dense(4, "tanh", name="hidden"), layers.Dense(2, name="top")]
    model = keras.Sequential(inside, name="model")
    model.compile(optimizer or optimizers.SGD(0.1, momentum=0.5, name="descent"), "mse", metrics=["mae"])
    return model


def on(n: int, model: Any) -> Any:
    return px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))


def values(model: Any) -> list[Any]:
    return [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]


def assert_close(have: Any, want: Any) -> None:
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for h, w in zip(jax.tree.leaves(have), jax.tree.leaves(want)):
        np.testing.assert_allclose(h, w, rtol=2e-5, atol=1e-6)


# ---- averaged weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_averaged_weights_are_swapped_in_and_out(swap_on_epoch):
    def averaging() -> Any:
        return optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5)

    def run(model: Any) -> Any:
        at_end: list[Any] = []
        swap = callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        look = callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: at_end.append(values(model)))
        history = model.fit(X, Y, **IN_ORDER, epochs=3, validation_data=(X, Y), callbacks=[swap, look]).history
        evaluated = model.evaluate(X, Y, batch_size=8, verbose=0, callbacks=[callbacks.SwapEMAWeights()])
        return history, at_end, evaluated, values(model)

    expected = run(plain(averaging()))
    assert_close(run(on(4, plain(averaging()))), expected)
    raw = plain(averaging()).fit(X, Y, **IN_ORDER, epochs=3, validation_data=(X, Y)).history
    assert_close(expected[0]["loss"], raw["loss"])
    assert abs(expected[0]["val_loss"][0] - raw["val_loss"][0]) > 1e-3


# ---- files and servers ---------------------------------------------------------------------------


def test_event_files_hold_what_those_of_plain_keras_do(tmp_path, monkeypatch):
    tf = pytest.importorskip("tensorflow")

    def write(name: str, data: Any, step: Any) -> None:  # as the package tensorboard does, which need not be there
        summary.write(name, tf.convert_to_tensor(data, "float32"), step=step)

    summary = callbacks.TensorBoard(tmp_path).summary
    monkeypatch.setattr(summary, "scalar", write)
    monkeypatch.setattr(summary, "histogram", write)

    def written(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in sorted(folder.rglob("events.*")):
            for event in tf.compat.v1.train.summary_iterator(str(file)):
                for value in event.summary.value:
                    if value.tag != "keras":  # the model, as JSON
                        name = f"{file.parent.name}/{value.tag}"
                        found.setdefault(name, []).append((event.step, tf.make_ndarray(value.tensor)))
        return found

    found = []
    for model in (plain(), on(4, plain())):
        folder = tmp_path / str(len(found))
        board = callbacks.TensorBoard(folder, histogram_freq=1, update_freq=1)
        history = model.fit(X, Y, **IN_ORDER, epochs=2, validation_data=(X, Y), callbacks=[board]).history
        found.append(written(folder))
        losses = [float(value) for _, value in found[-1]["train/epoch_loss"]]
        np.testing.assert_allclose(losses, history["loss"], rtol=1e-6)
    assert_close(*reversed(found))
    assert len(found[1]["train/batch_loss"]) == 6 and len(found[1]["validation/epoch_mae"]) == 2


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # which plain Keras leaves to Orbax
def test_an_orbax_checkpoint_is_loaded_by_plain_keras_and_goes_on(tmp_path):
    model, loaded = on(4, plain()), plain()
    model.fit(X, Y, **IN_ORDER, epochs=2, callbacks=[callbacks.OrbaxCheckpoint(str(tmp_path / "kept"))])
    loaded.optimizer.build(loaded.trainable_variables)  # Keras fills what is there
    loaded.load_weights(tmp_path / "kept")
    for have, want in zip(values(loaded), values(model), strict=True):
        np.testing.assert_array_equal(have, want)
    assert_close(loaded.fit(X, Y, **IN_ORDER).history, model.fit(X, Y, **IN_ORDER).history)
    assert_close(values(loaded), values(model))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_remote_monitor_is_sent_the_logs(monkeypatch, as_json):
    sent: list[Any] = []
    fake = SimpleNamespace(
        post=lambda url, data=None, json=None, headers=None: sent.append((url, data, json)),
        exceptions=SimpleNamespace(RequestException=OSError),
    )
    monkeypatch.setattr("keras.src.callbacks.remote_monitor.requests", fake)
    monitor = callbacks.RemoteMonitor("http://host", send_as_json=as_json)
    history = on(4, plain()).fit(X, Y, **IN_ORDER, epochs=2, validation_data=(X, Y), callbacks=[monitor]).history
    assert [url for url, _, _ in sent] == ["http://host/publish/epoch/end/"] * 2
    logs = [as_dict if as_json else json.loads(data["data"]) for _, data, as_dict in sent]
    assert logs == [{"epoch": i, **{name: v[i] for name, v in history.items()}} for i in range(2)]


# ---- the progress bar ----------------------------------------------------------------------------


class Clock:
    """Goes on by as much in each step."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("n", [1, 4])
def test_the_progress_bar_shows_the_last_numbers_and_asks_for_them_as_often_as_it_is_drawn(n, monkeypatch, capsys):
    clock, fetched = Clock(), []
    original = keras.src.utils.python_utils.pythonify_logs

    def pythonify_logs(logs: Any) -> Any:
        if any(isinstance(value, jax.Array) for value in (logs or {}).values()):
            fetched.append(logs)
        return original(logs)

    monkeypatch.setattr("keras.src.utils.python_utils.pythonify_logs", pythonify_logs)
    monkeypatch.setattr("phalanx.keras.callbacks.time", clock)

    def go_on(batch: int, logs: Any = None) -> None:
        clock.now += 0.02

    ticking = [callbacks.LambdaCallback(on_train_batch_begin=go_on, on_test_batch_begin=go_on)]
    model, steps = on(n, plain()), 40
    x, y = np.resize(X, (4 * steps, 3)), np.resize(Y, (4 * steps, 2))
    options = {"batch_size": 4, "verbose": 1, "callbacks": ticking}
    history = model.fit(x, y, shuffle=False, epochs=2, validation_data=(X, Y), **options).history
    lines = capsys.readouterr().out.splitlines()
    assert "Epoch 2/2" in lines
    last = {name: f"{value[-1]:.4f}" for name, value in history.items()}
    assert re.findall(r"(\w+): ([\d.]+)", lines[-1].rpartition("\r")[2]) == list(last.items())
    assert f"{steps}/{steps}" in lines[-1]
    drawn = 2 * steps * 0.02 / 0.05
    assert drawn / 2 <= len(fetched) <= drawn + 3  # and once at the end of each epoch, and of all

    fetched.clear()
    told = model.evaluate(x, y, **options)
    assert len(fetched) <= steps * 0.02 / 0.05
    printed = re.findall(r"loss: ([\d.]+)", capsys.readouterr().out)
    assert printed[-1] == f"{told[0]:.4f}"
    fetched.clear()
    model.fit(x, y, shuffle=False, **(options | {"verbose": 0}))
    assert len(fetched) == 2
