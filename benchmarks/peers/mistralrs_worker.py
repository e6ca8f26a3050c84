"""mistral.rs in a process of its own, by its Python package: its HTTP server is not in it.

It runs in mistral.rs's virtual environment, with the standard library only. The first line on stdout says that the model is loaded, or
why not; then each line on stdin is a load and is answered by a line, both in JSON and as client.py's. Logs go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

RAW = "{{ messages[0]['content'] }}"  # the prompt as it is: only conversations are streamed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--drafts", type=int, help="by the checkpoint's own MTP layer")
    return parser.parse_args()


def loaded(args: argparse.Namespace) -> Any:
    from mistralrs import ModelDType, Runner, Which

    kinds = {"auto": ModelDType.Auto, "float32": ModelDType.F32, "bfloat16": ModelDType.BF16, "float16": ModelDType.F16}
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(RAW)
        template.flush()
        which = Which.Plain(model_id=args.model, dtype=kinds[args.dtype])
        drafting = {"mtp_model": args.model, "mtp_n_predict": args.drafts} if args.drafts else {}
        return Runner(which=which, max_seqs=args.seats, prefix_cache_n=0, token_source="none", jinja_explicit=template.name, **drafting)


def ask(runner: Any, model: str, prompt: str, tokens: int, starting: threading.Lock) -> dict[str, Any]:
    """One request, streamed."""
    from mistralrs import ChatCompletionRequest

    message = {"role": "user", "content": prompt}
    request = ChatCompletionRequest(messages=[message], model=model, max_tokens=tokens, temperature=0.0, ignore_eos=True, stream=True)
    sent, arrivals, text, usage = time.perf_counter(), list[float](), "", None
    with starting:  # the runner may be used by one thread at a time; the streams that it gives are independent
        stream = runner.send_chat_completion_request(request)
    for chunk in stream:
        now = time.perf_counter()
        for choice in chunk.choices:
            if choice.delta.content is not None:  # white space at the beginning comes as an empty text
                arrivals.append(now)
                text += choice.delta.content
        usage = chunk.usage or usage
    if usage is None:
        raise RuntimeError("the stream ended without a count of its tokens")
    end = time.perf_counter()
    counted = {"tokens": usage.completion_tokens, "prompt_tokens": usage.prompt_tokens}
    return {"sent": sent, "arrivals": arrivals, "end": end, "text": text} | counted


def drive(runner: Any, model: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Keeps `concurrency` requests running."""
    waiting: Iterator[tuple[int, str]] = iter(enumerate(job["prompts"]))
    taking, starting = threading.Lock(), threading.Lock()
    seen, failed = dict[int, dict[str, Any]](), list[Exception]()

    def worker() -> None:
        while not failed:
            with taking:
                number, prompt = next(waiting, (-1, ""))
            if number < 0:
                return
            try:
                seen[number] = ask(runner, model, prompt, job["tokens"], starting)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=worker) for _ in range(min(job["concurrency"], len(job["prompts"])))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [seen[number] for number in range(len(seen))]


def main() -> None:
    args = arguments()
    answers: TextIO = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # logs

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        runner = loaded(args)
    except Exception as error:
        answer({"error": first_line(error)})
        return
    answer({"ready": True})
    for line in sys.stdin:
        try:
            answer({"requests": drive(runner, args.model, json.loads(line))})
        except Exception as error:
            answer({"error": first_line(error)})


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    main()
