"""Without the launcher: who is gone is named by the others, soon; hangs are reported; SIGTERM is heard everywhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from cluster import environment, pair, stop_when_told, wait_for, write

import phalanx as px

pytestmark = pytest.mark.processes

LOOP = """
    import os, signal, sys, time
    import phalanx as px
    me, task = int(sys.argv[1]), sys.argv[3]
    px.connect(px.cluster.Explicit(2, me, f"127.0.0.1:{sys.argv[2]}"), timeout=30, heartbeat=2)
    import numpy as np
    strategy = px.Mirrored()
    with strategy.scope():
        w = px.Variable(0.0)

    @px.function
    def step():
        strategy.run(lambda: w.assign_add(px.get_replica_context().all_reduce("sum", 1.0)))

    with px.cluster.Watchdog(step_timeout=2) as watchdog:
        for number in watchdog.over(range(100_000)):
            step()
            float(w)
            if number == 20 and me == 1:
                if task == "ends early":
                    break
                if task == "fails":
                    raise ValueError("bad data")
                if task == "hangs":
                    def load_the_data():
                        time.sleep(600)
                    load_the_data()
                if task in ("SIGKILL", "SIGSTOP", "SIGTERM"):
                    os.kill(os.getpid(), getattr(signal, task))
            if number == 20 and me == 0 and task == "SIGKILL of process 0":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 20 and me == 0 and task == "SIGSTOP of process 0":
                os.kill(os.getpid(), signal.SIGSTOP)
"""


def ends(tmp_path, task):
    """Exit codes and errors of two processes, and how long the survivor lived on."""
    processes = pair(write(tmp_path / "loop.py", LOOP), task)
    victim = 0 if task.endswith("process 0") else 1
    try:
        _, errors = processes[1 - victim].communicate(timeout=60)
        if "SIGSTOP" in task:
            processes[victim].kill()
        _, others = processes[victim].communicate(timeout=20)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [p.returncode for p in processes], (errors, others)


@pytest.mark.parametrize(
    "task, why",
    [
        ("SIGKILL", "process 1 (host .*) is gone: its connection closed without a word, as when it is killed"),
        ("SIGKILL of process 0", "process 0 (host .*) is gone: its connection closed without a word"),
        ("SIGTERM", "process 1 (host .*) is gone"),
        ("SIGSTOP", "process 1 (host .*) has not been heard of for . s: it is stopped"),
        ("SIGSTOP of process 0", "process 0 (host .*) has not been heard of for . s: it is stopped"),
        ("fails", "process 1 (host .*) failed with ValueError: bad data"),
    ],
)
def test_the_others_name_the_one_that_is_gone_and_end(task, why, tmp_path):
    codes, (errors, others) = ends(tmp_path, task)
    survivor = 1 if task.endswith("process 0") else 0
    assert re.search(f"phalanx: {why.replace('(', '[(]').replace(')', '[)]')}", errors), errors
    assert f"Process {survivor} of 2 cannot go on without it and exits with code 76." in errors
    assert codes[survivor] == px.cluster.EXIT_LOST
    if task == "fails":
        assert codes[1] == 1 and others.rstrip().endswith("ValueError: bad data")


def test_a_step_that_hangs_is_reported_with_the_stacks_of_every_thread_of_every_process(tmp_path):
    codes, reports = ends(tmp_path, "hangs")
    assert codes == [px.cluster.EXIT_STUCK] * 2
    waiting, hanging = reports
    assert "in load_the_data" in hanging and "--- thread MainThread" in hanging
    assert "phalanx: process 1 is in step 20" in hanging
    for report in reports:
        assert "--- thread phalanx-lifeline" in report
        assert re.search(r"Behind the others, in step 20: process 1 \(host", report) or "in step 20" in report
    assert "_launch.py" in waiting or "float(w)" in waiting


def test_a_process_that_makes_fewer_steps_ends_all(tmp_path):
    codes, (waiting, _) = ends(tmp_path, "ends early")
    assert codes == [px.cluster.EXIT_STUCK] * 2
    assert "phalanx: process 0 is in step 21" in waiting and "loop.py" in waiting


RESUMABLE = """
    import os, sys, time
    folder, phase = sys.argv[1:]
    import jax, numpy as np
    import phalanx as px

    def say(text):
        print(text, flush=True)

    w = px.Variable(0.0)

    @px.function
    def train(x):
        def slowly(x):  # while it is traced, which is the first compilation
            if phase == "first compilation" and not os.path.exists(folder + "/1"):
                say("now")
                time.sleep(1.0)
            return x
        w.assign_add(slowly(x))

    def data():
        for i in range(6):
            if phase == "waiting for data" and i == 3 and not os.path.exists(folder + "/3"):
                say("now")
                for _ in range(3000):  # a signal that comes just before a sleep is heard after it
                    time.sleep(0.02)
            yield float(i)

    class Source:
        def __iter__(self):
            return data()

    for step in px.resumable(folder, Source(), px.Checkpoint(w=w), every=100):
        if step.number == 0:
            say(f"starts with {step.number}")
        train(step.batch)
        if phase == "training" and step.number == 2 and not os.path.exists(folder + "/3"):
            say("now")
            time.sleep(0.5)
        if phase == "validation" and step.number == 2 and not os.path.exists(folder + "/3"):
            say("now")
            for _ in range(20):
                time.sleep(0.02)
        last = step.number
    say(f"ends after {last} with {float(w)}")
