"""Options of peers that ask for what is done anyway, or tune code that this program has not. They
change no text, so a published command goes on without them, with a warning."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from mtpserve.cli.peers import MORE_FLAGS, MORE_VALUES
from mtpserve.core.errors import ConfigError

log = logging.getLogger(__name__)


class NoOp(NamedTuple):
    why: str
    takes: bool = False  # a value; else it is a flag
    values: str = ".*"  # regular expression: those that change nothing
    otherwise: str = ""  # what to do instead, where another value is given


KERNELS = "the kernels are this program's own, see --attention-backend"
GRAPHS = "steps are captured as CUDA graphs, see --disable-cuda-graph"
GRAMMARS = "grammars are llguidance's"
EXCHANGE = "ranks exchange rows by torch.distributed, or by shared memory on CPUs"
EXPERTS = "experts stay where --expert-map places them"
WINDOWS = "the pages follow the model's own windows"
TEXT_ALONE = "a model gets text alone"
ANYWAY = "it is so anyway"
FLAGS = {  # names of one reason with blanks between them
    "async-scheduling": "on a GPU a step is planned while the last one runs, see --disable-overlap-schedule",
    "trust-remote-code no-trust-remote-code": "code in a checkpoint is never run",
    "enable-cache-report enable-prompt-tokens-details": "cached tokens are counted anyway",
    "disable-log-requests": "requests are logged with --log-requests only",
    "disable-frontend-multiprocessing": "one process answers HTTP",
    "enable-memory-saver enable-sleep-mode": "memory can always be given back, see /sleep",
    "enable-torch-compile disable-cuda-graph-padding enable-piecewise-cuda-graph "
    "disable-piecewise-cuda-graph": GRAPHS,
    "skip-server-warmup": "a few tokens are always computed first, to refuse damaged weights",
    "enable-request-id-headers enable-server-load-tracking incremental-streaming-output stream-output "
    "enable-reasoning enable-multi-layer-eagle jinja cont-batching metrics": ANYWAY,
    "disable-custom-all-reduce enable-nccl-nvls enable-symm-mem enable-p2p-check enable-mscclpp "
    "enable-torch-symm-mem": EXCHANGE,
    "disable-cascade-attn disable-hybrid-kv-cache-manager disable-hybrid-swa-memory swa-full": WINDOWS,
    "enable-two-batch-overlap enable-single-batch-overlap enable-dbo": "a step's rows are computed together",
    "enable-dp-lm-head": "with --enable-dp-attention each engine has all but the experts whole",
    "enable-eplb enable-deepep-moe enable-ep-moe": EXPERTS,
    "disable-shared-experts-fusion disable-chunked-prefix-cache enable-flashinfer-allreduce-fusion "
    "enable-flashinfer-mla enable-flashmla enable-fused-qk-norm-rope enable-flashinfer-cutlass-moe "
    "enable-flashinfer-trtllm-moe enable-fused-moe-sum-all-reduce enable-flashinfer-autotune "
    "triton-attention-reduce-in-fp32": KERNELS,
    "language-model-only disable-mm-preprocessor-cache": TEXT_ALONE,
    "no-mmap mlock no-warmup use-v2-block-manager": "memory is managed by this program",
}
VALUES = {
    "api-server-count": "one process answers HTTP",
    "compilation-config optimization-level torch-compile-max-bs cuda-graph-mode cudagraph-mode": GRAPHS,
    "swap-space": "preempted requests are recomputed",
    "grammar-backend guided-decoding-backend": GRAMMARS,
    "moe-a2a-backend deepep-mode deepep-config all2all-backend": EXCHANGE,
    "moe-runner-backend fp8-gemm-backend fp4-gemm-backend nsa-prefill-backend "
    "nsa-decode-backend dsa-prefill-backend dsa-decode-backend decode-attention-backend moe-backend "
    "prefill-attention-backend mm-attention-backend sampling-backend linear-attn-backend gdn-prefill-backend "
    "attention-config kernel-config linear-backend mamba-backend": KERNELS,
    "eplb-config ep-num-redundant-experts eplb-algorithm": EXPERTS,
    "moe-dense-tp-size": "dense layers are split as --tensor-parallel-size says",
    "mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-encoder-tp-mode "
    "limit-mm-per-prompt": TEXT_ALONE,
    "mamba-cache-mode": "states of recurrent layers are cached with the pages",
    "num-continuous-decode-steps": "a step is planned while the last one runs",
    "stream-interval": "each step's tokens are sent at once",
    "prefix-caching-hash-algo radix-eviction-policy": "the least recently used pages are evicted",
    "prompt-lookup-max prompt-lookup-min": "n-grams of 4 tokens are looked up, then shorter ones",
    "max-parallel-loading-workers model-loader-extra-config weight-loader-prefetch": "weights are read in "
    "the order of their files",
    "threads-batch": "all steps have --cpu-threads",
    "batch-size": "a step has at most --chunked-prefill-size tokens",
    "collect-detailed-traces trace-level trace-modules": "a trace has spans for queue, prompt and decoding, "
    "see --otlp-traces-endpoint",
}
LIMITED = {
    "chat-template-content-format": NoOp(
        "templates get a message's text as one string", True, "auto|string", "use auto or string"
    ),
    "cpu-offload-gb": NoOp(
        "weights stay on the device", True, r"0(\.0)?", "weights stay on the device: leave it out"
    ),
    "distributed-executor-backend": NoOp(
        "an engine's ranks are processes of one machine", True, "mp|uni|external_launcher",
        "under Ray see mtpserve.integrations.ray; else leave it out",
    ),
    "nnodes": NoOp(ANYWAY, True, "1", "a server is on one machine: put a router before several"),
    "node-rank": NoOp(ANYWAY, True, "0", "a server is on one machine: put a router before several"),
    "runner convert task": NoOp(
        "models continue text", True, "auto|generate|none", "models continue text: leave it out"
    ),
    "tokenizer-mode config-format": NoOp(
        "the checkpoint's tokenizer.json and config.json are read", True,
        "auto|hf|slow|deepseek_v32|deepseek_v4",
        "leave it out; the checkpoint's tokenizer.json and config.json are read",
    ),
    "mamba-ssm-cache-dtype": NoOp(
        "recurrent states are stored in float32", True, "auto|float32", "leave it out; they are float32"
    ),
    "model-impl": NoOp("a model's code is this program's", True, "auto|vllm|sglang", "leave it out"),
    "n-gpu-layers gpu-layers": NoOp(
        "all layers are on the device", True, r"[1-9]\d*|-1|all|auto|max", "use --device cpu"
    ),
    "flash-attn": NoOp(KERNELS, True, "on|auto|1|true", "attention has one form: leave it out"),
}  # fmt: skip
NO_OPS = (
    {name: NoOp(why) for names, why in (FLAGS | MORE_FLAGS).items() for name in names.split()}
    | {name: NoOp(why, True) for names, why in (VALUES | MORE_VALUES).items() for name in names.split()}
    | {name: no_op for names, no_op in LIMITED.items() for name in names.split()}
)
# values of options that exist
PEER_VALUES = {
    "attention-backend": NoOp(
        "the kernels are this program's own", True,
        r"flash_?infer\w*|fa[234]|flash_?attn\w*|\w*mla\w*|trtllm_\w+|torch_native|flex_\w+|triton_attn\w*"
        r"|nsa|dsa|aiter\w*|intel_\w+|dual_chunk\w*|wave|hybrid_linear_attn|torch_sdpa|cpu_attn|rocm\w*",
    ),
    "load-format": NoOp(
        "safetensors are read", True,
        "fastsafetensors|runai_streamer|instanttensor|hf|prefetch",
    ),
}  # fmt: skip
SWITCHED = ("on", "off", "auto", "0", "1", "true", "false")  # values of llama.cpp's -fa, which may have none


def is_no_op(name: str, value: str | None) -> bool:
    """True, with a warning, if the option `name`, without dashes, changes nothing with this value; None: it
    has none. Raises ConfigError for a value of such an option that would change something."""
    if name in PEER_VALUES:
        no_op = PEER_VALUES[name]
        if value is None or re.fullmatch(no_op.values, value, re.IGNORECASE) is None:
            return False
    elif (no_op := NO_OPS.get(name, NoOp(""))).why == "":
        return False
    elif not no_op.takes and value is not None:
        raise ConfigError(f"--{name} takes no value, got {value!r}")
    elif value is not None and re.fullmatch(no_op.values, value, re.IGNORECASE | re.DOTALL) is None:
        raise ConfigError(f"--{name} {value} is not possible: {no_op.otherwise}")
    log.warning("--%s is ignored, it changes nothing here: %s", name, no_op.why)
    return True


def takes_value(name: str, following: str | None) -> bool:
    """True if the next argument, which is `following`, is the option's value."""
    if name == "flash-attn":
        return following is not None and following.lower() in SWITCHED
    return name in PEER_VALUES or (name in NO_OPS and NO_OPS[name].takes)
