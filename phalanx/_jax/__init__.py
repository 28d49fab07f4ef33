"""The only package that touches JAX's extension points, and the only one that knows its versions.

Everything Phalanx needs beyond JAX's public API stands here: the current trace, traces of our own,
programs whose inputs are found while they are traced, and what JAX can prove about replicas.
Supported: jax 0.10.2 to 0.12. Names under ``jax._src`` carry no promise; a release that moves one
of them breaks a module of this package and no other.
"""

from phalanx._jax.devices import REPLICA_AXIS as REPLICA_AXIS
from phalanx._jax.devices import SliceDevice as SliceDevice
from phalanx._jax.devices import backend_started as backend_started
from phalanx._jax.devices import replica_mesh as replica_mesh
from phalanx._jax.devices import replicated as replicated
from phalanx._jax.devices import span as span
from phalanx._jax.devices import split as split
from phalanx._jax.devices import would_hang as would_hang
from phalanx._jax.jaxprs import COLLECTIVES as COLLECTIVES
from phalanx._jax.jaxprs import has_callback as has_callback
from phalanx._jax.jaxprs import has_collective as has_collective
from phalanx._jax.jaxprs import inner_jaxprs as inner_jaxprs
from phalanx._jax.jaxprs import is_literal as is_literal
from phalanx._jax.jaxprs import pulled_to as pulled_to
from phalanx._jax.jaxprs import reaches as reaches
from phalanx._jax.jaxprs import split_scan as split_scan
from phalanx._jax.jaxprs import zero_outputs as zero_outputs
from phalanx._jax.lines import line_of as line_of
from phalanx._jax.lines import line_of_error as line_of_error
from phalanx._jax.lines import scope_of as scope_of
from phalanx._jax.lines import short_path as short_path
from phalanx._jax.lines import user_line as user_line
from phalanx._jax.lines import users_line_of as users_line_of
from phalanx._jax.observed import OperationTrace as OperationTrace
from phalanx._jax.observed import close_traces as close_traces
from phalanx._jax.observed import observe_operations as observe_operations
from phalanx._jax.operations import Operation as Operation
from phalanx._jax.operations import OperationCache as OperationCache
from phalanx._jax.processes import connect as connect
from phalanx._jax.processes import connected as connected
from phalanx._jax.processes import delete_note as delete_note
from phalanx._jax.processes import is_collective_failure as is_collective_failure
from phalanx._jax.processes import read_note as read_note
from phalanx._jax.processes import stay_on_loopback as stay_on_loopback
from phalanx._jax.processes import write_note as write_note
from phalanx._jax.profiler import DeviceOperation as DeviceOperation
from phalanx._jax.profiler import compilations as compilations
from phalanx._jax.profiler import device_operations as device_operations
from phalanx._jax.programs import Program as Program
from phalanx._jax.programs import Tracing as Tracing
from phalanx._jax.programs import compiling as compiling
from phalanx._jax.programs import is_leaked as is_leaked
from phalanx._jax.programs import known_calls as known_calls
from phalanx._jax.programs import results_are_checked as results_are_checked
from phalanx._jax.programs import trace_program as trace_program
from phalanx._jax.replicas import all_gather as all_gather
from phalanx._jax.replicas import aval_varies as aval_varies
from phalanx._jax.replicas import in_replica_trace as in_replica_trace
from phalanx._jax.replicas import lift as lift
from phalanx._jax.replicas import local_aval as local_aval
from phalanx._jax.replicas import on_replicas as on_replicas
from phalanx._jax.replicas import sum_of_one as sum_of_one
from phalanx._jax.replicas import type_of as type_of
from phalanx._jax.replicas import varies as varies
from phalanx._jax.slices import Lowered as Lowered
from phalanx._jax.slices import back_to as back_to
from phalanx._jax.slices import compile_for_slice as compile_for_slice
from phalanx._jax.slices import compile_here as compile_here
from phalanx._jax.slices import has_libtpu as has_libtpu
from phalanx._jax.slices import hide_absent_tpu as hide_absent_tpu
from phalanx._jax.slices import lower_traced as lower_traced
from phalanx._jax.slices import types_alone as types_alone
from phalanx._jax.traces import current_trace as current_trace
from phalanx._jax.traces import is_eager as is_eager
from phalanx._jax.traces import is_staging as is_staging
from phalanx._jax.traces import outside_traces as outside_traces
from phalanx._jax.traces import set_body_generation as set_body_generation
from phalanx._jax.traces import set_trace as set_trace
from phalanx._jax.traces import staged_for as staged_for
from phalanx._jax.traces import trace_chain as trace_chain
from phalanx._jax.traces import trace_context as trace_context
from phalanx._jax.traces import using_trace as using_trace
from phalanx._jax.transposes import local_gradients as local_gradients
from phalanx._jax.transposes import local_lift as local_lift
from phalanx._jax.transposes import typed_as as typed_as
from phalanx._jax.values import ConcreteArray as ConcreteArray
from phalanx._jax.values import alias as alias
from phalanx._jax.values import is_tracer as is_tracer
from phalanx._jax.values import read_again as read_again
from phalanx._jax.values import register_array_like as register_array_like
