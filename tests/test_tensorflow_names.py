"""Whoever types TensorFlow's name is told what it is called here."""

from __future__ import annotations

import re

import optax
import pytest

import phalanx as px
from phalanx._tensorflow import MODULE, OPTIMIZER, STRATEGY


@pytest.mark.parametrize("name", MODULE)
def test_a_name_of_the_module(name):
    with pytest.raises(AttributeError, match=f"what TensorFlow calls {name} is here {re.escape(MODULE[name])}"):
        getattr(px, name)


@pytest.mark.parametrize("name", STRATEGY)
def test_a_name_of_a_strategy(name):
    with pytest.raises(AttributeError, match=f"'OneDevice' has no .*{name} is here {re.escape(STRATEGY[name])}"):
        getattr(px.OneDevice(), name)


@pytest.mark.parametrize("name", OPTIMIZER)
def test_a_name_of_an_optimizer_is_neither_read_nor_set(name):
    optimizer = px.Optimizer(optax.sgd(0.1))
    for use in (lambda: getattr(optimizer, name), lambda: setattr(optimizer, name, 1)):
        with pytest.raises(AttributeError, match=f"'Optimizer' has no .*{name} is here {re.escape(OPTIMIZER[name])}"):
            use()
    assert not hasattr(optimizer, name)


def test_what_is_recommended_exists():
    text = " ".join([*MODULE.values(), *STRATEGY.values(), *OPTIMIZER.values()])
    for name in re.findall(r"\bpx\.(\w+)", text):
        assert hasattr(px, name)
    for name in re.findall(r"\bstrategy\.(\w+)", text):
        assert hasattr(px.Strategy, name) or hasattr(px.OneDevice(), name)
    for name in re.findall(r"\boptimizer\.(\w+)", text):
        assert hasattr(px.Optimizer, name)


def test_other_names_are_plainly_unknown():
    for owner in (px, px.OneDevice(), px.Optimizer(optax.sgd(0.1))):
        with pytest.raises(AttributeError, match="has no attribute 'frobnicate'$"):
            _ = owner.frobnicate
    assert not hasattr(px, "__path_of_nothing__")
