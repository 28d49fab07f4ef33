"""Whoever types TensorFlow's name is told what it is called here."""

from __future__ import annotations

import re

import optax
import pytest

import phalanx as px
from phalanx._tensorflow import FUNCTION, MODULE, OPTIMIZER, STRATEGY
from phalanx.errors import ArgumentTypeError


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


@pytest.mark.parametrize("name", FUNCTION)
def test_a_parameter_of_tf_function_that_has_no_meaning_here(name):
    expected = re.escape(f"px.function takes no {name}: {FUNCTION[name]}. Leave the argument out.")
    with pytest.raises(ArgumentTypeError, match=expected):
        px.function(**{name: True})(lambda x: x)
    with pytest.raises(ArgumentTypeError, match="px.function got an unexpected keyword argument 'frobnicate'"):
        px.function(frobnicate=True)


def test_what_is_recommended_exists():
    text = " ".join([*MODULE.values(), *STRATEGY.values(), *OPTIMIZER.values(), *FUNCTION.values()])
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
