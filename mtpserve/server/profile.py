"""/start_profile and /stop_profile: traces of the engine's steps. The fields are SGLang's; vLLM has none."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from time import strftime
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from starlette.responses import Response

from mtpserve.config import ServerConfig
from mtpserve.core.errors import EngineBusy, InvalidRequest, RequestFailed, quantity
from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.server.chat.service import Served, Service
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.http.rendering import JSON, Rendered
from mtpserve.server.schema.base import Strict
from mtpserve.server.schema.shapes import Schema

FOLDERS = ("VLLM_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR")  # the environment variables that name one
# an eager step is some thousand events, and a hundred thousand take up to a minute to write
DEFAULT_STEPS, MAX_STEPS = 20, 200
ANSWER_S = 600.0  # a trace is written between two steps


class ProfileStarted(Rendered):
    success: Literal[True]
    message: str


class ProfileStopped(Rendered):
    success: Literal[True]
    message: str
    files: list[str]  # where the engines run


class ProfileRequest(Strict):
    shapes: ClassVar[dict[str, Schema]] = {
        "activities": {"contains": {"enum": ["CPU", "GPU"]}},
        "start_step": {"enum": [0]}, "profile_by_stage": {"enum": [False]},
        "merge_profiles": {"enum": [False]},
    }  # fmt: skip

    output_dir: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    activities: list[Literal["CPU", "GPU", "MEM"]] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")] | None = None
    start_step: int | None = None
    profile_by_stage: bool | None = None
    merge_profiles: bool | None = None

    def check(self) -> None:
        for name in ("start_step", "profile_by_stage", "merge_profiles"):
            if getattr(self, name):
                raise Unsupported(f"{name} is not supported: leave it out", name)
        if self.activities is not None and not {"CPU", "GPU"} & set(self.activities):
            raise InvalidRequest("activities must have CPU or GPU among them", "activities")


async def start_profile(service: Served, body: ProfileRequest | None = None) -> Response:
    """Start to trace the engines' steps with torch's profiler. It ends at /stop_profile, or by itself
    after `num_steps`, 20 where nothing is said."""
    service.check_alive()
    body = body or ProfileRequest()
    body.check()
    folder = folder_of(service.server_config, body.output_dir)
    begun = f"{strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    activities = ("CPU", "GPU") if body.activities is None else tuple(body.activities)
    change = ProfileChange(
        folder=str(folder),
        name=f"{body.profile_prefix}-{begun}" if body.profile_prefix else begun,
        steps=body.num_steps or DEFAULT_STEPS,
        cpu="CPU" in activities,
        gpu="GPU" in activities,
        memory="MEM" in activities,
        stacks=bool(body.with_stack),
        shapes=bool(body.record_shapes),
    )
    await exchange(service, change)
    return JSON(ProfileStarted(True, f"a profile of {change.steps} steps is being taken, into {folder}"))


async def stop_profile(service: Served) -> Response:
    """Stop the trace and write it to files. `files` names each engine's. A trace that has ended by itself
    is named once."""
    service.check_alive()
    reports = await exchange(service, ProfileChange())
    files = [file for report in reports for file in report.files]
    return JSON(ProfileStopped(True, f"{quantity(len(files), 'file')} written", files))


async def exchange(service: Service, change: ProfileChange) -> Sequence[ProfileReport]:
    """Raises InvalidRequest where all engines refuse, RequestFailed where one could not."""
    try:
        reports = await asyncio.wait_for(service.client.profile(change), ANSWER_S)
    except TimeoutError:
        raise EngineBusy(f"the engine did not answer within {ANSWER_S:g} s") from None
    for report in reports:
        if report.failed:
            raise RequestFailed(f"the profile failed: {report.failed}")
    if all(report.refused for report in reports):
        raise InvalidRequest(f"{reports[0].refused}: see /start_profile and /stop_profile")
    return reports


def folder_of(config: ServerConfig, wanted: str | None) -> Path:
    """Clients may choose a folder inside of the operator's. Raises InvalidRequest."""
    named = config.profile_dir or next((os.environ[name] for name in FOLDERS if os.environ.get(name)), None)
    if named is None:
        raise InvalidRequest("profiles need a folder: start the server with --profile-dir DIRECTORY")
    root = Path(named).resolve()
    folder = (root / wanted).resolve() if wanted else root
    if not folder.is_relative_to(root):
        raise InvalidRequest(
            f"output_dir must be inside of --profile-dir {root}, got {wanted!r}", "output_dir"
        )
    return folder
