"""Words that must stay out, because the things they name must: speculation below `spec`, modes, and loaders that run code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house.tree import KERNELS, PACKAGE, ROOT, lines, name, sources, tree

# As words and as parts of identifiers (`draft_rows`, `SpecShape`), but not inside other words (`special`, `specific`, `inspect`).
SPECULATION = re.compile(r"(?<![a-z])(drafts?|draft(ed|er|ers|ing)|spec|specs|speculat\w*|mtp)(?![a-z])", re.IGNORECASE)
OWN_NAME = re.compile(r"mtpserve\w*")
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
MODES = re.compile(r"is_(prefill|decode|verify|draft_extend)\b")

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle"}  # whatever they are set to
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
SPEECHLESS = [PACKAGE / "attention", PACKAGE / "cache", PACKAGE / "quant", KERNELS / "attention", KERNELS / "cache", KERNELS / "quant"]
# The rooms of speculation, and the tools. A family's file, of which there are many, names the MTP layer that it is published with.
ROOMS = ("spec/", "heads/", "models/", "engine/depth/", "tools/")
MAX_NAMING = 48  # files outside of these rooms; SGLang has 313 and vLLM 286


def speculation(line: str) -> list[str]:
    """The forbidden words of a line; identifiers such as `SpecShape` and `DRAFT_ROWS` are split into words."""
    return [match.group() for match in SPECULATION.finditer(CAMEL.sub("_", OWN_NAME.sub("", line)))]


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("from mtpserve.core.batch import Batch", 0),
        ("special specific inspect overdraft", 0),
        ("draft_rows = 1", 1),
        ("class SpecShape: ...", 1),
        ("the speculative rows # MTP", 2),
        ("batch.draft_count", 1),
    ],
)
def test_the_search_finds_words_and_no_others(line: str, count: int) -> None:
    assert len(speculation(line)) == count


@pytest.mark.parametrize("folder", SPEECHLESS, ids=name)
def test_speculation_is_unknown_below(folder: Path) -> None:
    found = [f"{place}: {words}" for place, line in lines(folder) if (words := speculation(line))]
    assert not found


def test_few_files_outside_of_spec_name_speculation() -> None:
    """By the words drafts, speculation and MTP; `spec` alone is the name of a grammar too, and of a section of the configuration."""
    naming = {place.split(":")[0] for place, line in lines(PACKAGE) if {word.lower() for word in speculation(line)} - {"spec", "specs"}}
    outside = sorted(file for file in naming if not file.removeprefix("mtpserve/").startswith(ROOMS))
    assert len(outside) <= MAX_NAMING, outside


def test_there_are_no_modes() -> None:
    found = [place for place, line in lines(PACKAGE, KERNELS) if MODES.search(line)]
    assert not found


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def test_nothing_that_is_read_can_run_code() -> None:
    found = []
    for file in sources(PACKAGE, KERNELS):
        for node in ast.walk(tree(file)):
            modules = {module.split(".")[0] for module in imported(node)} & FORBIDDEN_MODULES
            names = set(imported(node)) & FORBIDDEN_CALLS
            call = {ast.unparse(node.func)} & FORBIDDEN_CALLS if isinstance(node, ast.Call) else set()
            if isinstance(node, ast.Call):
                call |= {keyword.arg or "" for keyword in node.keywords} & FORBIDDEN_KEYWORDS
                call |= {node.func.attr} & FORBIDDEN_METHODS if isinstance(node.func, ast.Attribute) else set()
            found += [f"{name(file)}:{node.lineno}: {bad}" for bad in modules | names | call if isinstance(node, ast.stmt | ast.expr)]
    assert not found


def test_the_server_asserts_nothing_that_a_client_sends() -> None:
    """`python -O` removes them. Those of the server tell mypy a type; the value is checked where it comes from."""
    asserted = {
        f"{name(file)}:{node.lineno}": ast.unparse(node.test)
        for file in sources(PACKAGE / "server")
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Assert)
    }
    assert not {place: test for place, test in asserted.items() if not test.startswith("isinstance(")}


def test_durations_are_measured_with_monotonic_clocks() -> None:
    """A machine's date may jump. It is read for dates alone: when an answer was made, when the server began, when a cache has changed or a
    load was told."""
    wanted = {"time.time", "datetime"}
    dated = {name(file) for file in sources(PACKAGE, KERNELS) for node in ast.walk(tree(file)) if wanted & set(imported(node))}
    dated -= {"mtpserve/runtime/parallel/peers.py"}  # torch.distributed wants its timeouts as a timedelta
    events = "mtpserve/engine/pages/kv_events.py"
    assert dated == {
        events,
        *(
            f"mtpserve/server/{file}.py"
            for file in ("openai/answer", "openai/responses/response_answer", "openai/responses/routes", "sglang/loads", "app")
        ),
    }
    calls = [
        f"{name(file)}:{node.lineno}"
        for file in sources(PACKAGE, KERNELS)
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "datetime.now")
    ]
    assert not calls
    assert (ROOT / events).read_text().count("time()") == 1, "as vLLM's, with fractions"
    for file in dated - {events}:
        assert (ROOT / file).read_text().count("int(time())") == 1, f"{file}: a date in whole seconds, once"
