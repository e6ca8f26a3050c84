"""`mtpserve launch`: the server. Here is only its command line; `server.launch` starts the processes."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.cli.options import add_options, given, settings
from mtpserve.cli.parser import Parser


def parser() -> Parser:
    made = Parser(prog="mtpserve launch", description="Serve a model over HTTP with OpenAI's API.")
    add_options(made)
    return made


def run(arguments: Sequence[str]) -> int:
    chosen = settings(given(parser().parse(arguments)))
    from mtpserve.server.launch import serve

    return serve(chosen.engine, chosen.server)
