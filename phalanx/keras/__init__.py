"""Keras 3 models on a strategy; its variables take part in tapes, traced functions and replicas.

Importing this makes Keras's variables, optimizers and losses (JAX backend) follow the rules of `phalanx`;
`phalanx` does it by itself where it meets Keras in the same program.
"""

from phalanx.keras import _install as _install
from phalanx.keras.model import Model as Model
from phalanx.keras.model import replicate as replicate
