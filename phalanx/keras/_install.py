"""Makes Keras follow the rules, and checkpoints take what is Keras's; once."""

from phalanx.keras import checkpointed, reductions, variables

variables.install()
reductions.install()
checkpointed.install()
