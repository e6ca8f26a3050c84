"""What real clients send and expect beyond the letter of the APIs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.test_tools import Server, tokenizer  # noqa: F401 (a fixture)


@pytest.mark.parametrize(("option", "names"), [
    (None, {"reasoning_content"}),
    ("reasoning", {"reasoning"}),
    ("both", {"reasoning_content", "reasoning"}),
])  # fmt: skip
def test_a_stream_has_reasoning_in_the_fields_of_the_option(tokenizer: Tokenizer, option: str | None, names: set[str]) -> None:  # noqa: F811
    server = Server(tokenizer, "<think>Why not?</think>Yes.", reasoning="qwen3")
    if option is not None:
        service: Any = server.app.state.service
        service.server_config = replace(service.server_config, reasoning_field=option)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(server.post(stream=True))[:-1]]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == ("Why not?" if name in names else "")
    message = server.choice()["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Why not?"
