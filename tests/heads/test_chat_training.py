"""An MTP layer that benchmarks/heads trains from conversations: what it learns from, and that the engine drafts what the module does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from tests.models.checkpoints import Tiny, llama

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "heads"))
import chat_prompts
import chat_texts
import train_chat
import trunk as trunk_module
from drafters import DEPTHS, Given, Sizes

PROMPT, TOKENS = list(range(5, 20)), 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=5)


@pytest.fixture
def given(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.setattr(trunk_module, "Tokenizer", lambda directory: None)  # nothing here is text
    trunk = trunk_module.Trunk(str(tiny.directory), 64, torch.float32)
    arch, tokens = trunk.arch, torch.arange(trunk.arch.vocab)
    head = trunk.head_of(tokens)
    sample = trunk.see(torch.tensor([PROMPT]), head, 1.0)
    sizes = Sizes(arch.heads, arch.attention(0).kv.heads, arch.head_dim, arch.intermediate)
    return Given(trunk, tokens, head, arch.eos_ids[0], sample, sizes)


def talks(given: Given, count: int = 6) -> list[train_chat.Talk]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        ids = torch.randint(given.trunk.arch.vocab, (20 + 3 * number,), generator=generator)
        hidden = given.trunk.see(ids[None], given.head, 1.0).last[0]
        found.append(train_chat.Talk(ids, hidden, 6 + number))
    return found


def test_prompts_that_are_held_out_are_no_others() -> None:
    train, unseen = chat_prompts.prompts(None), chat_prompts.prompts(None, unseen=True)
    assert len(set(train)) == len(train) > 4000 and len(set(unseen)) == len(unseen) > 500
    assert not set(train) & set(unseen)
    assert chat_prompts.prompts(7, unseen=True) == chat_prompts.QUESTIONS[:7]
    assert chat_prompts.prompts(9) == train[:9] != chat_prompts.prompts(9, seed=1)
    for templates, subjects in chat_prompts.KINDS:
        hidden = chat_prompts.held_out(subjects)
        assert hidden and not {template.format(subject) for template in templates for subject in hidden} & set(train)


def test_the_recorder_finds_each_text_among_the_steps_rows() -> None:
    steps = [  # seats, positions, tokens, hidden
        ([0, 0, 1], [0, 1, 0], [10, 11, 20]), ([0, 1], [2, 1], [12, 21]), ([1, 0], [2, 0], [22, 30]), ([0], [1], [31]),
    ]  # fmt: skip
    recorder = chat_texts.Recorder(SimpleNamespace(forward=None))  # type: ignore[arg-type]
    recorder.rows = [(*map(torch.tensor, step), torch.tensor(step[2]).float()[:, None]) for step in steps]
    texts = recorder.texts()
    assert set(texts) == {(10, 11, 12), (20, 21, 22), (30, 31)}
    assert all(hidden.flatten().tolist() == list(ids) for ids, hidden in texts.items())
    assert recorder.rows == []


def test_places_are_drafts_that_stand_in_an_answer(given: Given) -> None:
    texts = train_chat.Texts.of(some := talks(given, 3))
    for depth in range(DEPTHS):
        pairs = [(row // texts.rows, row % texts.rows) for row in texts.places[depth].tolist()]
        # row p's draft is token p + 2 + depth, of which row p + 1 + depth is the distribution: the last is after the last token
        wanted = [(n, p) for n, talk in enumerate(some) for p in range(talk.prompt - 1, min(texts.rows, len(talk.ids) - 1 - depth))]
        assert pairs == wanted
        after = texts.hidden.flatten(0, 1)[texts.after(depth)]
        assert torch.equal(after, torch.stack([some[number].hidden[p + 1 + depth] for number, p in wanted]))


def test_the_loss_has_the_gradient_of_its_definition() -> None:
    torch.manual_seed(0)
    state, head = torch.randn(700, 8, requires_grad=True), torch.randn(11, 8)
    chances = torch.randn(700, 11).softmax(-1)
    loss: Any = train_chat.SoftLoss.apply(state, chances, head)
    loss.backward()
    found = state.grad
    state.grad = None
    wanted = -(chances * (state @ head.mT / train_chat.TEMPERATURE).log_softmax(-1)).sum(-1).mean()
    wanted.backward()
    assert torch.allclose(loss, wanted) and state.grad is not None
    assert found is not None and torch.allclose(found, state.grad, atol=1e-7)


def pupil_of(given: Given) -> train_chat.ChatPupil:
    torch.manual_seed(1)
    return train_chat.ChatPupil("nextn", train_chat.layer_of(given))


def test_a_layer_learns_what_it_is_shown(given: Given) -> None:
    pupil, texts = pupil_of(given), train_chat.Texts.of(talks(given))
    for step in range(40):
        pupil.study(texts, 1.0, 1 if step < 10 else DEPTHS)
    assert pupil.losses[9] < pupil.losses[0] and pupil.losses[-1] < 0.9 * pupil.losses[10]


def rounded(pupil: train_chat.ChatPupil) -> train_chat.ChatPupil:
    """In numbers that bfloat16 has, and different from the trunk's."""
    state = {
        name: (p + 0.1 * p.std() * torch.randn(p.shape) if p.ndim > 1 else p).bfloat16().float()
        for name, p in pupil.drafter.state_dict().items()
    }
    pupil.drafter.load_state_dict(state)
    return pupil


