"""Makes Keras follow the rules, once."""

from phalanx.keras import reductions, variables

variables.install()
reductions.install()
