"""Options of vLLM, SGLang and llama.cpp: what is done anyway is left out with a warning, what has another name here is found."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mtpserve.cli import generate, launch
from mtpserve.cli.noops import NO_OPS
from mtpserve.cli.options import Settings, parsed_values, settings
from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.eval import bench_eval


def parse(line: str) -> Settings:
    return settings(parsed_values(launch.parser().parse(shlex.split(line))))


@pytest.mark.parametrize(
    ("line", "left_out"),
    [
        ("m --trust-remote-code", ["trust-remote-code"]),
        ("--trust_remote_code m", ["trust-remote-code"]),
        ("m --swap-space 4 --disable-log-requests", ["swap-space", "disable-log-requests"]),
        ("m --enable-torch-compile --skip-server-warmup", ["enable-torch-compile", "skip-server-warmup"]),
        ("--compilation-config '{\"mode\": 3}' m", ["compilation-config"]),
        ("m --compilation-config.mode 3 -O.mode=3", ["compilation-config", "optimization-level"]),
        ("-O3 m -O 2", ["optimization-level", "optimization-level"]),
        ("m --attention-backend FLASH_ATTN_MLA", ["attention-backend"]),
        ("m --attention-backend=fa3", ["attention-backend"]),
        ("m --load-format fastsafetensors", ["load-format"]),
        ("m -ngl 99 --jinja -fa", ["n-gpu-layers", "jinja", "flash-attn"]),
        ("-fa on m", ["flash-attn"]),
        ("--nnodes 1 --node-rank 0 m", ["nnodes", "node-rank"]),
    ],
)
def test_what_is_done_anyway_is_left_out_with_a_warning(line: str, left_out: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert parse(line) == parse("m")
    names = [record.getMessage().partition(" is ignored, it changes nothing here: ")[0] for record in caplog.records]
    assert names == [f"--{name}" for name in left_out]


@pytest.mark.parametrize("name", NO_OPS)
def test_every_such_option_is_left_out_alone(name: str) -> None:
    value = {"n-gpu-layers": "9", "gpu-layers": "9", "nnodes": "1", "node-rank": "0", "cpu-offload-gb": "0", "flash-attn": "on"}.get(name)
    value = value or {"distributed-executor-backend": "mp"}.get(name, "auto")
    assert parse(f"--{name} {value} m" if NO_OPS[name].takes else f"--{name} m") == parse("m")


def test_a_prompt_may_follow_a_flag_that_is_left_out() -> None:
    assert generate.parser().parse(["--trust-remote-code", "hello"]).prompt == "hello"
    assert generate.parser().parse(["--", "--trust-remote-code"]).prompt == "--trust-remote-code"


def test_a_command_may_have_an_option_of_that_name() -> None:
    assert bench_eval.parser().parse(["--task", "mmlu", "--data", "x"]).task == "mmlu"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m -ngl 0", "--n-gpu-layers 0 is not possible: use --device cpu"),
        ("m --runner pooling", "--runner pooling is not possible: models continue text"),
        ("m --nnodes 2", "--nnodes 2 is not possible: a server is on one machine"),
        ("m --cpu-offload-gb 10", "--cpu-offload-gb 10 is not possible: weights stay on the device"),
        ("m --trust-remote-code=false", "--trust-remote-code takes no value, got 'false'"),
        ("m --no-async-scheduling", "unknown option --no-async-scheduling; it cannot be turned off: on a GPU"),
        ("m --attention-backend mine", "--attention-backend must be one of auto, triton, cpu, reference, got 'mine'"),
        ("m --mmproj x.gguf", "unknown option --mmproj; pictures and sound are not supported"),
        ("m --ctx-siz 8", "unknown option --ctx-siz; did you mean --ctx-size?"),
        ("m --context-length 8q", "--context-length must be a whole number, got '8q'"),
        ("m --context-length 0.0001k", "--context-length must be a whole number, got '0.0001k'"),
    ],
)
def test_what_would_change_something_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("-m x.gguf -c 8192 -np 4 -t 8", "--model x.gguf --context-length 8192 --max-running-requests 4 --cpu-threads 8"),
        ("--ctx-size=0 -hf o/n -a name", "--model o/n --served-model-name name"),
        ("m --parallel 4 --threads 2 --draft-max 3", "m --max-running-requests 4 --cpu-threads 2 --speculative-num-steps 3"),
        ("m -md d.gguf -ub 512 -b 2048", "m --speculative-draft-model-path d.gguf --chunked-prefill-size 512"),
        ("m --spec-type draft-mtp --spec-draft-n-max 2", "m --speculative-algorithm MTP --speculative-num-steps 2"),
        ("m --spec-type ngram-mod,draft-eagle3 -md h", "m --speculative-algorithm EAGLE3+NGRAM --speculative-draft-model-path h"),
        ("m --disable-log-stats --seed 1", "m --log-interval 0 --random-seed 1"),
        ("m --max-model-len 32k --max-num-batched-tokens 8K", "m --context-length 32000 --chunked-prefill-size 8192"),
        ("m --max-model-len 25.6k --max-total-tokens 1M", "m --context-length 25600 --max-total-tokens 1048576"),
        ("m --max-model-len auto", "m"),
        ("m --max-model-len=-1", "m"),
        ("m --dtype half --kv-cache-dtype bf16", "m --dtype float16 --kv-cache-dtype bfloat16"),
        ("m --dtype bf16", "m --dtype bfloat16"),
        ("m --dtype float", "m --dtype float32"),
        ("m --enable-prefix-caching", "m"),
        ("m --no-enable-prefix-caching --enable-prefix-caching", "m"),
        ("m --served-model-name a b --api-key k1 k2", "m --served-model-name a,b --api-key k1 --api-key k2"),
        ("--served-model-name a b --model m", "m --served-model-name a,b"),
    ],
)
def test_names_and_values_of_peers_mean_ours(theirs: str, ours: str) -> None:
    assert parse(theirs) == parse(ours)


def test_a_model_is_not_taken_for_a_key() -> None:
    with pytest.raises(ConfigError, match=r"^--api-key takes all words up to the next option: put MODEL before it") as caught:
        parse("--api-key secret org/model")
    assert "secret" not in str(caught.value)


def test_a_file_may_have_them_too(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model: m\ntrust-remote-code: true\nswap-space: 4\nenable-prefix-caching: false\nattention-backend: fa3\n")
    assert parse(f"--config {file}") == parse("m --no-enable-prefix-caching")
    file.write_text("model: m\nrunner: pooling\n")
    with pytest.raises(ConfigError, match="--runner pooling is not possible"):
        parse(f"--config {file}")
