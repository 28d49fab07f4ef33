"""`px.preflight`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import jax

from phalanx import state
from phalanx._checks import check_choice, check_function, check_int, check_seconds, packages
from phalanx._methods import BoundFunction
from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError
from phalanx.function import Function
from phalanx.preflight import compiler, targets
from phalanx.preflight.compiler import Effort, Settings
from phalanx.preflight.program import JittedStep, VariableStep
from phalanx.preflight.report import Report
from phalanx.preflight.targets import Target


def preflight(
    fn: Callable[..., Any],
    *args: Any,
    topology: str | None = None,
    strategy: Strategy | None = None,
    num_slices: int = 1,
    global_batch: int | None = None,
    timeout: float = 900.0,
    effort: Effort = "full",
    **kwargs: Any,
) -> Report:
    """Compile a step for devices that need not be here, and say what would happen there.

    Nothing runs, no variable changes, and variables need no data (see `px.abstract`). The compiler works in a
    process of its own.

    Args:
        fn: a `px.function`, a function that calls ``strategy.run``, or one that ``jax.jit`` made; for Keras
            models see their method ``preflight``.
        args: example arguments: arrays, or ``jax.ShapeDtypeStruct``, with the shapes of all replicas together.
            Where the step uses a strategy, those with as many rows as the first one are split over the replicas,
            as a distributed dataset would; the others reach all of them whole, as all do where the step computes
            with them outside of ``strategy.run``. Elements of a distributed dataset will do. A function with an
            ``input_signature`` needs none. What ``jax.jit`` made takes its weights as arguments too: there the batch
            is the last argument with rows, and those that have as many.
        topology: a TPU slice such as ``"v5e:4x4"`` (``phalanx preflight --topology list`` shows them), or devices
            that are present, ``"gpu:1"``, or any number of CPU devices, ``"cpu:8"``. Default: the strategy's own.
        strategy: the one that the step uses; found by itself where it is used in the step.
        num_slices: so many slices, joined by the data-center network.
        global_batch: rows of all replicas, in place of those of the example arguments.
        timeout: seconds after which the compiler is stopped.
        effort: ``"full"`` compiles as training would, which takes minutes for a large convolutional model;
            ``"quick"`` optimizes little, and what it needs in memory and time is an upper bound.
        kwargs: further example arguments, by name.

    Raises:
        StrategyError: in a traced function, a replica or `px.abstract`.
        ArgumentError: for a topology that is not known, or no arguments where some are needed.
        ArgumentTypeError: for what is no function, or cannot be traced and lowered.
        UnevenBatchError: when the batch does not divide by the replicas.
        CompilationError: when the compiler is not installed; it says which package has it.

    Example:
        >>> w = px.Variable(jnp.zeros((32, 4)))
        >>> @px.function
        ... def step(x):
        ...     w.assign_add(x.T @ (x @ w))
        >>> report = px.preflight(step, jax.ShapeDtypeStruct((64, 32), "float32"), topology="cpu:1")
        >>> report.fits, report.bytes.params
        (True, 512)
    """
    check_function(fn, "preflight")
    if not state.top().is_eager:
        place = "a traced function or a replica" if state._stack.without_storage is None else "px.abstract()"
        raise StrategyError(f"px.preflight is called in {place}. Call it outside.")
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ArgumentTypeError(f"preflight: strategy must be a strategy such as px.Mirrored(), got {strategy!r:.60}.")
    check_int(global_batch, "preflight: global_batch", optional=True)
    if topology is not None:
        targets.find(topology, num_slices)
    if not args and not kwargs:
        args, kwargs = _known_arguments(fn)
    if isinstance(fn, jax.stages.Wrapped):
        step: VariableStep | JittedStep = JittedStep(fn, args, kwargs)
    else:
        step = VariableStep(fn, args, kwargs, strategy)
    return report_on(step, _target(topology, num_slices, step), global_batch, settings(timeout, effort))


def settings(timeout: float, effort: Effort) -> Settings:
    """As the arguments say.

    Raises:
        ArgumentError: for a timeout that is no positive number, or an effort that is not known.
    """
    check_seconds(timeout, "preflight: timeout")
    check_choice(effort, "preflight: effort", get_args(Effort))
    return Settings(timeout, effort)


def report_on(step: VariableStep | JittedStep, target: Target, global_batch: int | None, settings: Settings) -> Report:
    """The report of a step on a target."""
    compiler.check_available(target)

    def again(other: Target, batch: int | None) -> Report:
        program = step.prepare(other, batch)
        return Report(program, other, compiler.run(program.lowered, other, settings), again, settings)

    return again(target, global_batch)


def _target(topology: str | None, num_slices: int, step: VariableStep | JittedStep) -> Target:
    if topology is not None:
        return targets.find(topology, num_slices)
    if num_slices != 1:
        raise ArgumentError("preflight: num_slices needs a topology, such as topology='v5e:4x4'.")
    if isinstance(step, VariableStep):
        step.settle()
    return own_target(step.strategy)


def own_target(strategy: Strategy | None) -> Target:
    """The devices that a strategy has."""
    devices = list(jax.devices()[:1]) if strategy is None else list(strategy.devices)
    if devices[0].platform == "cpu":
        return targets.find(f"cpu:{len(devices)}")
    return targets.of_devices(devices)


def _known_arguments(fn: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example arguments where none were given."""
    if "keras" in packages(fn):
        raise ArgumentTypeError(
            "preflight: a Keras model by itself is no training step. After compile(), call"
            " px.keras.replicate(model, strategy).preflight(...)."
        )
    function = fn._function if isinstance(fn, BoundFunction) else fn
    known = function.known_arguments if isinstance(function, Function) else None
    if known is not None:
        return known
    try:
        inspect.signature(fn).bind()
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise ArgumentError(
            f"preflight: {name} needs example arguments ({error}): arrays, or jax.ShapeDtypeStruct(shape, dtype) with"
            " the shapes of all replicas together; on the command line --arg for each, or a function"
            f" preflight_{name} in the file. A px.function with an input_signature, or one that has been called, needs"
            " none."
        ) from None
    except ValueError:  # builtins
        pass
    return (), {}
