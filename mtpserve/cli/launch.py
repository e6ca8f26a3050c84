"""`mtpserve launch`: the server's command line; `server.launch` starts the processes."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.cli.options import add_options, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.core.logs import held_records


def parser() -> Parser:
    about = "Serve a model over HTTP with OpenAI's API. `mtpserve serve` is the same."
    arg_parser = Parser(prog="mtpserve launch", usage="%(prog)s [MODEL] [options]", description=about)
    arg_parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    add_options(arg_parser)
    return arg_parser


def run(arguments: Sequence[str]) -> int:
    with held_records():  # --log-format is known when the options are read, warnings of them included
        config = settings(parsed_values(parser().parse(arguments)))
        from mtpserve.weights.checkpoint.hub import fetched, require_names

        require_names(config.engine)  # before what takes seconds to import
        from mtpserve.server.launch import serve

        return serve(config.engine, config.server, fetch=fetched)
