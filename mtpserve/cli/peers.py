"""Options of SGLang and vLLM that do not exist here: the advice in the error that refuses them."""

from __future__ import annotations

LEAVE = "leave it out"
ADVICE = {  # names of one advice with blanks between them
    "async-scheduling": f"it is on by default on a GPU, see --disable-overlap-schedule: {LEAVE}",
    "attn-dp-size": "use --data-parallel-size, with --enable-dp-attention",
    "data-parallel-size-local data-parallel-start-rank": f"all engines are on this machine: {LEAVE}",
    "data-parallel-address data-parallel-rpc-port data-parallel-backend": f"all engines are on this machine: {LEAVE}",
    "chat-template-content-format": f"templates get a message's text as one string: {LEAVE}",
    "cuda-graph-bs cudagraph-capture-sizes": "give the largest batch with --cuda-graph-max-bs",
    "disable-log-requests": f"requests are logged with --log-requests only: {LEAVE}",
    "disable-log-stats": "use --log-interval 0",
    "enable-cache-report enable-prefix-caching enable-prompt-tokens-details": f"prefixes are cached, and cached tokens counted: {LEAVE}",
    "draft-tensor-parallel-size": f"a draft model is computed as the model is: {LEAVE}",
    "init-expert-location ep-dispatch-algorithm": "use --expert-map, a file that `mtpserve experts` makes",
    "enable-eplb eplb-config ep-num-redundant-experts": f"an expert is in one engine, see --expert-map: {LEAVE}",
    "moe-a2a-backend deepep-mode all2all-backend": f"rows are exchanged by torch.distributed: {LEAVE}",
    "moe-dense-tp-size enable-dp-lm-head": f"with --enable-dp-attention each engine has all but the experts whole: {LEAVE}",
    "enable-multi-layer-eagle": f"the checkpoint says how many MTP layers it has: {LEAVE}",
    "enable-two-batch-overlap enable-single-batch-overlap enable-dbo": f"a step's rows are computed together: {LEAVE}",
    "disable-shared-experts-fusion": f"shared experts are computed by themselves: {LEAVE}",
    "enable-mtp": "use --speculative-algorithm MTP",
    "enable-torch-compile": f"steps are captured as CUDA graphs: {LEAVE}",
    "grammar-backend guided-decoding-backend": f"grammars are llguidance's: {LEAVE}",
    "max-num-partial-prefills": "use --max-long-partial-prefills: short prompts are not limited",
    "max-prefill-tokens": "use --chunked-prefill-size, which bounds a step's tokens, prompts and decoding together",
    "nnodes node-rank dist-init-addr dist-timeout master-addr master-port data-parallel-address data-parallel-size-local headless": (
        "a server's engines are on one machine: put a router before those of several machines"
    ),
    "num-gpu-blocks-override": "use --max-total-tokens, which is in tokens",
    "enable-priority-scheduling schedule-low-priority-values-first": "use --scheduling-policy priority, under which lower values go first",
    "prompt-lookup-max prompt-lookup-min": f"n-grams of 4 tokens are looked up, then shorter ones: {LEAVE}",
    "seed": "use --random-seed for the server, or `seed` in a request",
    "skip-server-warmup": f"a few tokens are always computed before the server is ready, to refuse damaged weights: {LEAVE}",
    "speculative-draft-attention-backend": f"drafting uses --attention-backend: {LEAVE}",
    "speculative-attention-mode": f"drafts are verified by one kernel: {LEAVE}",
    "speculative-use-rejection-sampling": f"chains from an MTP layer always use it: {LEAVE}",
    "speculative-token-tree": "use --speculative-eagle-topk and --speculative-num-draft-tokens: the tree grows where drafts are likely",
    "stream-interval": f"each step's tokens are sent at once: {LEAVE}",
    "swap-space": f"preempted requests are recomputed: {LEAVE}",
    "trust-remote-code": f"code in a checkpoint is never run: {LEAVE}",
    "uvicorn-log-level": "use --log-level",
}
INSTEAD = {name: advice for names, advice in ADVICE.items() for name in names.split()}
SHORT = {"-dp": "--dp", "-ep": "--ep", "-pp": "--pp", "-sc": "--speculative-config", "-tp": "--tp"}  # vLLM's
