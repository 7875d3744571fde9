"""Stand-in for torchvision: text-only serving imports names of it and calls none."""

import sys

from absent_names import stand_in

__version__ = "0.0.0+standin"
stand_in(sys.modules[__name__])
