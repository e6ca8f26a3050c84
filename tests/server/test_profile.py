"""Traces of the engine's steps: asked for over HTTP, taken in the engines' processes, and readable."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from mtpserve.config import ServerConfig
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.test_end_to_end import Running, running
from tests.server.test_errors import error, send


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running("--profile-dir", str(folder / "new"), "--tensor-parallel-size", "2") as started:
        yield started


def post(server: Running, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=fields or None, timeout=120)


def generate(server: Running, tokens: int = 8) -> str:
    body = {"model": "demo", "prompt": "import os", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return str(post(server, "/v1/completions", **body).json()["choices"][0]["text"])


def events_of(file: str | Path) -> list[dict[str, Any]]:
    """What Perfetto reads: complete events have a name, a start and a duration."""
    trace = json.loads(gzip.decompress(Path(file).read_bytes()))
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert found and all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in found)
    return found


def steps_of(file: str | Path) -> int:
    return sum(event["name"] == "step" for event in events_of(file))


def written(file: str) -> None:
    """Another rank writes its own by itself."""
    end = time.monotonic() + 60
    while True:
        try:
            events_of(file)
            return
        except (OSError, EOFError, ValueError):
            assert time.monotonic() < end, file
            time.sleep(0.1)


def test_a_profile_is_taken_and_ended(server: Running, folder: Path) -> None:
    text = generate(server)
    assert post(server, "/start_profile").json()["message"].endswith(f"into {folder / 'new'}")
    again = post(server, "/start_profile")
    assert again.status_code == 400 and "being taken already" in again.json()["error"]["message"]
    assert generate(server) == text
    files = post(server, "/stop_profile").json()["files"]
    assert [Path(file).parent for file in files] == [folder / "new"] * 2
    assert [Path(file).name.split("-", 3)[3] for file in files] == [f"engine0-rank{rank}.trace.json.gz" for rank in (0, 1)]
    assert steps_of(files[0]) > 1 and any(event["cat"] == "cpu_op" for event in events_of(files[0]))
    written(files[1])
    assert steps_of(files[1]) > 1
    none = post(server, "/stop_profile")
    assert none.status_code == 400 and "no profile is being taken" in none.json()["error"]["message"]
    assert generate(server) == text


def test_a_profile_ends_by_itself(server: Running, folder: Path) -> None:
    fields: dict[str, Any] = {"num_steps": 3, "output_dir": "deep/er", "profile_prefix": "mine", "activities": ["CPU", "MEM"]}
    assert post(server, "/start_profile", **fields, with_stack=True, record_shapes=True).status_code == 200
    generate(server, 64)
    files = post(server, "/stop_profile").json()["files"]  # nothing is running: those that are there already
    assert len(files) == 2 and Path(files[0]).parent == folder / "new" / "deep" / "er" and Path(files[0]).name.startswith("mine-2")
    found = events_of(files[0])
    assert steps_of(files[0]) == 3 and any("Input Dims" in event.get("args", {}) for event in found)
    assert post(server, "/stop_profile").status_code == 400  # it is said once
    assert post(server, "/start_profile", num_steps=1).status_code == 200
    generate(server)
    assert post(server, "/start_profile").status_code == 200
    assert len(post(server, "/stop_profile").json()["files"]) == 2


def test_a_folder_that_cannot_be_written_harms_nothing(server: Running, folder: Path) -> None:
    (folder / "new").mkdir(parents=True, exist_ok=True)
    (folder / "new" / "file").write_text("")
    failed = post(server, "/start_profile", output_dir="file")
    assert failed.status_code == 500 and "the profile failed" in failed.json()["error"]["message"]
    assert generate(server)
    assert post(server, "/stop_profile").status_code == 400


def app_of(tokenizer: Tokenizer, client: FakeClient, **options: Any) -> httpx.AsyncClient:
    app = create_app(client, tokenizer, server_config=ServerConfig(**options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(("fields", "param"), [
    ({"num_steps": 0}, "num_steps"), ({"num_steps": 10**6}, "num_steps"), ({"activities": ["RPD"]}, "activities"),
    ({"activities": ["MEM"]}, "activities"), ({"activities": []}, "activities"), ({"profile_prefix": "a/b"}, "profile_prefix"),
    ({"start_step": 5}, "start_step"), ({"profile_by_stage": True}, "profile_by_stage"), ({"merge_profiles": True}, "merge_profiles"),
    ({"output_dir": "../other"}, "output_dir"), ({"output_dir": "/tmp"}, "output_dir"), ({"output_dir": ""}, "output_dir"),
])  # fmt: skip
def test_what_is_refused(
    tokenizer: Tokenizer,
    client: FakeClient,
    valid: Callable[[dict[str, Any]], bool],
    tmp_path: Path,
    fields: dict[str, Any],
    param: str,
) -> None:
    http = app_of(tokenizer, client, profile_dir=str(tmp_path / "profiles"))
    assert error(send(http, "POST", "/start_profile", json=fields), 400)["param"] == param
    assert not client.profiles
    if param != "output_dir" or not fields[param]:  # which folders there are is the operator's to say
        assert not valid(fields), "the OpenAPI document says so too"


@pytest.fixture(scope="module")
def valid(tokenizer: Tokenizer) -> Callable[[dict[str, Any]], bool]:
    """Whether the OpenAPI document allows a body."""
    schemas = create_app(FakeClient(), tokenizer).openapi()["components"]["schemas"]
    return Draft202012Validator(schemas["ProfileRequest"]).is_valid


def test_the_document_allows_what_is_taken(valid: Callable[[dict[str, Any]], bool]) -> None:
    taken = {"start_step": 0, "merge_profiles": False, "profile_by_stage": None, "activities": ["MEM", "GPU"]}
    for fields in (*({name: value} for name, value in taken.items()), {"activities": None, "start_step": None}, taken):
        assert valid(fields)


def test_the_folder_is_the_operators(tokenizer: Tokenizer, client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR"):
        monkeypatch.delenv(name, raising=False)
    http = app_of(tokenizer, client)
    assert "--profile-dir" in error(send(http, "POST", "/start_profile"), 400)["message"]
    for name in ("SGLANG_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert send(http, "POST", "/start_profile").status_code == 200
        assert client.profiles[-1].folder == str(tmp_path / name)
    inside = str(tmp_path / "own" / "a")
    assert send(
        app_of(tokenizer, client, profile_dir=str(tmp_path / "own")), "POST", "/start_profile", json={"output_dir": inside}
    ).is_success
    assert client.profiles[-1].folder == inside and not tmp_path.joinpath("own").exists()  # which is the engine's to make


def test_it_is_the_admins(tokenizer: Tokenizer, client: FakeClient, tmp_path: Path) -> None:
    http = app_of(tokenizer, client, profile_dir=str(tmp_path), api_key=("user",), admin_api_key=("admin",))
    for path in ("/start_profile", "/stop_profile"):
        statuses = [send(http, "POST", path, headers={"Authorization": f"Bearer {key}"}).status_code for key in ("none", "user", "admin")]
        assert statuses == [401, 403, 200]
