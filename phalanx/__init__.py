from phalanx.variables import Variable as Variable
from phalanx.tape import GradientTape as GradientTape
from phalanx.function import function as function, run_functions_eagerly as run_functions_eagerly, strict as strict
from phalanx.distribute.strategy import *
from phalanx.distribute.values import PerReplica
