"""A loop that is stopped anywhere and started again ends as if it had never stopped, bit for bit."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError


class Program:
    """What a script makes anew in each run."""

    def __init__(self, n=2, data="distributed"):
        self.strategy = px.Mirrored(jax.devices()[:n])
        with self.strategy.scope():
            self.w = px.Variable(jnp.zeros(3), name="w")
            self.key = px.Variable(jax.random.key(0), name="key", trainable=False)
            schedule = optax.exponential_decay(0.1, 3, 0.5)
            self.optimizer = px.Optimizer(optax.adam(schedule))
            self.optimizer.build([self.w])
        rows = np.arange(48.0, dtype=np.float32).reshape(16, 3)
        self.data = [self.strategy.split_rows(rows[i : i + 4]) for i in range(0, 16, 4)]
        if data == "distributed":
            self.data = self.strategy.distribute_dataset(rows, 4, shuffle=True, seed=5)
        self.checkpoint = px.Checkpoint(w=self.w, optimizer=self.optimizer, key=self.key)
        self.step = px.function(self._step)

    def _step(self, x, noise):
        key, used = jax.random.split(self.key.value)
        self.key.assign(key)

        def replica(x):
            with px.GradientTape() as tape:
                loss = ((self.w - x) ** 2).mean() * (noise + jax.random.uniform(used))
            self.optimizer.apply_gradients([(tape.gradient(loss, self.w), self.w)], reduce="mean")

        self.strategy.run(replica, args=(x,))

    def run(self, directory, stop=None, every=2):
        """The numbers and epochs of the steps that were run."""
        seen = []
        for step in px.resumable(directory, self.data, self.checkpoint, epochs=3, every=every):
            if step.number == stop:
                raise RuntimeError("power failure")
            self.step(step.batch, np.float32(random.random() + np.random.rand()))
            seen.append((step.number, step.epoch))
        return seen

    def values(self):
        return [np.asarray(v).tobytes() for v in [self.w, *self.optimizer.variables]]


def seed(value):
    random.seed(value)
    np.random.seed(value)


@pytest.mark.parametrize("data", ["distributed", "list"])
def test_stopped_anywhere_it_ends_as_if_it_had_never_stopped(tmp_path, data):
    seed(1)
    whole = Program(data=data)
    assert whole.run(tmp_path / "whole") == [(i, i // 4) for i in range(12)]
    seed(1)
    for stop, start in [(1, 0), (3, 0), (4, 2), (7, 4), (8, 6), (11, 8), (None, 10)]:
        program = Program(data=data)
        if stop is not None:
            with pytest.raises(RuntimeError, match="power failure"):
                program.run(tmp_path / "run", stop)
        else:
            assert program.run(tmp_path / "run") == [(i, i // 4) for i in range(start, 12)]
        if stop == 1:
            seed(1)  # nothing was saved yet
        else:
            seed(stop)
    assert program.values() == whole.values()
    finished = Program(data=data)
    assert finished.run(tmp_path / "run") == []
    assert finished.values() == whole.values()


def test_without_a_number_of_steps_each_epoch_is_kept(tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        Program().run(tmp_path, stop=6, every=None)
    assert px.CheckpointManager(tmp_path).steps == [4]
    assert Program().run(tmp_path, every=None) == [(i, i // 4) for i in range(4, 12)]
    assert px.CheckpointManager(tmp_path).steps == [4, 8, 12]


def test_it_goes_on_with_another_number_of_replicas(tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        Program(n=2).run(tmp_path, stop=6)
    assert Program(n=4).run(tmp_path) == [(i, i // 4) for i in range(6, 12)][-6:]


def test_a_break_keeps_what_was_saved(tmp_path):
    program = Program()
    for step in px.resumable(tmp_path, program.data, program.checkpoint, every=1):
        program.step(step.batch, np.float32(1))
        if step.number == 2:
            break
    assert px.CheckpointManager(tmp_path).latest_step == 2


def test_data_that_gives_nothing_in_an_epoch_is_an_error(tmp_path):
    def steps(name, data, epochs):
        return [step.number for step in px.resumable(tmp_path / name, data, px.Checkpoint(), epochs=epochs, every=1)]

    for name, data, epoch in (("empty", [], 0), ("generator", (i for i in range(3)), 1), ("iterator", iter([1]), 1)):
        with pytest.raises(ArgumentError, match=f"the data gives nothing in epoch {epoch}.*for each epoch"):
            steps(name, data, epochs=2)
    assert steps("generator", [0, 1, 2], epochs=2) == [3, 4, 5], "the run goes on with what is right"
    assert steps("once", iter([1, 2]), epochs=1) == [0, 1]
    # Stopped after the last step of an epoch, before that was noted: it has nothing left, and that is no error.
    assert steps("end", [1, 2], epochs=1) == [0, 1]
    assert steps("end", [1, 2], epochs=2) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        ((3, px.Checkpoint()), {}, ArgumentTypeError, "data must be something to iterate, got int 3"),
        (([1], {"w": 1}), {}, ArgumentTypeError, r"takes a px.Checkpoint\(name=object, ...\), got dict"),
        (([1], px.Checkpoint()), {"epochs": 0}, ArgumentError, "epochs must be a positive int, got 0"),
        (([1], px.Checkpoint()), {"every": 1.5}, ArgumentError, "every must be a positive int or None, got 1.5"),
        (([1], px.Checkpoint()), {"keep": 0}, ArgumentError, "keep must be a positive int or None"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path, arguments, options, kind, message):
    with pytest.raises(kind, match=message):
        px.resumable(tmp_path, *arguments, **options)
