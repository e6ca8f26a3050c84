"""What the peers' load generators have and ours has not: the advice in the error that refuses it; and their
backends, as our APIs."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.core.errors import ConfigError

COMPLETIONS = ("openai", "vllm", "sglang", "sglang-native", "sglang-oai", "lmdeploy", "llama.cpp", "mtpserve")
CHAT = ("openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat", "mtpserve-chat")
NATIVE = ("sglang", "sglang-native")  # their own route is /generate
VLLM_PORT, PORT = 8000, 30000

ADVICE = {  # names of one advice with blanks between them
    "apply-chat-template": "use --backend openai-chat: the server applies its template",
    "append-metadata use-beam-search tokenizer-mode skip-tokenizer-init": "leave it out",
    "asr-max-audio-len-sec asr-min-audio-len-sec random-mm-base-items-per-request "
"random-mm-bucket-config random-mm-limit-mm-per-prompt "
    "random-mm-num-mm-items-range-ratio image-count image-resolution image-format image-content "
"random-image-count": "only text is asked",
    "blazedit-max-distance blazedit-min-distance hf-subset hf-split hf-name hf-output-len "
"sonnet-input-len sonnet-output-len "
    "sonnet-prefix-len speed-bench-category speed-bench-dataset-subset speed-bench-output-len "
"burstgpt": "bring the texts in a file: "
    "--dataset-name custom --dataset-path FILE",
    "cache-report": "cached tokens are reported wherever the server tells them: leave it out",
    "fake-prefill pd-separated": "it says nothing to a server with OpenAI's API",
    "gsp-fast-prepare gsp-ordered gsp-range-ratio gsp-send-routing-key gsp-num-turns "
"gsp-group-distribution": "not implemented: prompts of "
    "--dataset-name generated-shared-prefix have one length and come in random order",
    "input-len": "use --random-input-len",
    "output-len": "use --random-output-len, --sharegpt-output-len, --custom-output-len or --gsp-output-len",
    "label": "use --tag",
    "logprobs return-logprob top-logprobs-num return-routed-experts": "use --extra-request-body, with the "
"field as the server names it",
    "lora-name lora-modules lora-assignment lora-request-distribution lora-zipf-alpha": (
        "use --model with the adapter's name"
    ),
    "mooncake-workload mooncake-slowdown-factor mooncake-num-rounds use-trace-timestamps self-timed": (
        "traces with times are not replayed against a server; "
        "mtpserve bench cache --trace FILE simulates them"
    ),
    "no-oversample disable-shuffle": "not implemented: a dataset is asked once through, ShareGPT's in "
"random order of --seed",
    "no-reranker random-batch-size": "embeddings and reranking are not asked",
    "plot-throughput plot-timeline plot-dataset-stats timeline-itl-thresholds": "use --plot FILE",
    "prefix-repetition-prefix-len prefix-repetition-suffix-len prefix-repetition-num-prefixes "
"prefix-repetition-output-len": "use "
    "--dataset-name generated-shared-prefix with --gsp-system-prompt-len, --gsp-question-len, "
"--gsp-num-groups and --gsp-output-len",
    "print-requests": "use --output-details, which writes every request's times and text to --output-file",
    "probe-request-rate": "not implemented: all requests are of one kind",
    "profile profile-activities profile-num-steps profile-by-stage profile-stages "
"profile-output-dir profile-prefix profile-start-step "
    "profile-steps": "the server's profiler is not driven from here",
    "prompt-suffix": "put the text into a file: --dataset-name custom",
    "ramp-up-strategy ramp-up-start-rps ramp-up-end-rps": "use --sweep request-rate=1,2,4: a run for each "
"rate",
    "rust-client": "not implemented: the client is Python, and says how much of a core it needed",
    "tokenize-prompt": "use --dataset-name random-ids, whose prompts are token ids",
    "trust-remote-code": "code in a tokenizer is never run: leave it out",
}  # fmt: skip
REFUSED = {name: advice for names, advice in ADVICE.items() for name in names.split()}


def refuse_unknown(arguments: Sequence[str], option_names: Sequence[str]) -> None:
    """Raises ConfigError for the first option that a peer has and that is not implemented."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if argument.startswith("--") and name not in option_names and name[2:] in REFUSED:
            raise ConfigError(f"{argument.partition('=')[0]} is not an option here: {REFUSED[name[2:]]}")
