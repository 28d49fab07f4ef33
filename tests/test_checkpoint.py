"""Checkpoints: what is kept, what comes back, where it fits, and what is refused."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.checkpoint import files
from phalanx.errors import ArgumentError, ArgumentTypeError, CheckpointError, StrategyError

Pair = namedtuple("Pair", "left right")


def saved(directory, step=1, **objects):
    """A manager of a directory in which these objects were saved."""
    manager = px.CheckpointManager(directory)
    assert manager.save(px.Checkpoint(**objects), step=step)
    manager.wait()
    return manager


def restored(directory, **objects):
    checkpoint = px.Checkpoint(**objects)
    px.CheckpointManager(directory).restore_latest(checkpoint)
    return checkpoint


def bits(array):
    return np.asarray(array).tobytes()


# ---- what is kept --------------------------------------------------------------------------------

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "int8", "float8_e4m3fn"]


@pytest.mark.parametrize("per_replica", [False, True], ids=["mirrored", "per_replica"])
def test_variables_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path, per_replica, strategy):
    aggregation = "only_first_replica" if per_replica else "none"
    kind = {"synchronization": "on_read" if per_replica else "auto", "aggregation": aggregation}

    def make(fill):
        with strategy.scope():
            made = {
                f"{dtype}{shape}": px.Variable(jnp.full(shape, fill).astype(dtype), **kind)
                for dtype in DTYPES
                for shape in [(), (3, 2), (0, 4)]
            }
            made["key"] = px.Variable(jax.random.key(fill, impl="rbg"), **kind)
            return made

    here, there = make(1), make(0)
    if per_replica:
        strategy.run(lambda: here["float32(3, 2)"].assign_add(jnp.ones((3, 2)) * px.get_replica_context().replica_id))
    here["float32()"].assign(np.nan)
    saved(tmp_path, all=here)
    restored(tmp_path, all=there)
    for name in here:
        for a, b in zip(here[name].components, there[name].components):
            a, b = (jax.random.key_data(x.value) if name == "key" else x.value for x in (a, b))
            assert bits(a) == bits(b), name
            assert a.devices() == b.devices()


def test_plain_values_come_back_as_they_were_in_their_places(tmp_path):
    values = {
        "whole": 2**80,
        "number": 0.1,
        "unusual": [float("nan"), float("inf"), -float("inf"), -0.0, 1 + 2j],
        "text": "größer ' \" / \\ \n",
        "raw": bytes(range(256)),
        "nothing": None,
        "truth": True,
        "nested": {"a": [1, (2.5, None)], 7: {"b": "c"}, (1, "x"): []},
        "scalars": [np.float32(1.5), np.int64(-(2**60)), np.bool_(True)],
        "losses": [jnp.float32(0.25)],
    }
    saved(tmp_path, **values)
    again = restored(tmp_path, **dict.fromkeys(values))
    for name, value in values.items():
        found = getattr(again, name)
        assert repr(found) == repr(value), name
        assert type(found) is type(value)


def test_containers_stay_the_same_objects_and_named_tuples_are_made_anew(tmp_path):
    def make(fill):
        state = {"array": np.full(2, fill), "pair": Pair(jnp.full(3, fill), [fill]), "variable": px.Variable(fill)}
        return {"state": state, "history": [fill] * int(fill), "rate": fill}

    saved(tmp_path, **make(3.0))
    objects = make(0.0)
    state, history, variable, array = (
        objects["state"],
        objects["history"],
        objects["state"]["variable"],
        objects["state"]["array"],
    )
    again = restored(tmp_path, **objects)
    assert again.rate == 3.0
    assert again.history is history and history == [3.0] * 3
    assert again.state is state and state["variable"] is variable and float(variable) == 3.0
    assert state["array"].tolist() == [3, 3] and array.tolist() == [0, 0]
    assert isinstance(state["pair"], Pair)
    assert state["pair"].left.tolist() == [3, 3, 3] and state["pair"].right == [3.0]


def test_a_checkpoint_within_another_gets_its_numbers_back_too(tmp_path):
    inner = px.Checkpoint(best=0.5, w=px.Variable(1.0), log=[1])
    saved(tmp_path, inner=inner)
    other = px.Checkpoint(best=0.0, w=px.Variable(0.0), log=[])
    restored(tmp_path, inner=other)
    assert (other.best, float(other.w), other.log) == (0.5, 1.0, [1])


def test_generators_of_random_numbers_go_on_where_they_were(tmp_path):
    def make(seed):
        return {
            "python": random.Random(seed),
            "numpy": np.random.default_rng(seed),
            "bits": np.random.MT19937(seed),
            "old": np.random.RandomState(seed),
            "key": jax.random.key(seed),
        }

    def draw(made):
        numbers = [made["python"].random(), made["numpy"].random(), made["bits"].random_raw(), made["old"].rand()]
        return [*map(float, numbers), jax.random.key_data(made["key"]).tolist()]

    first, second = make(1), make(2)
    draw(first)
    saved(tmp_path, random=first)
    expected = draw(first)
    again = restored(tmp_path, random=second)
    assert draw(again.random) == expected


def test_an_optimizer_goes_on_as_if_it_had_never_stopped(tmp_path, strategy):
    def make():
        with strategy.scope():
            w = px.Variable([1.0, 2.0], name="w")
            optimizer = px.Optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
            optimizer.build([w])
        return w, optimizer

    def train(w, optimizer, steps):
        for _ in range(steps):
            strategy.run(lambda: optimizer.apply_gradients([(2 * w.value, w)], reduce="mean"))

    w, optimizer = make()
    train(w, optimizer, 2)
    optimizer.state.hyperparams["learning_rate"].assign(0.5)
    saved(tmp_path, w=w, optimizer=optimizer)
    train(w, optimizer, 2)
    v, other = make()
    restored(tmp_path, w=v, optimizer=other)
    train(v, other, 2)
    assert bits(v) == bits(w)


def test_a_dataset_goes_on_at_its_next_element(tmp_path):
    def make():
        return px.OneDevice().distribute_dataset(np.arange(12.0), 2, shuffle=True)

    dataset = make()
    elements = iter(dataset)
    next(elements)
    saved(tmp_path, data=dataset)
    rest = [x.values[0].tolist() for x in elements]
    again = make()
    restored(tmp_path, data=again)
    assert [x.values[0].tolist() for x in again] == rest


def test_objects_with_a_list_of_variables_are_kept_by_their_names(tmp_path):
    class Network:
        def __init__(self, fill):
            self.variables = [px.Variable(fill, name="a"), px.Variable(2 * fill, name="b")]

    saved(tmp_path, network=Network(1.0))
    network = Network(0.0)
    network.variables.reverse()
    restored(tmp_path, network=network)
    assert {v.name: float(v) for v in network.variables} == {"a": 1.0, "b": 2.0}


def test_a_variable_that_is_given_twice_is_kept_once(tmp_path):
    w = px.Variable(jnp.ones(1000))
    saved(tmp_path, a=w, b=[w])
    contents, arrays = files.read(tmp_path / "1")
    assert list(arrays) == ["a"]
    assert contents["step"] == 1


def test_what_cannot_be_kept_is_named():
    manager = px.CheckpointManager("unused")
    w = px.Variable(1.0, name="w")
    for objects, kind, message in [
        ({"f": {"inner": [len]}}, ArgumentTypeError, "'f/inner/0' is a builtin_function_or_method"),
        ({"part": w.components[0]}, ArgumentTypeError, "'part' is a Component"),
        ({"optimizer": px.Optimizer(optax.adam(0.1))}, ArgumentError, r"'optimizer' has no variables yet.*\.build"),
        (
            {"a": {"names": np.array(["a"])}},
            ArgumentTypeError,
            "'a/names' is a ndarray of dtype <U1. Arrays of numbers",
        ),
        ({"a": np.array([None])}, ArgumentTypeError, "'a' is a ndarray of dtype object"),
        ({"a": np.zeros(1, "datetime64[s]")}, ArgumentTypeError, "'a' is a ndarray of dtype datetime64"),
        ({"a": np.zeros(1, np.longdouble)}, ArgumentTypeError, "'a' is a ndarray of dtype float128"),
        ({"a": np.ma.masked_array([1.0, 2.0], [True, False])}, ArgumentTypeError, "'a' is a MaskedArray"),
        ({"a": {1: w, "1": px.Variable(2.0)}}, ArgumentError, "two things that would be called 'a/1'"),
    ]:
        for call in (lambda c: manager.save(c, step=1), manager.restore_latest):
            with pytest.raises(kind, match=message):
                call(px.Checkpoint(**objects))


def test_a_checkpoint_is_read_and_set_by_its_names():
    checkpoint = px.Checkpoint(step=1, w=px.Variable(2.0))
    checkpoint.step += 1
    assert checkpoint.step == 2
    with pytest.raises(AttributeError, match="nothing called 'epoch'; it has step, w"):
        checkpoint.epoch = 1
    with pytest.raises(AttributeError, match="nothing called 'epoch'"):
        _ = checkpoint.epoch


# ---- on other replicas ---------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 4, 8])
@pytest.mark.parametrize("before", [1, 3])
def test_a_checkpoint_is_restored_on_any_number_of_replicas(tmp_path, before, after):
    def make(n):
        strategy = px.Mirrored(jax.devices()[:n])
        with strategy.scope():
            variables = {
                "w": px.Variable(jnp.zeros(3)),
                "sum": px.Variable(0, synchronization="on_read", aggregation="sum"),
                "mean": px.Variable(0.0, synchronization="on_read", aggregation="mean"),
                "first": px.Variable(0, synchronization="on_read", aggregation="only_first_replica"),
            }
        return strategy, variables

    strategy, here = make(before)
    here["w"].assign([1.0, 2.0, 3.0])

    def update():
        replica = px.get_replica_context().replica_id
        here["sum"].assign(replica + 5)
        here["mean"].assign(replica + 1.0)
        here["first"].assign(replica + 7)

    strategy.run(update)
    saved(tmp_path, variables=here)
    _, there = make(after)
    restored(tmp_path, variables=there)
    for name in here:
        np.testing.assert_array_equal(here[name].numpy(), there[name].numpy(), err_msg=name)
    assert len({bits(c.value) for c in there["w"].components}) == 1


def test_components_without_an_aggregation_need_as_many_replicas(tmp_path):
    def own(n):
        with px.Mirrored(jax.devices()[:n]).scope():
            return px.Variable(0.0, synchronization="on_read")

    saved(tmp_path, own=own(2))
    restored(tmp_path, own=own(2))
    with pytest.raises(CheckpointError, match="'own' was saved with one component for each of 2 replicas"):
        restored(tmp_path, own=own(4))


# ---- what does not match -------------------------------------------------------------------------


def test_missing_entries_are_listed_and_nothing_is_restored(tmp_path):
    a, b = px.Variable(1.0), px.Variable(2.0)
    saved(tmp_path, a=a, gone=3)
    a.assign(5.0)
    with pytest.raises(CheckpointError) as caught:
        restored(tmp_path, a=a, b=b)
    assert "b: here, not in the checkpoint" in str(caught.value)
    assert "gone: in the checkpoint, not here" in str(caught.value)
    assert float(a) == 5.0


def test_a_partial_restore_takes_what_there_is_and_says_what_does_not_match(tmp_path, caplog):
    a, b = px.Variable(1.0), px.Variable(2.0)
    manager = saved(tmp_path, a=a, gone=3)
    a.assign(5.0)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        assert manager.restore_latest(px.Checkpoint(a=a, b=b), partial=True) == 1
    assert (float(a), float(b)) == (1.0, 2.0)
    assert "b: here, not in the checkpoint" in caplog.text
    assert "gone: in the checkpoint, not here" in caplog.text


def test_entries_that_nothing_takes_are_logged_and_an_error_when_strict(tmp_path, caplog):
    a = px.Variable(1.0)
    saved(tmp_path, a=a, gone=3)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        restored(tmp_path, a=a)
    assert "gone: in the checkpoint, not here" in caplog.text
    px.strict(True)
    with pytest.raises(CheckpointError, match="gone: in the checkpoint, not here"):
        restored(tmp_path, a=a)


class Refuses:
    """Its state cannot be loaded."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("not this one")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: px.Variable(jnp.ones(3)), r"'b' is of shape \(2,\) in the checkpoint and of shape \(3,\) here"),
        (lambda: px.Variable([1, 2]), "'b' is of dtype float32 in the checkpoint and of dtype int32 here"),
        (lambda: px.Variable(jnp.ones(2), synchronization="on_read"), "a mirrored one in the checkpoint and a per-replica"),
        (lambda: 3.0, "'b' is a variable in the checkpoint and a value here"),
        (Refuses, "'b' is a variable in the checkpoint and a state here"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_and_everything_stays_as_it_was(tmp_path, other, message):
    saved(tmp_path, a=px.Variable(1.0), b=px.Variable([1.0, 2.0]), c=1, d=px.Variable(1.0))
    here = px.Checkpoint(a=px.Variable(7.0), b=other(), c=7, d=px.Variable(7.0))
    with pytest.raises(CheckpointError, match=message):
        px.CheckpointManager(tmp_path).restore_latest(here)
    assert (float(here.a), here.c, float(here.d)) == (7.0, 7, 7.0)


def test_a_state_that_is_refused_takes_back_those_before_it(tmp_path):
    class Counter:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    saved(tmp_path, w=px.Variable(1.0), counter=Counter(1), last=Refuses())
    w, counter = px.Variable(7.0), Counter(7)
    with pytest.raises(CheckpointError, match="'last' cannot take its state from the checkpoint: not this one"):
        restored(tmp_path, w=w, counter=counter, last=Refuses())
    assert (float(w), counter.value) == (7.0, 7)


# ---- the manager ---------------------------------------------------------------------------------


def test_the_last_few_checkpoints_are_kept(tmp_path):
    w = px.Variable(0.0)
    manager = px.CheckpointManager(tmp_path / "new" / "folder", keep=2, every=10)
    assert (manager.latest_step, manager.restore_latest(px.Checkpoint(w=w))) == (None, None)
    done = [step for step in range(1, 46) if manager.save(px.Checkpoint(w=w.assign(step)), step=step)]
    assert done == [10, 20, 30, 40]
    assert manager.save(px.Checkpoint(w=w), step=45, force=True)
    assert not manager.save(px.Checkpoint(w=w), step=45, force=True)
    manager.wait()
    assert (manager.steps, manager.latest_step) == ([40, 45], 45)
    manager.restore(px.Checkpoint(w=w), 40)
    assert float(w) == 40
    everything = px.CheckpointManager(tmp_path / "all", keep=None)
    for step in range(5):
        everything.save(px.Checkpoint(w=w), step=step)
    everything.wait()
    assert everything.steps == [0, 1, 2, 3, 4]


def test_a_step_is_not_written_over(tmp_path):
    manager = saved(tmp_path, step=5, a=1)
    for step in (3, 5):
        with pytest.raises(ArgumentError, match=f"step {step} is not after step 5"):
            px.CheckpointManager(tmp_path).save(px.Checkpoint(a=2), step=step)
    assert not manager.save(px.Checkpoint(a=2), step=5)
    with pytest.raises(ArgumentError, match=r"no checkpoint of step 4 in .*, only \[5\]"):
        manager.restore(px.Checkpoint(a=2), 4)


def test_threads_may_save_at_the_same_time(tmp_path):
    manager, start = px.CheckpointManager(tmp_path, keep=None), threading.Barrier(6)
    refused = []

    def save(step):
        start.wait(20)
        try:
            manager.save(px.Checkpoint(w=px.Variable(float(step))), step=step)
        except ArgumentError as error:  # a later one came first
            refused.append((step, "is not after step" in str(error)))

    threads = [threading.Thread(target=save, args=(step,)) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager.wait()
    assert sorted([*manager.steps, *(step for step, _ in refused)]) == list(range(6))
    assert all(explained for _, explained in refused)
    w = px.Variable(-1.0)
    assert manager.restore_latest(px.Checkpoint(w=w)) == 5 == float(w)


def test_what_is_in_the_directory_by_another_name_is_no_checkpoint(tmp_path):
    manager = saved(tmp_path, step=5, a=1)
    for name in ("0007", "\u0668", "\u00b2", "9 ", "-9", "9.0", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "10").write_text("a file")
    assert manager.steps == [5]
    assert manager.restore_latest(px.Checkpoint(a=2)) == 5


def test_another_program_that_writes_to_the_directory_is_named_and_a_dead_one_is_not_in_the_way(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "saved\n"
        manager, w = px.CheckpointManager(tmp_path), px.Variable(0.0)
        for write in (lambda: manager.save(px.Checkpoint(w=w), step=2), lambda: next(iter(resumable(tmp_path, w)))):
            with pytest.raises(
                CheckpointError, match=f"Another program writes .*: pid {other.pid} on host .*of its own"
            ):
                write()
        assert manager.restore_latest(px.Checkpoint(w=w)) == 1 == float(w), "it may be read"
    finally:
        other.kill()
        other.communicate()
    assert manager.save(px.Checkpoint(w=w), step=2)
    manager.wait()
    assert len(list(resumable(tmp_path / "next", w))) == 1
    assert sorted(path.name for path in (tmp_path / "next").iterdir()) == ["1"], "a loop leaves nothing behind"


OTHER = """
import sys
import phalanx as px

manager = px.CheckpointManager(sys.argv[1])
manager.save(px.Checkpoint(w=px.Variable(1.0)), step=1)
manager.wait()
print("saved", flush=True)
sys.stdin.read()
"""


def resumable(directory, w):
    return px.resumable(directory, [1.0], px.Checkpoint(w=w))


def test_a_program_that_ends_leaves_nothing_but_checkpoints_and_says_nothing(tmp_path):
    code = "import sys, phalanx as px; m = px.CheckpointManager(sys.argv[1]); m.save(px.Checkpoint(a=1), step=1)"
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_an_interrupt_while_it_waits_for_the_writing_does_not_let_the_next_one_begin(tmp_path, monkeypatch):
    go_on, writes, write = threading.Event(), [], files.write
    monkeypatch.setattr(
        files, "write", lambda *args: (writes.append("begins"), go_on.wait(20), write(*args), writes.append("ends"))
    )
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(a=1), step=1)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                manager.save(px.Checkpoint(a=1), step=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert writes == ["begins"]
    go_on.set()
    assert manager.save(px.Checkpoint(a=1), step=2)
    manager.wait()
    assert writes == ["begins", "ends"] * 2 and manager.steps == [1, 2]


def test_managers_of_one_program_share_its_directory_until_none_needs_it(tmp_path):
    first, second = saved(tmp_path, step=1, a=1), px.CheckpointManager(tmp_path)
    second.save(px.Checkpoint(a=2), step=2)
    first.settle()
    assert (tmp_path / ".writer").exists()
    second.wait()
    del second
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "2"]
    first.save(px.Checkpoint(a=2), step=3)
    assert f"pid {os.getpid()} on host" in (tmp_path / ".writer").read_text()


def test_the_state_is_that_of_the_moment_of_saving_whatever_training_does_meanwhile(tmp_path, strategy, monkeypatch):
    with strategy.scope():
        w = px.Variable(jnp.zeros(1000))
    step = px.function(lambda: strategy.run(lambda: w.assign_add(jnp.ones(1000))))
    array, numbers = np.zeros(3), [0]
    step()
    go_on, write = threading.Event(), files.write
    monkeypatch.setattr(files, "write", lambda *args: (go_on.wait(20), write(*args)))
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(w=w, array=array, numbers=numbers), step=1)
    for _ in range(3):
        step()
    array += 1
    numbers[0] = 1
    assert manager.steps == [], "the steps did not wait for the writing"
    go_on.set()
    manager.wait()
    again = restored(tmp_path, w=w, array=array, numbers=numbers)
    assert set(w.numpy().tolist()) == {1.0}
    assert again.array.tolist() == [0, 0, 0] and numbers == [0]
    step()
    assert set(w.numpy().tolist()) == {2.0}


def test_checkpoints_are_for_eager_code(tmp_path):
    w = px.Variable(1.0)
    manager = saved(tmp_path, w=w)
    for place in (lambda fn: px.function(fn)(), px.OneDevice().run, lambda fn: jax.jit(lambda: (fn(), 1.0)[1])()):
        with pytest.raises(StrategyError, match="cannot be saved in a traced function or a replica"):
            place(lambda: manager.save(px.Checkpoint(w=w), step=2))
        with pytest.raises(StrategyError, match="cannot be restored in a traced function or a replica"):
            place(lambda: manager.restore_latest(px.Checkpoint(w=w)))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda m: px.CheckpointManager(3), ArgumentTypeError, "directory must be a path, got 3"),
        (lambda m: px.CheckpointManager(__file__), ArgumentError, "test_checkpoint.py is a file; checkpoints need"),
        (lambda m: px.CheckpointManager("x", keep=0), ArgumentError, "keep must be a positive int or None, got 0"),
        (lambda m: px.CheckpointManager("x", every=1.5), ArgumentError, "every must be a positive int or None"),
        (lambda m: px.CheckpointManager("x", timeout=0), ArgumentError, "timeout must be a positive number"),
        (lambda m: m.save({"w": 1}, step=1), ArgumentTypeError, r"save takes a px.Checkpoint\(name=object, ...\), got dict"),
        (lambda m: m.save(px.Checkpoint(), step=-1), ArgumentError, "step must be an int from 0 on, got -1"),
        (lambda m: m.save(px.Checkpoint(), step=jnp.int32(1)), ArgumentError, "step must be an int from 0 on"),
        (lambda m: m.save(px.Checkpoint(), step=1, force=1), ArgumentTypeError, "force takes True or False"),
        (lambda m: m.restore_latest(3), ArgumentTypeError, "restore_latest takes a px.Checkpoint"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        call(px.CheckpointManager(tmp_path))


def test_orbax_is_imported_where_it_is_needed_and_its_absence_says_what_to_install(monkeypatch, tmp_path):
    code = "import phalanx as px, sys; px.Checkpoint(a=1); print({'orbax', 'keras'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "set()\n"
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'phalanx\[checkpoint\]'"):
        px.CheckpointManager(tmp_path)
