"""The parts of gpu_profile.py and gpu_model.py: what a step launches, how long that takes on a GPU, and how long it should take."""

from __future__ import annotations

import sys
from pathlib import Path

# From a checkout the package need not be installed. The tests' recorder and compiler tools are used, too.
for folder in (Path(__file__).parents[2], Path(__file__).parents[2] / "kernels"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
