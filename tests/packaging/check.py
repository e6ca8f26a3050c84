"""Wheels and an sdist, tried as users get them: no file of the package is missing, and the wheel's server answers.

python -m tests.packaging.check dist [OPTION of pip …]      (make dist: where torch comes from without a GPU)

The wheels are built from the sdist, so a wheel that runs shows that the sdist is whole. This machine's goes into an empty environment
with `pip install WHEEL` and no constraints, so pip takes the newest versions that pyproject.toml admits. Where pip reaches no index, the
packages of this environment take their place. There its server finds no compiler and no kernels that were compiled before: it must take
the wheel's own, of the best instruction set that this CPU has.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtpserve_kernels.cpu.build import INSTRUCTION_SETS, available

from tests.packaging.wheels import instruction_sets, object_name

ROOT = Path(__file__).resolve().parents[2]
PARTS = (ROOT / "mtpserve", ROOT / "kernels" / "mtpserve_kernels")
MACHINES = {isa.machine for isa in INSTRUCTION_SETS}
PROMPT, MAX_TOKENS = "import os\n\ndef read_lines(path):", 24
GENERATE = ("generate", "--model", "demo", "--temperature", "0", "--max-tokens", str(MAX_TOKENS), PROMPT)
LAUNCH = ("launch", "--model", "demo", "--speculative-algorithm", "NEXTN", "--host", "127.0.0.1", "--port", "0")
START_LIMIT = 600  # seconds until a server that says nothing is killed
SMALL_PACKAGE = "mdurl"  # 10 KB, and one of ours: rich needs it


def package_files() -> set[str]:
    """Every file of the packages, as the wheel names it."""
    files = (file for part in PARTS for file in part.rglob("*") if file.is_file() and not file.name.startswith("."))
    sources = (file for file in files if not {"__pycache__", "objects"} & set(file.parts))
    return {str(file.relative_to(ROOT if ROOT / "mtpserve" in file.parents else ROOT / "kernels")) for file in sources}


def single_file(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder}: {len(found)} files {pattern}, expected one")
    return found[0].resolve()


def wheel_of_this_machine(folder: Path) -> Path:
    return single_file(folder, f"*_{platform.machine()}.whl" if platform.system() == "Linux" else "*-any.whl")


def objects_of(wheel: Path) -> set[str]:
    """Compiled kernels that a wheel must have by the machine in its name: of the sources that are here."""
    machine = next((machine for machine in MACHINES if wheel.name.endswith(f"_{machine}.whl")), "any")
    return {f"mtpserve_kernels/cpu/objects/{object_name(isa)}" for isa in instruction_sets(machine)}


def missing_files(folder: Path) -> list[str]:
    """What a distribution lacks, and objects of other sources, which nothing would load."""
    expected, wrong = package_files(), list[str]()
    for file in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(file) as wheel:
            inside, objects = set(wheel.namelist()), objects_of(file)
        wrong += [f"{file.name} has no {name}" for name in (expected | objects) - inside]
        wrong += [f"{file.name} has {name}" for name in inside - objects if name.endswith(".so")]
    with tarfile.open(single_file(folder, "*.tar.gz")) as sdist:
        inside = {name.split("/", 1)[-1].removeprefix("kernels/") for name in sdist.getnames()}
        wrong += [f"the sdist has no {name}" for name in (expected | {"setup.py"}) - inside]
    return sorted(wrong)


class Environment:
    """An empty virtual environment below `place`, with the pip of this Python. It sees neither this checkout nor a compiler."""

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        self.programs = self.place / "environment" / "bin"
        self.kernels = self.place / "cache" / "mtpserve" / "kernels"  # where a start keeps what it has compiled
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME", "CXX", "MTPSERVE_CPU_ISA")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        venv.create(self.programs.parent, with_pip=True)

    def hide_compilers(self) -> None:
        """What is started from now on finds this environment's programs alone, and no kernels that were compiled before."""
        self.variables |= {"PATH": str(self.programs), "XDG_CACHE_HOME": str(self.kernels.parents[1])}

    def run(self, program: str, *arguments: str | Path) -> str:
        """Its output. Raises SystemExit with all of it where it fails."""
        command = [str(self.programs / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=self.place, env=self.variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def reaches_index(self) -> bool:
        command = [self.programs / "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", self.place, SMALL_PACKAGE]
        return subprocess.run(command, cwd=self.place, env=self.variables, capture_output=True, check=False).returncode == 0

    def install(self, wheel: Path, options: Sequence[str]) -> None:
        """With its dependencies by the ranges of pyproject.toml. On a terminal pip shows its bars, elsewhere its errors."""
        quiet = () if sys.stdout.isatty() else ("-qq",)
        command = [self.programs / "pip", "install", "--disable-pip-version-check", "--no-compile", *quiet, *options, wheel]
        if code := subprocess.run(command, cwd=self.place, env=self.variables, check=False).returncode:
            raise SystemExit(f"pip install {wheel.name} in an empty environment: exit code {code}")

    def install_alone(self, wheel: Path) -> None:
        """With this environment's packages in place of its dependencies."""
        paths = sysconfig.get_paths(vars={"base": str(self.programs.parent), "platbase": str(self.programs.parent)})
        here = sysconfig.get_paths()
        Path(paths["purelib"], "dependencies.pth").write_text("\n".join(dict.fromkeys((here["purelib"], here["platlib"]))) + "\n")
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--force-reinstall", wheel)

    def answers(self) -> tuple[str, dict[str, Any]]:
        """The text with which this environment's server answers PROMPT, and its /server_info. The server is ended. Raises SystemExit
        with its log."""
        log = self.place / "server.log"
        command = [self.programs / "mtpserve", *LAUNCH]
        with log.open("w") as errors, subprocess.Popen(
            command, cwd=self.place, env=self.variables, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as server:  # fmt: skip
            limit = threading.Timer(START_LIMIT, server.kill)
            limit.start()
            try:
                assert server.stdout is not None
                if (ready := re.search(r"http://\S+", server.stdout.readline())) is None:
                    raise SystemExit(f"the server of the wheel has ended before it was ready:\n{log.read_text()}")
                answers = ask(ready[0])
                server.terminate()
                if code := server.wait():
                    raise SystemExit(f"the server of the wheel: exit code {code}\n{log.read_text()}")
                return answers
            finally:
                limit.cancel()
                server.kill()


def ask(url: str) -> tuple[str, dict[str, Any]]:
    """A completion of PROMPT by a server that is healthy, and what it says of itself. Raises urllib.error.URLError."""
    with urllib.request.urlopen(f"{url}/health"), urllib.request.urlopen(f"{url}/server_info") as about:
        information = json.load(about)
    body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["text"]), information


def try_wheel(wheel: Path, options: Sequence[str], place: Path) -> None:
    """Raises SystemExit where the wheel's commands do not do what they should."""
    environment = Environment(place)
    if environment.reaches_index():
        environment.install(wheel, options)
        print("resolved:", ", ".join(environment.run("pip", "list", "--format", "freeze").split()), flush=True)
    else:
        environment.install_alone(wheel)
        print("pip reaches no index: the wheel runs with the packages of this environment", flush=True)
    origin = environment.run("python", "-c", "import mtpserve, mtpserve_kernels as k; print(mtpserve.__file__, k.__file__)")
    if any(environment.place not in Path(file).resolve().parents for file in origin.split()):
        raise SystemExit(f"the wheel's package was not imported, but {origin}")
    if "mtp.layers" not in (tables := environment.run("mtpserve", "inspect", "demo")):
        raise SystemExit(f"mtpserve inspect demo shows no MTP layer:\n{tables}")
    environment.hide_compilers()
    (text, information), generated = environment.answers(), environment.run("mtpserve", *GENERATE)
    check_kernels(environment, str(information["kernels"]))
    if not text.strip() or text.strip() not in generated:
        raise SystemExit(f"the server and `mtpserve generate` wrote different texts:\n{text}\n{generated}")
    version = environment.run("mtpserve", "--version").strip()
    print(
        f"{version}: the wheel runs in an empty environment without a compiler ({information['kernels']}), and its server writes:\n{text}"
    )


def check_kernels(environment: Environment, said: str) -> None:
    """said: what /server_info calls the kernels. Raises SystemExit where they are not the wheel's best ones that this CPU has."""
    expected = f"cpu, {available()[0].name}" if available() else said
    compiled = sorted(str(file) for file in environment.kernels.rglob("*.so"))
    if said != expected or compiled:
        raise SystemExit(f"the server of the wheel computes with {said!r}, not {expected!r}; it compiled {compiled or 'nothing'}")


def main(folder: Path, *options: str) -> None:
    if wrong := missing_files(folder):
        raise SystemExit("\n".join(["the distributions are not whole:", *wrong]))
    print(f"wheels and sdist have all {len(package_files())} files, and the wheels their compiled kernels", flush=True)
    with tempfile.TemporaryDirectory() as place:
        try_wheel(wheel_of_this_machine(folder), options, Path(place))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
