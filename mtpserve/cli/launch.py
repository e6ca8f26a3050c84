"""`mtpserve launch`: the server's command line; `server.launch` starts the processes."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.cli.options import add_options, given, settings
from mtpserve.cli.parser import Parser


def parser() -> Parser:
    about = "Serve a model over HTTP with OpenAI's API. `mtpserve serve` is the same."
    made = Parser(prog="mtpserve launch", usage="%(prog)s [MODEL] [options]", description=about)
    made.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    add_options(made)
    return made


def run(arguments: Sequence[str]) -> int:
    chosen = settings(given(parser().parse(arguments)))
    from mtpserve.server.launch import serve
    from mtpserve.weights.checkpoint.hub import fetched

    return serve(chosen.engine, chosen.server, fetch=fetched)
