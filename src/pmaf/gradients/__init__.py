"""Ways to differentiate a solution: small frozen objects, one file each."""

from pmaf.gradients.base import Conditions, Gradient, VectorConditions
from pmaf.gradients.ddn import DDN
from pmaf.gradients.ift import IFT
from pmaf.gradients.implicit import Implicit
from pmaf.gradients.unroll import Unroll

__all__ = ["DDN", "IFT", "Conditions", "Gradient", "Implicit", "Unroll", "VectorConditions"]
