"""Models by their id on Hugging Face's hub: `org/name` becomes the directory to which huggingface_hub has downloaded it.

Its variables hold: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. What is there already is not downloaded again. Only what can be
read is taken: safetensors, JSON and templates; no pickles, no code.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mtpserve.config import EngineConfig
from mtpserve.core.errors import LoadError

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
TOKENIZER = ("*.json", "*.jinja")
WEIGHTS = (*TOKENIZER, "*.safetensors")
BELOW = "*/*"  # other formats, and the same weights again, lie in subdirectories


def fetched(config: EngineConfig, download: bool = True) -> EngineConfig:
    """`config` with directories for ids; the API's name of the model stays what was asked for. Not `download`: only what is there.

    Raises LoadError naming the id.
    """
    model, spec = config.model, config.spec
    where = (model.revision, model.download_dir, download)
    if is_id(model.model):
        files = TOKENIZER if model.load_format == "dummy" else WEIGHTS
        found = directory_of(model.model, files, *where)
        model = replace(model, model=found, served_model_name=model.served_model_name or (model.model,))
    if model.tokenizer is not None and is_id(model.tokenizer):
        model = replace(model, tokenizer=directory_of(model.tokenizer, TOKENIZER, None, *where[1:]))
    if spec.speculative_draft_model_path is not None and is_id(spec.speculative_draft_model_path):
        found = directory_of(spec.speculative_draft_model_path, WEIGHTS, None, *where[1:])
        spec = replace(spec, speculative_draft_model_path=found)
    return replace(config, model=model, spec=spec)


def is_id(name: str) -> bool:
    return ID.fullmatch(name) is not None and not Path(name).exists()


def directory_of(name: str, files: tuple[str, ...], revision: str | None, cache: str | None, download: bool) -> str:
    from huggingface_hub import snapshot_download  # it brings an HTTP client along
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found: str = snapshot_download(
            name, revision=revision, cache_dir=cache, allow_patterns=list(files), ignore_patterns=BELOW, local_files_only=not download
        )
    except RevisionNotFoundError as error:
        raise LoadError(f"{name}: the hub has no revision {revision!r} of it") from error
    except RepositoryNotFoundError as error:
        raise LoadError(f"{name}: no such directory, and the hub shows no such model; a private one needs HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        why = "the hub cannot be reached" if download else f"it was not downloaded yet: `hf download {name}`"
        raise LoadError(f"{name}: no such directory, and {why}") from error
    except Exception as error:  # the library's own errors, its HTTP client's, a full disk
        raise LoadError(f"{name}: could not be downloaded: {' '.join(str(error).split())[:300]}") from error
    return found
