"""The command line and YAML files fill the config dataclasses, in every spelling, and say what they do not understand."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtpserve.cli import launch
from mtpserve.cli.noops import NO_OPS, PEER_VALUES
from mtpserve.cli.options import OBJECTS, SECTIONS, Option, Settings, add_options, all_options, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.cli.peers import INSTEAD, SHORT, WITH_VALUE
from mtpserve.config import ModelConfig
from mtpserve.config.options import option
from mtpserve.core.errors import ConfigError
from tests.house.tree import ROOT


def parse(*arguments: str) -> Settings:
    return settings(parsed_values(launch.parser().parse(arguments)))


def from_yaml(folder: Path, text: str, *arguments: str) -> Settings:
    file = folder / "x.yaml"
    file.write_text(text, encoding="utf-8")
    return parse("--config", str(file), *arguments)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_example_configs_are_understood(file: Path) -> None:
    assert parse("--config", str(file)).engine.model.model in file.read_text(encoding="utf-8")


def test_nothing_given_is_the_dataclasses_own_defaults() -> None:
    assert parse() == settings({})


def test_what_is_given_reaches_the_configuration_in_every_section() -> None:
    found = parse(
        "--model", "m", "--page-size", "8", "--spec-method", "mtp", "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "7"
    )
    assert found.engine.model.model == "m"
    assert found.engine.cache.page_size == 8
    assert found.engine.spec.speculative_algorithm == "mtp"
    assert found.engine.sampling.logprobs_mode == "processed_logprobs"
    assert found.engine.scheduler.max_running_requests == 7
    assert parse("--metrics-compat", "vllm").server.dialects == ("vllm",)


@pytest.mark.parametrize("one", all_options(), ids=lambda one: one.name)
def test_every_spelling_of_every_option_reaches_its_field(one: object) -> None:
    assert hasattr(one, "spellings")
    samples = {"speculative_algorithm": "mtp", "speculative_eagle_topk": "1", "context_length": "64", "max_total_tokens": "64"}
    value = "a,b" if one.many else samples.get(one.name, (one.choices or ("3",))[-1] if one.kind is not float else "0.5")
    for spelling in one.spellings:
        for flag in (f"--{spelling}", f"--{spelling.replace('-', '_')}"):
            for arguments in ([flag],) if one.kind is bool else ([flag, value], [f"{flag}={value}"]):
                values = parsed_values(launch.parser().parse(arguments))
                assert values == {one.name: ("a", "b") if one.many else one.kind(value)}


@pytest.mark.parametrize(
    "arguments",
    [
        # the first dialect's own names
        "--model-path demo --speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1 --max-running-requests 8",
        "--model-path demo --speculative-algo NEXTN --speculative-num-draft-tokens 3 --max-running-requests 8",
        # the second's
        "--model demo --spec-method mtp --num-speculative-tokens 2 --max-num-seqs 8",
        '--model demo --max-num-seqs 8 --speculative-config={"method":"deepseek_mtp","num_speculative_tokens":2}',
        # vllm serve MODEL
        'demo -sc {"method":"mtp","num_speculative_tokens":2} --max-num-seqs 8 -tp 1 -dp=1 --enable-chunked-prefill',
    ],
)
def test_both_dialects_mean_the_same(arguments: str) -> None:
    engine = parse(*arguments.split()).engine
    assert (engine.model.model, engine.spec.steps, engine.scheduler.max_running_requests) == ("demo", 2, 8)


@pytest.mark.parametrize(
    "arguments",
    [
        "--model-path x --tp-size 8 --enable-dp-attention --dp 8 --speculative-algorithm NEXTN --speculative-draft-model-path y",
        "--model-path x --tp 8 --ep 8 --dp-size 8 --enable-dp-attention",
        "--model x --data-parallel-size 8 --enable-expert-parallel",
        "x -dp 8 -ep 8",
    ],
)
def test_both_dialects_spread_experts(arguments: str) -> None:
    parallel = parse(*arguments.split()).engine.parallel
    assert parallel.spreads and (parallel.data_parallel_size, parallel.ranks) == (8, 1)


@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        ("mtp", "MTP"), ("deepseek_mtp", "MTP"), ("eagle", "EAGLE"), ("eagle3", "EAGLE3"), ("medusa", "MEDUSA"), ("dflash", "DFLASH"),
        ("draft_model", "DRAFT_MODEL"), ("STANDALONE", "STANDALONE"), ("NEXTN", "NEXTN"), ("ngram", None),
    ],
)  # fmt: skip
def test_both_dialects_name_drafters(method: str, drafter: str | None) -> None:
    """vLLM's methods in one object, SGLang's algorithms in options of their own."""
    path = {"model": "/draft"} if drafter is not None else {}
    config = json.dumps({"method": method, "num_speculative_tokens": 2, **path})
    options = ["--speculative-algorithm", method.upper(), "--speculative-num-steps", "2"]
    options += ["--speculative-draft-model-path", "/draft"] if path else []
    for spec in (parse("--speculative-config", config).engine.spec, parse(*options).engine.spec):
        assert (spec.drafter, spec.ngram, spec.steps, spec.checkpoint) == (drafter, drafter is None, 2, path.get("model"))


def test_what_peers_call_otherwise_has_no_option_here() -> None:
    """Advice for an option that exists would never be seen."""
    known = {spelling for option in all_options() for spelling in option.spellings}
    assert not known & (INSTEAD.keys() | NO_OPS.keys()) and not INSTEAD.keys() & NO_OPS.keys() and known >= PEER_VALUES.keys()
    texts = [*INSTEAD.values(), *(f"{no_op.why} {no_op.otherwise}" for no_op in NO_OPS.values()), *WITH_VALUE.values()]
    named = {flag for advice in texts for flag in re.findall(r"--([\w-]+)", advice)}
    assert named and named <= known
    assert {name.lstrip("-") for name in SHORT.values()} <= known | INSTEAD.keys() | NO_OPS.keys() | {"speculative-config"}


def test_keys_of_published_configs_that_change_no_text_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    keys: dict[str, object] = {"quantization": None, "enforce_eager": True, "disable_padded_drafter_batch": False, "max_model_len": 2048}
    keys |= {"draft_tensor_parallel_size": 1, "rejection_sample_method": "strict", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    config = {"method": "mtp", "num_speculative_tokens": 2}
    assert parse("-sc", json.dumps(config | keys)).engine.spec == parse("-sc", json.dumps(config)).engine.spec
    assert [record.getMessage() for record in caplog.records] == [
        f"--speculative-config: {key!r} is ignored, it changes nothing here" for key in keys
    ]


@pytest.mark.parametrize("arguments", [
    ["--speculative-config.method", "mtp", "--speculative-config.num_speculative_tokens", "2"],
    ["-sc.method=mtp", "--speculative_config.num_speculative_tokens=2"],
    ["-sc.method=mtp", "--speculative-config", '{"num_speculative_tokens": 2}'],
    ['--speculative-config={"num_speculative_tokens": 2}', "--page-size", "8", "--speculative-config.method", "mtp"],
])  # fmt: skip
def test_members_of_an_object_one_by_one(arguments: list[str]) -> None:
    spec = parse("demo", *arguments).engine.spec
    assert (spec.speculative_algorithm, spec.steps) == ("mtp", 2)


def test_members_may_be_objects_lists_and_texts() -> None:
    x = "--default-chat-template-kwargs"
    found = parse(f"{x}.a.b", "1", f"{x}.a.c=x=y", f"{x}.d+", "u", f"{x}.d+", "-0.5", f"{x}.e", "[1]", x, '{"f": null}').server
    assert found.template_kwargs == {"a": {"b": 1, "c": "x=y"}, "d": ["u", -0.5], "e": [1], "f": None}
    assert set(OBJECTS) <= {f"--{spelling}" for one in all_options() for spelling in one.spellings} | {"--speculative-config"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modle", "x"], ["--modle", "did you mean", "--model"]),
        (["--max-running", "8"], ["unknown option --max-running; did you mean --max-running-requests?"]),
        (["--speculative-al", "MTP"], ["unknown option --speculative-al; did you mean --speculative-algo"]),
        (["--otlp", "x"], ["unknown option --otlp; did you mean --otlp-traces-endpoint?"]),
        (["--port", "many"], ["--port", "whole number", "'many'"]),
        (["--port", "70000"], ["--port", "70000"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--dtype", "int9"], ["--dtype", "bfloat16", "'int9'"]),
        (["--mem-fraction-static", "nan"], ["--mem-fraction-static"]),
        (["--speculative-num-steps", "3", "--speculative-algorithm", "none"], ["--speculative-num-steps", "--speculative-algorithm none"]),
        (["--speculative-config", "null", "--speculative-num-steps", "3"], ["--speculative-num-steps", "--speculative-algorithm none"]),
        (["--speculative-config", "null", "--speculative-algorithm", "MTP"], ["twice", "none", "MTP"]),
        (["--speculative-config", '{"quantization":"fp8"}'], ["'quantization' in --speculative-config must be null", "got 'fp8'"]),
        (["-sc", '{"rejection_sample_method":"synthetic"}'], ["'rejection_sample_method'", 'null or "strict"', "'synthetic'"]),
        (["-sc", '{"disable_by_batch_size":8,"speculative_disable_by_batch_size":9}'], ["given twice: 8 and 9"]),
        (["--speculative-algorithm", "LOOKAHEAD"], ["LOOKAHEAD", "NEXTN"]),
        (["--speculative-algorithm", "MEDUSA"], ["--speculative-draft-model-path must be the draft model of MEDUSA, got None"]),
        (["--speculative-config", '{"method":"draft_model"}'], ["--speculative-draft-model-path must be the draft model of draft_model"]),
        (["--speculative-config", '{"method":"suffix"}'], ["suffix", "NGRAM"]),
        (["--speculative-config", '{"method":"eagle3","speculative_token_tree":"[(0,)]"}'], ["--speculative-eagle-topk"]),
        (["--speculative-algorithm", "MTP", "--speculative-num-steps", "8"], ["--speculative-num-steps", "8"]),
        (["--speculative-config", "{"], ["--speculative-config", "JSON"]),
        (["--speculative-config", "[]"], ["--speculative-config", "object"]),
        (["--speculative-config", '{"method":"mtp","tokens":1}'], ["'tokens'", "num_speculative_tokens"]),
        (["--speculative-config", '{"method":"mtp","num_speculative_tokens":"many"}'], ["--speculative-num-steps", "'many'"]),
        (["--speculative-config", '{"method":"mtp"}', "--speculative-algo", "EAGLE"], ["twice", "EAGLE"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml", "No such file"]),
        (["demo", "surplus"], ["surplus"]),
        (["demo", "--model", "other"], ["model is given twice", "'demo'", "'other'"]),
        (["--tp", "0"], ["--tensor-parallel-size", "must be in [1, 64]", "got 0"]),
        (["--pp", "2"], ["--pipeline-parallel-size", "must be 1", "got 2"]),
        (["-ep", "2"], ["--expert-parallel-size", "got 2"]),
        (["-dp", "0"], ["--data-parallel-size", "got 0"]),
        (["--enable_priority_scheduling"], ["--scheduling-policy priority"]),
        (["--max-num-partial-prefills", "2"], ["--max-long-partial-prefills"]),
        (["--no-enable-chunked-prefill"], ["--enable-chunked-prefill must be true"]),
        (["--enable-auto-tool-choice", "--tool-call-parser", "none"], ["--enable-auto-tool-choice", "--tool-call-parser none"]),
        (["--tool-call-parser", "mine"], ["--tool-call-parser must be one of auto, none, deepseek_v3", "'mine'"]),
        (["--reasoning-parser", "mine"], ["--reasoning-parser must be one of auto, none, deepseek-r1", "'mine'"]),
        (["--default-chat-template-kwargs", "[1]"], ["--default-chat-template-kwargs must be a JSON object, got '[1]'"]),
        (["--port.a", "1"], ["--port is not a JSON option", "--speculative-config"]),
        (["--speculative-config.method"], ["--speculative-config.method", "expected one argument"]),
        (["-sc.method", "mtp", "-sc.method", "ngram"], ["-sc.method is given twice: 'mtp' and 'ngram'"]),
        (["-sc.method", "mtp", "-sc", '{"method": "ngram"}'], ["--speculative-config.method is given twice"]),
        (["-sc.method", "mtp", "-sc", "[1]"], ["--speculative-config must be a JSON object, got [1]"]),
        (["-sc.method", "mtp", "-sc.method.a", "1"], ["-sc.method.a", "'method' is no object"]),
        (["--speculative-config.tokens", "1"], ["'tokens'", "num_speculative_tokens"]),
        (["--root-path", "api"], ["--root-path must be a path like /api, got 'api'"]),
        (["--root-path", "/"], ["--root-path must be a path like /api, got '/'"]),
        (["--ssl-keyfile-password", "x"], ["--ssl-keyfile must be given together with --ssl-keyfile-password"]),
        (["--max-loras", "0"], ["--max-loras must be at least 1, got 0"]),
        (["--model", "demo", "--lora-modules", "a=x", "a=y"], ["--lora-modules must be names that differ", "'a'"]),
        (["--lora-modules", '{"name": "sql", "rank": 1}'], ["--lora-modules must be name=path, or JSON", "sql"]),
        (["--lora-modules", "{"], ["--lora-modules: '{' is no JSON"]),
        (["--max-cpu-loras", "3"], ["all loaded adapters are in host memory"]),
        (["--disable-uvicorn-access-log"], ["--log-level warning"]),
        (["--default-chat-template-kwargs", "{"], ["--default-chat-template-kwargs must be a JSON object, got '{'"]),
    ],
)
def test_a_mistake_is_named(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "model: demo\nspeculative-algorithm: NEXTN\nspeculative_num_steps: 2\nmax-num-seqs: 8\nport: 1",
        "model: {model-path: demo}\nspec: {spec-method: mtp, spec_tokens: 2}\nscheduler: {max_running_requests: 8}\nserver: {port: 1}",
        "model-path: demo\nspeculative-config: {method: mtp, num_speculative_tokens: 2}\nmax-num-seqs: '8'\nport: 1\ncache:",
        'spec: {speculative-config: \'{"method": "mtp", "num_speculative_tokens": 2}\'}\nmax-num-seqs: 8\nport: 1',
    ],
)
def test_yaml_takes_the_same_keys_nested_or_flat(tmp_path: Path, text: str) -> None:
    expected = parse("--model", "demo", "--spec-method", "mtp", "--spec-tokens", "2", "--max-num-seqs", "8", "--port", "1")
    found = from_yaml(tmp_path, text)
    assert found.engine.spec.steps == expected.engine.spec.steps
    assert (found.engine.model, found.engine.scheduler, found.server) == (expected.engine.model, expected.engine.scheduler, expected.server)


def test_the_command_line_overrides_the_file_key_by_key(tmp_path: Path) -> None:
    found = from_yaml(tmp_path, "spec: {speculative-algorithm: MTP, speculative-num-steps: 5}\nport: 1", "--num-speculative-tokens", "1")
    assert (found.engine.spec.speculative_algorithm, found.engine.spec.steps, found.server.port) == ("MTP", 1, 1)


def test_an_empty_file_and_null_are_fine(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "") == from_yaml(tmp_path, "context-length: null\nserver:\n") == parse()


def test_a_whole_number_is_a_number(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "log-interval: 2").server.log_interval == 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: demo", ["'modle'", "did you mean model"]),
        ("server: {prot: 1}", ["'prot'", "'server'", "did you mean port"]),
        ("server: {model: demo}", ["'model'", "'server'"]),
        ("port: true", ["--port", "whole number", "True"]),
        ("port: 1.5", ["--port", "1.5"]),
        ("port: null", ["--port", "None"]),
        ("tokenizer: 7", ["--tokenizer", "quotes", "7"]),
        ("dtype: quarter", ["--dtype", "float16"]),
        ("model: demo\nmodel-path: other", ["model", "twice", "'demo'", "'other'"]),
        ("model: [demo]", ["--model", "text"]),
        ("- model", ["mapping of options to values"]),
        ("model: 'demo", ["not YAML"]),
        ("model: !!python/object/apply:os.system [ls]", ["not YAML"]),
        ("7: 8", ["'7'"]),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, text)
    assert [word for word in ["x.yaml", *words] if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_configs_of_the_repository_are_valid(file: Path) -> None:
    assert parse("--config", str(file)).engine.spec.steps > 0


def test_switches_are_read_as_such() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Made:
        overlap: bool = option(True, "run ahead", "run-ahead")

    parser = Parser(prog="made")
    add_options(parser, {"made": Made})
    assert [parser.parse([flag]).overlap for flag in ("--overlap", "--no-overlap", "--no-run-ahead", "--run_ahead")] == [
        True,
        False,
        False,
        True,
    ]
    (found,) = all_options({"made": Made})
    assert (found.read(False), found.kind) == (False, bool)
    with pytest.raises(ConfigError):
        found.read("yes")


def test_no_spelling_belongs_to_two_options() -> None:
    spellings = [spelling for one in all_options() for spelling in one.spellings]
    assert len(spellings) == len(set(spellings))
    assert "speculative-config" not in spellings and "config" not in spellings
    assert set(SECTIONS) & set(spellings) <= {"model"}


@pytest.mark.parametrize("one", all_options(), ids=lambda one: one.name)
def test_every_option_reaches_the_settings(one: Option) -> None:
    """Not only its field: what is dropped on the way to the dataclasses would be a switch that does nothing."""
    values: dict[str, object] = {"speculative_algorithm": "MTP"} if one.section == "spec" else {}
    value = {str: "1", int: 1, float: 0.5, bool: not one.default}[one.kind]
    given = {
        "context_length": 64,
        "max_total_tokens": 64,
        "metrics_compat": "vllm",
        "default_chat_template_kwargs": "{}",
        "root_path": "/a",
    }
    given |= {"kv_events_config": "{}", "kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'}
    value = one.choices[-1] if one.choices else given.get(one.name, value)
    if one.name.endswith(("pipeline_parallel_size", "expert_parallel_size", "enable_chunked_prefill")):  # those have one value, and say so
        with pytest.raises(ConfigError, match=f"--{one.spellings[0]} must be"):
            settings({one.name: 2 if one.kind is int else False})
        return
    values |= {"kv_offload_dir": "pages"} if one.name == "kv_offload_dir_gib" else {}
    if one.name in ("expert_map", "record_expert_load"):
        values |= {"enable_expert_parallel": True, "data_parallel_size": 2}
    value = ("a",) if one.many else value
    if one.name.startswith("ssl_"):  # those belong together
        values |= {"ssl_keyfile": "1", "ssl_certfile": "1"}
    value = "NGRAM" if one.name == "speculative_algorithm" else value
    made = settings(values | {one.name: value})
    section = made.server if one.section == "server" else getattr(made.engine, one.section)
    assert getattr(section, one.name) == value


def test_lists_are_given_in_any_way_and_never_repeated(tmp_path: Path) -> None:
    assert parse("--api-key", "a", "--api-key", "b,c").server.api_key == ("a", "b", "c")
    assert parse("--served-model-name", "a,org/b", "--served-model-name", "c").engine.model.names == ("a", "org/b", "c")
    assert parse("--model", "m").engine.model.names == ("m",)
    with pytest.raises(ConfigError, match="--served-model-name must be a tuple of names, got 'a'"):
        ModelConfig(served_model_name="a")  # type: ignore[arg-type]
    assert from_yaml(tmp_path, "api-key: [a, b]").server.api_key == ("a", "b")
    for bad in ("", "secret,,b", "secret b", "secret\nc"):
        with pytest.raises(ConfigError, match="must be texts without spaces") as found:
            parse("--api-key", bad)
        assert "secret" not in str(found.value)


def test_short_spellings_of_vllm() -> None:
    parallel = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size", "-ep": "expert_parallel_size"}
    for flag, name in parallel.items():
        assert launch.parser().parse([flag, "2"]) == launch.parser().parse([f"--{name}", "2"])
    assert parse("-sc", '{"method": "mtp"}').engine.spec.speculative_algorithm == "mtp"
    assert parse("--cuda-graph-max-bs-decode", "8").engine.scheduler.cuda_graph_max_bs == 8


@pytest.mark.parametrize(
    ("arguments", "named", "parts"),
    [
        ([], False, []),
        (["--speculative-algorithm", "AUTO"], False, []),
        (["--speculative-algorithm", "None"], True, []),
        (["--speculative-config", "null"], True, []),
        (["--speculative-config", "{}"], False, []),
        (["--speculative-config", '{"num_speculative_tokens": 2}'], False, []),
        (["--speculative-config", '{"method": "ngram"}'], True, ["NGRAM"]),
    ],
)
def test_speculation_may_be_left_to_the_model_or_turned_off(arguments: list[str], named: bool, parts: list[str]) -> None:
    spec = parse(*arguments).engine.spec
    assert (spec.named, spec.parts, spec.steps > 0) == (named, parts, bool(parts))


def test_a_config_file_may_turn_speculation_off(tmp_path: Path) -> None:
    assert not from_yaml(tmp_path, "speculative-config: {}").engine.spec.named
    for text in ("speculative-config: null", "spec: {speculative-algorithm: none}"):
        assert from_yaml(tmp_path, text).engine.spec.named
    assert not from_yaml(tmp_path, "speculative-algorithm: null").engine.spec.named
    assert not from_yaml(tmp_path, "speculative-algorithm: NGRAM", "--speculative-algorithm", "auto").engine.spec.named
