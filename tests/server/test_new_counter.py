"""A counter is added in two files: a field with its metrics, and the line that counts it. An option is a field alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.house.tree import PACKAGE, ROOT

FIELD = "    steps_total: int ="
PROBE = """    probes_total: int = counter(
        "probes", "Outcomes.", replica="Outcomes of it.", vllm=(("probes", "V."),), sglang=(("probes", "S."),)
    )
"""
COUNTED = "    stats.failed_requests_total"
OPTION = "    random_seed: int | None ="
READ = """import asyncio, json, types
import httpx
from mtpserve.cli.options import settings
from mtpserve.core.stats.reports import EngineState
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.process.totals import counters, total
from mtpserve.engine.stats import count
from mtpserve.server.observe.metrics import Metrics
from mtpserve.server.page.page import Stats
from tests.server.fake_client import FakeClient

one, two = EngineStats(), EngineStats()
for stats in (one, two, two):
    count(stats, types.SimpleNamespace(finish=None), types.SimpleNamespace(tokens=[]))

class TwoEngines(FakeClient):
    engines = [EngineState(0, "up", 0, 0, "", one), EngineState(1, "up", 0, 0, "", two)]

    def stats(self):
        return total([one, two])

print(total([one, two]).probes_total, counters(two).probes_total, settings({"probe_size": 7}).engine.scheduler.probe_size)
print(Metrics(TwoEngines(), ("sglang", "vllm")).text().decode())
"""


def patched(file: Path, place: str, lines: str) -> None:
    """`lines` in front of a place that occurs once."""
    text = file.read_text(encoding="utf-8")
    assert text.count(place) == 1
    file.unlink()
    file.write_text(text.replace(place, lines + place), encoding="utf-8")


def test_a_counter_in_two_files_and_an_option_in_one(tmp_path: Path) -> None:
    package = tmp_path / "mtpserve"
    shutil.copytree(PACKAGE, package, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    patched(package / "core" / "stats" / "engine_stats.py", FIELD, PROBE)
    patched(package / "engine" / "stats.py", COUNTED, "    stats.probes_total += 1\n")
    patched(package / "config" / "scheduler.py", OPTION, '    probe_size: int = option(3, "probes at a time")\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT / "kernels", ROOT)))}
    done = subprocess.run([sys.executable, "-P", "-c", READ], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == "3 2 7"
    expected = {
        "# HELP mtpserve_probes_total Outcomes.", "# TYPE mtpserve_probes_total counter", 'mtpserve_probes_total{model_name="fake"} 3.0',
        'mtpserve_replica_probes_total{engine="0",model_name="fake"} 1.0',
        'mtpserve_replica_probes_total{engine="1",model_name="fake"} 2.0',
        'vllm:probes_total{engine="1",model_name="fake"} 2.0',
    }  # fmt: skip
    assert expected <= set(lines)
    assert any(line.startswith("sglang:probes_total{") and line.endswith(" 3.0") for line in lines)
