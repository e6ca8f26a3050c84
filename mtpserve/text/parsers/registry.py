"""The formats of tool calls and of reasoning by name: vLLM's, and SGLang's where they differ."""

from collections.abc import Callable

from mtpserve.core.registry import Registry
from mtpserve.text.parsers.reasoning import Thinking
from mtpserve.text.parsers.tools import CallFormat

JSON, DEEPSEEK, TAGGED = (f"mtpserve.text.parsers.{module}" for module in ("json_calls", "deepseek", "tagged_calls"))
REASONING = "mtpserve.text.parsers.reasoning"

TOOL_CALLS: Registry[type[CallFormat]] = Registry(
    "tool call parser",
    {
        "hermes": f"{JSON}:Hermes",
        "qwen": f"{JSON}:Hermes",
        "qwen25": f"{JSON}:Hermes",
        "llama3_json": f"{JSON}:Llama3",
        "llama3": f"{JSON}:Llama3",
        "mistral": f"{JSON}:Mistral",
        "deepseek_v3": f"{DEEPSEEK}:DeepSeekV3",
        "deepseekv3": f"{DEEPSEEK}:DeepSeekV3",
        "deepseek_v31": f"{DEEPSEEK}:DeepSeekV31",
        "deepseekv31": f"{DEEPSEEK}:DeepSeekV31",
        "glm": f"{TAGGED}:GLM45",
        "glm45": f"{TAGGED}:GLM45",
        "glm47": f"{TAGGED}:GLM47",
        "qwen3_coder": f"{TAGGED}:Qwen3Coder",
        "qwen3_xml": f"{TAGGED}:Qwen3Coder",
    },
)
REASONINGS: Registry[Callable[[], Thinking]] = Registry(
    "reasoning parser",
    {
        "deepseek_r1": f"{REASONING}:always",
        "deepseek-r1": f"{REASONING}:always",
        "qwen3-thinking": f"{REASONING}:always",
        "deepseek_v3": f"{REASONING}:sometimes",
        "deepseek-v3": f"{REASONING}:sometimes",
        "qwen3": f"{REASONING}:sometimes",
        "glm45": f"{REASONING}:sometimes",
        "mimo": f"{REASONING}:sometimes",
    },
)
