"""What the integrations share: options as another project hands them on, and engines without a server of
ours."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from tempfile import TemporaryDirectory
from typing import NoReturn

from fastapi import FastAPI

from mtpserve.cli.options import Settings, Values, from_tree, settings
from mtpserve.core.errors import ConfigError
from mtpserve.engine.process.engines import engines_of, meetings_of
from mtpserve.engine.process.process import DEFAULT_FACTORY
from mtpserve.engine.process.replicas import Replicas
from mtpserve.server.app import create_app
from mtpserve.server.launch import load_tokenizer
from mtpserve.text.tokenizer import Tokenizer
from mtpserve.weights.checkpoint.hub import fetched

log = logging.getLogger(__name__)

FLAGS = {"true": True, "false": False}  # as command lines write them


def values_of(args: Mapping[str, object]) -> Values:
    """Options of `mtpserve launch` with underscores or dashes, nested or not; texts are parsed. Raises
    ConfigError."""
    return from_tree({name: FLAGS.get(str(value), value) for name, value in args.items()})


def checked_settings(values: Values, foreign: Collection[str], whose: str) -> Settings:
    """Returns the settings. Raises ConfigError for an option in `foreign`, which the other project sets."""
    for name in foreign:
        if name in values:
            raise ConfigError(f"--{name.replace('_', '-')} is {whose} here and cannot be set")
    return settings(values)


class Engines:
    """The engines of one configuration, and the tokenizer."""

    def __init__(
        self,
        settings: Settings,
        client: Replicas,
        tokenizer: Tokenizer,
        meetings: TemporaryDirectory[str] | None,
    ) -> None:
        self.settings, self.client, self.tokenizer, self._meetings = settings, client, tokenizer, meetings

    @classmethod
    async def start(cls, config: Settings, factory: str = DEFAULT_FACTORY) -> Engines:
        """What comes from the hub is downloaded first. Raises MTPServeError, and leaves no process then."""
        engine = await asyncio.to_thread(fetched, config.engine)
        meetings = meetings_of(engine)
        server = config.server
        client = engines_of(
            engine, meetings, factory, log_level=server.log_level, log_format=server.log_format
        )
        try:
            _, tokenizer = await asyncio.gather(
                client.start(), asyncio.to_thread(load_tokenizer, engine.model)
            )
        except BaseException:
            await client.stop(grace=0)
            clean(meetings)
            raise
        return cls(Settings(engine, config.server), client, tokenizer, meetings)

    def app(self) -> FastAPI:
        """The app with all of the server's routes."""
        return create_app(self.client, self.tokenizer, self.settings.engine, self.settings.server)

    async def end_process(self, what: str) -> NoReturn:
        """Ends the process once no engine lives and none will be started again, at once: what came in
        meanwhile would be lost, too."""
        log.error("%s stops: %s", what, await self.client.wait_dead())
        os._exit(1)

    async def stop(self) -> None:
        """May be repeated."""
        await self.client.stop()
        clean(self._meetings)


def clean(meetings: TemporaryDirectory[str] | None) -> None:
    if meetings is not None:
        meetings.cleanup()
