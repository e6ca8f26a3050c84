from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mtpserve.core.errors import LoadError
from mtpserve.weights import loader
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.loader import load
from mtpserve.weights.plan import WeightSource
from mtpserve.weights.rules import Drop, EveryExpert, Rule
from tests.weights.toys import RULES, Norm, Toy, tensors, write


def load_toy(directory: Path, module: nn.Module | None = None, rules: Sequence[Rule] = RULES, progress: bool = False) -> nn.Module:
    module = Toy() if module is None else module
    load(module, Checkpoint.open(directory), rules, dtype=torch.float32, device="cpu", progress=progress)
    return module


def refused(directory: Path, *words: str, module: nn.Module | None = None, rules: Sequence[Rule] = RULES) -> None:
    with pytest.raises(LoadError) as error:
        load_toy(directory, module, rules)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_everything_arrives_in_its_place(tmp_path: Path) -> None:
    source = tensors()
    names = sorted(source)
    toy = load_toy(write(tmp_path, {n: source[n] for n in names[::2]}, {n: source[n] for n in names[1::2]}))
    found = toy.state_dict()
    for layer in range(2):
        for kind in ("weight", "bias"):
            both = torch.cat([source[f"layers.{layer}.{part}.{kind}"] for part in "qk"])
            assert torch.equal(found[f"layers.{layer}.{kind}"], both)
    wanted = torch.stack([torch.cat([source[f"experts.{e}.gate"], source[f"experts.{e}.up"]]) for e in range(3)])
    assert torch.equal(found["experts.gate_up"], wanted)
    assert torch.equal(found["norm.weight"], source["norm.weight"]) and found["counts"].tolist() == [3, 4]
    assert toy.get_buffer("table").tolist() == [1, 1, 1]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("built", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_take_the_parameters_dtype(tmp_path: Path, stored: torch.dtype, built: torch.dtype) -> None:
    weight = torch.randn(4).to(stored)
    module = Norm().to(built)
    load(module, Checkpoint.open(write(tmp_path, {"norm.weight": weight})), [Rule("norm.weight", "weight")], dtype=built, device="cpu")
    assert module.weight.dtype == built and torch.equal(module.weight, weight.to(built))


def test_a_layer_may_insist_on_float32(tmp_path: Path) -> None:
    module = nn.ModuleList([Norm().to(torch.bfloat16), Norm()])
    checkpoint = Checkpoint.open(write(tmp_path, {"0": torch.ones(4), "1": torch.ones(4)}))
    load(module, checkpoint, [Rule(r"(?P<i>\d)", "{i}.weight")], dtype=torch.bfloat16, device="cpu")
    assert [p.dtype for p in module.parameters()] == [torch.bfloat16, torch.float32]


def test_a_module_of_another_dtype_is_the_callers_mistake(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"weight": torch.ones(4)}))
    with pytest.raises(ValueError, match=r"built in torch\.bfloat16"):
        load(Norm(), checkpoint, [Rule("weight", "weight")], dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize(
    ("absent", "target"),
    [
        ("norm.weight", "norm.weight"),
        ("layers.1.k.bias", "layers.1.bias"),
        ("experts.2.up", "experts.gate_up"),
        ("counts", "counts"),
    ],
)
def test_a_missing_tensor_is_named_with_its_parameter(tmp_path: Path, absent: str, target: str) -> None:
    source = tensors()
    del source[absent]
    refused(write(tmp_path, source), f"missing {absent}: nothing fills {target}", str(tmp_path))


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    source = {name: tensor for name, tensor in tensors().items() if not name.startswith(("layers.1", "experts"))}
    refused(write(tmp_path, source), "missing experts.0.gate, experts.0.up, experts.1.gate … (6 in all): nothing", "2 more gaps")


def test_a_parameter_without_a_rule(tmp_path: Path) -> None:
    source = tensors()
    del source["norm.weight"]
    refused(write(tmp_path, source), "missing tensor that no rule names: nothing fills norm.weight", rules=RULES[1:])


def test_a_tensor_without_a_rule(tmp_path: Path) -> None:
    refused(write(tmp_path, tensors() | {"surplus": torch.ones(1)}), "model.safetensors: surplus: the model has no parameter")


def test_a_tensor_for_a_layer_that_the_model_lacks(tmp_path: Path) -> None:
    source = tensors() | {"layers.2.q.weight": torch.randn(3, 4)}
    refused(write(tmp_path, source), "layers.2.q.weight belongs to layers.2.weight, which this model does not have")


def test_one_expert_too_many(tmp_path: Path) -> None:
    refused(write(tmp_path, tensors() | {"experts.3.up": torch.randn(2, 4)}), "experts.3.up is one expert too many", "has 3")


@pytest.mark.parametrize(
    ("name", "found", "wanted"),
    [
        ("norm.weight", (5,), [4]),
        ("layers.0.k.weight", (3, 4), [2, 4]),
        ("experts.1.gate", (2, 5), [2, 4]),
        ("layers.0.q.bias", (3, 1), [3]),
    ],
)
def test_a_wrong_shape(tmp_path: Path, name: str, found: tuple[int, ...], wanted: list[int]) -> None:
    directory = write(tmp_path, tensors() | {name: torch.ones(found)})
    refused(directory, f"model.safetensors: {name} has shape {list(found)}, the model needs {wanted}")


@pytest.mark.parametrize(("name", "dtype"), [("norm.weight", torch.int64), ("counts", torch.bool), ("counts", torch.float32)])
def test_a_dtype_that_does_not_fit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    source = tensors()
    refused(write(tmp_path, source | {name: source[name].to(dtype)}), f"{name} is stored as", "cannot take")


def test_integers_of_fewer_bits_fit(tmp_path: Path) -> None:
    source = tensors()
    module = load_toy(write(tmp_path, source | {"counts": source["counts"].int()}))
    assert torch.equal(module.get_buffer("counts"), source["counts"])


def test_two_rules_match(tmp_path: Path) -> None:
    rules = [*RULES, Rule(r"norm\..*", None, Drop("twice"))]
    refused(write(tmp_path, tensors()), "model.safetensors: norm.weight: 2 rules match", r"norm\..*", rules=rules)


def side_by_side() -> dict[str, Tensor]:
    """The toy's experts in two tensors."""
    source = tensors()
    parts = {part: torch.stack([source.pop(f"experts.{e}.{part}") for e in range(3)]) for part in ("gate", "up")}
    return source | {f"all.{part}": tensor for part, tensor in parts.items()}


EVERY = (Rule(r"all\.gate", "experts.gate_up", EveryExpert(0)), Rule(r"all\.up", "experts.gate_up", EveryExpert(1)))


def test_all_experts_of_a_part_in_one_tensor(tmp_path: Path) -> None:
    source = side_by_side()
    toy = load_toy(write(tmp_path, source), rules=[*RULES, *EVERY])
    assert torch.equal(toy.state_dict()["experts.gate_up"], torch.cat([source["all.gate"], source["all.up"]], 1))


def test_what_is_wrong_with_all_experts_in_one_tensor(tmp_path: Path) -> None:
    source, rules = side_by_side(), [*RULES, *EVERY]
    without = {name: tensor for name, tensor in source.items() if name != "all.up"}
    refused(write(tmp_path, without), "missing", "all.up", "nothing fills experts.gate_up", rules=rules)
    twice = source | {"experts.1.up": torch.ones(2, 4)}
    refused(write(tmp_path, twice), "all.up", "experts.1.up", "both fill the parameter experts.gate_up", rules=rules)
    refused(write(tmp_path, source | {"all.up": torch.ones(3, 1, 4)}), "all.up has shape [3, 1, 4], the model needs [3, 2, 4]", rules=rules)


def test_a_double_fill(tmp_path: Path) -> None:
    rules = [*RULES, Rule("other", "norm.weight")]
    refused(write(tmp_path, tensors() | {"other": torch.ones(4)}), "other", "norm.weight both fill", rules=rules)


def test_a_whole_over_a_part_is_a_double_fill(tmp_path: Path) -> None:
    rules = [*RULES, Rule("fused", "experts.gate_up")]
    refused(write(tmp_path, tensors() | {"fused": torch.ones(3, 4, 4)}), "fused", "both fill the parameter experts.gate_up", rules=rules)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["experts.1.up", "norm.weight"])