"""


@pytest.mark.parametrize(
    "phase, saved",
    [("first compilation", "1"), ("training", "3"), ("validation", "3"), ("waiting for data", "3")],
)
def test_sigterm_saves_the_last_step_in_every_phase(phase, saved, tmp_path):
    script, folder = write(tmp_path / "resumable.py", RESUMABLE), tmp_path / "run"
    command = [sys.executable, str(script), str(folder), phase]
    stop_when_told(command)
    assert [path.name for path in folder.iterdir()] == [saved]
    again = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert again.stdout.splitlines()[-1] == "ends after 5 with 15.0", again.stderr
    assert "starts with 0" not in again.stdout


def test_a_process_that_finishes_early_waits_for_the_others_and_is_not_mourned(tmp_path):
    script = write(
        tmp_path / "early.py",
        """
        import sys, time
        import phalanx as px
        from phalanx.cluster import connection
        connection._TELL_SECONDS = 0.5
        me = int(sys.argv[1])
        px.connect(px.cluster.Explicit(2, me, f"127.0.0.1:{sys.argv[2]}"), timeout=30, heartbeat=1)
        if me == int(sys.argv[3]):
            time.sleep(2.5)
        print("end of", me)
        """,
    )
    for late in (0, 1):
        processes = pair(script, str(late))
        ended = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ended
        assert [out for out, _ in ended] == ["end of 0\n", "end of 1\n"]
        assert f"process {1 - late} has finished and waits for process {late} (host" in ended[1 - late][1]
        assert "waits for" not in ended[late][1]


def test_a_process_that_calls_sys_exit_with_an_error_has_failed(tmp_path):
    script = write(
        tmp_path / "leaves.py",
        """
        import sys
        import phalanx as px
        me = int(sys.argv[1])
        px.connect(px.cluster.Explicit(2, me, f"127.0.0.1:{sys.argv[2]}"), timeout=30)
        strategy = px.Mirrored()

        @px.function
        def step():
            return strategy.run(lambda: px.get_replica_context().all_reduce("sum", 1.0))

        for number in range(1000):
            step()
            if number == 5 and me == int(sys.argv[3]):
                try:
                    sys.exit("caught, and of no account")
                except SystemExit:
                    sys.exit(9)
        """,
    )
    for leaving in (0, 1):
        processes = pair(script, str(leaving))
        ended = [process.communicate(timeout=60) for process in processes]
        assert processes[leaving].returncode == 9, ended
        assert processes[1 - leaving].returncode == px.cluster.EXIT_LOST
        assert f"phalanx: process {leaving} (host" in ended[1 - leaving][1]
        assert "ended by sys.exit with code 9" in ended[1 - leaving][1]


def test_a_forked_child_does_not_keep_its_dead_parent_alive_for_the_others(tmp_path):
    script = write(
        tmp_path / "forks.py",
        """
        import os, signal, sys, time, warnings
        warnings.simplefilter("ignore")
        import phalanx as px
        me = int(sys.argv[1])
        px.connect(px.cluster.Explicit(2, me, f"127.0.0.1:{sys.argv[2]}"), timeout=30, heartbeat=60)
        if me == 1:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            print(child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """,
    )
    processes = pair(script)
    assert processes[1].stdout is not None
    child = int(processes[1].stdout.readline())
    try:
        wait_for(lambda: processes[0].poll() is not None, 20)
        assert processes[0].returncode == px.cluster.EXIT_LOST
    finally:
        os.kill(child, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("limit", [1e30, 1e9])
def test_a_limit_beyond_what_clocks_can_count_is_watched_too(limit):
    watchdog, ended = px.cluster.Watchdog(step_timeout=limit), iter([False, True])
    watchdog._ended = SimpleNamespace(wait=lambda seconds: next(ended))
    watchdog._began = time.monotonic()
    watchdog._watch()
    assert list(ended) == []


@pytest.mark.parametrize("limit", [0, -1, "5", True])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(px.errors.ArgumentError, match="step_timeout must be a positive number"):
        px.cluster.Watchdog(step_timeout=limit)
