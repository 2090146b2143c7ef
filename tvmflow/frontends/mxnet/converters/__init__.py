"""Converters of MXNet operators to Relax, by operator name.

Each module imports only its neighbours and `_op`.

Defaults of attributes are those of MXNet 1.9's operator definitions; `symbol.json` omits defaults.
"""

from __future__ import annotations

from typing import Final

from tvmflow.frontends.mxnet._op import Converter
from tvmflow.frontends.mxnet.converters import arithmetic, arrays, detection, layers

CONVERTERS: Final[dict[str, Converter]] = {
    operator: converter
    for module in (arithmetic, arrays, detection, layers)
    for operator, converter in module.CONVERTERS.items()
}
