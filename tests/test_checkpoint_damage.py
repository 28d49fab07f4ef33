"""Damaged files, full disks, and programs that are killed: a checkpoint is whole, or is refused or not there."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.checkpoint import files
from phalanx.errors import ArgumentTypeError, CheckpointError


def state(value):
    w = px.Variable(jnp.full(500, float(value)), name="w")
    return px.Checkpoint(w=w, empty=px.Variable(jnp.zeros((0, 2))), number=value, names=["a"])


def values(checkpoint):
    return {*checkpoint.w.numpy().tolist(), checkpoint.number}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    manager = px.CheckpointManager(directory)
    for step in (1, 2):
        manager.save(state(step), step=step)
    manager.wait()
    manager.settle()  # lets go of the directory, whose files the tests copy
    return directory


@pytest.fixture
def directory(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def all_files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def refuses(directory, *named):
    here = state(7)
    with pytest.raises(CheckpointError) as caught:
        px.CheckpointManager(directory).restore_latest(here)
    for name in named:
        assert str(name) in str(caught.value)
    assert values(here) == {7}
    return str(caught.value)


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, empty, os.remove])
def test_any_file_that_is_damaged_is_named_and_older_checkpoints_stay_usable(directory, damage):
    count = len(all_files(directory / "2"))
    assert count > 5
    for i in range(count):
        path = all_files(directory / "2")[i]
        kept = path.read_bytes()
        damage(path)
        refuses(directory, path.relative_to(directory))
        path.write_bytes(kept)
    here = state(7)
    px.CheckpointManager(directory).restore(here, 1)
    assert values(here) == {1}
    assert px.CheckpointManager(directory).restore_latest(here) == 2


def test_files_exchanged_between_checkpoints_are_refused(directory):
    shutil.copy(directory / "1" / "contents.json", directory / "2" / "contents.json")
    refuses(directory, "2/contents.json")


def test_a_folder_that_is_no_checkpoint_is_refused(directory):
    (directory / "3").mkdir()
    refuses(directory, "3/checksums.json is missing")


def test_a_newer_format_is_refused_and_named(directory, monkeypatch):
    monkeypatch.setattr(files, "FORMAT", 99)
    manager = px.CheckpointManager(directory)
    manager.save(state(3), step=3)
    manager.wait()
    monkeypatch.undo()
    refuses(directory, "format 99", "reads format 1")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from a file was run')",)


def test_code_in_a_file_is_never_run_even_when_all_checksums_fit(directory):
    """Whoever can write the files can also write the checksums."""
    for path in all_files(directory / "2"):
        if path.name != "checksums.json":
            kept = path.read_bytes()
            path.write_bytes(pickle.dumps(Bomb()))
            sign(directory / "2")
            here = state(7)
            with pytest.raises(Exception):  # noqa: B017
                px.CheckpointManager(directory).restore_latest(here)
                assert values(here) == {2}  # a file that Orbax writes and does not read
                raise ValueError
            assert values(here) in ({7}, {2})
            path.write_bytes(kept)
    with pytest.raises(ArgumentTypeError, match="'bomb' is a Bomb"):
        px.CheckpointManager(directory).save(px.Checkpoint(bomb=Bomb()), step=9)
    entries = json.loads((directory / "2" / "contents.json").read_text())
    entries["entries"]["names"]["value"] = {"pickle": "gASVAA=="}
    (directory / "2" / "contents.json").write_text(json.dumps(entries))
    sign(directory / "2")
    refuses(directory, "a value that cannot be read")


def sign(folder):
    """Write checksums that fit the files as they are now."""
    names = [name for name in files._files(folder) if name != "checksums.json"]
    body = {"format": files.FORMAT, "files": {name: files._fingerprint(folder / name) for name in names}}
    (folder / "checksums.json").write_text(json.dumps({"body": body, "sha256": files._digest_of(body)}))


# ---- writing fails -------------------------------------------------------------------------------


def fails_and_leaves_everything(directory, manager, step=3):
    here = state(7)
    with pytest.raises(CheckpointError, match=r"could not be written to .*newest complete checkpoint is of step 2"):
        manager.save(here, step=step)
        manager.wait()
    assert values(here) == {7}
    assert manager.steps == [1, 2]
    assert not list(directory.glob(".*.incomplete")), "nothing is left of it"
    files.verify(directory / "2")


def test_a_full_disk_is_an_error_and_old_checkpoints_are_whole(directory):
    """A limit on the size of files: writing beyond it fails as on a full disk, half-way through a file."""
    kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    manager = px.CheckpointManager(directory, keep=1)
    try:
        for limit in (0, 100, 900):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            fails_and_leaves_everything(directory, manager)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, kept)
    assert manager.save(state(3), step=3)  # when there is room again
    manager.wait()
    assert manager.steps == [3]


@contextmanager
def as_nobody():
    """Whoever may write everywhere gives that up in the block."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


