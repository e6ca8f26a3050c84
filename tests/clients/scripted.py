"""A scripted model behind the real front end, for clients that need a socket.

`python -m tests.clients.scripted LOG TEXT...` prints its port; without texts, the model is obedient.py's.
Each request goes to LOG as a line of JSON: method, path, status, body.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from mtpserve.config import ServerConfig
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.clients.obedient import ObedientClient
from tests.server.speaking import SpeakingClient, checkpoint

CUT = "[cut]"  # a text that ends so goes on until it is cut
LONG = 50_000  # tokens: a limit that is higher is not the client's, but the context's
TITLE = "Hello"  # what requests without tools get: agents ask for titles and summaries beside their loop


class ScriptedClient(SpeakingClient):
    """Request number i with tools says text i, the last one again and again."""

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        prompt = self.tokenizer.decode(request.prompt, skip_special_tokens=False)
        text = TITLE
        if prompt.startswith("tool: "):
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        long, limit = text.endswith(CUT), request.sampling.max_tokens
        text = text.removesuffix(CUT)
        if long and limit is not None and limit < LONG:
            text += " and so on" * limit
        turn = SpeakingClient(self.tokenizer, [text], step=32)
        async for events in turn.submit(request):
            if long and events[-1].finish is Finish.STOP:
                events[-1] = msgspec.structs.replace(events[-1], finish=Finish.LENGTH, tokens=events[-1].tokens[:-1])
            yield events


class Log:
    """ASGI middleware: a line of JSON per request."""

    def __init__(self, app: Any, file: Path) -> None:
        self.app, self.file = app, file

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, statuses = bytearray(), list[int]()

        async def read() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def write(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])
            await send(message)

        try:
            await self.app(scope, read, write)
        finally:
            line = {"method": scope.get("method"), "path": scope["path"], "status": statuses[:1], "body": body.decode(errors="replace")}
            with self.file.open("a") as log:
                log.write(json.dumps(line) + "\n")


def main(log: str, *texts: str) -> None:
    tokenizer = Tokenizer(checkpoint(Path(tempfile.mkdtemp())))
    client = ScriptedClient(tokenizer, list(texts)) if texts else ObedientClient(tokenizer, [])
    client.card = replace(client.card, context_length=1 << 20)  # agents have long instructions, and a token here is a byte
    app = create_app(client, tokenizer, server_config=ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    server = uvicorn.Server(uvicorn.Config(Log(app, Path(log)), host="127.0.0.1", port=0, log_config=None, lifespan="off"))
    server.config.load()
    socket = server.config.bind_socket()
    print(socket.getsockname()[1], flush=True)
    server.run([socket])


if __name__ == "__main__":
    main(*sys.argv[1:])
