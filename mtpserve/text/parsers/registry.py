"""The formats of tool calls and of reasoning by name: vLLM's, and SGLang's where they differ."""

from mtpserve.core.registry import Registry
from mtpserve.text.parsers.reasoning import Thinking
from mtpserve.text.parsers.tools import CallFormat

JSON, DEEPSEEK, TAGGED, PYTHON, HARMONY, GEMMA = (
    f"mtpserve.text.parsers.formats.{module}"
    for module in ("json_calls", "deepseek", "tagged_calls", "python_calls", "harmony", "gemma")
)
REASONING = "mtpserve.text.parsers.reasoning"


def named(entries: dict[str, str]) -> dict[str, str]:
    """Names with blanks between them → one entry for each."""
    return {name: target for names, target in entries.items() for name in names.split()}


TOOL_CALLS: Registry[type[CallFormat]] = Registry(
    "tool call parser",
    named(
        {
            "hermes qwen qwen25 ernie45 granite4": f"{JSON}:Hermes",
            "longcat": f"{JSON}:Longcat",
            "longcat_xml": f"{TAGGED}:LongcatXML",
            "llama3_json llama3": f"{JSON}:Llama3",
            "mistral": f"{JSON}:Mistral",
            "deepseek_v3 deepseekv3": f"{DEEPSEEK}:DeepSeekV3",
            "deepseek_v31 deepseekv31": f"{DEEPSEEK}:DeepSeekV31",
            "deepseek_v32 deepseekv32": f"{TAGGED}:DSML",
            "deepseek_v4 deepseekv4": f"{TAGGED}:ToolCallsDSML",
            "glm45 glm": f"{TAGGED}:GLM45",
            "glm47": f"{TAGGED}:GLM47",
            "qwen3_coder qwen3_xml step3p5": f"{TAGGED}:Qwen3Coder",
            "mimo": f"{TAGGED}:MiMo",
            "minimax_m2 minimax-m2": f"{TAGGED}:MiniMaxM2",
            "pythonic llama4_pythonic": f"{PYTHON}:Pythonic",
            "lfm2": f"{PYTHON}:LFM2",
            "openai gpt-oss": f"{HARMONY}:Harmony",
            "gemma4": f"{GEMMA}:Gemma4",
        }
    ),
)
REASONINGS: Registry[Thinking] = Registry(
    "reasoning parser",
    named(
        {
            "deepseek_r1 deepseek-r1 qwen3-thinking step3p5 minimax_m2 minimax": f"{REASONING}:ALWAYS",
            (
                "deepseek_v3 deepseek-v3 deepseek_v4 deepseek-v4 qwen3 glm45 glm47 mimo nemotron_v3 "
                "nemotron_3 nano_v3"
            ): f"{REASONING}:SOMETIMES",
            "ernie45": f"{REASONING}:ERNIE",
            "longcat": f"{REASONING}:LONGCAT",
            "openai_gptoss gpt-oss": f"{HARMONY}:CHANNELS",
            "gemma4": f"{GEMMA}:THOUGHT",
        }
    ),
)
