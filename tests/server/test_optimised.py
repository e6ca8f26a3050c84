"""What a client may not ask is refused with assertions switched off too: `python -O`, or PYTHONOPTIMIZE in somebody's image."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.house.tree import ROOT

# In the tests' own modules pytest's assertions stay; everywhere else none is left.
REFUSALS = "bounds or no_request or cannot_be or what_is_refused or invalid_requests or in_use or bad_grammars or deep_grammars"
FILES = ("server/test_errors.py", "server/test_templates.py", "engine/test_engine.py", "text/test_grammar.py")


@pytest.mark.thorough
def test_refusals_need_no_assertions() -> None:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-k", REFUSALS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    files = [f"tests/{file}" for file in FILES]
    done = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 170, done.stdout[-400:]
