"""Models by name: `org/name`, an id on Hugging Face's hub, becomes the directory to which huggingface_hub has
downloaded it; what means a GGUF file becomes its path.

huggingface_hub's environment variables apply: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. Files in its
cache are not downloaded again. Only safetensors, JSON and templates are downloaded; no pickles, no code.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.config.drafters import DRAFTERS, OWN_LAYER
from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.gguf_names import PACKAGES, gguf_file

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
TOKENIZER = ("*.json", "*.jinja")
WEIGHTS = (*TOKENIZER, "*.safetensors")
USUAL_HEADER, WHOLE = 1 << 16, 1 << 28  # bytes that are asked for: of weights at first, of a config
BUNDLED = ("demo", *PACKAGES)
# MTP layers of such models, in this package
BUNDLED_LAYERS = {"smollm2": Path(__file__).parents[2] / "demo" / "smollm2-nextn"}
TOKEN_MAP = "token_map.json"  # beside one that has learned a part of the vocabulary
SIMILAR = 0.75  # names that share less are no suggestion
PATH_BEGINS = "/.~"
BELOW = "*/*"  # subdirectories hold other formats, or the same weights again


def fetched(config: EngineConfig, download: bool = True, headers: Path | None = None) -> EngineConfig:
    """`config` with directories and files in place of names; the API's name of the model stays as given. Not
    `download`: only from the cache, and where the model is not there, with an empty directory `headers`, its
    configs and headers. A draft model's numbers are read, too: it must be there.

    Raises LoadError naming the id.
    """
    require_names(config, paths=False)  # who reads the directory says that it is not there
    model, spec = config.model, config.spec
    where = (model.revision, model.download_dir, download, headers)
    local_path = gguf_file(model.model)
    if is_id(model.model):
        local_path = directory_of(model.model, TOKENIZER if model.load_format == "dummy" else WEIGHTS, *where)
    if local_path is not None:
        spec = with_bundled_layer(config)
        model = replace(model, model=local_path, served_model_name=model.names)
    if model.tokenizer is not None:
        text = (
            directory_of(model.tokenizer, TOKENIZER, None, *where[1:3], None)
            if is_id(model.tokenizer)
            else gguf_file(model.tokenizer)
        )
        model = replace(model, tokenizer=text or model.tokenizer)
    if spec.checkpoint is not None and own_layer(replace(config, spec=spec)):
        spec = spec.with_checkpoint(None)
    elif (draft := spec.checkpoint) is not None:
        files = TOKENIZER if model.load_format == "dummy" else WEIGHTS
        local_path = directory_of(draft, files, None, *where[1:3], None) if is_id(draft) else gguf_file(draft)
        spec = spec.with_checkpoint(local_path or str(ModelConfig(model=draft).directory))
    return replace(config, model=model, spec=spec)


def own_layer(config: EngineConfig) -> bool:
    """True if the draft model's path is the model's own: published commands name it twice, and mean the
    checkpoint's MTP layer."""
    spec, model = config.spec, config.model
    is_mtp = spec.drafter is None or DRAFTERS.get(spec.drafter).in_checkpoint(None)
    draft = ModelConfig(model=spec.checkpoint or "").directory
    return is_mtp and (spec.checkpoint == model.model or draft.resolve() == model.directory.resolve())


def with_bundled_layer(config: EngineConfig) -> SpecConfig:
    """The options with the MTP layer that this package has for the model, where that is what drafts: nothing
    is named, or MTP by one of its names."""
    spec, layer = config.spec, BUNDLED_LAYERS.get(config.model.model)
    if layer is None or not layer.is_dir() or spec.checkpoint is not None:
        return spec
    if config.model.load_format == "dummy":  # its layer is random, too
        return spec
    if spec.named and spec.drafter not in OWN_LAYER:
        return spec
    tokens = spec.speculative_token_map or str(layer / TOKEN_MAP)
    return replace(spec.with_checkpoint(str(layer)), speculative_token_map=tokens)


