"""What pyproject.toml cannot say: the tag of a wheel that brings compiled kernels.

`kernels/mtpserve_kernels/cpu/objects/` may have objects, which `python -m mtpserve_kernels.cpu.build --all` writes there and
`tests/packaging/wheels.py` puts there. They are plain C with neither Python's interface nor torch's, so a wheel with them is for a kind of
machine and for every Python 3: `py3-none-linux_x86_64`. Without them it is `py3-none-any`, and a start compiles.
"""

from __future__ import annotations

import struct
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

OBJECTS = Path(__file__).parent / "kernels" / "mtpserve_kernels" / "cpu" / "objects"
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF


def machine_of(file: Path) -> str:
    """Raises ValueError where the file is not an object of a machine that the kernels are written for."""
    header = file.read_bytes()[:20]
    number = struct.unpack_from("<H", header, 18)[0] if header[:4] == b"\x7fELF" and len(header) == 20 else None
    if number not in MACHINES:
        raise ValueError(f"{file}: not a compiled object for {' or '.join(MACHINES.values())}")
    return MACHINES[number]


def platform_of_objects() -> str | None:
    """`linux_x86_64`; None where there are no objects. Raises ValueError where they are for several kinds of machine."""
    machines = sorted({machine_of(file) for file in OBJECTS.glob("*.so")})
    if len(machines) > 1:
        raise ValueError(f"{OBJECTS}: objects for {' and '.join(machines)}; a wheel has those of one kind of machine")
    return f"linux_{machines[0]}" if machines else None


class DistributionWithObjects(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel's files belong where those of one kind of machine are."""
        return platform_of_objects() is not None


class WheelOfOneMachine(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", platform_of_objects() or "any")


setup(cmdclass={"bdist_wheel": WheelOfOneMachine}, distclass=DistributionWithObjects)
