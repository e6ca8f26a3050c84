"""Options of SGLang and vLLM that do not exist here: the advice in the error that refuses them."""

from __future__ import annotations

LEAVE = "leave it out"
ADVICE = {  # names of one advice with blanks between them
    "async-scheduling": f"it is on by default on a GPU, see --disable-overlap-schedule: {LEAVE}",
    "allow-auto-truncate": "use `truncate_prompt_tokens` in a request",
    "allowed-methods allowed-headers allow-credentials": f"--allowed-origins allows what the API needs, and "
    f"no cookies: {LEAVE}",
    "api-server-count disable-frontend-multiprocessing": f"one process answers HTTP, the engines have "
    f"theirs: {LEAVE}",
    "attn-dp-size": "use --data-parallel-size, with --enable-dp-attention",
    "data-parallel-size-local data-parallel-start-rank": f"all engines are on this machine: {LEAVE}",
    "data-parallel-address data-parallel-rpc-port data-parallel-backend": f"all engines are on this "
    f"machine: {LEAVE}",
    "chat-template-content-format": f"templates get a message's text as one string: {LEAVE}",
    "base-gpu-id gpu-id-step": "set CUDA_VISIBLE_DEVICES in the environment",
    "bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency": f"histograms have "
    f"fixed buckets: {LEAVE}",
    "collect-detailed-traces otlp-traces-endpoint enable-trace": f"there are no traces, see /metrics and "
    f"--record-steps: {LEAVE}",
    "compilation-config optimization-level": f"steps are captured as CUDA graphs: {LEAVE}, or see "
    f"--disable-cuda-graph",
    "cpu-offload-gb": "weights stay on the device: use --kv-offload-gib to keep keys and values in host "
    "memory",
    "cuda-graph-bs cuda-graph-bs-decode cudagraph-capture-sizes": "give the largest batch with "
    "--cuda-graph-max-bs",
    "decode-attention-backend prefill-attention-backend": "use --attention-backend: a step's rows are "
    "computed together",
    "decode-log-interval": "use --log-interval, which is in seconds",
    "dcp-size attn-cp-size enable-prefill-cp": f"a context is in one device: {LEAVE}",
    "decode-context-parallel-size prefill-context-parallel-size": f"a context is in one device: {LEAVE}",
    "disable-access-log disable-uvicorn-access-log": "use --log-level warning",
    "disable-cuda-graph-padding": f"batches are padded to captured sizes: {LEAVE}",
    "disable-custom-all-reduce": f"ranks sum by NCCL, or by shared memory on CPUs: {LEAVE}",
    "disable-fastapi-docs": f"/openapi.json needs a key where there is one: {LEAVE}",
    "disable-log-requests": f"requests are logged with --log-requests only: {LEAVE}",
    "disable-log-stats": "use --log-interval 0",
    "enable-cache-report enable-prefix-caching enable-prompt-tokens-details": f"prefixes are cached, and "
    f"cached tokens counted: {LEAVE}",
    "disable-sliding-window disable-cascade-attn disable-hybrid-kv-cache-manager": f"windows are the "
    f"model's own: {LEAVE}",
    "distributed-executor-backend worker-cls": f"processes of one machine; under Ray see "
    f"mtpserve.integrations.ray: {LEAVE}",
    "draft-tensor-parallel-size": f"a draft model is computed as the model is: {LEAVE}",
    "init-expert-location ep-dispatch-algorithm": "use --expert-map, a file that `mtpserve experts` makes",
    "enable-eplb eplb-config ep-num-redundant-experts": f"an expert is in one engine, see --expert-map: "
    f"{LEAVE}",
    "moe-a2a-backend deepep-mode all2all-backend": f"rows are exchanged by torch.distributed: {LEAVE}",
    "moe-dense-tp-size enable-dp-lm-head": f"with --enable-dp-attention each engine has all but the experts "
    f"whole: {LEAVE}",
    "enable-multi-layer-eagle": f"the checkpoint says how many MTP layers it has: {LEAVE}",
    "enable-two-batch-overlap enable-single-batch-overlap enable-dbo": f"a step's rows are computed "
    f"together: {LEAVE}",
    "disable-shared-experts-fusion": f"shared experts are computed by themselves: {LEAVE}",
    "enable-custom-logit-processor": "use --logits-processors",
    "enable-deterministic-inference": "use --speculative-exact",
    "enable-hierarchical-cache hicache-ratio kv-offloading-backend": "use --kv-offload-gib",
    "enable-log-outputs enable-per-request-metrics export-metrics-to-file": f"see --log-requests and "
    f"/metrics: {LEAVE}",
    "enable-lora lora-paths lora-modules max-loras max-loras-per-batch max-lora-rank lora-backend": (
        "adapters are not supported"
    ),
    "enable-memory-saver enable-sleep-mode": f"memory is kept until the server ends: {LEAVE}",
    "enable-metrics-for-all-schedulers": "use --metrics-compat vllm, which has the label engine",
    "enable-mtp": "use --speculative-algorithm MTP",
    "enable-request-id-headers": f"X-Request-Id is always answered: {LEAVE}",
    "enable-server-load-tracking": f"/load is always offered: {LEAVE}",
    "enable-torch-compile": f"steps are captured as CUDA graphs: {LEAVE}",
    "grammar-backend guided-decoding-backend": f"grammars are llguidance's: {LEAVE}",
    "h11-max-incomplete-event-size h11-max-header-count": "use --max-request-bytes",
    "hf-overrides json-model-override-args": f"the checkpoint's config.json says what the model is: "
    f"{LEAVE}, or edit it",
    "hf-token": "set HF_TOKEN in the environment",
    "hicache-storage-backend": "use --kv-offload-dir",
    "hicache-write-policy hicache-io-backend hicache-mem-layout hicache-storage-prefetch-policy": (
        "use --kv-offload-gib"
    ),
    "incremental-streaming-output stream-output": f"streams bring what is new: {LEAVE}",
    "is-embedding": "models that give vectors are not supported",
    "kv-cache-memory-bytes": "use --max-total-tokens, which is in tokens",
    "limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-attention-backend "
    "enable-multimodal language-model-only": (f"text is all that a model gets: {LEAVE}"),
    "log-config-file log-level-http": "use --log-level",
    "log-requests-level log-requests-format log-requests-target max-log-len": "use --log-requests",
    "max-num-partial-prefills": "use --max-long-partial-prefills: short prompts are not limited",
    "max-prefill-tokens": "use --chunked-prefill-size, which bounds a step's tokens, prompts and decoding "
    "together",
    "max-num-queued-tokens": "use --max-queued-requests",
    "max-seq-len-to-capture": "use --cuda-graph-max-bs: steps of any length are captured",
    "middleware": "put a proxy before the server",
    "nnodes node-rank dist-init-addr dist-timeout master-addr master-port data-parallel-hybrid-lb "
    "data-parallel-external-lb headless": (
        "a server's engines are on one machine: put a router before those of several machines"
    ),
    "num-continuous-decode-steps": f"a step is planned while the last one runs: {LEAVE}",
    "num-gpu-blocks-override": "use --max-total-tokens, which is in tokens",
    "enable-priority-scheduling schedule-low-priority-values-first": "use --scheduling-policy priority, "
    "under which lower values go first",
    "override-generation-config preferred-sampling-params": "use --sampling-defaults, or the fields of a "
    "request",
    "per-request-spec-decode-metrics": "use `return_spec_trace` in a request",
    "prefix-caching-hash-algo radix-eviction-policy": f"the least recently used pages are evicted: {LEAVE}",
    "prompt-lookup-max prompt-lookup-min": f"n-grams of 4 tokens are looked up, then shorter ones: {LEAVE}",
    "retraction-policy priority-scheduling-preemption-threshold": f"who came last is preempted first: "
    f"{LEAVE}",
    "runner convert task": f"models continue text: {LEAVE}",
    "seed": "use --random-seed for the server, or `seed` in a request",
    "skip-server-warmup": f"a few tokens are always computed before the server is ready, to refuse damaged "
    f"weights: {LEAVE}",
    "ssl-cert-reqs": "use --ssl-ca-certs, with which clients must present a certificate",
    "speculative-draft-attention-backend": f"drafting uses --attention-backend: {LEAVE}",
    "speculative-attention-mode": f"drafts are verified by one kernel: {LEAVE}",
    "speculative-use-rejection-sampling": f"chains from an MTP layer always use it: {LEAVE}",
    "speculative-token-tree": "use --speculative-eagle-topk and --speculative-num-draft-tokens: the tree "
    "grows where drafts are likely",
    "stream-interval": f"each step's tokens are sent at once: {LEAVE}",
    "constrained-json-whitespace-pattern constrained-json-disable-any-whitespace": f"grammars are "
    f"llguidance's: {LEAVE}",
    "structured-outputs-config": f"grammars are llguidance's: {LEAVE}",
    "swap-space": f"preempted requests are recomputed: {LEAVE}",
    "tokenizer-mode skip-tokenizer-init config-format": f"the checkpoint's tokenizer.json is used: {LEAVE}, "
    f"or see --tokenizer",
    "tokenizer-revision code-revision": "use --revision",
    "tool-parser-plugin reasoning-parser-plugin": "use --tool-call-parser and --reasoning-parser",
    "tool-server": f"tools are the client's: {LEAVE}",
    "trust-request-chat-template": f"a template in a request is refused: {LEAVE}",
    "trust-remote-code": f"code in a checkpoint is never run: {LEAVE}",
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
    "prompt_lookup_max": None,
    "prompt_lookup_min": None,
    "quantization": (None,),
    "rejection_sample_method": (None, "strict"),
}
INSTEAD = {name: advice for names, advice in ADVICE.items() for name in names.split()}
SHORT = {"-dp": "--dp", "-ep": "--ep", "-pp": "--pp", "-sc": "--speculative-config", "-tp": "--tp"}  # vLLM's
