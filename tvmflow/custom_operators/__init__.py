"""Custom operators: Python files that a recipe lists under `operators`.

A file imports `operator` (and `Tensor`) from here. Only workers run such files (`load_operators`); planning lists the
files and the modules that they import (`list_operator_files`). Imports only tuning and lower layers.
"""

from tvmflow.custom_operators.definition import Node as Node
from tvmflow.custom_operators.definition import Tensor as Tensor
from tvmflow.custom_operators.definition import operator as operator
