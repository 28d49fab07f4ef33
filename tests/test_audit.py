"""Audits: a bit that differs in one component is found, named, and repaired."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flipping import flip

import phalanx as px
from phalanx import _bits
from phalanx.errors import ArgumentError, ArgumentTypeError, ReplicaDivergenceError, StrategyError

DTYPES = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "int4", "uint16", "uint32", "bool", "complex64",
]  # fmt: skip


@pytest.fixture
def four():
    return px.Mirrored(jax.devices()[:4])


def make(strategy, value=None, name="w", **options):
    with strategy.scope():
        return px.Variable(jnp.arange(12.0).reshape(3, 4) if value is None else value, name=name, **options)


def test_a_flipped_bit_is_named_with_variable_replica_process_and_index(four):
    w, b = make(four, name="w"), make(four, 0.0, name="b")
    assert px.audit([w, b]).equal
    flip(w, replica=2, index=(1, 3))
    flip(w, replica=2, index=(2, 0))
    flip(w, replica=3, index=(0, 1), bit=31)
    flip(b, replica=1, bit=17)
    report = px.audit({"w": w, "b": [b]})
    found = [(d.variable, d.replica, d.process, d.index) for d in report.divergences]
    assert found == [("w", 2, 0, (1, 3)), ("w", 3, 0, (0, 1)), ("b", 1, 0, ())]
    assert not report.equal
    assert "Variable 'w': replica 2 (process 0) differs from replica 0, first at w[1, 3]" in str(report)


def test_the_one_that_differs_from_all_others_may_be_replica_0(four):
    w = make(four)
    flip(w, replica=0, index=(0, 2))
    assert [(d.replica, d.index) for d in px.audit(w).divergences] == [(i, (0, 2)) for i in (1, 2, 3)]


def test_variables_without_storage_are_left_out(four):
    with px.abstract():
        later = make(four, name="later")
    assert px.audit([make(four), later]).variables == 1
    assert px.audit(later).variables == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_every_dtype_counts_and_is_repaired(dtype):
    strategy = px.Mirrored(jax.devices()[:2])
    w = make(strategy, jnp.ones((3, 2)).astype(dtype))
    bits = 1 if dtype == "bool" else 4 if dtype == "int4" else 8 * w.dtype.itemsize
    before = np.asarray(w.components[0].value).tobytes()
    for bit in {0, bits // 2, bits - 1}:
        flip(w, replica=1, index=(1, 1), bit=bit)
        auditor = px.Auditor(w, every=1, on_divergence="repair")
        assert [d.index for d in px.audit(w).divergences] == [(1, 1)]
        auditor.after_step()
        auditor.finish()
        assert px.audit(w).equal
        for component in w.components:
            assert np.asarray(component.value).tobytes() == before


def test_values_that_compare_as_unequal_or_equal_are_compared_by_their_bits(four):
    nan = make(four, jnp.full(3, np.nan))
    assert px.audit(nan).equal
    zero = make(four, jnp.zeros(3))
    flip(zero, replica=1, index=(1,), bit=31)  # -0.0 == 0.0
    assert [d.index for d in px.audit([nan, zero]).divergences] == [(1,)]
    flip(nan, replica=3, index=(2,), bit=3)  # another NaN
    assert [(d.replica, d.index) for d in px.audit(nan).divergences] == [(3, (2,))]
    auditor = px.Auditor([nan, zero], every=1, on_divergence="repair")
    auditor.after_step()
    auditor.finish()
    assert px.audit([nan, zero]).equal
    assert np.isnan(nan.numpy()).all() and not np.signbit(zero.numpy()).any()


def test_random_keys_are_compared_and_repaired(four):
    key = make(four, jax.random.key(3), name="key")
    parts = [jax.device_put(jax.random.key(3 + (i == 2)), d) for i, d in enumerate(four.devices)]
    sharding = four.sharding(per_replica=False)
    key._replace(jax.make_array_from_single_device_arrays((), sharding, parts))
    assert [(d.variable, d.replica) for d in px.audit(key).divergences] == [("key", 2)]
    auditor = px.Auditor(key, every=1, on_divergence="repair")
    auditor.after_step()
    auditor.finish()
    assert px.audit(key).equal
    assert jax.random.key_data(key.value).tolist() == jax.random.key_data(jax.random.key(3)).tolist()


def test_fingerprints_tell_single_changes_and_exchanges_apart():
    array = np.random.default_rng(0).normal(size=64).astype(np.float32)
    prints = {tuple(np.asarray(_bits.fingerprint(jnp.asarray(array))).tolist())}
    for i in range(64):
        changed, exchanged = array.copy(), array.copy()
        changed[i] = np.nextafter(changed[i], 1, dtype=np.float32)
        exchanged[[i, i - 1]] = array[[i - 1, i]]
        prints |= {tuple(np.asarray(_bits.fingerprint(jnp.asarray(x))).tolist()) for x in (changed, exchanged)}
    assert len(prints) == 129


def test_what_can_be_audited(four):
    w = make(four)
    optimizer = px.Optimizer(optax.adam(0.1))
    optimizer.build([w])
    flip(optimizer.variables[1], replica=1)
    for target in (optimizer, [w, optimizer], four, px.Checkpoint(a=optimizer), {"x": w, "y": (optimizer, 3)}):
        assert [d.variable for d in px.audit(target).divergences] == ["optimizer[0].mu[0]"]
    assert px.audit(w, four).equal
    own = make(four, 0.0, synchronization="on_read", aggregation="sum")
    alone = px.Variable(1.0)
    four.run(lambda: own.assign(px.get_replica_context().replica_id + 0.0))
    report = px.audit([own, alone, make(px.OneDevice())])
    assert report.equal and report.variables == 0


def test_what_cannot_be_audited_is_refused(four):
    w = make(four)
    with pytest.raises(ArgumentTypeError, match="there are no variables in int 3"):
        px.audit(3)
    with pytest.raises(ArgumentTypeError, match="strategy must be a strategy"):
        px.audit(w, 3)
    with pytest.raises(StrategyError, match="'w' belongs to"):
        px.audit(w, px.Mirrored(jax.devices()[:2]))
    for place in (lambda fn: px.function(fn)(), four.run):
        with pytest.raises(StrategyError, match="audited outside of traced functions"):
            place(lambda: px.audit(w))
    with pytest.raises(ArgumentError, match="every must be a positive int, got 0"):
        px.Auditor(w, every=0)
    with pytest.raises(ArgumentError, match="on_divergence must be one of 'raise', 'repair'"):
        px.Auditor(w, on_divergence="warn")
    with pytest.raises(ArgumentError, match="say what to audit"):
        px.Auditor(every=1).after_step()


def steps(strategy, w):
    return px.function(lambda: strategy.run(lambda: w.assign_add(jnp.ones(w.shape))))


def test_an_auditor_raises_one_step_after_the_audit_that_found_it(four):
    w = make(four)
    step, auditor = steps(four, w), px.Auditor(w, every=3)
    for i in range(1, 20):
        if i == 5:
            flip(w, replica=1, index=(2, 2), bit=20)
        step()
        if i < 7:
            auditor.after_step()
        else:
            with pytest.raises(ReplicaDivergenceError, match=r"differ after step 6:\n.*replica 1 .*w\[2, 2\]"):
                auditor.after_step()
            break
    assert (i, auditor.audits) == (7, 2)


def test_a_repair_gives_all_replicas_what_the_first_holds_and_training_goes_on(four, caplog):
    w = make(four, jnp.zeros(5))
    step, auditor = steps(four, w), px.Auditor(four, every=2, on_divergence="repair")
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        for i in range(8):
            if i == 4:
                flip(w, replica=3, index=(1,), bit=30)
            step()
            auditor.after_step()
        auditor.finish()
    assert "audit after step 6: repaired from replica 0" in caplog.text
    assert px.audit(w).equal
    assert w.numpy().tolist() == [8.0] * 5
    assert step.trace_count == 1


def test_an_audit_leaves_buffers_to_the_next_step(four):
    """Looking at variables must not make the next step copy them."""
    w = make(four)
    step = steps(four, w)
    step()
    assert w._owned
    px.audit(w)
    assert w._owned
    step()
    assert float(w.numpy()[0, 0]) == 2.0
