"""What trainers send and read: SkyRL by vLLM's /inference/v1/generate, verl and slime by SGLang's /generate, others by completions.

Token ids go in and come out on each; the log-probability of a token is the same number on all, drafted or not.
"""

from __future__ import annotations

import base64
import concurrent.futures
import io
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec import structs

from mtpserve.core.request import Request, TokenEvent
from mtpserve.server.app import create_app
from mtpserve.text.experts import TokenExperts
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import FIRST_TOKEN, VOCAB
from tests.server.test_end_to_end import Running, running
from tests.server.test_errors import error, send

TOKENS = "/inference/v1/generate"
IDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("--logprobs-mode", "processed_logprobs", "--device", "cpu") as started:
        yield started


def post(server: Running, route: str, **body: Any) -> Any:
    answer = httpx.post(server.url + route, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.1}])
def test_the_same_tokens_and_log_probabilities_on_each_route(server: Running, law: dict[str, Any]) -> None:
    """As each trainer reads them. Greedy text is plain decoding's, too; a seed's text depends on the depth where that is fixed."""
    ids = post(server, "/tokenize", prompt="def read_lines(path):\n    with open(path) as file:\n")["tokens"]
    native = {"sampling_seed" if name == "seed" else name: value for name, value in law.items()}
    completion = {"prompt": ids, "max_tokens": 24, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}

    def by_tokens() -> tuple[list[int], list[float]]:
        (choice,) = post(server, TOKENS, token_ids=ids, sampling_params={"max_tokens": 24, "logprobs": 0} | law)["choices"]
        return choice["token_ids"], [score["logprob"] for score in choice["logprobs"]["content"]]

    def by_sglang() -> tuple[list[int], list[float]]:
        answer = post(server, "/generate", input_ids=ids, sampling_params={"max_new_tokens": 24} | native, return_logprob=True)
        scores = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in scores] == answer["output_ids"]
        return answer["output_ids"], [score for score, *_ in scores]

    def by_completions(**speculative: Any) -> tuple[list[int], list[float]]:
        (choice,) = post(server, "/v1/completions", **completion, **law, **speculative)["choices"]
        assert choice["prompt_token_ids"] == ids
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    tokens, scores = by_completions(speculative={"enabled": False} if law["temperature"] == 0 else None)
    for found in (by_tokens(), by_sglang(), by_completions()):
        assert found[0] == tokens and found[1] == pytest.approx(scores, abs=1e-4)


def test_several_rollouts_of_a_prompt(server: Running) -> None:
    """With a seed they are other texts each, and the same ones again; the prompt's whole pages are computed once."""
    ids = post(server, "/tokenize", prompt="import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n" * 4)["tokens"]
    asked = {"token_ids": ids, "sampling_params": {"n": 4, "seed": 5, "temperature": 1.0, "max_tokens": 12, "logprobs": 0}}
    first, again = post(server, TOKENS, **asked), post(server, TOKENS, **asked)
    assert [choice["token_ids"] for choice in first["choices"]] == [choice["token_ids"] for choice in again["choices"]]
    assert len({tuple(choice["token_ids"]) for choice in first["choices"]}) > 1
    batch = post(server, "/generate", input_ids=[ids[:40]] * 2, sampling_params={"n": 3, "max_new_tokens": 4}, return_logprob=[True, False])
    assert len(batch) == 6 and ["output_token_logprobs" in one["meta_info"] for one in batch] == [True] * 3 + [False] * 3


# -- SkyRL: RemoteInferenceClient


def test_token_ids_in_and_out(http: httpx.AsyncClient, client: FakeClient) -> None:
    sampling = {"max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "skip_special_tokens": True,
                "include_stop_str_in_output": True, "stop": ["zz"], "min_tokens": 1, "stop_token_ids": [VOCAB - 1]}  # fmt: skip
    answer = send(http, "POST", TOKENS, json={"sampling_params": sampling, "model": "fake", "token_ids": IDS}).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*range(FIRST_TOKEN, FIRST_TOKEN + 5)] and choice["finish_reason"] == "length"
    assert [score["token"] for score in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in choice["token_ids"]]
    (request,) = client.submitted
    assert request.prompt == IDS and (request.sampling.logprobs, request.sampling.stop, request.sampling.min_tokens) == (1, ("zz",), 1)


