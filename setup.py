"""What pyproject.toml cannot say: the tag of a wheel that brings compiled kernels, and the links of a published description.

`kernels/mtpserve_kernels/cpu/objects/` may have objects, which `python -m mtpserve_kernels.cpu.build --all` writes there and
`tests/packaging/wheels.py` puts there. They are plain C with neither Python's interface nor torch's, so a wheel with them is for a kind of
machine and for every Python 3: `py3-none-linux_x86_64`. Without them it is `py3-none-any`, and a start compiles.

README.md is the description on the package's page, where its links to files of the repository lead nowhere. In a workflow of GitHub the
repository is known, so that they become links to the files of the tag there.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
OBJECTS = ROOT / "kernels" / "mtpserve_kernels" / "cpu" / "objects"
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


def repository() -> tuple[str, str] | None:
    """Address of the repository, and the tag or branch. None where no workflow of GitHub builds."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
    server, name, ref = (os.environ.get(variable, "") for variable in names)
    return (f"{server}/{name}", ref) if server and name and ref else None


def with_absolute_links(text: str, address: str, ref: str) -> str:
    """A page of Markdown whose links and pictures within the repository are addresses. Those within the page stay."""
    text = re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", rf"]({address}/blob/{ref}/\1)", text)
    return re.sub(r'\b(src|srcset)="(?!\w+:)([^"]+)"', rf'\1="{address}/raw/{ref}/\2"', text)


def description() -> dict[str, object]:
    text, known = (ROOT / "README.md").read_text(encoding="utf-8"), repository()
    if known is None:
        return {"long_description": text, "project_urls": {}}
    address, ref = known
    urls = {"Source": address, "Documentation": f"{address}/tree/{ref}/docs", "Changelog": f"{address}/blob/{ref}/CHANGELOG.md"}
    return {"long_description": with_absolute_links(text, address, ref), "project_urls": urls}


class DistributionWithObjects(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel's files belong where those of one kind of machine are."""
        return platform_of_objects() is not None


class WheelOfOneMachine(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", platform_of_objects() or "any")


setup(
    cmdclass={"bdist_wheel": WheelOfOneMachine}, distclass=DistributionWithObjects,
    long_description_content_type="text/markdown", **description(),
)  # fmt: skip
