"""What the fields of bodies mean, by name: a name means the same in every body; and an example of each body.
For the OpenAPI document."""

from __future__ import annotations

from typing import Any

NOT_SUPPORTED = "Known to other servers, and not supported here: leave it out."
TEXTS: dict[str, str] = {
    # the prompt
    "model": "A name of the model that is served.",
    "prompt": "A text, several texts, or tokens of one or several prompts.",
    "messages": "The conversation so far. Text only.",
    "input": "A text, or a conversation as items.",
    "input_ids": "Tokens of one or several prompts, in place of `text`.",
    "system": "What the model is told before the conversation.",
    "instructions": "What the model is told before the conversation; not kept for the next response.",
    "tokens": "Token ids, or a list of such lists.",
    "add_special_tokens": "Whether the tokenizer's own tokens, such as the one for a text's beginning, are "
    "added.",
    "add_generation_prompt": "Whether the template opens the assistant's next message.",
    "continue_final_message": "Continue the last message, which is the assistant's, in place of a new one.",
    "chat_template": "The template is code, and the server's: leave it out.",
    "chat_template_kwargs": "Values for variables that the model's chat template reads, such as "
    "`enable_thinking`.",
    "previous_response_id": "The response whose conversation this one continues.",
    "truncate_prompt_tokens": "Keep so many of the prompt's tokens; -1: as many as fit.",
    "truncation_side": "Where tokens are cut off: `left`, the default, keeps the last ones.",
    # how much, and how
    "max_tokens": "The most tokens that are generated.",
    "max_completion_tokens": "The most tokens that are generated. It wins over `max_tokens`.",
    "max_output_tokens": "The most tokens that are generated.",
    "max_new_tokens": "The most tokens that are generated; 0 scores the prompt alone.",
    "min_tokens": "No stop token before so many tokens.",
    "min_new_tokens": "No stop token before so many tokens.",
    "n": "How many answers to each prompt.",
    "best_of": "How many are generated for each prompt; the `n` likeliest are answered.",
    "stream": "Answer by server-sent events while the text grows.",
    "stream_options": "What a stream contains besides the text.",
    "echo": "Answer with the prompt in front of the text.",
    "suffix": "Text after the gap: not supported.",
    "stop": "Texts that end the answer.",
    "stop_sequences": "Texts that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Go on after the model's own stop tokens.",
    "include_stop_str_in_output": "Keep the text that ended the answer.",
    "no_stop_trim": "Keep the text that ended the answer; SGLang's name.",
    "skip_special_tokens": "Leave special tokens out of the text; true unless said otherwise.",
    "timeout": "Seconds from the request's arrival after which it fails; the server's own limit may be "
    "shorter.",
    # sampling
    "temperature": "0 is greedy. Without it, top_p, top_k and min_p, the model's recommended values apply.",
    "top_p": "Sample only from the likeliest tokens that together have this probability.",
    "top_k": "Sample only from so many of the likeliest tokens; 0 and -1: all.",
    "min_p": "Sample only tokens with at least this share of the likeliest one's probability.",
    "seed": "The same request with the same seed gives the same text, whatever else is computed with it.",
    "sampling_seed": "The same request with the same seed gives the same text, whatever else is computed "
    "with it.",
    "repetition_penalty": "Above 1 tokens of the prompt and of the text become less likely.",
    "frequency_penalty": "Subtracted from a token's logit for each time that it is in the text.",
    "presence_penalty": "Subtracted from a token's logit if it is in the text.",
    "logit_bias": "Token ids and what is added to their logits.",
    "allowed_token_ids": "Only these tokens; empty: all.",
    "bad_words": "Texts that the answer must not contain.",
    "thinking_token_budget": "The most tokens of reasoning; then the model has to answer.",
    "budget_tokens": "The most tokens of reasoning; then the model has to answer.",
    "custom_params": "For the logits processors that the server was started with. `thinking_budget` is the "
    "same as `thinking_token_budget`.",
    # speculation and scheduling
    "speculative": "Ours. Whether and how deep to draft for this request; the distribution of its text "
    "does not depend on it.",
    "prediction": "Text that the answer probably repeats, to draft from: OpenAI's Predicted Outputs. No "
    "text depends on it.",
    "return_spec_trace": "Ours. With the answer: each step's draft, where it came from, and which of its "
    "tokens were accepted.",
    "priority": "Lower ones are scheduled first, where the server runs with `--scheduling-policy priority`.",
    "cache_salt": "Only requests with the same value share pages of the prefix cache.",
    "extra_key": "The same as `cache_salt`, which is independent of it; SGLang's name.",
    "kv_transfer_params": "Where the prompt's pages are kept or fetched, in vLLM's words; routers set it.",
    "bootstrap_host": "The node that computes the prompt, in SGLang's words; routers set it.",
    "bootstrap_port": "The port of `bootstrap_host`.",
    "bootstrap_room": "The name of the prompt's pages on both nodes; routers set it.",
    "num_steps": "How many draft steps at most.",
    "adaptive": "Whether the engine chooses the depth.",
    "reset": "Forget what was learned of acceptance.",
    "enabled": "False: no drafts, or no reasoning.",
    # what is answered beside the text
    "logprobs": "Log-probabilities of the text's tokens: whether, or with how many alternatives.",
    "top_logprobs": "How many alternatives to list for each token.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, with so many alternatives.",
    "return_logprob": "Log-probabilities of the text's tokens, and of the prompt's from "
    "`logprob_start_len` on.",
    "logprob_start_len": "The prompt's first token that is scored; -1: none.",
    "top_logprobs_num": "How many alternatives to list for each token.",
    "return_text_in_logprobs": "Whether log-probabilities list tokens as text, too.",
    "return_token_ids": "Whether the answer has the token ids of prompt and text.",
    "return_tokens_as_token_ids": "Tokens in log-probabilities as `token_id:7`.",
    "return_routed_experts": "Whether the answer has the experts that each token had, with "
    "`--enable-return-routed-experts`.",
    "routed_experts_start_len": "The first token whose experts are answered.",
    "return_token_strs": "Whether the answer has the vocabulary's pieces.",
    "include": "Nothing more can be included: these values are accepted.",
    # the form of the answer
    "response_format": "The form of the answer: any text, a JSON object, one of a schema, or a structural "
    "tag.",
    "structured_outputs": "The form of the answer, in vLLM's words: one of these.",
    "output_config": "The form of the answer, and how much to think.",
    "output_format": "The form of the answer; the name of `output_config.format` in the API's beta.",
    "json_schema": "A JSON schema that the answer fits.",
    "regex": "A regular expression that the answer matches.",
    "ebnf": "A grammar in EBNF (Lark or GBNF) that the answer follows.",
    "structural_tag": "A structural tag that the answer follows.",
    "guided_json": "A JSON schema that the answer fits.",
    "guided_regex": "A regular expression that the answer matches.",
    "guided_choice": "The answer is one of these.",
    "guided_grammar": "A grammar in EBNF that the answer follows.",
    # tools and reasoning
    "tools": "The tools that the model may call.",
    "tool_choice": "Whether the model must call a tool, and which.",
    "parallel_tool_calls": "False: at most one tool call in an answer.",
    "tool_call_parser": "The format of calls; by default the server's.",
    "reasoning_parser": "The format of reasoning; by default the server's.",
    "reasoning_effort": "How much to think, for the chat template; `none`: not at all.",
    "reasoning": "Whether and how much to think.",
    "thinking": "Whether to think.",
    "separate_reasoning": "False: reasoning stays in the content, as the model wrote it.",
    "include_reasoning": "False: reasoning is left out of the answer.",
    # about the request
    "lora_path": "The name of an adapter, or one for each prompt; SGLang's name. To load one: its directory.",
    "lora_name": "The name by which requests find the adapter as their model.",
    "load_inplace": "Replaces an adapter that has the name. Requests that run keep the old one.",
    "rid": "The answer's id, by which `/abort_request` ends it.",
    "request_id": "The same as `rid`; vLLM's name.",
    "abort_all": "Abort every request.",
    "mode": "What becomes of the requests that run.",
    "tags": "Which memory; all of it where this is left out.",
    "torch_empty_cache": "Changes nothing: memory that nobody needs goes back to the system anyway.",
    "user": "Says who asks, and changes no answer.",
    "safety_identifier": "Says who asks, and changes no answer.",
    "prompt_cache_key": "Changes no answer: the prefix cache needs no hint.",
    "metadata": "Comes back with the answer, or says who asks.",
    "service_tier": "There is one tier: nothing changes.",
    "truncation": "Nothing is dropped: an input that is too long is refused.",
    "max_tool_calls": "A limit for tools that the server runs itself. It runs none, so nothing changes.",
    "store": "False: the response is not kept.",
    "text": "A text, or several; of a response, its form.",
    "sampling_params": "SGLang's sampling parameters, or a list with those of each prompt.",
}