def test_a_read_only_directory_is_an_error(original):
    with tempfile.TemporaryDirectory() as outside:  # pytest's own folders are closed to others
        os.chmod(outside, 0o755)
        directory = Path(outside) / "run"
        shutil.copytree(original, directory)
        directory.chmod(0o555)
        manager = px.CheckpointManager(directory)
        with as_nobody():
            fails_and_leaves_everything(directory, manager)
            here = state(7)
            assert manager.restore_latest(here) == 2
        directory.chmod(0o755)


def test_a_path_that_cannot_be_a_directory_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    manager = px.CheckpointManager(tmp_path / "file" / "run")
    assert manager.latest_step is None
    manager.save(state(1), step=1)
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        manager.save(state(1), step=2)


def test_the_next_save_raises_what_went_wrong_and_the_one_after_it_works(directory, monkeypatch):
    manager = px.CheckpointManager(directory)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_json", lambda *args: raise_(OSError(28, "No space left on device")))
        manager.save(state(3), step=3)
        with pytest.raises(CheckpointError, match="No space left on device"):
            manager.save(state(4), step=4)
    assert manager.save(state(4), step=4)
    manager.wait()
    assert manager.steps == [1, 2, 4]


def raise_(error):
    raise error


# ---- the program is killed -----------------------------------------------------------------------

SAVES = """
import sys
import jax.numpy as jnp
import phalanx as px
w = px.Variable(jnp.zeros(20_000))
numbers = {"step": 0}
checkpoint = px.Checkpoint(w=w, numbers=numbers)
manager = px.CheckpointManager(sys.argv[1], keep=2)
first = manager.restore_latest(checkpoint) or 0
assert set(w.numpy().tolist()) == {first} and numbers["step"] == first
print(first, flush=True)
for step in range(first + 1, 10_000):
    w.assign_add(jnp.ones(20_000))
    numbers["step"] = step
    manager.save(checkpoint, step=step)
"""


@pytest.mark.processes
def test_a_program_killed_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path):
    moments = random.Random(0)
    starts = []
    for _ in range(6):
        program = [sys.executable, "-c", SAVES, str(tmp_path)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            starts.append(int(line))
            before = newest(tmp_path)
            wait_for(lambda before=before: newest(tmp_path) >= before + 2)
            time.sleep(moments.uniform(0, 0.05))  # somewhere in the writing of the next one
            process.kill()
        complete = sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
        for step in complete:
            files.verify(tmp_path / str(step))
    assert starts == sorted(set(starts)), "each went on from where the one before it had come"
    manager = px.CheckpointManager(tmp_path)
    w, numbers = px.Variable(jnp.zeros(20_000)), {}
    step = manager.restore_latest(px.Checkpoint(w=w, numbers=numbers))
    manager.save(px.Checkpoint(w=w, numbers=numbers), step=step + 1)
    manager.wait()
    assert not list(tmp_path.glob(".*.incomplete")), "what was left incomplete is removed"


def newest(directory):
    return max((int(path.name) for path in directory.iterdir() if path.name.isdecimal()), default=0)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
