"""`ConcreteFunction`: one trace of a function, and what a call of it checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from phalanx import _jax, state
from phalanx._history import context_keys
from phalanx._launch import Launch
from phalanx._signature import Call, Signature, describe
from phalanx._traced import Traced
from phalanx.errors import ArgumentTypeError, StrategyError


class ConcreteFunction:
    """One trace of a function, for arguments of one kind. Made by `Function.get_concrete_function`."""

    def __init__(self, traced: Traced, call: Call, signature: Signature, launch: Callable[[Traced], Launch]) -> None:
        self._traced = traced
        self._call = call
        self._signature = signature
        self._make_launch = launch
        self._context = context_keys()
        self.name = signature.name

    @property
    def captured_variables(self) -> tuple[Any, ...]:
        """Variables that the body reads."""
        return tuple(dict.fromkeys(variable for variable, _ in self._traced.captures))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call with arguments of exactly the traced shapes and dtypes, and the traced static values.

        Raises:
            ArgumentTypeError: for arguments of another kind.
            StrategyError: under another strategy, or in a replica when it was traced outside one.
        """
        call = self._signature.split(*self._signature.bind(args, kwargs))
        expected = self._call
        if call.structure != expected.structure:
            raise ArgumentTypeError(
                f"{self.name}: this concrete function takes arguments of structure {expected.structure}, got"
                f" {call.structure}."
            )
        for i, (found, wanted) in enumerate(zip(call.keys, expected.keys)):
            if not _same_kind(found, wanted):
                raise ArgumentTypeError(
                    f"{self.name}: {self._signature.label(call.structure, i)} of this concrete function is"
                    f" {describe(wanted)}, got {describe(found)}."
                )
        here = context_keys()
        if here != self._context:
            raise StrategyError(
                f"{self.name}: this concrete function was traced in the context {describe(self._context[0])} and is"
                f" called in {describe(here[0])}, or under other JAX settings. Call the function itself, which is"
                " traced for each."
            )
        return self._run(call.inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:
        if _jax.is_eager() and state.top().is_eager:
            return self._launch(inputs)
        return self._traced.call_in_place(inputs)

    @functools.cached_property
    def _launch(self) -> Launch:
        # Made at the first call: what is only ever called in other programs needs no compiled one of its own.
        with state.tracing(self.name):
            return self._make_launch(self._traced)

    def lower(self) -> Any:
        """JAX's lowered program (``jax.stages.Lowered``)."""
        return self._launch.lower()


def _same_kind(found: Any, wanted: Any) -> bool:
    if hasattr(found, "dtype") and hasattr(wanted, "dtype"):
        return bool(found.shape == wanted.shape and found.dtype == wanted.dtype)
    return bool(found == wanted)