@torch.no_grad()
def drafted(given: Given, pupil: train_chat.ChatPupil, ids: list[int]) -> list[int]:
    """The module's drafts after these tokens."""
    text = torch.tensor([ids])
    state, embedded, found = given.trunk.see(text, given.head, 1.0).last[:, :-1], [given.trunk.rows(text[:, 1:])], list[int]()
    for _ in range(DEPTHS):
        *_, out = pupil.drafter.states(embedded, state)
        found.append(int((out[0, -1] @ given.head.mT).argmax()))
        embedded.append(given.trunk.rows(torch.full((1, len(ids) - 1), found[-1])))
    return found


def test_the_engine_drafts_what_the_module_does(tiny: Tiny, given: Given, tmp_path: Path) -> None:
    pupil = rounded(pupil_of(given))
    pupil.save(tmp_path / "layer", {})
    spec = SpecConfig(speculative_draft_model_path=str(tmp_path / "layer"), speculative_num_steps=DEPTHS, speculative_adaptive=False)
    model = ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32")
    texts = dict[str, list[int]]()
    for name, drafting in (("plain", SpecConfig(speculative_algorithm="none")), ("drafts", spec)):
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=400), spec=drafting), poison=True)
        engine.add(Request("a", PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)))
        text, proposals = list(PROMPT), 0
        while engine.has_work:
            for event in engine.step():
                if event.proposal.tokens:
                    assert event.proposal.tokens == drafted(given, pupil, text)[: len(event.proposal.tokens)]
                    proposals += 1
                text += event.tokens
        texts[name] = text
        assert proposals > 5 or name == "plain"
    assert engine.card.algorithm == "NEXTN" and texts["drafts"] == texts["plain"]


def test_conversations_are_read_back(given: Given, tmp_path: Path) -> None:
    some = talks(given, 3)
    tensors = {
        "ids": torch.cat([talk.ids for talk in some]).int(), "hidden": torch.cat([talk.hidden for talk in some]).bfloat16(),
        "lengths": torch.tensor([len(talk.ids) for talk in some]), "prompts": torch.tensor([talk.prompt for talk in some[:2]] + [25]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "000.safetensors")
    found = train_chat.talks_in(tmp_path)
    assert [talk.ids.tolist() for talk in found] == [talk.ids.tolist() for talk in some[:2]], "the last one's answer is too short"
    assert [talk.prompt for talk in found] == [6, 7]
