"""Operators of one's own: a recipe names files that implement operators which tvmflow lacks.

A file imports `operator` (and `Tensor`) from here. Only workers run such files, by `_loading`; planning lists
them by `_files`, with what they import. Imports tuning and what is below it; no framework at its
top level.
"""

from tvmflow.operators.definition import Node as Node
from tvmflow.operators.definition import Tensor as Tensor
from tvmflow.operators.definition import operator as operator
