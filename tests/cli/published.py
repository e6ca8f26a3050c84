"""Published command lines of vLLM, SGLang and llama.cpp for models that this server serves, and what stands in for the models.

`RUNS` has what follows `vllm serve`, `sglang serve` or `llama-server`, with the depth of the drafts that the server then has. Where a
line names none, a checkpoint with an MTP layer drafts three deep, as everywhere here. `REFUSED` has the words of the error that name the
way out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.heads import eagles
from tests.models.chained import step
from tests.models.checkpoints import deepseek, glm4_moe, glm4_moe_lite, llama, mimo, qwen3, qwen3_moe
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.text import tiny
from tests.weights import published
from tests.weights.gguf_files import as_gguf

MTP1 = '\'{"method": "mtp", "num_speculative_tokens": 1}\''
MTP3 = '\'{"method": "mtp", "num_speculative_tokens": 3}\''
GLM5 = "--tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice"
STEP = "--reasoning-parser step3p5 --tool-call-parser step3p5 --enable-auto-tool-choice"
EAGLE = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
NSA = "--nsa-prefill-backend tilelang --nsa-decode-backend tilelang"
VLLM = {  # its recipes
    f"deepseek-ai/DeepSeek-V3 -tp 8 --trust-remote-code --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-R1 --trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel --no-enable-prefix-caching": 3,
    "deepseek-ai/DeepSeek-R1-0528 --trust-remote-code --data-parallel-size 8 --enable-expert-parallel": 3,
    f"deepseek-ai/DeepSeek-V3.1 --enable-expert-parallel -tp 8 --served-model-name ds31 --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-V3.1 --tool-call-parser deepseek_v31 --enable-auto-tool-choice --reasoning-parser deepseek_r1 -dp 8": 3,
    f"deepseek-ai/DeepSeek-V3.2 -tp 8 --tokenizer-mode deepseek_v32 --tool-call-parser deepseek_v32 --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --trust-remote-code --kernel-config.enable_flashinfer_autotune=False "
    "--tokenizer-mode deepseek_v32 --enable-auto-tool-choice --reasoning-parser deepseek_v3": 3,
    "deepseek-ai/DeepSeek-R1 -dp 8 --enable-expert-parallel --all2all-backend deepep_low_latency --enable-eplb --enable-dbo": 3,
    "deepseek-ai/DeepSeek-R1 -tp 8 --max-model-len 32k --max-num-batched-tokens 16K --gpu-memory-utilization 0.92 --swap-space 16": 3,
    "deepseek-ai/DeepSeek-V4-Flash --tensor-parallel-size 1 --pipeline-parallel-size 1 --kv-cache-dtype fp8 --trust-remote-code "
    '--gpu-memory-utilization 0.92 --compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "custom_ops": ["all"]}\' '
    "--attention_config.use_fp4_indexer_cache True --tokenizer-mode deepseek_v4 --tool-call-parser deepseek_v4 --enable-auto-tool-choice "
    f"--reasoning-parser deepseek_v4 --max-cudagraph-capture-size 128 --block-size 256 --speculative-config {MTP3}": 3,
    f"zai-org/GLM-4.5-FP8 -tp 8 --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice --speculative-config {MTP1}": 1,
    "zai-org/GLM-4.5-Air -tp 4 --speculative-config.method mtp --speculative-config.num_speculative_tokens 1": 1,
    "zai-org/GLM-4.6-FP8 -tp 8 --speculative-config.method=glm4_moe_mtp --speculative-config.num_speculative_tokens=1 -O3": 1,
    f"zai-org/GLM-4.7-FP8 -tp 4 --tool-call-parser glm47 --served-model-name glm-4.7-fp8 glm --speculative-config {MTP1}": 1,
    "zai-org/GLM-4.7 --tensor-parallel-size 8 --gpu-memory-utilization 0.9 --disable-log-requests --no-enable-prefix-caching": 3,
    "zai-org/GLM-5.1-FP8 --tensor-parallel-size 8 --speculative-config.method mtp --speculative-config.num_speculative_tokens 3 "
    f"{GLM5} --chat-template-content-format=string --served-model-name glm-5.1-fp8": 3,
    "zai-org/GLM-5.2-FP8 --kv-cache-dtype fp8_e4m3 --tensor-parallel-size 8 --speculative-config.method mtp "
    f"--speculative-config.num_speculative_tokens 5 --max-num-seqs 32 {GLM5}": 5,
    f"XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-config {MTP1} --disable-log-requests": 1,
    "XiaomiMiMo/MiMo-7B-RL --num-speculative-tokens 1 --trust-remote-code --seed 0 --dtype bfloat16": 1,
    "XiaomiMiMo/MiMo-V2-Flash -tp 4 --trust-remote-code --gpu-memory-utilization 0.9 --generation-config vllm": 3,
    "XiaomiMiMo/MiMo-V2-Flash --host 0.0.0.0 --port 9001 --seed 1024 --served-model-name mimo_v2_flash --data-parallel-size 2 "
    "--tensor-parallel-size 4 --enable-expert-parallel --gpu-memory-utilization 0.9": 3,
    "XiaomiMiMo/MiMo-V2.5-Pro --tensor-parallel-size 8 --gpu-memory-utilization 0.95 --max-model-len auto --reasoning-parser mimo": 3,
    "Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --tokenizer-mode auto --gpu-memory-utilization 0.8 --speculative-config "
    '\'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}\'': 2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8 --tensor-parallel-size 4 --enable-prefix-caching": 3,
    "Qwen/Qwen3.5-9B --language-model-only --reasoning-parser qwen3 --mm-encoder-tp-mode data --max-model-len auto": 3,
    "Qwen/Qwen3.5-9B --enable-prefix-caching --async-scheduling --limit-mm-per-prompt '{\"image\": 0}'": 3,
    "Qwen/Qwen3.5-397B-A17B-FP8 -dp 8 --enable-expert-parallel --language-model-only --reasoning-parser qwen3 --enable-prefix-caching": 3,
    "Qwen/Qwen3.5-397B-A17B-FP8 --tensor-parallel-size 8 --mm-processor-cache-type shm --reasoning-parser qwen3 --speculative-config "
    f"{MTP1}": 1,
    "Qwen/Qwen3.6-35B-A3B --trust-remote-code --kv-cache-dtype fp8 --moe-backend marlin --max-model-len 262144 --max-num-seqs 8 "
    "--max-num-batched-tokens 8192 --enable-chunked-prefill --load-format fastsafetensors --tool-call-parser qwen3_coder "
    '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3, "moe_backend": "triton"}\'': 3,
    "Qwen/Qwen3-8B-AWQ --quantization awq --dtype half --max-model-len 8192 --api-key k1 k2": 0,
    "Qwen/Qwen3-8B-AWQ --quantization awq_marlin --enable-prefix-caching": 0,
    "Qwen/Qwen3-235B-A22B --trust-remote-code -tp 4 --disable-log-requests --swap-space 32 --distributed-executor-backend mp "
    "--max-num-batched-tokens 32768 --max-model-len 32768 --no-enable-prefix-caching --gpu-memory-utilization 0.8": 0,
    'baidu/ERNIE-4.5-21B-A3B-PT --speculative-config \'{"method": "ernie_mtp", "num_speculative_tokens": 1}\'': 1,
    'baidu/ERNIE-4.5-300B-A47B-PT --tensor-parallel-size 16 --speculative-config \'{"method": "ernie_mtp", '
    '"model": "baidu/ERNIE-4.5-300B-A47B-PT", "num_speculative_tokens": 1}\'': 1,
    f"stepfun-ai/Step-3.5-Flash -tp 8 --trust-remote-code {STEP}": 3,
    "stepfun-ai/Step-3.7-Flash-FP8 --served-model-name step3p7-flash --tensor-parallel-size 8 --enable-expert-parallel "
    f"--disable-cascade-attn {STEP} --trust-remote-code --speculative-config {MTP3}": 3,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 --trust-remote-code --max-num-seqs 8 --compilation-config '{\"mode\": 3}'": 3,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 --kv-cache-dtype fp8 --tensor-parallel-size 4 --served-model-name nemotron "
    "--enable-auto-tool-choice --tool-call-parser qwen3_xml --reasoning-parser nemotron_v3 --mamba-ssm-cache-dtype float32 "
    f"--mamba-cache-mode align --attention-backend flashinfer --speculative-config {MTP3}": 3,
    "inclusionAI/Ring-1T-FP8 --trust-remote-code --tensor-parallel-size 8 --gpu-memory-utilization 0.97 --max-num-seqs 32 "
    "--kv-cache-dtype fp8 --compilation-config '{\"use_inductor\": false}' --served-model-name Ring-1T-FP8": 3,
    "inclusionAI/Ring-flash-2.0 --tensor-parallel-size 2 --pipeline-parallel-size 1 --use-v2-block-manager "
    "--gpu-memory-utilization 0.90": 3,
    "meituan-longcat/LongCat-Flash-Chat-FP8 --trust-remote-code --enable-expert-parallel --tensor-parallel-size 8": 3,
    "meituan-longcat/LongCat-Flash-Thinking-2601 --trust-remote-code --tensor-parallel-size 8 --speculative_config "
    '\'{"model": "meituan-longcat/LongCat-Flash-Thinking-2601", "num_speculative_tokens": 1, "method":"longcat_flash_mtp"}\'': 1,
    "meituan-longcat/LongCat-Flash-Chat --enable-auto-tool-choice --tool-call-parser longcat": 3,
    "openai/gpt-oss-120b --tensor-parallel-size=8 --attention-backend ROCM_AITER_UNIFIED_ATTN -cc.pass_config.fuse_rope_kvcache=True "
    "-cc.use_inductor_graph_partition=True --gpu-memory-utilization 0.95 --block-size=64": 0,
    'meta-llama/Llama-3.1-8B-Instruct --speculative-config \'{"model": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", '
    '"method": "eagle3", "num_speculative_tokens": 3}\'': 3,
}  # fmt: skip
SGLANG = {  # its cookbook
    f"--model-path deepseek-ai/DeepSeek-V3-0324 --tp 8 --trust-remote-code {EAGLE}": 3,
    "--model deepseek-ai/DeepSeek-R1 --tp 8 --speculative-algo NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2 --enable-torch-compile --torch-compile-max-bs 8": 1,
    f"--model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention {EAGLE} --host 0.0.0.0 --port 8000": 3,
    "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --ep 8 --dp 8 --enable-dp-attention --host 0.0.0.0 --port 8000": 3,
    "--model-path deepseek-ai/DeepSeek-R1 --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode low_latency": 3,
    "--model-path deepseek-ai/DeepSeek-V3.2 --tp 8 --dp 8 --enable-dp-attention --nsa-prefill-backend flashmla_sparse "
    f"--nsa-decode-backend fa3 {EAGLE}": 3,
    "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --attention-backend flashinfer --mem-fraction-static 0.85 --skip-server-warmup": 3,
    "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --enable-two-batch-overlap --disable-radix-cache --disable-overlap-schedule": 3,
    f"--model-path zai-org/GLM-4.5-Air-FP8 --tp-size 4 --disable-shared-experts-fusion --host 0.0.0.0 --port 8000 {EAGLE}": 3,
    f"--model-path zai-org/GLM-4.6 --tp-size 8 --tool-call-parser glm45 --served-model-name glm-4.6 --enable-cache-report {EAGLE}": 3,
    "--model zai-org/GLM-4.7 --reasoning-parser glm47 --tool-call-parser glm47 --tp 8 --host 0.0.0.0 --port 8000": 3,
    "--model zai-org/GLM-4.7-Flash --reasoning-parser glm45 --tool-call-parser glm47 --attention-backend triton --tp 1": 3,
    f"--model-path zai-org/GLM-5.1-FP8 --tp 8 --trust-remote-code {NSA} --chunked-prefill-size 131072 --mem-fraction-static 0.80 "
    "--watchdog-timeout 1200": 3,
    f"--model-path XiaomiMiMo/MiMo-7B-RL --trust-remote-code --dtype bfloat16 --attention-backend fa3 {EAGLE}": 3,
    "--model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --speculative-algo NEXTN --context-length 262144": 3,
    "--model-path Qwen/Qwen3.5-397B-A17B --tp 8 --reasoning-parser qwen3 --tool-call-parser qwen3_coder --speculative-algo NEXTN "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --mem-fraction-static 0.8": 3,
    "--model-path Qwen/Qwen3-8B --grammar-backend xgrammar --stream-interval 4 --num-continuous-decode-steps 4 --nnodes 1": 0,
    "--model-path stepfun-ai/Step-3.5-Flash --tp 4 --ep 4 --reasoning-parser step3p5 --tool-call-parser step3p5": 3,
    "--model-path nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 --trust-remote-code --tp 4 --tool-call-parser qwen3_coder "
    "--reasoning-parser nemotron_3 --max-running-requests 1024": 3,
    "--model-path inclusionAI/Ling-mini-2.0 --host 0.0.0.0 --port 30000 --trust-remote-code --attention-backend fa3 "
    "--speculative-algorithm NEXTN": 3,
    "--model meituan-longcat/LongCat-Flash-Chat-FP8 --trust-remote-code --attention-backend flashinfer --enable-ep-moe --tp 8": 3,
    "--model meituan-longcat/LongCat-Flash-Chat-FP8 --trust-remote-code --attention-backend flashinfer --enable-ep-moe --tp 8 "
    "--speculative-draft-model-path meituan-longcat/LongCat-Flash-Chat --speculative-algorithm NEXTN "
    "--speculative-num-draft-tokens 2 --speculative-num-steps 1 --speculative-eagle-topk 1": 1,
    "--model openai/gpt-oss-120b --reasoning-parser gpt-oss --tool-call-parser gpt-oss --tp 8": 0,
}
LLAMA_CPP = {  # its README, and guides to its MTP models
    "-m model.gguf": 0,
    "-m model.gguf --port 8080 -c 16384 -np 4": 0,
    "-m model.gguf -ngl 99 -fa on --jinja --ctx-size 0 --threads 8 -tb 8": 0,
    "--model model.gguf --n-gpu-layers all --parallel 2 --alias mine --api-key secret --cont-batching": 0,
    "-hf Qwen/Qwen3-8B --flash-attn --metrics": 0,
    "-m GLM-4.5-Air-MTP.gguf --spec-type draft-mtp --spec-draft-n-max 2 -fa on -np 1 -ngl 99 -c 8192": 2,
    "-m GLM-4.5-Air-MTP.gguf --spec-type draft-mtp,ngram-mod --spec-draft-n-max 3 --spec-draft-p-min 0.75 --no-mmap --jinja": 3,
    "-m model.gguf --spec-type ngram-simple --draft-max 7": 7,
    "-m model.gguf -md draft.gguf --draft-max 3 -ngl 99 -b 2048 -ub 512": 3,
    "-m model.gguf --spec-draft-model draft.gguf --spec-type draft-simple": 3,
}
RUNS = VLLM | SGLANG | LLAMA_CPP
REFUSED = {
    "deepseek-ai/DeepSeek-V3 -tp 8 -pp 2": "--pipeline-parallel-size must be 1",
    "--model-path deepseek-ai/DeepSeek-V3 --tp 16 --nnodes 2 --node-rank 0": "put a router before several",
    "deepseek-ai/DeepSeek-V3 --cpu-offload-gb 10": "weights stay on the device: leave it out",
    "deepseek-ai/DeepSeek-V4-Flash --kv-cache-memory-bytes 10000000000": "use --max-total-tokens",
    'deepseek-ai/DeepSeek-V4-Flash-0731 --reasoning-config \'{"reasoning_parser": "deepseek_v4"}\'': "use --reasoning-parser",
    'Qwen/Qwen3-8B --rope-scaling \'{"rope_type": "yarn", "factor": 4.0}\'': "leave it out, or edit it",
    "Qwen/Qwen3-8B --hf-overrides '{}'": "the checkpoint's config.json says what the model is",
    "Qwen/Qwen3-8B --quantization nf4": "--quantization must be one of auto, fp8, int4",
    "Qwen/Qwen3-8B --enable-lora --max-lora-rank 128": "--max-lora-rank must be from 1 to 64",
    "Qwen/Qwen3-8B --enable-lora --fully-sharded-loras": "adapters are computed as the model is",
    "Qwen/Qwen3-Embedding-8B --task embed": "models continue text: leave it out",
    "Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --no-enable-chunked-prefill": "true, or left out: prompts are always computed in chunks",
    "--model Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8 --tp 8 --ep 2 --context-length 8192": "--expert-parallel-size must be 1 or 8",
    "mistralai/Ministral-3-14B-Instruct-2512 --tokenizer_mode mistral --config_format mistral": "leave it out; the checkpoint's",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 --reasoning-parser-plugin nano_v3.py": "use --tool-call-parser and --reasoning-parser",
    "--model-path m --speculative-token-tree x": "use --speculative-eagle-topk",
    "--model-path Qwen/Qwen3-8B --json-model-override-args '{}'": "leave it out, or edit that file",
    "-m model.gguf --mmproj mmproj.gguf": "pictures and sound are not supported",
    "-m model.gguf -ngl 0": "use --device cpu",
    "-m model.gguf --spec-type draft-other": "--speculative-algorithm must be auto, none, MTP",
    "-m model.gguf --spec-type ngram-mod --draft-max 64": "--speculative-num-steps must be in [0, 7], got 64",
    "-m model.gguf --temp 0.6 --top-k 20": "use the fields of a request",
    "-m model.gguf -ctk q8_0": "use --kv-cache-dtype",
}

NAMED = ("-m", "-hf", "--model", "--model-path")  # options that name the model; without one it comes first
LONGCAT = {"num_attention_heads": 4, "expert_ffn_hidden_size": 24}  # for two ranks
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}  # for two ranks
Make = Callable[..., Any]


def eights(directory: Path, **options: Any) -> None:
    """A Llama with an EAGLE-3 head beside it, in the folder `head`."""
    target = llama(directory, num_hidden_layers=8, **options)
    eagles.eagle3(directory / "head", target, nested=True, drafts=None)


def awq(directory: Path, **options: Any) -> None:
    whole = qwen3(directory, hidden_size=64, intermediate_size=96, head_dim=16, **options)
    config, writer = published.LAYOUTS["AWQ"]
    tensors, _ = published.converted(whole.tensors, lambda name: "_proj" in name, writer)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    published.write(directory, whole.config | {"quantization_config": config}, tensors)


def with_whole(directory: Path, **options: Any) -> None:
    """A LongCat-Flash in float8 with the one in bfloat16 beside it, in the folder `head`."""
    longcat(directory, fp8=True, **LONGCAT, **options)
    longcat(directory / "head", **LONGCAT, **options)


def gguf_file(make: Make, directory: Path, **options: Any) -> None:
    """With one of a layer fewer beside it, in the folder `head`, as a draft model."""
    tokenizer = tiny.write(directory / "tokenizer")
    as_gguf(make(directory / "whole", **options), directory / "model.gguf", tokenizer=tokenizer)
    (directory / "head").mkdir()
    as_gguf(llama(directory / "small", num_hidden_layers=2, **options), directory / "head" / "model.gguf", tokenizer=tokenizer)


FAMILIES: dict[str, Make] = {  # regular expression of published names → the function that writes a tiny checkpoint of the family
    r"deepseek-ai/DeepSeek-V3\.2": partial(deepseek_v32, **HEADS),
    r"deepseek-ai/DeepSeek-V4": deepseek_v4,
    r"deepseek-ai/": partial(deepseek, fp8=True, **HEADS),
    r"zai-org/GLM-4\.7-Flash": partial(glm4_moe_lite, **HEADS),
    r"zai-org/GLM-4.*-FP8": partial(glm4_moe, fp8=True),
    r"zai-org/GLM-4": glm4_moe,
    r"zai-org/GLM-5": partial(glm_dsa, **HEADS),
    r"XiaomiMiMo/MiMo-7B": mimo,
    r"XiaomiMiMo/MiMo-V2": mimo_v2,
    r"Qwen/Qwen3-Next": qwen3_next,
    r"Qwen/Qwen3\.\d-\d+B-A": qwen3_5_moe,
    r"Qwen/Qwen3\.5": qwen3_5,
    r"Qwen/Qwen3-8B-AWQ": awq,
    r"Qwen/Qwen3-235B": qwen3_moe,
    r"Qwen/Qwen3-8B": qwen3,
    r"baidu/ERNIE-4\.5": ernie,
    r"stepfun-ai/Step-3\.7-Flash-FP8": partial(step, fp8=True),
    r"stepfun-ai/Step-3": step,
    r"inclusionAI/R.*-FP8": partial(ling, fp8=True),
    r"inclusionAI/": ling,
    r"meituan-longcat/.*-FP8": with_whole,
    r"meituan-longcat/": partial(longcat, **LONGCAT),
    r"nvidia/NVIDIA-Nemotron-3": nemotron_h,
    r"openai/gpt-oss": gpt_oss,
    r"meta-llama/": eights,
    r"GLM-4.*\.gguf": partial(gguf_file, glm4_moe),
    r"model\.gguf": partial(gguf_file, llama),
}
DRAFT_MODELS = ("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "draft.gguf", "meituan-longcat/LongCat-Flash-Chat")
CONTEXT = 262_144  # tokens, of the longest published line


def family_of(name: str) -> str:
    return next(pattern for pattern in FAMILIES if re.match(pattern, name))


def write_tiny(pattern: str, directory: Path) -> Path:
    """Returns the path of a tiny checkpoint with random weights, a tokenizer and a chat template."""
    FAMILIES[pattern](directory, vocab_size=tiny.VOCAB, max_position_embeddings=CONTEXT)
    tiny.write(directory)
    return directory / "model.gguf" if "gguf" in pattern else directory


def model_of(line: str) -> str:
    words = shlex.split(line)
    return words[next((words.index(flag) + 1 for flag in NAMED if flag in words), 0)]


# What a test on two cores cannot have → what stands in for it, both as regular expressions. All else of a line is given as published.
SUBSTITUTES = {
    # numbers of GPUs: RANKS of them
    r"(?<=\s)(-[tde]p|--(?:tp|dp|ep)(?:-size)?|--(?:tensor|data|expert)-parallel-size)[ =](?:[2-9]|1\d)\b": r"\1 RANKS",
    # a share of a GPU's memory: of this machine's, for the KV cache of a tiny model
    r"(--gpu-memory-utilization|--mem-fraction-static) [\d.]+": r"\1 0.05",
    # kernels for GPUs
    r"--attention-backend triton": "--attention-backend auto",
    # the machine's cores, addresses and ports
    r"(--threads|-tb|-t) \d+": r"\1 1",
    r"--host \S+": "--host 127.0.0.1",
    r"--port \d+": "--port 0",
}


def substituted(line: str, path: Path, ranks: int) -> list[str]:
    """Returns the line's words for a tiny checkpoint at `path` in place of the published one."""
    text = line.replace(model_of(line), str(path))
    for draft_model in DRAFT_MODELS:
        text = text.replace(draft_model, str((path if path.is_dir() else path.parent) / "head"))
    for published_words, ours in SUBSTITUTES.items():
        text = re.sub(published_words, ours.replace("RANKS", str(ranks)), text)
    return shlex.split(text)
