"""Which arrays travel together in an all-reduce."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.distribute.collectives import BUCKET_BYTES, SMALL_BYTES

KIB = 1024
SMALL = SMALL_BYTES["cpu"]


def reduction(arrays, replicas=2):
    strategy = px.Mirrored(jax.devices()[:replicas])

    def replica():
        context = px.get_replica_context()
        return context.all_reduce("sum", [a + context.replica_id.astype(a.dtype) for a in arrays])

    return px.function(lambda: strategy.run(replica))


def program(sizes, replicas=2, dtypes=("float32",)):
    """The lowered reduction of arrays of these sizes in bytes."""
    arrays = [
        jax.lax.broadcast(jnp.zeros((), dtype), (size // jnp.dtype(dtype).itemsize,))
        for size in sizes
        for dtype in dtypes
    ]
    return reduction(arrays, replicas).lower().as_text()


def collectives(*arguments, **options):
    return program(*arguments, **options).count("stablehlo.all_reduce")


def test_many_small_arrays_travel_together_and_large_ones_alone():
    assert collectives([KIB] * 20) == 1
    assert collectives([SMALL] * 9) == 1
    assert collectives([SMALL + 4] * 9) == 9
    assert collectives([SMALL + 4, *[KIB] * 20, SMALL + 4]) == 3


def test_fewer_than_nine_arrays_travel_together_only_when_they_are_tiny():
    assert collectives([8 * KIB] * 8) == 1
    assert collectives([16 * KIB] * 8) == 8
    assert collectives([KIB, SMALL, KIB, SMALL, KIB, SMALL]) == 4


def test_a_bucket_is_closed_when_it_is_full():
    in_one = BUCKET_BYTES // SMALL
    assert collectives([SMALL] * in_one) == 1
    assert collectives([SMALL] * (in_one + 9)) == 2


def test_arrays_of_different_dtypes_travel_apart():
    assert collectives([KIB] * 10, dtypes=("float32", "bfloat16")) == 2


def test_one_replica_copies_nothing_and_waits_for_nobody():
    alone, together = program([KIB] * 20, replicas=1), program([KIB] * 20, replicas=2)
    for operation in ("stablehlo.concatenate", "stablehlo.all_reduce"):
        assert operation not in alone
        assert operation in together


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_what_travels_together_arrives_in_its_place_and_shape(replicas):
    shapes = [(), (3,), (2, 2), (0,), (1, 5), (40, 300), (7,), (2, 1, 3), (4,), (6,), (300, 300)]
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 100, shape).astype(d) for d in ("float32", "int32") for shape in shapes]
    ids = sum(range(replicas))
    for total, array in zip(reduction(arrays, replicas)(), arrays):
        assert total.dtype == array.dtype
        np.testing.assert_array_equal(total, array * replicas + ids)
