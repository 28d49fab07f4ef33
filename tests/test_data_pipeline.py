"""The background pipeline: work ahead of the step, bounded in memory, and gone when the loop is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feeding import WAIT, feeding_threads, numbers, replicas

import phalanx as px
from phalanx.errors import StrategyError

MARK = (4, 24593)
"""A shape that no other array has: what has it is an element of the test."""


def on_devices() -> int:
    """How many elements of the test are alive."""
    gc.collect(0)
    return sum(array.shape == (2, 2, MARK[1]) for array in jax.live_arrays())


@pytest.fixture(autouse=True)
def _no_thread_left_behind():
    yield
    assert feeding_threads() == []


# ---- overlap -------------------------------------------------------------------------------------


def test_the_next_element_is_made_while_the_step_runs():
    asked = [threading.Event() for _ in range(4)]

    def source():
        for event in asked:
            event.set()
            yield np.ones(4)

    for i, _ in enumerate(replicas(2).distribute_dataset(source, prefetch=1)):
        assert i + 1 == len(asked) or asked[i + 1].wait(WAIT)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_the_source_is_not_asked_further_ahead_than_prefetch(prefetch):
    asked, used = [], []
    ahead = threading.Semaphore(0)

    def source():
        for i in range(12):
            asked.append(i - len(used))
            ahead.release()
            yield np.ones(4)

    for _ in replicas(2).distribute_dataset(source, prefetch=prefetch):
        for _ in range(1 if used else 1 + prefetch):  # until it is as far ahead as it may be
            if len(asked) < 12:
                assert ahead.acquire(timeout=WAIT)
        used.append(1)
    assert max(asked) == prefetch


def test_without_prefetch_the_source_is_read_by_the_thread_that_iterates():
    threads = []

    def source():
        for _ in range(3):
            threads.append(threading.current_thread())
            yield np.ones(4)

    iterator = iter(replicas(2).distribute_dataset(source, prefetch=0))
    next(iterator)
    assert len(threads) == 1
    assert len(list(iterator)) == 2
    assert set(threads) == {threading.current_thread()}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_source_runs_with_the_x64_setting_of_the_loop(prefetch):
    def source():
        yield jnp.arange(4.0)

    for on, dtype in ((True, "float64"), (False, "float32")):
        with jax.enable_x64(on):
            (element,) = replicas(2).distribute_dataset(source, prefetch=prefetch)
        assert element.dtype == dtype


@pytest.mark.parametrize("prefetch", [0, 2])
def test_feeding_is_no_implicit_transfer(prefetch):
    with jax.transfer_guard("disallow"):
        elements = list(replicas(2).distribute_dataset((np.ones(4), np.ones(4)), 2, mask=True, prefetch=prefetch))
    assert len(elements) == 2


def test_several_passes_at_once_do_not_disturb_each_other():
    dataset = replicas(2).distribute_dataset(numbers(4))
    pairs = [(float(a.values[0][0]), float(b.values[1][0])) for a, b in zip(dataset, dataset)]
    assert pairs == [(i, i) for i in range(4)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_traced_program_takes_elements_as_arguments_only(prefetch):
    """One that it took by itself would be that of the first call for ever; the iterator stays where it was."""
    strategy = replicas(2)
    dataset = strategy.distribute_dataset(np.arange(8.0), 4, prefetch=prefetch)
    iterator = iter(dataset)
    for trace in (lambda fn: px.function(fn)(), strategy.run, lambda fn: jax.jit(fn)()):
        for take in (lambda: next(iter(dataset)), lambda: next(iterator), lambda: list(px.progress(dataset))):
            with pytest.raises(StrategyError, match="pass each element to the function as an argument"):
                trace(lambda: jnp.ones(take().shape))
    step = px.function(lambda x: strategy.reduce("sum", strategy.run(jnp.sum, (x,))))
    assert [float(step(x)) for x in iterator] == [6, 22]
    px.run_functions_eagerly(True)
    assert px.function(lambda: len(list(dataset)))() == 2


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_prefetch_and_one_elements_are_on_the_devices_and_no_more(prefetch, monkeypatch):
    strategy, alive = replicas(2), []
    split, made = strategy.split_rows, threading.Semaphore(0)

    def counting(rows, **options):
        element = split(rows, **options)
        made.release()
        return element

    monkeypatch.setattr(strategy, "split_rows", counting)
    step = px.function(lambda x: strategy.reduce("sum", strategy.run(jnp.sum, (x,))))
    for x in strategy.distribute_dataset(lambda: (np.ones(MARK) for _ in range(12)), prefetch=prefetch):
        step(x).block_until_ready()
        for _ in range(1 if alive else 1 + prefetch):  # until all that may be made is made
            if len(alive) + prefetch < 12:
                assert made.acquire(timeout=WAIT)
        alive.append(on_devices())
    assert alive[: 12 - prefetch] == [prefetch + 1] * (12 - prefetch)
    assert max(alive) == prefetch + 1
    del x
    assert on_devices() == 0


def test_elements_that_are_kept_for_a_while_count_too(monkeypatch):
    """One is made only while fewer than three are alive, wherever they are: prefetch is 2."""
    strategy, made, alive = replicas(2), [], []
    split = strategy.split_rows

    def noting(rows, **options):
        element = split(rows, **options)
        made.append(weakref.ref(element.stacked))
        return element

    def source():
        for _ in range(40):
            alive.append(sum(array() is not None for array in made))
            yield np.ones(4)

    monkeypatch.setattr(strategy, "split_rows", noting)
    kept = []
    for x in strategy.distribute_dataset(source, prefetch=2):
        kept = [x, *kept[:1]]
    assert max(alive) == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_nothing_but_the_loops_variable_holds_an_element(prefetch):
    iterator = iter(replicas(2).distribute_dataset(lambda: iter([np.ones(MARK)]), prefetch=prefetch))
    element = next(iterator)
    assert on_devices() == 1
    del element
    assert on_devices() == 0
    assert list(iterator) == []


def test_without_prefetch_there_is_one_element_beside_the_one_being_made():
    alive = []

    def source():
        for _ in range(4):
            alive.append(on_devices())
            yield np.ones(MARK)

    for x in replicas(2).distribute_dataset(source, prefetch=0):
        assert x.shape == (2, MARK[1])
        assert on_devices() == 1
    assert alive == [0, 1, 1, 1]


def test_an_element_that_was_kept_does_not_stop_the_pipeline():
    elements = list(replicas(2).distribute_dataset(numbers(20), prefetch=2))
    assert [float(x.values[0][0]) for x in elements] == list(range(20))


def test_what_is_ahead_is_let_go_when_the_loop_is_left():
    elements = iter(replicas(2).distribute_dataset(lambda: (np.ones(MARK) for _ in range(12)), prefetch=4))
    next(elements)
    del elements
    assert feeding_threads() == []
    assert on_devices() == 0


# ---- errors in the source ------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_comes_where_its_element_would_have_with_the_sources_traceback(prefetch):
    def broken_reader(i):
        if i == 3:
            raise OSError("disk on fire")
        return np.full(4, i)

    seen = []
    with pytest.raises(OSError, match="disk on fire") as caught:
        for x in replicas(2).distribute_dataset(lambda: map(broken_reader, range(6)), prefetch=prefetch):
            seen.append(int(x.values[0][0]))
    assert seen == [0, 1, 2]
    assert "broken_reader" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_after_an_error_the_dataset_can_be_iterated_again():
    calls = []

    def source():
        calls.append(1)
        yield np.ones(4)
        if len(calls) == 1:
            raise OSError
        yield np.ones(4)

    dataset = replicas(2).distribute_dataset(source)
    with pytest.raises(OSError):
        list(dataset)
    assert len(list(dataset)) == 2


# ---- leaving -------------------------------------------------------------------------------------


def closing(closed: list[str]):
    """An endless source that notes when it is closed."""
    try:
        while True:
            yield np.ones(4)
    finally:
        closed.append(threading.current_thread().name)


def leave_by_break(dataset):
    for _ in dataset:
        break


def leave_by_exception(dataset):
    with pytest.raises(ZeroDivisionError):
        for _ in dataset:
            raise ZeroDivisionError


def leave_by_dropping_the_iterator(dataset):
    iterator = iter(dataset)
    next(iterator)
    del iterator


def leave_by_garbage_collection(dataset):
    cycle = [iter(dataset)]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_exception, leave_by_dropping_the_iterator, leave_by_garbage_collection],
    ids=lambda leave: leave.__name__,
)
def test_leaving_ends_the_thread_and_closes_the_source(leave):
    closed = []
    leave(replicas(2).distribute_dataset(lambda: closing(closed)))
    assert feeding_threads() == []
    assert closed == ["phalanx-feed"]


def test_an_iterator_that_was_never_asked_starts_nothing():
    iterator = iter(replicas(2).distribute_dataset(numbers(3)))
    assert feeding_threads() == []
    del iterator


@pytest.fixture
def blocking():
    """A source whose second element never comes, until the test is over."""
    released, reached = threading.Event(), threading.Event()

    def source():
        yield np.ones(4)
        reached.set()
        assert released.wait(WAIT)

    source.reached = reached
    yield source
    released.set()


def test_leaving_does_not_wait_for_a_source_that_blocks(blocking):
    for _ in replicas(2).distribute_dataset(blocking):
        assert blocking.reached.wait(WAIT)
        start = time.monotonic()
        break
    assert time.monotonic() - start < 1


def test_ctrl_c_is_answered_while_the_source_blocks(blocking):
    pressed = []

    def source():
        yield np.ones(4)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        yield from blocking()

    with pytest.raises(KeyboardInterrupt):
        for _ in replicas(2).distribute_dataset(source):
            pass
    assert time.monotonic() - pressed[0] < 1


def test_ctrl_c_while_a_loop_is_left_is_not_lost(blocking):
    with pytest.raises(KeyboardInterrupt):
        for _ in replicas(2).distribute_dataset(blocking):
            assert blocking.reached.wait(WAIT)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            break
        threading.Event().wait(WAIT)


def test_the_next_loop_does_not_read_a_source_that_is_still_being_left():
    released, reading, together = threading.Event(), [], []

    class Batches:
        def __iter__(self):
            for i in range(3):
                reading.append(i)
                together.append(len(reading))
                assert i == 0 or released.wait(WAIT)
                reading.pop()
                yield np.ones(4)

    dataset = replicas(2).distribute_dataset(Batches())
    for _ in dataset:
        break
    threading.Timer(0.05, released.set).start()
    assert len(list(dataset)) == 3
    assert max(together) == 1


# ---- the end of the program ----------------------------------------------------------------------


def run_script(script: str) -> tuple[int, str, float]:
    """Exit code, what was written to stderr, and the seconds that ending took."""
    source = (
        textwrap.dedent("""
        import os, signal, threading, time
        import numpy as np
        import phalanx as px

        px.cpu_devices(2)
        strategy = px.Mirrored()

        def endless():
            while True:
                yield np.ones(4)

        def blocking():
            yield np.ones(4)
            reached.set()
            time.sleep(60)

        reached = threading.Event()
        """)
        + textwrap.dedent(script)
        + "\nprint(time.time(), flush=True)\n"
    )
    command = [sys.executable, "-W", "error", "-X", "faulthandler", "-c", source]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stderr, time.time() - float(result.stdout or "inf")


@pytest.mark.parametrize(
    "script",
    [
        "iterator = iter(strategy.distribute_dataset(endless)); next(iterator)",
        "for x in strategy.distribute_dataset(endless): break",
        "iterator = iter(strategy.distribute_dataset(blocking)); next(iterator); reached.wait()",
        "for x in strategy.distribute_dataset(blocking): reached.wait(); break",
        "iterators = [iter(strategy.distribute_dataset(endless)) for _ in range(3)]; [next(i) for i in iterators]",
        "iterators = [iter(strategy.distribute_dataset(blocking)) for _ in range(30)]; [next(i) for i in iterators]",
    ],
    ids=["in use", "left", "source blocks", "left while it blocks", "several", "many block"],
)
def test_the_program_ends_at_once_and_without_a_word(script):
    code, said, seconds = run_script(script)
    assert (code, said) == (0, "")
    assert seconds < 10  # the source that blocks would do so for a minute


def test_a_forked_process_is_told_that_nobody_feeds_it():
    code, said, _ = run_script("""
        import warnings
        warnings.simplefilter("ignore")  # Python and JAX warn of forking
        iterator = iter(strategy.distribute_dataset(endless))
        next(iterator)
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            try:
                for _ in iterator:
                    pass
            except px.errors.StrategyError as error:
                os.write(2, str(error).encode())
            os._exit(0)
        """)
    assert code == 0
    assert said.startswith("The thread that feeds this iterator is gone: the process was forked")


def test_ctrl_c_ends_a_program_whose_source_blocks():
    code, said, _ = run_script("""
        start = time.monotonic()
        try:
            for x in strategy.distribute_dataset(blocking):
                reached.wait()
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            print(time.time(), flush=True)
            assert time.monotonic() - start < 1.5, "leaving took too long"
        """)
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert code == -signal.SIGINT
