"""`phalanx launch` and `phalanx run`: what comes out, how failures end, and that nothing is left behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from cluster import alive, end, environment, launch, start, wait_for, write

import phalanx as px
from phalanx.cli import main
from phalanx.cli.launch import Launcher

pytestmark = pytest.mark.processes


@pytest.fixture
def light(tmp_path):
    """A worker that uses nothing of Phalanx, so that it starts at once."""
    return write(
        tmp_path / "light.py",
        """
        import os, sys, time, subprocess
        me, task = int(os.environ["PHALANX_PROCESS_ID"]), sys.argv[1]
        print("args", *sys.argv[1:])
        if task == "fails" and me == 1:
            def inner():
                raise RuntimeError("no such luck")
            inner()
        if task == "fails once" and os.environ["PHALANX_RESTARTS"] == "0":
            sys.exit(9)
        if task in ("fails", "waits"):
            child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
            with open(sys.argv[2] + f"/pids{me}.tmp", "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            os.rename(sys.argv[2] + f"/pids{me}.tmp", sys.argv[2] + f"/pids{me}")
            time.sleep(600)
        if task == "stubborn":
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if me == 1:
                time.sleep(0.5)
                sys.exit(3)
            time.sleep(600)
        while task == "prints for ever":
            print("more")
        if task == "prints":
            sys.stdout.write("\\r1 of 2\\r2 of 2\\nno end")
        """,
    )


def pids(folder, n=2):
    def read():
        found = [folder / f"pids{i}" for i in range(n)]
        return all(path.exists() for path in found) and [int(x) for path in found for x in path.read_text().split()]

    return wait_for(read)


def test_output_has_a_prefix_and_arguments_arrive_as_they_are(light):
    outcome = launch(2, light, "prints", "a b", "$HOME", "--x=*")
    assert outcome.code == 0
    assert sorted(outcome.out.splitlines()) == sorted(
        f"[{i}] {line}" for i in (0, 1) for line in ("args prints a b $HOME --x=*", "2 of 2", "no end")
    )


def test_the_first_failure_ends_all_and_its_traceback_comes_last(light, tmp_path):
    begin = time.monotonic()
    outcome = launch(2, light, "fails", str(tmp_path))
    assert outcome.code == 1
    assert time.monotonic() - begin < 15
    *trace, last = outcome.err.splitlines()
    assert trace[-1] == "[1] RuntimeError: no such luck"
    assert last == "phalanx launch: worker 1 of 2 ended with exit code 1, the first to fail; see above"
    wait_for(lambda: not any(map(alive, pids(tmp_path, 1))), 5)


def test_a_worker_that_ignores_sigterm_is_ended_within_10_seconds(light):
    outcome = launch(2, light, "stubborn")
    assert outcome.code == 3
    assert "worker 1 of 2 ended with exit code 3" in outcome.err
    assert outcome.seconds < 12


def test_it_is_started_again_as_often_as_it_may(light):
    outcome = launch(2, light, "fails once", options=("--max-restarts", "2"))
    assert outcome.code == 0
    assert "starting all again in 0.5 s (1 of 2 restarts)" in outcome.err
    assert outcome.out.count("args") == 4


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_the_workers(light, tmp_path, number, code):
    launcher = start("launch", "-n", "2", str(light), "waits", str(tmp_path))
    processes = pids(tmp_path)
    launcher.send_signal(number)
    outcome = end(launcher, 20)
    assert outcome.code == code
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in outcome.err
    wait_for(lambda: not any(map(alive, processes)), 5)


def test_nothing_is_left_when_the_launcher_is_killed(light, tmp_path):
    launcher = start("launch", "-n", "2", str(light), "waits", str(tmp_path))
    processes = pids(tmp_path)
    children = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(launcher.pid)], text=True).split()]
    launcher.kill()
    launcher.communicate()
    wait_for(lambda: not any(map(alive, [*processes, *children])), 10)


def test_nothing_is_left_when_the_launcher_is_killed_while_it_starts(light, tmp_path):
    for seconds in (0.0, 0.05, 0.1, 0.2, 0.4):
        launcher = start("launch", "-n", "4", str(light), "waits", str(tmp_path))
        wait_for(lambda: subprocess.run(["pgrep", "-P", str(launcher.pid)], stdout=subprocess.DEVNULL).returncode == 0)
        time.sleep(seconds)
        launcher.kill()
        launcher.communicate()
    wait_for(lambda: subprocess.run(["pgrep", "-f", str(light)], stdout=subprocess.DEVNULL).returncode == 1, 10)


def test_run_gives_a_script_devices(tmp_path):
    script = write(
        tmp_path / "count.py",
        """
        import sys
        import phalanx as px
        print(px.Mirrored().num_replicas, sys.argv[1:])
        """,
    )
    outcome = end(start("run", "--devices", "3", str(script), "--verbose"))
    assert (outcome.code, outcome.out) == (0, "3 ['--verbose']\n")


@pytest.mark.parametrize("command", [["run", "--devices", "2"], ["launch", "-n", "1"]])
def test_modules_are_run_with_their_own_options(command):
    outcome = end(start(*command, "-m", "json.tool", "--help"))
    assert outcome.code == 0 and "sort-keys" in outcome.out


def test_a_module_is_started_as_a_script_is(tmp_path):
    write(tmp_path / "told.py", "import sys; print(__name__, sys.argv[1:])")
    for command, prefix in ((("launch", "-n", "1"), "[0] "), (("run", "--devices", "1"), "")):
        process = subprocess.run(
            [sys.executable, "-m", "phalanx", *command, "-m", "told", "-m", "--port", "x"],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert process.stdout == f"{prefix}__main__ ['-m', '--port', 'x']\n", process.stderr


def test_who_reads_the_output_may_go_and_there_need_be_nobody(light):
    with start("launch", "-n", "2", str(light), "prints for ever") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE
    command = f'exec "{sys.executable}" -m phalanx launch -n 1 "{light}" ends >&-'
    closed = subprocess.run(["/bin/sh", "-c", command], env=environment(), stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize(
    "command, text",
    [
        (["launch", "-n", "2", "none.py"], "there is no file 'none.py'"),
        (["launch", "-n", "0", __file__], "-n must be at least 1"),
        (["launch", "-n", "1", "--max-restarts", "-1", __file__], "--max-restarts must be at least 0"),
        (["launch", "-n", "1", "--devices-per-process", "0", __file__], "--devices-per-process must be at least 1"),
        (["run", "--devices", "0", __file__], "--devices must be at least 1"),
        (["launch", "-n", "1", "--port", "65536", __file__], "--port must be from 1 to 65535, or 0 for a free one"),
        (["launch", "-n", "1", "--pause", "nan", __file__], "--pause must be a number of seconds from 0 on, got nan"),
    ],
)
def test_command_lines_that_cannot_be_are_explained(command, text, capsys):
    assert main(command) == 2
    assert text in capsys.readouterr().err


def test_pauses_double_in_a_row_of_failures_and_start_anew_after_a_long_run(monkeypatch):
    launcher, now, pauses = Launcher(SimpleNamespace(max_restarts=9, pause=3.0), []), [0.0], []

    def attempt(number, shepherd):
        now[0] += 1000 if number == 6 else 1
        return 1

    monkeypatch.setattr("phalanx.cli.launch.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("phalanx.cli.launch.signal.signal", lambda number, handler: None)
    monkeypatch.setattr(launcher, "_attempt", attempt)
    monkeypatch.setattr(launcher, "_sleep", pauses.append)
    assert launcher.run() == 1
    assert pauses == [3, 6, 12, 24, 30, 30, 3, 6, 12]


def test_a_cluster_is_described_on_each_worker(tmp_path):
    script = write(
        tmp_path / "described.py",
        """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        import phalanx as px
        assert px.connect() == px.connect()
        cluster = px.cluster.describe()
        print(cluster)
        print(px.cluster.agree(10 * cluster.process_id))
        """,
    )
    outcome = launch(2, script)
    assert outcome.code == 0, outcome.err
    for i in (0, 1):
        assert re.search(
            rf"\[{i}\] cluster from phalanx launch: 2 processes, I am {i}, coordinator 127.0.0.1:\d+", outcome.err
        )
        assert f"[{i}] 2 processes, 2 devices, from phalanx launch" in outcome.out
        assert f"[{i}] [0, 10]" in outcome.out


def test_all_services_listen_on_loopback_only(tmp_path):
    script = write(
        tmp_path / "listening.py",
        """
        import json, os, pathlib
        import phalanx as px
        px.connect()
        import jax, numpy as np
        strategy = px.Mirrored()
        with strategy.scope():
            w = px.Variable(1.0)
        strategy.run(lambda: w.assign(px.get_replica_context().all_reduce("sum", w)))
        own = {os.readlink(fd) for fd in pathlib.Path("/proc/self/fd").iterdir() if os.path.islink(fd)}
        found = []
        for version in ("tcp", "tcp6"):
            for line in pathlib.Path(f"/proc/net/{version}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    found.append(fields[1].partition(":")[0])
        print(json.dumps({"listening": px.cluster.agree(found), "total": float(w)}))
        """,
    )
    outcome = launch(2, script)
    assert outcome.code == 0, outcome.err
    (told,) = outcome.told()[0]
    addresses = told["listening"]
    assert told["total"] == 2.0
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")
    assert len(addresses[0]) >= 2 and len(addresses[1]) >= 1
    assert all(address in loopback for those in addresses for address in those)


def test_a_worker_alone_is_told_who_is_missing(tmp_path):
    script = write(tmp_path / "alone.py", "import phalanx as px\npx.connect(timeout=1)")
    more = {"PHALANX_PROCESS_ID": "0", "PHALANX_NUM_PROCESSES": "2", "PHALANX_COORDINATOR": "127.0.0.1:0"}
    outcome = subprocess.run([sys.executable, str(script)], env=environment(**more), capture_output=True, text=True)
    assert outcome.returncode == 1
    assert "PHALANX_COORDINATOR: '127.0.0.1:0' has no port" in outcome.stderr


def test_importing_does_not_open_devices_and_stays_light():
    source = "import phalanx, sys, jax; print(phalanx._jax.backend_started(), sorted(m for m in sys.modules if m in ('keras', 'orbax', 'ray', 'asyncio.runners')))"
    outcome = subprocess.run(
        [sys.executable, "-c", source], env=environment(), capture_output=True, text=True, check=True
    )
    assert outcome.stdout.split()[0] == "False"
    assert "keras" not in outcome.stdout


def test_several_cpu_devices_in_several_processes_do_not_hang(tmp_path):
    script = write(
        tmp_path / "grid.py",
        """
        import phalanx as px
        px.connect()
        strategy = px.Mirrored()
        print(float(strategy.reduce("sum", strategy.run(lambda: px.get_replica_context().replica_id + 1.0))))
        """,
    )
    outcome = launch(2, script, options=("--devices-per-process", "2"), timeout=60)
    if px._jax.devices.jax.__version_info__ < (0, 11):
        assert outcome.code == 1
        assert "several CPU devices in each of several processes hang in JAX" in outcome.err
    else:
        assert "[0] 10.0" in outcome.out and "[1] 10.0" in outcome.out


@pytest.mark.parametrize(
    "codes, first",
    [
        ([76, 1], 1),  # it says itself that another was lost
        ([1, 137], 1),  # of two that end in one moment the one that was killed is the cause
        ([134, 137], 1),  # JAX aborts those that lose its coordinator
        ([1, 2], 0),
        ([76, 76], 0),
    ],
)
def test_the_worker_that_is_told_as_the_first_to_fail_is_the_cause(codes, first, capsys):
    failed = [
        SimpleNamespace(number=i, code=code, ending=f"ended with exit code {code}", traceback=list)
        for i, code in enumerate(codes)
    ]
    launcher = Launcher(SimpleNamespace(), [])
    assert launcher._outcome(SimpleNamespace(all=failed, failed=failed)) == codes[first]
    assert f"worker {first} of 2 ended with exit code {codes[first]}, the first to fail" in capsys.readouterr().err
