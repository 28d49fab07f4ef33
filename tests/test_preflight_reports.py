"""The reports of docs/howto/preflight.md, their figures against what can be computed by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np
import pytest
from slices import needs_libtpu

from phalanx.preflight import operations, targets
from phalanx.preflight.program import VariableStep

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reports():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import preflight_reports

        yield preflight_reports
    finally:
        sys.path.remove(str(ROOT / "examples"))


def gradients(report):
    return sum(c.bytes for c in report.collectives if c.source.startswith("gradient"))


@needs_libtpu
def test_the_digits(reports):
    report = reports.digits()
    weights = [(3, 3, 1, 16), (16,), (3, 3, 16, 32), (32,), (512, 64), (64,), (64, 10), (10,)]
    size = 4 * sum(map(int, map(np.prod, weights)))
    assert report.fits and report.bytes.params == size
    assert report.bytes.slots == 2 * size + 2 * 4  # Adam's moments, its count and that of the schedule
    assert report.bytes.inputs == 128 * (64 + 1 + 1) * 4
    assert gradients(report) == size
    forward = 2 * 1024 * (64 * 9 * 16 + 16 * 9 * 16 * 32 + 512 * 64 + 64 * 10)
    first_layer = 2 * 1024 * 64 * 9 * 16  # needs no gradient of its input
    assert report.matmul_flops == pytest.approx(3 * forward - first_layer, rel=0.05)


def parameters(context):
    shapes = 12 * 768**2 + 2 * 768
    return 50257 * 768 + context * 768 + 768 + 12 * shapes


def test_arithmetic_of_the_transformer_is_six_for_each_parameter_and_word(reports):
    for context, attention in [(128, False), (1024, True)]:
        step, tokens = reports.transformer_step(16, context=context)
        program = VariableStep(step, (tokens,), {}, None).prepare(targets.find("v5e:2x4"))
        n, words = parameters(context), 16 * context
        assert sum(e.bytes for e in program.entries if e.kind == "params") == 4 * n
        assert sum(e.bytes for e in program.entries if e.kind == "slots") == 2 * 4 * n + 4
        expected = 6 * n * words + (12 * 12 * context * 768 * words if attention else 0)
        assert operations.of(program.jaxpr, 8).flops * 8 == pytest.approx(expected, rel=0.05)


@needs_libtpu
@pytest.mark.slow
def test_the_transformer_in_float32_does_not_fit(reports):
    report = reports.transformer()
    assert report.verdict == "does not fit" and report.bytes.params == 4 * parameters(1024)
    assert report.largest_buffers[0].what.endswith("float32[16,1024,50257]")


@needs_libtpu
@pytest.mark.slow
def test_the_transformer_in_bfloat16_with_rematerialisation_fits(reports):
    report = reports.transformer(dtype="bfloat16", remat=True)
    assert report.fits and gradients(report) == 4 * parameters(1024)
    assert {w.kind for w in report.warnings} == {"float32-matmul", "padding"}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4"])
def test_resnet_50(reports, topology):
    report = reports.resnet(topology)
    trainable, statistics = 25_583_592, 53_120  # as Keras's summary counts
    assert report.fits and report.global_batch == 1024
    # Where two branches are added, the shifts of their last normalisations have one gradient: XLA reduces it once.
    assert gradients(report) == 4 * (trainable - (256 + 512 + 1024 + 2048))
    assert report.bytes.params == pytest.approx(4 * (trainable + statistics), rel=0.001)
    assert report.bytes.slots == pytest.approx(4 * trainable, rel=0.001)  # one momentum for each
    assert report.bytes.inputs == 64 * (224 * 224 * 3 + 1) * 4
    forward = 2 * 3.86e9  # multiply-adds for one image
    assert report.matmul_flops == pytest.approx(3 * 1024 * forward, rel=0.05)


def test_the_page_shows_the_reports_that_the_script_makes(reports):
    page = (ROOT / "docs/howto/preflight.md").read_text()
    assert [
        line.removeprefix("### ")
        for line in page.partition("## Three reports")[2].splitlines()
        if line.startswith("### ")
    ] == list(reports.REPORTS)
