"""Published command lines of vLLM, SGLang and llama.cpp for models with MTP layers: each is understood, or refused with the way out."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mtpserve.cli import launch
from mtpserve.cli.options import Settings, parsed_values, settings
from mtpserve.config import ModelConfig
from mtpserve.config.model import FORMATS
from mtpserve.core.errors import ConfigError
from mtpserve.engine.startup.storage import with_format
from mtpserve.weights.checkpoint.hf_config import HFConfig

MTP1 = '\'{"method": "mtp", "num_speculative_tokens": 1}\''
EAGLE3 = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
UNDERSTOOD = {  # command line after `vllm serve` or `launch_server` → the depth of its drafts
    # vLLM's recipes
    f"deepseek-ai/DeepSeek-V3 -tp 8 --trust-remote-code --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-R1 --trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel --no-enable-prefix-caching": 0,
    f"deepseek-ai/DeepSeek-V3.1 --enable-expert-parallel -tp 8 --served-model-name ds31 --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-V3.1 --tool-call-parser deepseek_v31 --enable-auto-tool-choice --reasoning-parser deepseek_r1 -dp 8": 0,
    f"deepseek-ai/DeepSeek-V3.2 -tp 8 --tokenizer-mode deepseek_v32 --tool-call-parser deepseek_v32 --speculative-config {MTP1}": 1,
    "deepseek-ai/DeepSeek-R1 -dp 8 --enable-expert-parallel --all2all-backend deepep_low_latency --enable-eplb --enable-dbo": 0,
    "deepseek-ai/DeepSeek-R1 -tp 8 --max-model-len 32k --max-num-batched-tokens 16K --gpu-memory-utilization 0.92 --swap-space 16": 0,
    f"zai-org/GLM-4.5-FP8 -tp 8 --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice --speculative-config {MTP1}": 1,
    "zai-org/GLM-4.5-Air -tp 4 --speculative-config.method mtp --speculative-config.num_speculative_tokens 1": 1,
    "zai-org/GLM-4.6-FP8 -tp 8 --speculative-config.method=glm4_moe_mtp --speculative-config.num_speculative_tokens=1 -O3": 1,
    f"zai-org/GLM-4.7-FP8 -tp 4 --tool-call-parser glm47 --served-model-name glm-4.7-fp8 glm --speculative-config {MTP1}": 1,
    f"XiaomiMiMo/MiMo-7B-RL --trust-remote-code --speculative-config {MTP1} --disable-log-requests": 1,
    "XiaomiMiMo/MiMo-7B-RL --num-speculative-tokens 1 --trust-remote-code --seed 0 --dtype bfloat16": 0,
    "XiaomiMiMo/MiMo-V2-Flash -tp 4 --trust-remote-code --gpu-memory-utilization 0.9 --generation-config vllm": 0,
    "Qwen/Qwen3-Next-80B-A3B-Instruct -tp 4 --tokenizer-mode auto --gpu-memory-utilization 0.8 --speculative-config "
    '\'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}\'': 2,
    "Qwen/Qwen3.5-9B --language-model-only --reasoning-parser qwen3 --mm-encoder-tp-mode data --max-model-len auto": 0,
    "Qwen/Qwen3.5-9B --enable-prefix-caching --async-scheduling --limit-mm-per-prompt '{\"image\": 0}'": 0,
    "Qwen/Qwen3-8B-AWQ --quantization awq --dtype half --max-model-len 8192 --api-key k1 k2": 0,
    'baidu/ERNIE-4.5-21B-A3B-PT --speculative-config \'{"method": "ernie_mtp", "num_speculative_tokens": 1}\'': 1,
    "stepfun-ai/Step-3.5-Flash -tp 8 --trust-remote-code --reasoning-parser step3p5 --tool-call-parser step3p5": 0,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 --trust-remote-code --max-num-seqs 8 --compilation-config '{\"mode\": 3}'": 0,
    # SGLang's cookbook
    f"--model-path deepseek-ai/DeepSeek-V3-0324 --tp 8 --trust-remote-code {EAGLE3}": 3,
    "--model deepseek-ai/DeepSeek-R1 --tp 8 --speculative-algo NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2 --enable-torch-compile --torch-compile-max-bs 8": 1,
    "--model-path deepseek-ai/DeepSeek-R1 --tp 8 --dp 8 --enable-dp-attention --moe-a2a-backend deepep --deepep-mode low_latency": 0,
    "--model-path deepseek-ai/DeepSeek-V3.2 --tp 8 --dp 8 --enable-dp-attention --nsa-prefill-backend flashmla_sparse "
    f"--nsa-decode-backend fa3 {EAGLE3}": 3,
    "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --attention-backend flashinfer --mem-fraction-static 0.85 --skip-server-warmup": 0,
    "--model-path deepseek-ai/DeepSeek-V3 --tp 8 --enable-two-batch-overlap --disable-radix-cache --disable-overlap-schedule": 0,
    f"--model-path zai-org/GLM-4.5-Air-FP8 --tp-size 4 --disable-shared-experts-fusion --host 0.0.0.0 --port 8000 {EAGLE3}": 3,
    f"--model-path zai-org/GLM-4.6 --tp-size 8 --tool-call-parser glm45 --served-model-name glm-4.6 --enable-cache-report {EAGLE3}": 3,
    f"--model-path XiaomiMiMo/MiMo-7B-RL --trust-remote-code --dtype bfloat16 --attention-backend fa3 {EAGLE3}": 3,
    "--model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp 4 --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --speculative-algo NEXTN --context-length 262144": 3,
    "--model-path Qwen/Qwen3-8B --grammar-backend xgrammar --stream-interval 4 --num-continuous-decode-steps 4 --nnodes 1": 0,
    # llama.cpp's README
    "-m model.gguf": 0,
    "-m model.gguf --port 8080 -c 16384 -np 4": 0,
    "-m model.gguf -ngl 99 -fa on --jinja --ctx-size 0 --threads 8 -tb 8": 0,
    "--model model.gguf --n-gpu-layers all --parallel 2 --alias mine --api-key secret --cont-batching": 0,
    "-hf Qwen/Qwen3-8B --flash-attn --metrics": 0,
}
REFUSED = {  # → what the error says of the way out
    "deepseek-ai/DeepSeek-V3 -tp 8 -pp 2": "--pipeline-parallel-size must be 1",
    "--model-path deepseek-ai/DeepSeek-V3 --tp 16 --nnodes 2 --node-rank 0": "put a router before several",
    "deepseek-ai/DeepSeek-V3 --cpu-offload-gb 10": "weights stay on the device: leave it out",
    'Qwen/Qwen3-8B --rope-scaling \'{"rope_type": "yarn", "factor": 4.0}\'': "leave it out, or edit it",
    "Qwen/Qwen3-8B --hf-overrides '{}'": "the checkpoint's config.json says what the model is",
    "Qwen/Qwen3-8B --quantization bitsandbytes": "--quantization must be one of auto, fp8, int4",
    "Qwen/Qwen3-8B --enable-lora": "adapters are not supported",
    "Qwen/Qwen3-Embedding-8B --task embed": "models continue text: leave it out",
    "--model-path m --speculative-token-tree x": "use --speculative-eagle-topk",
    "--model-path Qwen/Qwen3-8B --json-model-override-args '{}'": "leave it out, or edit it",
    "-m model.gguf --mmproj mmproj.gguf": "pictures and sound are not supported",
    "-m model.gguf -md draft.gguf": "use --speculative-algorithm STANDALONE with --speculative-draft-model-path",
    "-m model.gguf -ngl 0": "use --device cpu",
    "-m model.gguf --spec-type draft-mtp": "MTP for draft-mtp",
    "-m model.gguf -ctk q8_0": "use --kv-cache-dtype",
    "-m model.gguf -b 2048 -ub 512": "use --chunked-prefill-size",
}


def parse(line: str) -> Settings:
    return settings(parsed_values(launch.parser().parse(shlex.split(line))))


@pytest.mark.parametrize("line", UNDERSTOOD)
def test_a_published_line_is_understood(line: str) -> None:
    engine = parse(line).engine
    words = shlex.split(line)
    place = next((words.index(flag) + 1 for flag in ("-m", "-hf", "--model", "--model-path") if flag in words), 0)
    assert (engine.model.model, engine.spec.steps) == (words[place], UNDERSTOOD[line])


@pytest.mark.parametrize("line", REFUSED)
def test_a_published_line_is_refused_with_the_way_out(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert REFUSED[line] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "method"), [("awq", "awq"), ("awq_marlin", "awq"), ("gptq_marlin", "gptq"), ("modelopt_fp8", "modelopt")])
def test_a_format_that_the_checkpoint_has_may_be_named(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.engine.startup.storage.quantization", lambda config: config.values["method"])
    engine = parse(f"m --quantization {name}").engine
    config = HFConfig(Path("m/config.json"), {"method": method})
    assert with_format(engine, config) == replace(engine, model=ModelConfig(model="m"))
    for other, words in (("fp8", "has weights in the format fp8"), ("none", "has weights that are not quantised")):
        with pytest.raises(ConfigError, match=f"^--quantization {name}: m {words}: leave the option out"):
            with_format(engine, HFConfig(Path("m/config.json"), {"method": other}))
    assert with_format(parse("m.gguf --quantization gguf").engine, config).model.quantization == "auto"
    assert name in FORMATS
