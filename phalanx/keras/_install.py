"""Makes Keras follow the rules, checkpoints take what is Keras's, and errors name the line that called Keras; once."""

import os

from phalanx import _jax
from phalanx.keras import _keras, checkpointed, feed, reductions, variables

_jax.pass_over(os.path.dirname(_keras.keras.__file__))
variables.install()
reductions.install()
checkpointed.install()
feed.install()
