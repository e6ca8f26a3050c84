"""A wheel and an sdist, tried as users get them: nothing of the package is missing, and the wheel runs outside of the checkout.

python -m tests.packaging.check dist         (make dist)

`python -m build` makes the wheel from the sdist, so that a wheel that runs shows that the sdist is whole. The wheel is installed into an
empty environment, to which the packages of this one are added: its dependencies are not installed once more, which would need an index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = (ROOT / "mtpserve", ROOT / "kernels" / "mtpserve_kernels")
COMMANDS = (
    ["mtpserve", "--version"],
    ["mtpserve", "inspect", "demo"],
    ["mtpserve", "generate", "--model", "demo", "--temperature", "0", "--max-tokens", "24", "import os\n\ndef read_lines(path):"],
)


def wanted() -> set[str]:
    """Every file of the packages, as the wheel names it."""
    files = (file for part in PARTS for file in part.rglob("*") if file.is_file() and not file.name.startswith("."))
    kept = (file for file in files if not {"__pycache__", "objects"} & set(file.parts))
    return {str(file.relative_to(ROOT if ROOT / "mtpserve" in file.parents else ROOT / "kernels")) for file in kept}


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder}: {len(found)} files {pattern}, expected one")
    return found[0]


def lacking(folder: Path) -> list[str]:
    with zipfile.ZipFile(only(folder, "*.whl")) as wheel, tarfile.open(only(folder, "*.tar.gz")) as sdist:
        inside = {name.split("/", 1)[-1].removeprefix("kernels/") for name in sdist.getnames()}
        return sorted([f"wheel: {name}" for name in wanted() - set(wheel.namelist())] + [f"sdist: {name}" for name in wanted() - inside])


def environment(place: Path) -> Path:
    """An empty environment that sees this one's packages, but not this checkout. Returns its folder of programs."""
    venv.create(place, with_pip=False)
    programs = place / "bin"
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    here = sysconfig.get_paths()
    Path(paths["purelib"], "dependencies.pth").write_text("\n".join(dict.fromkeys((here["purelib"], here["platlib"]))) + "\n")
    return programs


def run(*command: str | Path, cwd: Path) -> str:
    """Its output. Raises SystemExit with all of it where it fails."""
    hidden = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=hidden, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tried(folder: Path, place: Path) -> list[str]:
    """The outputs of COMMANDS, of the wheel in an environment below `place`."""
    programs = environment(place / "environment")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    wheel = only(folder, "*.whl").resolve()
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", *quiet, "--force-reinstall", wheel, cwd=place)
    origin = run(programs / "python", "-c", "import mtpserve, mtpserve_kernels as k; print(mtpserve.__file__, k.__file__)", cwd=place)
    if any(place.resolve() not in Path(file).resolve().parents for file in origin.split()):
        raise SystemExit(f"the wheel's package was not imported, but {origin}")
    return [run(programs / command[0], *command[1:], cwd=place) for command in COMMANDS]


def main(folder: Path) -> None:
    if missing := lacking(folder):
        raise SystemExit("\n".join(["not in the distributions:", *missing]))
    with tempfile.TemporaryDirectory() as place:
        version, inspected, text = tried(folder, Path(place))
    if "mtp.layers" not in inspected or not text.strip():
        raise SystemExit(f"the wheel's commands answered otherwise than expected:\n{inspected}\n{text}")
    print(f"{version.strip()}: wheel and sdist have all {len(wanted())} files, and the wheel runs in an empty environment")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
