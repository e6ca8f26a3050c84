"""A wheel and an sdist, tried as users get them: no file of the package is missing, and the wheel's server answers.

python -m tests.packaging.check dist [OPTION of pip …]      (make dist: where torch comes from without a GPU)

`python -m build` makes the wheel from the sdist, so a wheel that runs shows that the sdist is whole. It goes into an empty environment
with `pip install WHEEL` and no constraints, so pip takes the newest versions that pyproject.toml admits. Where pip reaches no index, the
packages of this environment take their place.
"""

from __future__ import annotations

import json
import os
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

ROOT = Path(__file__).resolve().parents[2]
PARTS = (ROOT / "mtpserve", ROOT / "kernels" / "mtpserve_kernels")
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


def missing_files(folder: Path) -> list[str]:
    with zipfile.ZipFile(single_file(folder, "*.whl")) as wheel, tarfile.open(single_file(folder, "*.tar.gz")) as sdist:
        inside = {name.split("/", 1)[-1].removeprefix("kernels/") for name in sdist.getnames()}
        expected = package_files()
        return sorted([f"wheel: {name}" for name in expected - set(wheel.namelist())] + [f"sdist: {name}" for name in expected - inside])


class Environment:
    """An empty virtual environment below `place`, with the pip of this Python. It does not see this checkout."""

    def __init__(self, place: Path) -> None:
        self.place = place.resolve()
        self.programs = self.place / "environment" / "bin"
        self.variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
        venv.create(self.programs.parent, with_pip=True)

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

    def completion(self) -> str:
        """The text with which this environment's server answers PROMPT. The server is ended. Raises SystemExit with its log."""
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
                text = ask(ready[0])
                server.terminate()
                if code := server.wait():
                    raise SystemExit(f"the server of the wheel: exit code {code}\n{log.read_text()}")
                return text
            finally:
                limit.cancel()
                server.kill()


def ask(url: str) -> str:
    """A completion of PROMPT by a server that is healthy. Raises urllib.error.URLError."""
    with urllib.request.urlopen(f"{url}/health"):
        pass
    body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["text"])


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
    text, generated = environment.completion(), environment.run("mtpserve", *GENERATE)
    if not text.strip() or text.strip() not in generated:
        raise SystemExit(f"the server and `mtpserve generate` wrote different texts:\n{text}\n{generated}")
    print(f"{environment.run('mtpserve', '--version').strip()}: the wheel runs in an empty environment, and its server writes:\n{text}")


def main(folder: Path, *options: str) -> None:
    if missing := missing_files(folder):
        raise SystemExit("\n".join(["not in the distributions:", *missing]))
    print(f"wheel and sdist have all {len(package_files())} files", flush=True)
    with tempfile.TemporaryDirectory() as place:
        try_wheel(single_file(folder, "*.whl"), options, Path(place))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