def require_names(config: EngineConfig, paths: bool = True) -> None:
    """Raises LoadError for a name that means nothing here, before an import or download. `paths`:
    also for what can only be a path."""
    for name in (config.model.model, config.model.tokenizer, config.spec.checkpoint):
        if not name or name in BUNDLED or Path(name).exists() or (not paths and name[0] in PATH_BEGINS):
            continue
        if (tagged := ID.match(name)) is not None and (":" in name or name.upper().endswith("-GGUF")):
            raise LoadError(
                f"{name}: GGUF files are not downloaded from Hugging Face automatically: run `hf "
                f"download {tagged[0]} FILE.gguf`, and give --model the path that it prints"
            )
        if not is_id(name):
            beside = [path.name for path in Path(name).parent.glob("*")]
            near = get_close_matches(Path(name).name, [*BUNDLED, *beside], n=2, cutoff=SIMILAR)
            advice = f"; did you mean {' or '.join(near)}?" if near else ""
            others = f", not a bundled model ({', '.join(BUNDLED)}), and not a Hugging Face id (org/name)"
            raise LoadError(
                f"{name}: no such directory or GGUF file{'' if name[0] in PATH_BEGINS else others}{advice}"
            )


def is_id(name: str) -> bool:
    return ID.fullmatch(name) is not None and not Path(name).exists()


def directory_of(
    name: str,
    files: tuple[str, ...],
    revision: str | None,
    cache: str | None,
    download: bool,
    headers: Path | None,
) -> str:
    # not at the top: it imports an HTTP client
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if headers is not None and not is_offline_mode():
        with suppress(LocalEntryNotFoundError):
            snapshot: str = snapshot_download(
                name,
                revision=revision,
                cache_dir=cache,
                allow_patterns=list(files),
                ignore_patterns=BELOW,
                local_files_only=True,
            )
            if any(file.suffix == ".safetensors" for file in Path(snapshot).iterdir()):
                return snapshot
    try:
        if headers is not None and not is_offline_mode():
            return read_headers(name, revision, headers / name.replace("/", "--"))
        directory: str = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(files),
            ignore_patterns=BELOW,
            local_files_only=not download,
        )
    except RevisionNotFoundError as error:
        raise LoadError(f"{name}: no revision {revision!r} on Hugging Face") from error
    except RepositoryNotFoundError as error:
        raise LoadError(
            f"{name}: no such directory, and no such model on Hugging Face; a private model needs HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        why = "Hugging Face cannot be reached" if download else f"it is not downloaded: `hf download {name}`"
        if download and is_offline_mode():
            why = "HF_HUB_OFFLINE is set: it is not downloaded, and not searched on Hugging Face"
        raise LoadError(f"{name}: no such directory, and {why}") from error
    except Exception as error:  # the library's own errors, its HTTP client's, a full disk
        raise LoadError(f"{name}: could not be downloaded: {' '.join(str(error).split())[:300]}") from error
    return directory


def read_headers(name: str, revision: str | None, directory: Path) -> str:
    """Configs, and of each file of weights as much as its header takes: the rest of it is a hole, which takes
    no room on the disk. Raises what the hub's library raises."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    def part(file: str, end: int) -> tuple[bytes, int]:
        """The first `end` bytes, and how many there are."""
        url = hf_hub_url(name, file, revision=info.sha)
        answer = get_session().get(
            url, headers=build_hf_headers() | {"Range": f"bytes=0-{end - 1}"}, follow_redirects=True
        )
        hf_raise_for_status(answer)
        return answer.content, int(
            answer.headers.get("Content-Range", f"/{len(answer.content)}").rpartition("/")[2]
        )

    info = HfApi().model_info(name, revision=revision or "main")
    directory.mkdir(parents=True, exist_ok=True)
    for file in (sibling.rfilename for sibling in info.siblings or [] if "/" not in sibling.rfilename):
        if fnmatch(file, "*.json") and file not in ("tokenizer.json", "vocab.json"):
            data, size = part(file, WHOLE)
        elif file.endswith(".safetensors"):
            data, size = part(file, USUAL_HEADER)
            if (end := 8 + int.from_bytes(data[:8], "little")) > len(data) and end < size:
                data, size = part(file, end)
        else:
            continue
        with (directory / file).open("wb") as written:
            written.write(data)
            written.truncate(size)
    return str(directory)
