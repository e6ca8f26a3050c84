"""The tokenizer's wrapper: prompts, chats, the model's recommendations, and what a damaged directory is answered with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtpserve.config import ModelConfig
from mtpserve.core.errors import ConfigError, InvalidRequest, LoadError
from mtpserve.text.tokenizer import Tokenizer, tokenizer_of
from tests.text import tiny

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny.write(tmp_path_factory.mktemp("tokenizer"), temperature=0.6, top_k=20, repetition_penalty=1.1))


def test_a_prompt_gets_the_special_tokens_and_comes_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Grüße, 世界! 🎉")
    assert ids[0] == tiny.BOS_ID
    assert tokenizer.decode(ids) == "Grüße, 世界! 🎉"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(tiny.BOS)
    assert tokenizer.special_ids == {tiny.BOS_ID, tiny.EOS_ID}


def test_a_rendered_chat_gets_them_once(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat(MESSAGES).text
    assert text == f"{tiny.BOS}user: hi\nassistant:"
    assert tokenizer.encode(text, special=False).count(tiny.BOS_ID) == 1
    assert not tokenizer.render_chat(MESSAGES, add_generation_prompt=False).text.endswith("assistant:")


def test_the_models_recommendations(tokenizer: Tokenizer) -> None:
    assert tokenizer.defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",  # does not parse
        "{{ raise_exception('only one turn') }}",
        "{{ messages[0]['nothing']['at all'] }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # must not leave the sandbox
        "{{ messages.append(1) }}",
        None,
    ],
)
def test_a_bad_template_disables_chat_only(template: str | None, tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny.write(tmp_path, template))
    assert tokenizer.encode("a")
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_a_models_recommendations_can_be_left_out(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, temperature=0.6)
    chosen = {
        name: tokenizer_of(ModelConfig(model=str(directory), sampling_defaults=name)).defaults for name in ("model", "openai", "vllm")
    }
    assert chosen == {"model": {"temperature": 0.6}, "openai": {}, "vllm": {}}


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nowhere: no such directory"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)
    tiny.write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"generation_config\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab"')
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from transformers import PreTrainedTokenizerFast
if "torch" in sys.modules:  # transformers' older versions bring it along whatever we do
    sys.exit()
from mtpserve.text.tokenizer import Tokenizer
tokenizer = Tokenizer({str(tiny.write(tmp_path))!r})
tokenizer.decode(tokenizer.encode_chat(tokenizer.render_chat({MESSAGES!r})))
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    """What transformers calls remote code: classes that the checkpoint names and brings along."""
    directory, marker = tiny.write(tmp_path / "model"), tmp_path / "it ran"
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | named))
    (directory / "config.json").write_text(json.dumps({"model_type": "evil"} | named))
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: ...\n")
    assert Tokenizer(directory).encode("a")
    assert not marker.exists()


def test_a_template_of_the_operators_own(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    tiny.write(tmp_path)
    file.write_text("{% for m in messages %}{{ m.content }}!{% endfor %}", encoding="utf-8")
    assert Tokenizer(tmp_path, chat_template=str(file)).render_chat(MESSAGES).text == "hi!"
    file.write_text("{{ raise_exception('no empty messages') }}", encoding="utf-8")
    assert Tokenizer(tmp_path, chat_template=str(file)).has_chat_template
    for text, said in (("{% if %}", "line 1: "), (b"\xff", "utf-8"), (None, "No such file")):
        file.unlink()
        if text is not None:
            file.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError, match=rf"--chat-template .*own\.jinja: .*{said}"):
            Tokenizer(tmp_path, chat_template=str(file))
