"""Fields that other servers know and this one does not, in one table with a column for each route's body.

A value that asks for nothing passes; any other is refused by name, because a field that is ignored gives wrong answers. A field that is
neither declared by a body nor listed here is unknown: it is left out, since clients send fields that servers have not heard of yet.
"""

from __future__ import annotations

from typing import Any, Literal

from mtpserve.server.http.errors import Unsupported

Column = Literal["completions", "chat", "responses", "messages", "generate", "sampling_params"]

# One letter for each column: /v1/completions, /v1/chat/completions (t), /v1/responses, /v1/messages, /generate and its sampling_params.
# A dot: the route has the field, or has never heard of it. Last: the values that ask for nothing.
LETTERS: dict[Column, str] = {"completions": "c", "chat": "t", "responses": "r", "messages": "m", "generate": "g", "sampling_params": "s"}
TABLE: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("add_special_tokens", ".trm..", (None, False)),
    ("audio", "ctrm..", (None,)),
    ("audio_data", "....g.", (None,)),
    ("background", "..r.g.", (None, False)),
    ("bootstrap_host", "ctrmg.", (None,)),
    ("bootstrap_port", "ctrmg.", (None,)),
    ("bootstrap_room", "ctrmg.", (None,)),
    ("chat_template", "ctrm..", (None,)),
    ("compaction", "...m..", (None,)),
    ("container", "...m..", (None,)),
    ("conversation", "..r...", (None,)),
    ("custom_logit_processor", "ctrmg.", (None,)),
    ("data_parallel_rank", "ctrmg.", (None, 0)),
    ("disagg_prefill_dp_rank", "ctrm..", (None,)),
    ("documents", "ctrm..", (None, [])),
    ("echo", ".trm..", (None, False)),
    ("function_call", "ctrm..", (None, "none", "auto")),
    ("functions", "ctrm..", (None, [])),
    ("guided_whitespace_pattern", "ctrm..", (None,)),
    ("image_data", "....g.", (None,)),
    ("input_embeds", "ctrmg.", (None,)),
    ("kv_transfer_params", "ctrm..", (None,)),
    ("length_penalty", "ctrm..", (None, 1)),
    ("logits_processors", "ctrm..", (None, [])),
    ("logprob_token_ids", "ctrm..", (None, [])),
    ("lora_id", "....g.", (None,)),
    ("lora_path", "ctrmg.", (None,)),
    ("max_tool_calls", "..r...", (None,)),
    ("mcp_servers", "...m..", (None, [])),
    ("media_io_kwargs", "ctrm..", (None, {})),
    ("mm_processor_kwargs", "ctrm..", (None, {})),
    ("modalities", "ctrm..", (None, ["text"])),
    ("modalities", "....g.", (None, [])),
    ("multi_item_delimiter_indices", "....g.", (None, [])),
    ("prompt", "..r...", (None,)),
    ("prompt_embeds", "ctrm..", (None,)),
    ("repetition_detection", "ctrm..", (None,)),
    ("request_id", "..r...", (None,)),
    ("return_bytes", "....g.", (None, False)),
    ("return_cached_tokens_details", "ctrm..", (None, False)),
    ("return_entropy", "....g.", (None, False)),
    ("return_hidden_states", "ctrmg.", (None, False)),
    ("return_meta_info", "ctrm..", (None, False)),
    ("return_prompt_token_ids", "ctrmg.", (None, False)),
    ("return_routed_experts", "ctrmg.", (None, False)),
    ("return_spec_tokens_details", "ctrm..", (None, False)),
    ("return_token_ids", "..rm..", (None, False)),
    ("return_tokens_as_token_ids", "..rm..", (None, False)),
    ("rid", "..r...", (None,)),
    ("routed_dp_rank", "ctrmg.", (None, 0)),
    ("service_tier", "ctr...", (None, "auto", "default")),
    ("session_params", "ctrmg.", (None,)),
    ("spaces_between_special_tokens", "ctrm.s", (None, True)),
    ("stop_regex", "ctrm.s", (None, [])),
    ("store", "ct.m..", (None, False)),
    ("stream_reasoning", "ctrm..", (None, True)),
    ("thinking_token_budget", "ctrm..", (None,)),
    ("token_ids_logprob", "....g.", (None, [])),
    ("top_logprobs", "..r...", (None, 0)),
    ("truncate_prompt_tokens", "..rm..", (None,)),
    ("truncation", "..r...", (None, "disabled")),
    ("use_beam_search", "ctrm..", (None, False)),
    ("verbosity", "ctrm..", (None, "low", "medium", "high")),  # a wish that no template is told of
    ("video_data", "....g.", (None,)),
    ("vllm_xargs", "ctrm..", (None, {})),
    ("web_search_options", "ctrm..", (None,)),
)


def unsupported(column: Column) -> dict[str, tuple[Any, ...]]:
    """The fields that a route refuses, each with the values that pass."""
    return {name: neutral for name, columns, neutral in TABLE if LETTERS[column] in columns}


REFUSED = {column: unsupported(column) for column in LETTERS}


def refuse(body: dict[str, Any], column: Column) -> dict[str, Any]:
    """The body without the fields that ask for nothing. Raises Unsupported for the first that asks for something."""
    refused = REFUSED[column]
    for name in sorted(body.keys() & refused.keys()):
        if not any(same(body[name], neutral) for neutral in refused[name]):
            raise Unsupported(f"{name} is not supported: leave it out", name)
    return {name: value for name, value in body.items() if name not in refused}


def same(value: Any, neutral: Any) -> bool:
    """Equal, and False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
