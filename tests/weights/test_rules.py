from __future__ import annotations

import pytest

from mtpserve.core.errors import LoadError
from mtpserve.weights.rules import Drop, Expert, Matcher, Rule, Stack, source_name

Q = Rule(r"model\.layers\.(?P<layer>\d+)\.q_proj\.weight", "layers.{layer}.qkv.weight", Stack(0))
UP = Rule(r"model\.layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.up\.weight", "layers.{layer}.experts.gate_up", Expert(1))


def test_a_template_takes_the_groups() -> None:
    rule, groups = Matcher([Q, UP]).match("model.layers.12.q_proj.weight")
    assert rule is Q and rule.resolve(groups) == "layers.12.qkv.weight"


def test_the_whole_name_must_match() -> None:
    with pytest.raises(LoadError, match=r"model\.layers\.1\.q_proj\.weight_more: the model has no parameter"):
        Matcher([Q]).match("model.layers.1.q_proj.weight_more")


def test_two_rules_for_one_name_are_an_error_that_shows_both() -> None:
    with pytest.raises(LoadError, match=r"^model\.layers\.1\.q_proj\.weight: 2 rules .*q_proj.*, \.\*$"):
        Matcher([Q, Rule(".*", None, Drop("anything"))]).match("model.layers.1.q_proj.weight")


def test_a_rule_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="group named expert"):
        Rule("x", "y", Expert(0))
    with pytest.raises(ValueError, match="has a target"):
        Rule("x", None)
    with pytest.raises(ValueError, match="has a target"):
        Rule("x", "y", Drop("why"))


@pytest.mark.parametrize(
    ("rule", "target", "expert", "name"),
    [
        (Q, "layers.3.qkv.weight", None, "model.layers.3.q_proj.weight"),
        (Q, "layers.3.qkv.bias", None, None),
        (UP, "layers.3.experts.gate_up", 5, "model.layers.3.experts.5.up.weight"),
        (Rule(r"a\.(?P<l>(?:[0-5]|1\d))\.w", "b.{l}.w"), "b.12.w", None, "a.12.w"),
        (Rule(r"a\.(?P<l>[0-5])\.w", "b.{l}.w"), "b.7.w", None, None),
        (Rule(r"a\.(?:w|v)", "b.w"), "b.w", None, r"a.(?:w|v)"),
        (Rule(r"a\.(?P<path>.*)", "{path}.w"), "b.c.d.w", None, "a.b.c.d"),
        (Rule(r"a\.(?P<l>\d+)\.w", "b.{l}.{l}"), "b.5.5", None, "a.5.w"),
        (Rule(r"a\.(?P<l>\d+)\.w", "b.{l}.{l}"), "b.5.6", None, None),
        (Rule(".*", None, Drop("computed")), "b", None, None),
    ],
)
def test_rules_run_backwards_for_error_messages(rule: Rule, target: str, expert: int | None, name: str | None) -> None:
    assert source_name(rule, target, expert) == name
