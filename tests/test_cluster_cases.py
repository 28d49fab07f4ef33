"""Whole kinds of trouble that users have reported of programs on many processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster import environment, launch, stop_when_told, write

pytestmark = pytest.mark.processes

FIT = """
    import sys, os, time
    import phalanx as px
    import keras, numpy as np

    folder, phase = sys.argv[1:]
    first_run = not os.path.exists(folder)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 1)).astype("float32")

    def now(seconds):
        print("now", flush=True)
        for _ in range(int(seconds * 50)):  # a signal that comes just before a sleep is heard after it
            time.sleep(0.02)

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            if phase == "waiting for data" and first_run and i == 2 and epochs == 1:
                now(60)
            return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    epochs = 0

    def end_of_batch(batch, logs):
        if phase == "training" and first_run and epochs == 1 and batch == 1:
            now(0.3)

    def end_of_test_batch(batch, logs):
        if phase == "validation" and first_run and epochs == 1 and batch == 0:
            now(0.3)

    def begin(epoch, logs):
        global epochs
        epochs = epoch

    model = px.keras.replicate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)]))
    model.compile(optimizer="adam", loss="mse")
    if phase == "first compilation" and first_run:
        build = keras.layers.Dense.call
        def slow(self, *args, **kwargs):
            keras.layers.Dense.call = build
            now(0.5)
            return build(self, *args, **kwargs)
        keras.layers.Dense.call = slow
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_train_batch_end=end_of_batch)
    watch.on_test_batch_end = end_of_test_batch
    history = model.fit(Data(), epochs=3, validation_data=(x[:16], y[:16]), validation_batch_size=8, verbose=0,
                        resume=folder, callbacks=[watch]).history
    print("epochs", len(history["loss"]), "weights", b"".join(w.tobytes() for w in model.get_weights()).hex())
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    script = write(folder / "fit.py", FIT)
    ran = subprocess.run(
        [sys.executable, str(script), str(folder / "run"), "none"], env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.split()


@pytest.mark.parametrize("phase", ["first compilation", "training", "validation", "waiting for data"])
def test_fit_hears_sigterm_in_every_phase_and_goes_on_as_if_nothing_had_happened(phase, undisturbed, tmp_path):
    script = write(tmp_path / "fit.py", FIT)
    command = [sys.executable, str(script), str(tmp_path / "run"), phase]
    stop_when_told(command)
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.split()[-1] == undisturbed[-1]
    assert int(again.stdout.split()[1]) == (3 if phase == "first compilation" else 2)


def test_one_process_alone_may_save_a_model_and_both_may(tmp_path):
    script = write(
        tmp_path / "saves.py",
        """
        import os, sys
        import phalanx as px
        spec = px.connect()
        import keras, numpy as np
        folder = sys.argv[1]
        keras.utils.set_random_seed(1)
        model = px.keras.replicate(keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]))
        model.compile(optimizer="adam", loss="mse")
        model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), batch_size=2, verbose=0)
        if spec.process_id == 0:
            model.save(folder + "/alone.keras")  # needs nothing of the other
            model.save_weights(folder + "/alone.weights.h5")
        model.save(folder + "/both.keras")
        px.cluster.agree("saved")
        for name in ("alone", "both"):
            loaded = keras.saving.load_model(f"{folder}/{name}.keras")
            same = all(np.array_equal(a, b) for a, b in zip(loaded.get_weights(), model.get_weights()))
            print(name, same, sorted(os.listdir(folder)))
        """,
    )
    folder = tmp_path / "models"
    folder.mkdir()
    outcome = launch(2, script, str(folder))
    assert outcome.code == 0, outcome.err[-3000:]
    files = "['alone.keras', 'alone.weights.h5', 'both.keras']"
    for i in (0, 1):
        assert f"[{i}] alone True {files}" in outcome.out and f"[{i}] both True {files}" in outcome.out


def test_other_data_on_one_process_is_refused_on_all(tmp_path):
    script = write(
        tmp_path / "differs.py",
        """
        import phalanx as px
        spec = px.connect()
        import keras, numpy as np
        model = px.keras.replicate(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        model.compile(optimizer="sgd", loss="mse")

        def batches(count, value):
            for _ in range(count):
                yield np.full((2, 2), value, "float32"), np.ones((2, 1), "float32")

        for count, value in ((3, 1.0 + spec.process_id), (2 + spec.process_id, 1.0)):
            try:
                model.fit(batches(count, value), verbose=0)
            except px.errors.StrategyError as error:
                print(error)
        """,
    )
    outcome = launch(2, script)
    assert outcome.code == 0, outcome.err[-3000:]
    for i in (0, 1):
        assert f"[{i}] The first batches of the processes differ." in outcome.out
        assert f"[{i}] The data of process 0 ended after 2 batches, and others have more." in outcome.out


def test_settings_that_are_passed_beat_the_environment(tmp_path):
    script = write(
        tmp_path / "explicit.py",
        """
        import os
        import phalanx as px
        address, number = os.environ["PHALANX_COORDINATOR"], int(os.environ.pop("PHALANX_PROCESS_ID"))
        os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}'
        print(px.connect(px.cluster.Explicit(2, number, address)))
        """,
    )
    outcome = launch(2, script)
    assert outcome.code == 0, outcome.err[-3000:]
    assert "[1] cluster by hand: 2 processes, I am 1" in outcome.out
