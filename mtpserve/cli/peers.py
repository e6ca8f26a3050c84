"""Options of SGLang, vLLM and llama.cpp that do not exist here: the advice in the error that refuses them,
and names that mean another option. Those that change nothing are in noops.py."""

from __future__ import annotations

LEAVE = "leave it out"
ADVICE = {  # names of one advice with blanks between them
    "additional-config": f"it is for plug-ins of vLLM, which are not loaded: {LEAVE}",
    "allow-auto-truncate": "use `truncate_prompt_tokens` in a request",
    "allowed-methods allowed-headers allow-credentials": f"--allowed-origins allows what the API needs, and "
    f"no cookies: {LEAVE}",
    "attn-dp-size": "use --data-parallel-size, with --enable-dp-attention",
    "data-parallel-size-local data-parallel-start-rank": f"all engines are on this machine: {LEAVE}",
    "data-parallel-address data-parallel-rpc-port data-parallel-backend": f"all engines are on this "
    f"machine: {LEAVE}",
    "base-gpu-id gpu-id-step": "set CUDA_VISIBLE_DEVICES in the environment",
    "bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency": f"histograms have "
    f"fixed buckets: {LEAVE}",
    "cuda-graph-bs cuda-graph-bs-decode cudagraph-capture-sizes": "give the largest batch with "
    "--cuda-graph-max-bs",
    "decode-log-interval": "use --log-interval, which is in seconds",
    "dcp-size attn-cp-size enable-prefill-cp": f"a context is in one device: {LEAVE}",
    "decode-context-parallel-size prefill-context-parallel-size": f"a context is in one device: {LEAVE}",
    "disable-access-log disable-uvicorn-access-log": "use --log-level warning",
    "disable-fastapi-docs": f"/openapi.json needs a key where there is one: {LEAVE}",
    "disable-log-stats": "use --log-interval 0",
    "disable-sliding-window": f"windows are the model's own: {LEAVE}",
    "worker-cls": f"processes of one machine; under Ray see mtpserve.integrations.ray: {LEAVE}",
    "init-expert-location ep-dispatch-algorithm": "use --expert-map, a file that `mtpserve experts` makes",
    "enable-custom-logit-processor": "use --logits-processors",
    "enable-deterministic-inference": "use --speculative-exact",
    "enable-hierarchical-cache hicache-ratio kv-offloading-backend": "use --kv-offload-gib",
    "enable-log-outputs enable-per-request-metrics export-metrics-to-file": f"see --log-requests and "
    f"/metrics: {LEAVE}",
    "lora-backend lora-target-modules lora-dtype fully-sharded-loras lora-extra-vocab-size": f"adapters are "
    f"computed as the model is: {LEAVE}",
    "max-cpu-loras max-loaded-loras lora-eviction-policy enable-lora-overlap-loading": f"all loaded adapters "
    f"are in host memory, and the least recently used one leaves the device: {LEAVE}",
    "enable-metrics-for-all-schedulers": "use --metrics-compat vllm, which has the label engine",
    "enable-mtp": "use --speculative-algorithm MTP",
    "h11-max-incomplete-event-size h11-max-header-count": "use --max-request-bytes",
    "hf-overrides json-model-override-args": f"the checkpoint's config.json says what the model is: "
    f"{LEAVE}, or edit that file",
    "hf-token": "set HF_TOKEN in the environment",
    "hicache-storage-backend": "use --kv-offload-dir",
    "hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-prefetch-policy": (
        "use --kv-offload-gib"
    ),
    "is-embedding": "models that give vectors are not supported",
    "kv-cache-memory-bytes": "use --max-total-tokens, which is in tokens",
    "enable-multimodal": (f"text is all that a model gets: {LEAVE}"),
    "log-config-file": "use --log-level and --log-format",
    "log-level-http": "use --log-level",
    "log-requests-format": "use --log-format",
    "log-requests-level log-requests-target max-log-len": "use --log-requests",
    "max-num-partial-prefills": "use --max-long-partial-prefills: short prompts are not limited",
    "max-prefill-tokens": "use --chunked-prefill-size, which bounds a step's tokens, prompts and decoding "
    "together",
    "max-num-queued-tokens": "use --max-queued-requests",
    "max-seq-len-to-capture": "use --cuda-graph-max-bs: steps of any length are captured",
    "middleware": "put a proxy before the server",
    "dist-init-addr dist-timeout master-addr master-port data-parallel-hybrid-lb "
    "data-parallel-external-lb headless": (
        "a server's engines are on one machine: put a router before those of several machines"
    ),
    "num-gpu-blocks-override": "use --max-total-tokens, which is in tokens",
    "enable-priority-scheduling schedule-low-priority-values-first": "use --scheduling-policy priority, "
    "under which lower values go first",
    "override-generation-config preferred-sampling-params": "use --sampling-defaults, or the fields of a "
    "request",
    "per-request-spec-decode-metrics": "use `return_spec_trace` in a request",
    "reasoning-config": "use --reasoning-parser, and `thinking_token_budget` in a request",
    "retraction-policy priority-scheduling-preemption-threshold": f"who came last is preempted first: "
    f"{LEAVE}",
    "seed": "use --random-seed for the server, or `seed` in a request",
    "ssl-cert-reqs": "use --ssl-ca-certs, with which clients must present a certificate",
    "speculative-token-tree": "use --speculative-eagle-topk and --speculative-num-draft-tokens: the tree "
    "grows where drafts are likely",
    "constrained-json-whitespace-pattern constrained-json-disable-any-whitespace": f"grammars are "
    f"llguidance's: {LEAVE}",
    "structured-outputs-config": f"grammars are llguidance's: {LEAVE}",
    "skip-tokenizer-init": f"the checkpoint's tokenizer.json is used: {LEAVE}, or see --tokenizer",
    "tokenizer-revision code-revision": "use --revision",
    "tool-parser-plugin reasoning-parser-plugin": "use --tool-call-parser and --reasoning-parser alone: the "
    "parsers of this server read the formats of all models that it serves",
    "tool-server": f"tools are the client's: {LEAVE}",
    "trust-request-chat-template": f"a template in a request is refused: {LEAVE}",
    "uds": "use --host and --port",
    "uvicorn-log-level": "use --log-level",
    "warmups": f"a few tokens are always computed before the server is ready: {LEAVE}",
}
# Keys of vLLM's --speculative-config that say how drafts are computed, and change no text; with the values of
# which that is true, where it is not true of all. Published commands have them.
UNUSED_KEYS: dict[str, tuple[object, ...] | None] = {
    "disable_padded_drafter_batch": None,
    "draft_tensor_parallel_size": None,
    "enforce_eager": None,
    "max_model_len": None,
    "moe_backend": None,
    "prompt_lookup_max": None,
    "prompt_lookup_min": None,
    "quantization": (None,),
    "rejection_sample_method": (None, "strict"),
}
LLAMA = {  # llama.cpp's
    "cache-type-k cache-type-v": "use --kv-cache-dtype, for keys and values alike",
    "chat-template-kwargs": "use --default-chat-template-kwargs",
    "cpu-moe n-cpu-moe override-tensor": f"weights are on one device: {LEAVE}",
    "embedding embeddings reranking": "models that give vectors are not supported",
    "grammar grammar-file json-schema": "use the fields of a request: `response_format`, or `ebnf`",
    "hf-file": "use --model with the path of the downloaded GGUF file",
    "lora lora-scaled": "use --lora-modules with a directory as PEFT saves it",
    "mmproj mmproj-url no-mmproj": "pictures and sound are not supported: a model gets text alone",
    "model-url": "download the file, and use --model with its path",
    "predict n-predict temp temperature top-k top-p min-p presence-penalty frequency-penalty repeat-penalty "
    "repeat-last-n samplers ignore-eos reverse-prompt": "use the fields of a request",
    "reasoning-format reasoning-budget": "use --reasoning-parser, and `thinking_token_budget` in a request",
    "rope-scaling rope-scale rope-freq-base rope-freq-scale yarn-orig-ctx": f"the checkpoint's "
    f"config says how positions are scaled: {LEAVE}, or edit it",
    "slot-save-path slots no-slots": f"prefixes are cached, see --kv-offload-dir: {LEAVE}",
    "split-mode tensor-split main-gpu": "use --tensor-parallel-size, and CUDA_VISIBLE_DEVICES in the "
    "environment",
    "verbose log-verbosity": "use --log-level debug",
    "webui no-webui": f"the page at / is always offered: {LEAVE}",
}
INSTEAD = {name: advice for names, advice in (ADVICE | LLAMA).items() for name in names.split()}
# names that mean another one, on the command line alone: vLLM's, then llama.cpp's
# those of noops.py that are about speculation
MORE_FLAGS = {
    "speculative-use-rejection-sampling": "chains of an MTP layer are always verified by rejection",
}
MORE_VALUES = {
    "speculative-moe-a2a-backend speculative-moe-runner-backend speculative-draft-attention-backend "
    "speculative-attention-mode": "a draft model has the kernels and the exchange of the model",
    "draft-tensor-parallel-size speculative-draft-tensor-parallel-size": "a draft model is computed as the "
    "model is",
    "draft-p-min draft-min draft-n-min spec-draft-p-min spec-draft-n-min": "the depth of the drafts is "
    "chosen while serving",
}
SHORT = {
    "-dp": "--dp", "-ep": "--ep", "-pp": "--pp", "-sc": "--speculative-config", "-tp": "--tp",
    "-O": "--optimization-level", "-cc": "--compilation-config", "--seed": "--random-seed",
    "-m": "--model", "-c": "--context-length", "-np": "--max-running-requests", "-t": "--cpu-threads",
    "-hf": "--model", "-hfr": "--model", "-a": "--served-model-name", "-ngl": "--n-gpu-layers",
    "-fa": "--flash-attn", "-tb": "--threads-batch", "-cb": "--cont-batching",
    "-md": "--speculative-draft-model-path",
    "-b": "--batch-size", "-ub": "--chunked-prefill-size", "-n": "--n-predict",
    "-v": "--verbose", "-mm": "--mmproj",
    "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-ot": "--override-tensor", "-sm": "--split-mode",
    "-ts": "--tensor-split", "-mg": "--main-gpu", "-cmoe": "--cpu-moe", "-ncmoe": "--n-cpu-moe",
    "-hff": "--hf-file", "-mu": "--model-url",
    "--ctx-size": "--context-length", "--parallel": "--max-running-requests", "--threads": "--cpu-threads",
    "--ubatch-size": "--chunked-prefill-size", "--model-draft": "--speculative-draft-model-path",
    "--spec-draft-model": "--speculative-draft-model-path", "--hf-repo": "--model",
    "--alias": "--served-model-name", "--chat-template-file": "--chat-template",
    "--draft-max": "--speculative-num-steps", "--draft-n": "--speculative-num-steps",
    "--draft": "--speculative-num-steps", "--spec-type": "--speculative-algorithm",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
}  # fmt: skip
WITH_VALUE = {"disable-log-stats": "--log-interval=0"}  # switches that mean an option with a value
