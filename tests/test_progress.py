"""`px.progress`: a bar on a terminal, lines in a file, on process 0 alone, and never in the way of the devices."""

from __future__ import annotations

import io
import re
import sys
from operator import length_hint

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feeding import replicas

import phalanx as px
from phalanx.data import progress as module
from phalanx.errors import ArgumentTypeError


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def shown(self) -> list[str]:
        """What stood on the line, one text after the other."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())
        return [" ".join(line.split()) for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.fixture
def clock(monkeypatch):
    """Time as the test moves it on."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def on_terminal(monkeypatch) -> Terminal:
    """stdout is a terminal from here on (pytest sets its own before each phase of a test)."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


# ---- lines, where the output is no terminal ------------------------------------------------------


def test_there_is_a_line_now_and_then_and_one_at_the_end(clock, capsys):
    for i in (bar := px.progress(range(40), "epoch 1")):
        clock.now += 0.5
        bar.update(loss=jnp.float32(i) / 8)
    assert lines(capsys) == [
        "epoch 1: 10/40  2.0 steps/s  0:00:15 left  loss 1.125",
        "epoch 1: 20/40  2.0 steps/s  0:00:10 left  loss 2.375",
        "epoch 1: 30/40  2.0 steps/s  0:00:05 left  loss 3.625",
        "epoch 1: 40/40  2.0 steps/s  loss 4.875",
        "epoch 1: 40/40  2.0 steps/s  loss 4.875",
    ]


def test_the_first_step_which_compiles_does_not_count_for_the_speed(clock, capsys):
    for i in px.progress([1, 2, 3], "train"):
        clock.now += 60 if i == 1 else 0.1
    assert lines(capsys)[-1] == "train: 3/3  10.0 steps/s"


def test_without_a_length_there_is_no_total_and_no_time_left(clock, capsys):
    for _ in px.progress(iter(range(3)), "train"):
        clock.now += 10
    assert lines(capsys) == ["train: 1", "train: 2  0.1 steps/s", "train: 3  0.1 steps/s", "train: 3  0.1 steps/s"]


def test_a_loop_that_is_left_counts_the_item_that_it_was_left_with(capsys):
    for i in px.progress(range(10), "train"):
        if i == 3:
            break
    with pytest.raises(ZeroDivisionError):
        for i in px.progress(range(10), "test"):
            _ = 1 / (i - 2)
    assert [line.split("  ")[0] for line in lines(capsys)] == ["train: 4/10", "test: 3/10"]


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_a_resumed_pass_goes_on_counting(remainder, clock, capsys):
    dataset = replicas(2).distribute_dataset(np.arange(26), 4, remainder=remainder)
    iterator, total = iter(dataset), len(dataset)
    next(iterator), next(iterator)
    dataset.load_state_dict(dataset.state_dict())
    for _ in px.progress(dataset, "resumed"):
        clock.now += 1.0
    last = lines(capsys)[-1]
    assert last.startswith(f"resumed: {total}/{total}  1.0 steps/s")
    for _ in px.progress(dataset, "next"):
        clock.now += 1.0
    assert lines(capsys)[-1].startswith(f"next: {total}/{total}")
    assert length_hint(iterator, -1) == total - 2


def test_a_hint_that_fails_is_none(capsys):
    class Hinting:
        def __init__(self):
            self.items = iter([1, 2])

        def __iter__(self):
            return self

        def __len__(self):
            return 2

        def __next__(self):
            return next(self.items)

        def __length_hint__(self):
            raise ValueError

    for items in (Hinting(), iter([1, 2])):
        assert list(px.progress(items, "train")) == [1, 2]
    assert [line.split()[1] for line in lines(capsys)] == ["2/2", "2"]


def test_numbers_are_given_by_name():
    with pytest.raises(
        ArgumentTypeError, match=r"update\(loss=loss\), or update\(\*\*metrics\) for a dict; got {'loss': 3.0}"
    ):
        px.progress([1]).update({"loss": 3.0})


def test_counts_are_shown_in_full_and_other_numbers_with_four_digits(capsys):
    for _ in (bar := px.progress([1], "train")):
        bar.update(count=12345678, rows=jnp.float32(123456), loss=1234.5678, tiny=1.23456e-7, huge=1e20, bad=np.inf)
    (line,) = lines(capsys)
    assert line.endswith("count 12345678  rows 123456  loss 1235  tiny 1.235e-07  huge 1e+20  bad inf")


def test_items_and_length_are_those_of_what_is_wrapped():
    dataset = replicas(2).distribute_dataset(np.arange(8), 4)
    bar = px.progress(dataset)
    assert len(bar) == 2
    assert [int(x.values[0][0]) for x in bar] == [0, 4]


def test_metrics_of_every_kind_are_shown_and_stay_until_they_change(capsys):
    per_replica = px.Mirrored(jax.devices()[:2]).distribute_values_from_function(lambda c: np.float32(c.replica_id))
    variable = px.Variable(2.0)
    for i in (bar := px.progress(range(2), "train")):
        if i == 0:
            bar.update(number=0.123456, text="warm-up", array=np.array([1, 2]), parts=per_replica)
        bar.update(variable=variable, whole=3)
        variable.assign_add(1.0)
    (line,) = lines(capsys)
    assert line.endswith("variable 3  whole 3")
    for _ in (bar := px.progress(range(1), "train")):
        bar.update(number=0.123456, text="warm-up", array=np.array([1, 2]), parts=per_replica)
    (line,) = lines(capsys)
    assert "number 0.1235  text warm-up  array [1 2]  parts PerReplica(x2" in line


class Unknown:
    """Three items whose number cannot be told."""

    def __init__(self, length):
        self._length = length

    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        if isinstance(self._length, int):
            return self._length
        raise self._length


@pytest.mark.parametrize(
    "length", [RuntimeError("no"), NotImplementedError(), OverflowError(), -1, sys.maxsize // 8], ids=repr
)
def test_a_length_that_cannot_be_told_or_never_ends_is_none(length, clock, capsys):
    for _ in px.progress(Unknown(length), "train"):
        clock.now += 1
    assert lines(capsys)[-1] == "train: 3  1.0 steps/s"
    iterator = iter(px.progress(range(10**20), "train"))
    assert [next(iterator), next(iterator)] == [0, 1]


def test_a_time_left_of_many_months_is_not_shown(clock, capsys):
    for i in px.progress(range(2 * 10**7), "train"):
        clock.now += 1
        if i == 5:
            break
    assert lines(capsys)[0] == "train: 5/20000000  1.0 steps/s"


def test_a_metric_that_cannot_be_shown_does_not_end_the_loop(clock, capsys):
    class Broken:
        def __float__(self):
            raise RuntimeError("Array has been deleted")

    donated = jnp.ones(3)
    donated.delete()
    for _ in (bar := px.progress(range(2), "train")):
        bar.update(loss=1, broken=Broken(), donated=donated, large=10**400, larger=10**10000)
        clock.now += 6
    assert lines(capsys)[-1] == f"train: 2/2  0.2 steps/s  loss 1  large {10**400}"


# ---- metrics are fetched late --------------------------------------------------------------------


class Pending:
    """A number that the device has not computed yet; asking for its value would wait."""

    def __init__(self, value):
        self.value, self.ready = value, False

    def __float__(self):
        assert self.ready, "the loop waited for the device"
        return float(self.value)


@pytest.fixture
def late(monkeypatch):
    ready = module._is_ready
    monkeypatch.setattr(module, "_is_ready", lambda v: v.ready if isinstance(v, Pending) else ready(v))


def test_the_loop_never_waits_for_a_metric_and_shows_the_newest_there_is(clock, late, capsys):
    metrics = [Pending(i) for i in range(4)]

    def steps():
        yield from range(4)
        metrics[3].ready = True

    for i in (bar := px.progress(steps(), "train")):
        bar.update(loss=metrics[i])
        if i:
            metrics[i - 1].ready = True
        clock.now += 10
    shown = [line.rsplit("  ", 1)[-1] for line in lines(capsys)]
    assert shown == ["train: 1", "loss 0", "loss 1", "loss 2", "loss 3"]


def test_at_the_end_the_last_metric_is_waited_for(late, capsys):
    class Waiting(Pending):
        def __float__(self):
            return float(self.value)

    for i in (bar := px.progress(range(3), "train")):
        bar.update(loss=Waiting(i))
    assert lines(capsys)[-1].endswith("loss 2")


def test_numbers_are_fetched_only_when_a_line_is_due(clock, capsys):
    fetched = []

    class Counting(Pending):
        def __float__(self):
            fetched.append(self.value)
            return 0.0

    for i in (bar := px.progress(range(1000), "train")):
        clock.now += 0.01
        bar.update(loss=Counting(i))
    assert len(fetched) <= 1000 * 0.01 / 5 + 1
    capsys.readouterr()


def test_metrics_that_are_not_shown_are_let_go():
    bar = px.progress(range(1000))
    for i in range(1000):
        bar.update(loss=i)
    assert len(bar._unshown) <= 64


def test_a_real_array_is_shown_when_it_is_computed(clock, capsys):
    step = px.function(lambda x: x + 1)
    loss = jnp.float32(0)
    for _ in (bar := px.progress(range(3), "train")):
        loss = step(loss)
        loss.block_until_ready()
        bar.update(loss=loss)
        clock.now += 6
    assert [line.rsplit(" ", 1)[-1] for line in lines(capsys)] == ["1", "2", "3", "3"]


# ---- a terminal ----------------------------------------------------------------------------------


def test_on_a_terminal_there_is_a_bar_with_steps_speed_time_left_and_metrics(clock, monkeypatch):
    terminal = on_terminal(monkeypatch)
    for i in (bar := px.progress(range(40), "epoch 1")):
        clock.now += 0.5
        bar.update(loss=i / 8)
    bars = [re.sub("[━╸╺]+", "━", line) for line in terminal.shown]
    assert bars[0] == "epoch 1 ━ 0/40"
    assert "epoch 1 ━ 20/40 2.0 steps/s 0:00:10 left loss 2.375" in bars
    assert bars[-1] == "epoch 1 ━ 40/40 2.0 steps/s loss 4.875"


def test_on_a_terminal_brackets_are_text(monkeypatch):
    terminal = on_terminal(monkeypatch)
    for _ in (bar := px.progress(range(1), "[a/b] [red]")):
        bar.update(x="[/bold]")
    assert terminal.shown[-1].startswith("[a/b] [red]") and terminal.shown[-1].endswith("x [/bold]")


def test_the_bar_is_drawn_ten_times_a_second_at_most(clock, monkeypatch):
    terminal = on_terminal(monkeypatch)
    for _ in px.progress(range(1000), "train"):
        clock.now += 0.001
    assert len(terminal.shown) <= 13


def test_what_the_loop_prints_stands_above_the_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    for i in px.progress(range(2), "train"):
        print(f"step {i}")
    assert [line for line in terminal.shown if line.startswith("step")] == ["step 0", "step 1"]
    assert "step" not in terminal.shown[-1].replace("steps/s", "")


def test_without_rich_a_terminal_gets_lines(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    list(px.progress(range(2), "train"))
    assert terminal.shown[0].startswith("train: 2/2")


# ---- where it is silent, and what it refuses -----------------------------------------------------


def test_only_process_0_prints(monkeypatch, capsys):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert list(px.progress(range(3), "train")) == [0, 1, 2]
    assert capsys.readouterr().out == ""


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(ArgumentTypeError, match="progress takes an iterable, got int"):
        px.progress(3)
