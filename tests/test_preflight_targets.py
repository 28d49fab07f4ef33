"""Slices by their names, and what is known of their chips."""

from __future__ import annotations

import math

import pytest

import phalanx as px
from phalanx.preflight import estimate, targets
from phalanx.preflight.chips import CHIPS
from phalanx.preflight.hlo import Collective


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts"),
    [
        ("v2:2x2", 4, 8, 1),
        ("v3:4x4", 16, 32, 4),
        ("v4:2x2x2", 8, 8, 2),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 8, 8, 1),
        ("v5e:16x16", 256, 256, 64),
        ("v5p:2x2x1", 4, 4, 1),
        ("v6e:4x4", 16, 16, 4),
        ("tpu7x:2x2x1", 4, 8, 1),
        ("2*v5e:4x4", 32, 32, 8),
        ("v5e:4x4*2", 32, 32, 8),
        ("V5E:4x4", 16, 16, 4),
    ],
)
def test_a_name_says_how_many_chips_devices_and_hosts_there_are(name, chips, devices, hosts):
    target = targets.find(name)
    assert (target.num_chips, target.num_devices, target.num_hosts) == (chips, devices, hosts)


def test_cloud_tpus_own_names_are_known():
    same = {"v5litepod-16": "v5e:4x4", "v6e-8": "v6e:2x4", "v4-8": "v4:2x2x1", "v5p-8": "v5p:2x2x1", "v3-32": "v3:4x4"}
    assert {name: targets.find(name).name for name in same} == same
    assert all(
        targets.find(t.accelerator_type).num_chips == t.num_chips for t in targets.known() if t.chip.name != "tpu7x"
    )


def test_an_unknown_topology_lists_those_that_are_known():
    with pytest.raises(px.errors.ArgumentError, match="'v9:2x2' is not known") as error:
        targets.find("v9:2x2")
    assert all(t.name in str(error.value) for t in targets.known())
    with pytest.raises(px.errors.ArgumentError, match="v5e:2x4") as error:
        targets.find("v5e:3x3")
    assert "v6e" not in str(error.value).replace("v5e", "")
    with pytest.raises(px.errors.ArgumentError, match="num_slices"):
        targets.find("v5e:2x2", 0)
    with pytest.raises(px.errors.ArgumentTypeError, match="topology must be a name"):
        targets.find(16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((["v5e:2x2"],), "topology must be a name"),
        (("v5e:2x2", [2]), "num_slices must be a positive int"),
        (("cpu:2", True), "num_slices must be a positive int, got True"),
        (("v5e:2x2", 1.0), "num_slices must be a positive int, got 1.0"),
        (("cpu:2", 3), "'cpu:2' is none. Say how many devices there are in all: 'cpu:6'"),
        (("2*cpu:4",), "in all: 'cpu:8'"),
        (("gpu:0",), "'gpu:0' has no devices. Give it some: 'gpu:1'"),
        (("cpu:0",), "'cpu:0' has no devices"),
        (("cpu:4096",), "has 4,096 devices; programs are compiled for 2,048 at most"),
        (("v5e:2x2", 10**9), "has 4,000,000,000 devices; programs are compiled for 131,072 at most"),
    ],
)
def test_numbers_that_make_no_sense_are_explained(call, text):
    targets.find("v5e:2x2", 1), targets.find("cpu:2", 1)  # what was asked before makes no difference
    with pytest.raises((px.errors.ArgumentError, px.errors.ArgumentTypeError)) as error:
        targets.find(*call)
    assert text in str(error.value)


def test_devices_that_are_not_here_cannot_be_had_unless_the_cpu_plays_them():
    assert targets.find("cpu:3").num_devices == 3
    with pytest.raises(px.errors.DeviceError, match="JAX sees 0 such devices"):
        targets.find("gpu:2")


def test_every_chip_has_figures_and_a_source():
    for chip in CHIPS.values():
        assert chip.source.startswith("https://")
        assert chip.usable_bytes * chip.devices <= chip.hbm_bytes * 1.02
        assert min(chip.flops["bfloat16"], chip.hbm_bandwidth, chip.ici_link_bandwidth, chip.dcn_bandwidth) > 0


def all_reduce(n, amount, network="ICI"):
    return Collective("all-reduce", "f32", amount, "", n, "all", network, 1)


def test_step_time_is_what_the_published_rates_allow():
    target = targets.find("v5e:4x4")
    time = estimate.step_time(197e12, 819e9, [all_reduce(16, 100_000_000)], target)
    assert time.compute == pytest.approx(1.0) and time.memory == pytest.approx(1.0)
    # 4x4 closes to no ring: two links of 50 GB/s; 2 (n - 1) / n of the bytes go through each chip.
    assert time.communication == pytest.approx(2 * 15 / 16 * 1e8 / 100e9, rel=0.02)
    assert time.seconds == max(time.compute, time.memory) and time.bound == "compute"
    assert time.seconds_without_overlap == time.compute + time.communication


def test_a_collective_between_slices_goes_over_the_data_center_network():
    both = targets.find("2*v5e:4x4")
    slow = estimate.step_time(1, 1, [all_reduce(2, 10**9, "DCN")], both).communication
    fast = estimate.step_time(1, 1, [all_reduce(16, 10**9)], both).communication
    assert slow == pytest.approx(10**9 / 3.1e9, rel=0.01) and slow > 10 * fast


def test_an_all_reduce_of_more_chips_takes_little_longer_on_one_slice_and_longer_on_two():
    measured = targets.find("v5e:4x4")
    collectives = [all_reduce(16, 10**9)]
    same = estimate.scaled_communication(collectives, measured, measured)
    ring = estimate.scaled_communication(collectives, measured, targets.find("v5e:16x16"))
    two = estimate.scaled_communication(collectives, measured, targets.find("v5e:16x16", 2))
    assert same == pytest.approx(estimate.step_time(1, 1, collectives, measured).communication)
    assert ring < same  # twice the links
    assert two > ring


def test_the_largest_batch_is_found_by_a_few_trials():
    from phalanx.preflight.batches import LIMIT, largest

    def trial(limit, fixed=0, curve=1.0):
        tried = []

        def needed(rows):
            tried.append(rows)
            size = int(fixed + rows**curve)
            return size <= limit, size

        return tried, needed

    for fixed, limit, curve in [(0, 640, 1.0), (100, 1000, 1.0), (0, 1, 1.0), (10, 5000, 1.1), (0, 10**9, 1.0)]:
        for start in (1, 64, 5000):
            tried, needed = trial(limit, fixed, curve)
            expected = max(
                (r for r in (int((limit - fixed) ** (1 / curve)) + d for d in (-1, 0, 1)) if needed(r)[0]), default=0
            )
            tried.clear()
            found = largest(needed, start, limit)
            assert expected * 63 // 64 <= found <= expected if expected < LIMIT else found == LIMIT
            assert needed(found)[0] or found == 0
            assert len(tried) - 1 == len(set(tried)) <= math.log2(LIMIT)
    tried, needed = trial(0)
    assert largest(needed, 64, 0) == 0
