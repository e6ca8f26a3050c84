"""Fields that other servers know and this one does not, in one table with a column for each route's body.

A value that asks for nothing passes; any other is refused by name, because a field that is ignored gives
wrong answers. A field that is neither declared by a body nor listed here is unknown: it is left out, since
clients send fields that are newer than their servers.
"""

from __future__ import annotations

from typing import Any, Literal

from mtpserve.server.http.errors import Unsupported

Column = Literal["completions", "chat", "responses", "messages", "generate", "sampling_params"]

# One letter for each column: /v1/completions, /v1/chat/completions (t), /v1/responses, /v1/messages,
# /generate and its sampling_params.
LETTERS: dict[Column, str] = {
    "completions": "c",
    "chat": "t",
    "responses": "r",
    "messages": "m",
    "generate": "g",
    "sampling_params": "s",
}
# The columns that refuse the fields (a dot: the route has them, or does not know them), the values that pass,
# and the fields.
TABLE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    (
        "ctrmg.",
        (None, 0),
        "data_parallel_rank routed_dp_rank routed_experts_prompt_start",
    ),
    (
        "ctrmg.",
        (None, False),
        "return_hidden_states return_prompt_token_ids return_sampling_mask watermarking",
    ),
    ("ctrm..", (None, 0), "routed_experts_start_len"),
    ("..rm..", (None, False), "return_routed_experts"),
    (
        "ctrmg.",
        (None, False),
        "return_assistant_tokens_mask return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs",
    ),
    (
        "ctrmg.",
        (None, False),
        "return_indexer_topk return_prompt_text return_token_offsets use_audio_in_video",
    ),
    (
        "ctrmg.",
        (None,),
        "custom_logit_processor disagg_prefill_dp_rank ec_transfer_params input_embeds session_params",
    ),
    ("ctrm..", (None,), "lora_path"),  # these name an adapter as the model
    (
        "ctrmg.",
        (None,),
        "images_config max_dynamic_patch min_dynamic_patch sampling_logprobs_mode video_config",
    ),
    ("ctrmgs", (None, False), "watermark"),
    ("..rm..", (None,), "bootstrap_host bootstrap_port bootstrap_room kv_transfer_params"),
    ("ctrm..", (None, True), "spaces_between_special_tokens"),
    (".....s", (None, True, False), "spaces_between_special_tokens"),  # SGLang's fast tokenizers have none
    ("ctrm.s", (None, []), "stop_regex"),
    ("ctrmgs", (None, 1), "stream_interval"),  # each step's tokens are sent at once
    (".....s", (None,), "beam_width stop_regex_strs stop_strs"),
    (".....s", (None, False), "ebnf_full_assistant is_normalized"),
    (".....s", (None, 0), "stop_regex_max_len stop_str_max_len"),
    ("ctrm..", (None, "low", "medium", "high"), "verbosity"),  # no template is told of it
    ("ctrm..", (None, "none", "auto"), "function_call"),
    ("ctrm..", (None, 1), "length_penalty"),
    (
        "ctrm..",
        (None, False),
        "return_cached_tokens_details return_meta_info return_spec_tokens_details use_beam_search",
    ),
    ("ctrm..", (None, True), "stream_reasoning"),
    ("ctrm..", (None, ["text"]), "modalities"),
    ("ctrm..", (None, []), "documents functions logits_processors logprob_token_ids"),
    ("ctrm..", (None, {}), "media_io_kwargs mm_processor_kwargs vllm_xargs"),
    ("ctrm..", (None,), "audio chat_template guided_whitespace_pattern"),
    ("ctrm..", (None,), "prompt_embeds repetition_detection web_search_options"),
    (
        "ctr...",
        (None, "auto", "default", "flex", "scale", "priority"),
        "service_tier",
    ),  # all are the same here
    ("ct.m..", (None, False), "store"),
    (
        ".trm..",
        (None, False),
        "add_special_tokens echo return_input_ids_in_sglext return_output_ids_in_sglext",
    ),
    (".t....", (None,), "input_ids task"),
    ("..rm..", (None, False), "return_token_ids return_tokens_as_token_ids"),
    ("..rm..", (None,), "truncate_prompt_tokens truncation_side"),
    ("..r...", (None, False), "enable_response_messages"),
    ("..r...", (None, []), "previous_input_messages"),
    ("..r.g.", (None, False), "background"),
    ("..r...", (None, 0), "top_logprobs"),
    ("..r...", (None,), "conversation prompt request_id rid"),
    ("...m..", (None, []), "mcp_servers"),
    ("...m..", (None,), "compaction container"),
    ("....g.", (None, False), "need_wait_for_mm_inputs require_reasoning return_bytes return_entropy"),
    (
        "....g.",
        (None,),
        "bootstrap_pair_key decode_tp_size encoder_urls http_worker_ipc image_max_dynamic_patch "
        "max_thinking_tokens",
    ),
    (
        "....g.",
        (None,),
        "mm_content_hashes mm_hashes mm_processor_kwargs num_items_assigned positional_embed_overrides",
    ),
    ("....g.", (None,), "token_indices_to_pool video_max_dynamic_patch"),
    ("....g.", (None, []), "modalities multi_item_delimiter_indices token_ids_logprob"),
    ("....g.", (None,), "audio_data image_data lora_id video_data"),
)

# The fields that each route refuses, with the values that pass.
REFUSED: dict[Column, dict[str, tuple[Any, ...]]] = {
    column: {
        name: neutral for columns, neutral, names in TABLE if letter in columns for name in names.split()
    }
    for column, letter in LETTERS.items()
}


def refuse(body: dict[str, Any], column: Column) -> dict[str, Any]:
    """The body without the fields that ask for nothing. Raises Unsupported for the first that asks for
    something."""
    refused = REFUSED[column]
    for name in sorted(body.keys() & refused.keys()):
        if not any(same(body[name], neutral) for neutral in refused[name]):
            raise Unsupported(f"{name} is not supported: leave it out", name)
    return {name: value for name, value in body.items() if name not in refused}


def same(value: Any, neutral: Any) -> bool:
    """Equal, and False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