def test_what_the_route_answers_without_being_asked_for_more(http: httpx.AsyncClient, client: FakeClient) -> None:
    body = {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 0, "max_tokens": 2}, "request_id": "mine", "cache_salt": "step 3"}
    answer = send(http, "POST", TOKENS, json=body).json()
    assert answer["request_id"] == "mine" and answer["choices"][0]["logprobs"] is None
    assert len(answer["prompt_logprobs"]) == len(IDS) and answer["prompt_logprobs"][0] is None
    (request,) = client.submitted
    assert request.id == "mine-0" and "step 3" in request.salt
    send(http, "POST", TOKENS, json={"token_ids": IDS, "sampling_params": {}})
    assert client.submitted[-1].sampling.max_tokens == 16, "the default of vLLM's SamplingParams"


@pytest.mark.parametrize(("body", "field"), [
    ({"sampling_params": {}}, "token_ids"),
    ({"token_ids": IDS}, "sampling_params"),
    ({"token_ids": [], "sampling_params": {}}, "token_ids"),
    ({"token_ids": [VOCAB], "sampling_params": {}}, "token_ids"),
    ({"token_ids": "text", "sampling_params": {}}, "token_ids"),
    ({"token_ids": IDS, "sampling_params": {"temperature": -1}}, "temperature"),
    ({"token_ids": IDS, "sampling_params": {"n": 0}}, "n"),
    ({"token_ids": IDS, "sampling_params": {"max_tokens": 5000}}, "max_tokens"),
    ({"token_ids": IDS, "sampling_params": {}, "stream": True}, "stream"),
    ({"token_ids": IDS, "sampling_params": {}, "features": {"mm_hashes": {}}}, "features"),
    ({"token_ids": IDS, "sampling_params": {"length_penalty": 2.0}}, "length_penalty"),
])  # fmt: skip
def test_what_is_wrong_is_named(http: httpx.AsyncClient, client: FakeClient, body: dict[str, Any], field: str) -> None:
    assert error(send(http, "POST", TOKENS, json=body), 400)["param"] in (field, f"sampling_params.{field}")
    assert not client.submitted


# -- verl's adapter for a server of SGLang's, slime's rollout


def test_sglangs_answers_have_what_rollouts_read(http: httpx.AsyncClient, client: FakeClient) -> None:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None,
                "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}  # fmt: skip
    body = {"input_ids": IDS, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1, "stream": False, "rid": "r"}
    answer = send(http, "POST", "/generate", json=body).json()
    meta = answer["meta_info"]
    assert answer["output_ids"] == [token for _, token, _ in meta["output_token_logprobs"]] and meta["id"] == "r"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["finish_reason"]) == (4, 6, {"type": "length", "length": 6})
    assert client.submitted[0].sampling.stop_token_ids == ()


def test_an_abort_answers_with_what_there_is(server: Running) -> None:
    """slime ends what is still running once it has enough samples, and keeps the part that was said."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sampling = {"max_new_tokens": 1500, "ignore_eos": True}
        asked = pool.submit(post, server, "/generate", input_ids=[5, 6], sampling_params=sampling, return_logprob=True)
        deadline = time.monotonic() + 30
        while not post(server, "/abort_request", rid="", abort_all=True)["aborted"]:  # as verl has it
            assert time.monotonic() < deadline
            time.sleep(0.3)
        answer = asked.result(30)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"]) < 1500


# -- the experts of each token


SIZES = (3, 2, 1)  # layers, experts of a token in each, bytes of a number


def experts_of(tokens: int) -> Any:
    return np.arange(tokens)[:, None, None] % 7 + np.arange(3)[None, :, None] + np.arange(2)[None, None, :]


class RoutedClient(FakeClient):
    """Reports the experts of the tokens that each step computes, the prompt's first; one part of them twice, as after an engine's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.card = replace(self.card, experts=SIZES)

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        done = len(request.prompt)
        async for (event,) in super().submit(request):
            rows = [row.astype(np.uint8).tobytes() for row in experts_of(done + len(event.tokens) + 1)]
            first = max(done - 2, 0) if done > len(request.prompt) else 0
            part = (first, rows[first : done + len(event.tokens) - 1 + bool(event.finish)])  # a stopped text may have more than counts
            done += len(event.tokens)
            yield [structs.replace(event, routed_experts=part if request.sampling.return_routed_experts else None)]


@pytest.fixture
def routed(tokenizer: Tokenizer) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(RoutedClient(), tokenizer)), base_url="http://test")


def as_sglang(experts: str) -> Any:
    """As slime reads them."""
    return np.frombuffer(base64.b64decode(experts), dtype=np.int32).reshape(-1, 3, 2)


