""".github/workflows: what a tag publishes is built, tried and named before, and each step names what is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import mtpserve
from tests.docker.test_docker import stages
from tests.packaging.release import ROOT, notes

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
RELEASE = ROOT / ".github" / "workflows" / "release.yaml"
ACTIONLINT = shutil.which("actionlint")


def jobs() -> dict[str, Any]:
    return yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["jobs"]  # type: ignore[no-any-return]


def before(name: str) -> set[str]:
    """The jobs that must have passed before one begins."""
    needs = jobs()[name].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(before(each) for each in direct))


def steps(name: str) -> list[dict[str, Any]]:
    return jobs()[name]["steps"]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- the version


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "mtpserve").mkdir()
    (tmp_path / "mtpserve" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-12-01\n\n- A line.\n\n## [1.2.2]\n\n- Old.\n"
    )
    return tmp_path


def test_the_notes_are_the_changelogs_section(tree: Path) -> None:
    assert notes("v1.2.3", tree) == "- A line.\n"


@pytest.mark.parametrize("tag", ["v1.2.4", "1.2.3", "v1.2.3rc1"])
def test_another_tag_is_refused_by_both_names(tree: Path, tag: str) -> None:
    with pytest.raises(SystemExit, match=rf"the tag is {re.escape(tag)}, and mtpserve.__version__ is '1\.2\.3'"):
        notes(tag, tree)


@pytest.mark.parametrize("changelog", ["## [Unreleased]\n\n- A line.\n", "## [1.2.3]\n\n## [1.2.2]\n\n- Old.\n"])
def test_a_version_without_lines_in_the_changelog_is_refused(tree: Path, changelog: str) -> None:
    (tree / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(SystemExit, match=r"no section ## \[1\.2\.3\], or an empty one"):
        notes("v1.2.3", tree)


def test_this_tree_refuses_another_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.packaging.release", "v999.0"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"must be v{mtpserve.__version__}" in done.stderr


# -------------------------------------------------------------------------------------------------------- the workflow


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_has_githubs_form(file: Path) -> None:
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: the extra `test`")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(ACTIONLINT is None, reason="actionlint is not installed")
@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_actionlint(file: Path) -> None:
    done = subprocess.run([str(ACTIONLINT), str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_tag_publishes_and_nothing_else_does() -> None:
    assert yaml.safe_load(RELEASE.read_text(encoding="utf-8"))[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true


@pytest.mark.parametrize("name", ["pypi", "images", "release"])
def test_what_is_published_was_built_installed_and_has_the_packages_version(name: str) -> None:
    assert {"version", "build", "install"} <= before(name)
    (checked,) = [step["run"] for step in steps("version") if "run" in step]
    assert checked.startswith('python -m tests.packaging.release "$GITHUB_REF_NAME"')


def test_each_machine_builds_its_wheel_and_makes_the_check_of_make_dist() -> None:
    rows = {row["machine"]: row["runner"] for row in jobs()["build"]["strategy"]["matrix"]["include"]}
    assert rows.keys() == {"x86_64", "aarch64"}
    assert rows["aarch64"].endswith("-arm") and not rows["x86_64"].endswith("-arm")
    assert any(step.get("run") == "make dist" for step in steps("build"))
    assert re.search(r"(?m)^dist: .*\n(?:\t.*\n)*\t.*tests\.packaging\.check dist", (ROOT / "Makefile").read_text(encoding="utf-8"))


def test_rights_to_publish_are_with_the_jobs_that_do() -> None:
    assert yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    granted = {name: {key for key, value in job.get("permissions", {}).items() if value == "write"} for name, job in jobs().items()}
    expected = {"pypi": {"id-token"}, "images": {"packages"}, "release": {"contents"}}
    assert {name: rights for name, rights in granted.items() if rights} == expected
    assert [step["uses"] for step in steps("pypi") if "pypa/" in step.get("uses", "")] == ["pypa/gh-action-pypi-publish@release/v1"]
    assert not [step for step in steps("pypi") if "password" in step.get("with", {})]


def test_both_images_are_built_from_their_stages_and_named_by_tag_and_latest() -> None:
    rows = jobs()["images"]["strategy"]["matrix"]["include"]
    assert {row["target"] for row in rows} == {"cpu", "cuda"} <= stages().keys()
    assert len({row["suffix"] for row in rows}) == len(rows)  # otherwise one image takes the other's name
    (names,) = [step["with"] for step in steps("images") if "metadata-action" in step.get("uses", "")]
    assert "latest=true" in names["flavor"] and "type=pep440,pattern={{version}}" in names["tags"]
    (pushed,) = [step["with"] for step in steps("images") if step.get("with", {}).get("push") is True]
    assert pushed["tags"] == "${{ steps.names.outputs.tags }}" and (ROOT / pushed["file"]).is_file()
