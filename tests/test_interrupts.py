"""Ctrl-C at any point: the variables hold the last finished step, all of them, and the next step goes on from there."""

from __future__ import annotations

import ctypes
import gc
import linecache
import os
import signal
import sys
import threading

import jax
import numpy as np
import pytest

import phalanx as px
from phalanx._interrupts import HeldBack

ONES = np.ones(2, np.float32)


def make_step(n, also=lambda v: None, compiled=True):
    """Three variables that a step changes together, and the step: on n replicas, or without a strategy for 0."""
    strategy = px.Mirrored(jax.devices()[:n]) if n else None
    variables = [px.Variable(np.zeros(2, np.float32)) for _ in range(3)]

    def update():
        for v in variables:
            v.assign_add(ONES)
        return also(variables[0])

    def make():
        return px.function((lambda: strategy.run(update)) if strategy else update)

    step = make()
    step()
    return variables, step if compiled else make()


def finished_steps(variables):
    """How many steps the variables have seen; they must agree."""
    values = {x for v in variables for x in v.numpy().tolist()}
    assert len(values) == 1, f"a step was half done: {values}"
    return values.pop()


def by_signal():
    signal.raise_signal(signal.SIGINT)


def from_another_thread():
    """As task runners cancel a thread."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(KeyboardInterrupt))


def lines_run(call, at=0, interrupt=None, where=("",)):
    """Make the call, interrupted where its `at`-th line of Python starts; how many lines had started.

    With `where` only lines of files with one of these in their path count. Lines that are no place for handlers
    are left out: `try:`, and the end of a `with` block, where Python reports its first line again.
    """
    lines = 0

    def trace(frame, event, arg):
        if not any(part in frame.f_code.co_filename for part in where):
            return None
        blocks = set()

        def trace_line(frame, event, arg):
            nonlocal lines
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            if event == "line" and text != "try:" and frame.f_lineno not in blocks:
                lines += 1
                if text.startswith("with "):
                    blocks.add(frame.f_lineno)
                if lines == at:
                    sys.settrace(None)
                    interrupt()
            return trace_line

        return trace_line

    before = sys.gettrace()
    gc.disable()  # its callbacks are Python code too, at places of their own
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


def check_all(points, make, interrupt, where=("",)):
    """Interrupt steps at each of the points; how many of the interrupts came out of a step."""
    interrupted = 0
    for at in points:
        variables, step = make()
        try:
            lines_run(step, at, interrupt, where)
        except KeyboardInterrupt:
            interrupted += 1
        now = finished_steps(variables)
        other = threading.Thread(target=step)  # which finds no lock held
        other.start()
        other.join(20)
        assert not other.is_alive()
        assert finished_steps(variables) == now + 1
    return interrupted


def again(variables, step):
    """The same step each time, after one that leaves nothing to copy: JAX's own eager code is not safe everywhere."""

    def make():
        step()
        return variables, step

    return make


@pytest.mark.parametrize("interrupt", [by_signal, from_another_thread])
@pytest.mark.parametrize("n", [0, 2])
def test_an_interrupt_at_any_line_of_a_step(n, interrupt):
    make = again(*make_step(n))
    for _ in range(3):
        variables, step = make()
    total = lines_run(step)
    assert total > 20
    assert check_all(range(1, total + 1), make, interrupt) == total
    assert 5 + 2 * total <= finished_steps(variables) <= 5 + 3 * total


@pytest.mark.parametrize("n", [0, 2])
def test_an_interrupt_at_the_end_of_the_compiling_call(n):
    """Where buffers are given away, in JAX's own Python code, and the new values arrive."""
    total = lines_run(make_step(n, compiled=False)[1])
    points = range(total - 200, total, 12)
    assert check_all(points, lambda: make_step(n, compiled=False), by_signal) >= len(points) - 1


def test_an_interrupt_in_a_step_that_prints():
    """Each of its calls passes through JAX's Python code."""
    make = again(*make_step(0, also=lambda v: jax.debug.print("{x}", x=v.value)))
    make()
    total = lines_run(make()[1])
    points = range(1, total, max(1, total // 60))
    assert check_all(points, make, by_signal) >= len(points) - 1


def test_an_interrupt_around_a_program_that_calls_python_functions():
    make = again(*make_step(0, also=lambda v: jax.debug.print("{x}", x=v.value)))
    where = ("_launch.py", "_turns.py", "contextlib.py")
    for _ in range(3):
        total = lines_run(make()[1], where=where)
    assert check_all(range(1, total + 1), make, by_signal, where) > total // 2


@pytest.mark.parametrize("n", [0, 2])
def test_an_interrupt_in_a_step_under_a_tape(n):
    """There the program runs as one recorded operation, and Python code of ours takes its results."""
    made = make_step(n)
    where = ("function.py", "_traced.py", "_launch.py", "state.py")
    with px.GradientTape():
        for _ in range(2):
            total = lines_run(made[1], where=where)
        assert check_all(range(1, total + 1), lambda: made, by_signal, where) > total // 2


def test_signals_that_arrive_on_their_own_time():
    variables, step = make_step(0)
    go, done = threading.Semaphore(0), threading.Event()
    armed = False

    def interrupt(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def send():
        while go.acquire() and not done.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    interrupted = 0
    try:
        for _ in range(200):
            try:
                armed = True
                go.release()
                while armed:
                    step()
            except KeyboardInterrupt:
                interrupted += 1
            finished_steps(variables)
    finally:
        done.set()
        go.release()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert interrupted == 200


def test_a_callback_that_is_interrupted():
    interrupts = []

    def call_back(x):
        if x[0] == 3 and not interrupts:
            interrupts.append(x)
            raise KeyboardInterrupt
        return x

    variables, step = make_step(0, also=lambda v: jax.pure_callback(call_back, v.value, v.value))
    step()
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        step()
    assert finished_steps(variables) == 2
    step()
    assert finished_steps(variables) == 3


# ---- holding signals back ------------------------------------------------------------------------


def test_a_held_signal_arrives_after_the_block():
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with HeldBack():
            by_signal()
            reached.append("end of the block")
        reached.append("after it")
    assert reached == ["end of the block"]
    with pytest.raises(KeyboardInterrupt):
        by_signal()


def test_an_error_in_the_block_restores_the_handlers():
    with pytest.raises(ValueError, match="mine"), HeldBack():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def sigterm_is_the_systems():
    """Whoever listened to it before in this process."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_is_the_systems")
def test_signals_without_a_python_handler_and_other_threads_are_left_alone():
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    inside = []

    def look():
        with HeldBack():
            inside.append([signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)])

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert inside == [before]
    look()
    assert inside[1][0] is not before[0] and inside[1][1] is before[1]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