def test_experts_in_sglangs_form(routed: httpx.AsyncClient) -> None:
    def ask(**fields: Any) -> httpx.Response:
        sampling = {"max_new_tokens": 5} | fields.pop("sampling_params", {})
        return send(
            routed, "POST", "/generate", json={"input_ids": IDS, "return_routed_experts": True, "sampling_params": sampling} | fields
        )

    meta = ask().json()["meta_info"]
    assert (as_sglang(meta["routed_experts"]) == experts_of(4 + 5 - 1)).all()
    assert (as_sglang(ask(routed_experts_start_len=3).json()["meta_info"]["routed_experts"]) == experts_of(8)[3:]).all()
    for one in ask(sampling_params={"n": 2}).json():
        assert (as_sglang(one["meta_info"]["routed_experts"]) == experts_of(8)).all()
    assert "routed_experts" not in ask(return_routed_experts=False).json()["meta_info"]
    *before, last = events(ask(stream=True))[:-1]
    assert not any("routed_experts" in chunk["meta_info"] for chunk in before)
    assert (as_sglang(last["meta_info"]["routed_experts"]) == experts_of(8)).all()
    assert error(ask(routed_experts_start_len=-1), 400)["param"] == "routed_experts_start_len"


def test_experts_of_a_text_that_a_stop_string_ends(routed: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    stop = tokenizer.decode([FIRST_TOKEN + 2])
    body = {"input_ids": IDS, "return_routed_experts": True, "sampling_params": {"max_new_tokens": 9, "stop": stop, "no_stop_trim": True}}
    answer = send(routed, "POST", "/generate", json=body).json()
    assert answer["output_ids"] == [FIRST_TOKEN, FIRST_TOKEN + 1, FIRST_TOKEN + 2]
    assert (as_sglang(answer["meta_info"]["routed_experts"]) == experts_of(4 + 3 - 1)).all()


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_experts_beside_openais_answers(routed: httpx.AsyncClient, route: str) -> None:
    prompt: dict[str, Any] = {"prompt": IDS} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = prompt | {"max_tokens": 5, "return_routed_experts": True}
    whole = send(routed, "POST", route, json=body).json()
    tokens = whole["usage"]["total_tokens"]
    assert (as_sglang(whole["sglext"]["routed_experts"]) == experts_of(tokens - 1)).all()
    both = send(routed, "POST", route, json=body | {"n": 2}).json()["sglext"]["routed_experts"]
    assert both == [whole["sglext"]["routed_experts"]] * 2
    chunks = events(send(routed, "POST", route, json=body | {"stream": True}))[:-1]
    assert chunks[-1]["choices"] == [] and chunks[-1]["sglext"] == whole["sglext"]
    assert not any("sglext" in chunk for chunk in chunks[:-1])
    assert "sglext" not in send(routed, "POST", route, json=prompt).json()


def test_experts_in_vllms_form(routed: httpx.AsyncClient) -> None:
    """Where the server keeps them, each answer has them: vLLM has no field to ask for them."""
    answer = send(routed, "POST", TOKENS, json={"token_ids": IDS, "sampling_params": {"max_tokens": 5, "n": 2}}).json()
    for choice in answer["choices"]:
        found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert found.dtype == np.uint8 and (found == experts_of(8)).all()


@pytest.mark.parametrize(("route", "body"), [
    ("/generate", {"input_ids": IDS}),
    ("/v1/completions", {"prompt": IDS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
])  # fmt: skip
def test_a_server_that_does_not_keep_them_says_so(http: httpx.AsyncClient, client: FakeClient, route: str, body: dict[str, Any]) -> None:
    found = error(send(http, "POST", route, json=body | {"return_routed_experts": True}), 400)
    assert found["param"] == "return_routed_experts" and "--enable-return-routed-experts" in found["message"]
    assert not client.submitted


def test_many_experts_have_numbers_of_two_bytes() -> None:
    experts, numbers = TokenExperts(), np.array([[[5, 300]], [[7, 260]], [[1, 2]]])
    experts.add((0, [row.astype(np.int16).tobytes() for row in numbers]))
    assert np.frombuffer(base64.b64decode(experts.int32((1, 2, 2), 3)), np.int32).tolist() == [5, 300, 7, 260]
    found = np.load(io.BytesIO(base64.b64decode(experts.npy((1, 2, 2), 4))))
    assert found.dtype == np.uint16 and (found == numbers).all()