def test_bad_numbers(tmp_path: Path, name: str, bad: float) -> None:
    source = tensors()
    source[name].view(-1)[-1] = bad
    directory = write(tmp_path, source)
    refused(directory, f"model.safetensors: {name} holds NaN or infinite")
    load(Toy(), Checkpoint.open(directory), RULES, dtype=torch.float32, device="cpu", check_finite=False)


def test_numbers_too_large_for_the_dtype(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"weight": torch.full((4,), 1e6)}))
    with pytest.raises(LoadError, match=r"weight holds numbers too large for torch\.float16"):
        load(Norm().half(), checkpoint, [Rule("weight", "weight")], dtype=torch.float16, device="cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Norm(), Norm()
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_shared_parameter_is_filled_under_either_name(tmp_path: Path, name: str) -> None:
    tied = load_toy(write(tmp_path, {name: torch.ones(4)}), Tied(), [Rule(r"(?P<any>.*)", "{any}")])
    assert all(p.tolist() == [1, 1, 1, 1] for p in tied.parameters())


def test_a_shared_parameter_is_filled_once(tmp_path: Path) -> None:
    source = {"embed.weight": torch.ones(4), "head.weight": torch.ones(4)}
    refused(write(tmp_path, source), "both fill", module=Tied(), rules=[Rule(r"(?P<any>.*)", "{any}")])


def test_a_missing_shared_parameter_counts_once(tmp_path: Path) -> None:
    rules = [Rule(r"(?P<any>e.*)", "{any}"), Rule("lm_head", "head.weight"), Rule("other", None, Drop("unused"))]
    directory = write(tmp_path, {"other": torch.ones(1)})
    with pytest.raises(LoadError, match=r"missing embed\.weight, lm_head: nothing fills embed\.weight$"):
        load_toy(directory, Tied(), rules)


def test_a_second_checkpoint_with_its_own_rules(tmp_path: Path) -> None:
    trunk, layer = tensors(), {}
    for name in [n for n in trunk if n.startswith("layers.1.")]:
        layer[name.replace("layers.1.", "model.layers.0.")] = trunk.pop(name)
    more = WeightSource(
        Checkpoint.open(write(tmp_path / "layer", layer)),
        [
            Rule(r"model\.layers\.0\.q\.(?P<kind>weight|bias)", "layers.1.{kind}", RULES[1].how),
            Rule(r"model\.layers\.0\.k\.(?P<kind>weight|bias)", "layers.1.{kind}", RULES[2].how),
        ],
    )
    toy, checkpoint = Toy(), Checkpoint.open(write(tmp_path / "trunk", trunk))
    load(toy, checkpoint, RULES, dtype=torch.float32, device="cpu", also=[more])
    assert torch.equal(toy.state_dict()["layers.1.weight"][:3], layer["model.layers.0.q.weight"])


class Hooked(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def finish_loading(self) -> None:
        self.seen = self.weight.detach().clone()


def test_hooks_run_once_all_is_there(tmp_path: Path) -> None:
    module = nn.ModuleList([Hooked(), nn.ModuleList([Hooked()])])
    load_toy(write(tmp_path, {"0": torch.ones(4), "1.0": torch.zeros(4)}), module, [Rule(r"(?P<path>.*)", "{path}.weight")])
    seen = [part.seen.tolist() for part in module.modules() if isinstance(part, Hooked) and part.seen is not None]
    assert seen == [[1] * 4, [0] * 4]


def test_silent_unless_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = write(tmp_path, tensors())
    load_toy(directory)
    assert capfd.readouterr() == ("", "")
    load_toy(directory, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "loading weights" in err


def test_a_wrong_checkpoint_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(self: Checkpoint, name: str) -> Tensor:
        raise AssertionError(name)

    monkeypatch.setattr(Checkpoint, "tensor", unexpected)
    source = tensors()
    del source["experts.2.up"]
    refused(write(tmp_path, source), "experts.2.up")


def test_a_long_load_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mtpserve.weights.loader")
    write(tmp_path, tensors())
    load_toy(tmp_path)
    assert not caplog.messages, "it was short"
    monkeypatch.setattr(loader, "LOG_S", 0.0)
    load_toy(tmp_path)
    assert len(caplog.messages) > 1
    assert caplog.messages[-1].startswith("loading weights: 100 %, ")