ASKED = "What is speculative decoding?"
CONVERSATION = [{"role": "user", "content": ASKED}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
# By the body's class: small, and answered whatever the model is called; the depth can be set where drafting
# adapts.
EXAMPLES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": "import os", "max_tokens": 32, "temperature": 0},
    "ChatRequest": {"messages": CONVERSATION, "max_tokens": 32},
    "ResponsesRequest": {"input": ASKED, "max_output_tokens": 32},
    "InputTokensRequest": {"input": ASKED},
    "CompactRequest": {"model": "default", "input": ASKED},
    "MessagesRequest": {"messages": CONVERSATION, "max_tokens": 32},
    "CountRequest": {"messages": CONVERSATION},
    "NativeRequest": {"text": "import os", "sampling_params": {"max_new_tokens": 32, "temperature": 0}},
    "TokenRequest": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "logprobs": 0}},
    "TokenizeRequest": {"prompt": "import os"},
    "DetokenizeRequest": {"tokens": [1, 2, 3]},
    "ParseFunctionCall": {
        "text": CALL,
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_call_parser": "hermes",
    },
    "SeparateReasoning": {"text": "<think>Two and two.</think>Four.", "reasoning_parser": "qwen3"},
    "LoadLoRABody": {"lora_name": "sql", "lora_path": "adapters/sql"},
    "UnloadLoRABody": {"lora_name": "sql"},
    "DiskUpdate": {"model_path": "checkpoints/step-1", "weight_version": "step-1"},
    "TensorUpdate": {"serialized_named_tensors": ["AAAA"], "weight_version": "step-1"},
    "BroadcastUpdate": {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[4096]]},
    "GroupJoin": {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2},
    "GroupLeave": {"group_name": "weight_update_group"},
    "WeightsQuery": {"name": "model.norm.weight", "truncate_size": 4},
    "WeightsCheck": {"action": "checksum"},
    "VersionChange": {"new_version": "step-1"},
    "AbortRequest": {"rid": "the-request-id"},
    "SpecBody": {"adaptive": True},
    "PauseRequest": {"mode": "retract"},
    "ContinueRequest": {},
    "MemoryRequest": {"tags": ["kv_cache"]},
}
