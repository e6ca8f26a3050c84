"""From bytes to tokens and times, without a network: what counts as a token, when, and what is a failure."""

from __future__ import annotations

import pytest

from mtpserve.tools.bench.serve.measured import BY_CHUNK, BY_LENGTH, BY_TOKENIZER, BY_USAGE, Arrival, Failure
from mtpserve.tools.bench.serve.stream import AnswerReader, message_of
from tests.bench.fake import DONE, chat_event, event


def read(*parts: tuple[float, bytes], streamed: bool = True, words: bool = False) -> AnswerReader:
    reader = AnswerReader(streamed, (lambda text: len(text.split())) if words else None)
    for time, data in parts:
        reader.feed(data, time)
    reader.close(99.0)
    return reader


def test_a_chunk_of_several_tokens_counts_as_several() -> None:
    reader = read((1.0, event("a", 1)), (2.0, event("b c d", 4)), (3.0, event("e", 6)), (3.5, event(usage=6)), (3.5, DONE))
    assert reader.tokens() == ((Arrival(1.0, 1), Arrival(2.0, 3), Arrival(3.0, 2)), BY_USAGE)
    assert reader.failure is None and reader.text == "ab c de" and reader.cached == 2


def test_tokens_that_only_the_end_knows_of_came_with_the_last_chunk() -> None:
    reader = read((1.0, event("a", 1)), (2.0, event("b", 2, finish_reason="stop")), (2.0, event(usage=3)), (2.0, DONE))
    assert reader.tokens()[0] == (Arrival(1.0, 1), Arrival(2.0, 2))


def test_tokens_without_text_have_arrived() -> None:
    """Half a character, or a special token: vLLM sends an empty text, and the usage has grown."""
    reader = read((1.0, event("", 1)), (1.5, event("", 1)), (2.0, event("é", 3)), (2.0, DONE))
    assert reader.tokens()[0] == (Arrival(1.0, 1), Arrival(2.0, 2))


def test_a_role_chunk_is_no_token() -> None:
    parts = ((1.0, chat_event({"role": "assistant", "content": ""})), (2.0, chat_event({"reasoning_content": "hm"})),
             (3.0, chat_event({"content": "x"})), (4.0, chat_event({}, "stop")), (4.0, DONE))  # fmt: skip
    reader = read(*parts)
    assert reader.tokens() == ((Arrival(2.0, 1), Arrival(3.0, 1)), BY_CHUNK)
    assert reader.text == "x" and reader.finish == "stop", "reasoning is output, and no part of the conversation"


def test_calls_are_output() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    assert len(read((1.0, chat_event({"tool_calls": call})), (1.0, chat_event({"tool_calls": []})), (1.0, DONE)).tokens()[0]) == 1


def test_without_usage_in_chunks_a_tokenizer_counts_and_the_total_is_kept() -> None:
    parts = ((1.0, event("one two")), (2.0, event("three four")), (3.0, event(usage=6)), (3.0, DONE))
    assert read(*parts, words=True).tokens() == ((Arrival(1.0, 3), Arrival(2.0, 3)), BY_TOKENIZER)
    assert read(*parts[:2], (3.0, DONE), words=True).tokens() == ((Arrival(1.0, 2), Arrival(2.0, 2)), BY_TOKENIZER)


def test_without_either_tokens_are_divided_by_characters() -> None:
    parts = ((1.0, event("abc")), (2.0, event("a" * 9)), (3.0, event(usage=8)), (3.0, DONE))
    assert read(*parts).tokens() == ((Arrival(1.0, 2), Arrival(2.0, 6)), BY_LENGTH)


def test_bytes_may_be_cut_anywhere() -> None:
    whole = event("é", 1).replace(b"\n", b"\r\n") + b": a comment\n\n" + event("b", 3) + b"data: [DONE]"
    reader = AnswerReader(True)
    for i in range(len(whole)):
        reader.feed(whole[i : i + 1], float(i))
    reader.close(1000.0)
    assert [arrival.tokens for arrival in reader.tokens()[0]] == [1, 2] and reader.failure is None and reader.text == "éb"


def test_a_whole_answer_arrives_at_its_end() -> None:
    body = (
        b'{"choices": [{"message": {"content": "abc"}, "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}'
    )
    reader = read((1.0, body[:20]), (2.0, body[20:]), streamed=False)
    assert reader.tokens() == ((Arrival(99.0, 9),), BY_USAGE) and reader.text == "abc"


def test_what_the_server_says_of_its_verifications() -> None:
    usage = b'{"prompt_tokens": 1, "completion_tokens": 7, "speculative": {"steps": 3, "draft_tokens": 6, "accepted_tokens": 4}}'
    reader = read(
        (1.0, b'data: {"choices": [{"text": "a"}]}\n\n'), (1.0, b'data: {"choices": [], "usage": ' + usage + b"}\n\n"), (1.0, DONE)
    )
    figures = reader.figures
    assert figures is not None and (figures.steps, figures.proposed, figures.accepted) == (3, 6, 4)
    metrics = b'{"speculative_decoding": {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 4}}'
    figures = read((1.0, b'data: {"choices": [{"text": "a"}], "metrics": ' + metrics + b"}\n\n"), (1.0, DONE)).figures
    assert figures is not None and (figures.steps, figures.proposed, figures.accepted) == (3, 6, 4)


@pytest.mark.parametrize(
    ("parts", "failure"),
    [
        ((event("a", 1),), Failure("ended in the middle of the answer")),
        ((event("a", 1), b'data: {"error": {"message": "out of\\nluck"}}\n\n', DONE), Failure("error in the answer", "out of luck")),
        ((DONE,), Failure("no tokens in the answer")),
        ((), Failure("ended in the middle of the answer")),
    ],
)
def test_failures(parts: tuple[bytes, ...], failure: Failure) -> None:
    assert read(*((1.0, part) for part in parts)).failure == failure


def test_what_is_not_the_format_is_a_failure() -> None:
    for data in (b"data: {\n\n", b'data: {"choices": 3}\n\n'):
        failure = read((1.0, data), (1.0, DONE)).failure
        assert failure is not None and failure.reason == "not OpenAI's format"


def test_messages_of_errors() -> None:
    bodies = {
        b'{"error": {"message": "a"}}': "a",
        b'{"object": "error", "message": "b"}': "b",
        b'{"detail": "c"}': "c",
        b"<p>d</p>": "<p>d</p>",
        b'{"error": "e"}': "e",
        b'{"detail": [{"loc": 1}]}': '[{"loc":1}]',
        b"": "",
    }
    assert [message_of(body) for body in bodies] == list(bodies.values())
