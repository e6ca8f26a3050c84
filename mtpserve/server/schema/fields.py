"""Single fields of a body that need a closer look than their type. No defaults and no bodies here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import MAX_BIAS, MAX_BIASED
from mtpserve.text.requests import check_text

MAX_ID_DIGITS = 20  # longer ones are not token ids, and Python refuses to read some thousands of digits


def either(kinds: str) -> WrapValidator:
    """Returns a validator with one message for a union, instead of one for each member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("kinds", "must be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(validate)


def refuse_constant(constant: str) -> None:
    """Refuses NaN and Infinity, which `json.loads` otherwise takes. Raises ValueError."""
    raise ValueError(f"{constant} is no JSON")


def texts(field: str, values: Sequence[str]) -> tuple[str, ...]:
    for text in values:
        check_text(text, field)
    return tuple(values)


def biases(logit_bias: dict[str, float]) -> dict[int, float]:
    if len(logit_bias) > MAX_BIASED:  # megabytes of them would block the event loop
        raise InvalidRequest(
            f"logit_bias must be at most {MAX_BIASED} entries, got {len(logit_bias)}", "logit_bias"
        )
    by_token: dict[int, float] = {}
    for token, bias in logit_bias.items():
        if not token.isascii() or not token.isdigit() or len(token) > MAX_ID_DIGITS:
            raise InvalidRequest(f"logit_bias must have token ids as keys, got {token[:50]!r}", "logit_bias")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias must be in [-{MAX_BIAS}, {MAX_BIAS}], got {bias} for token {token}", "logit_bias"
            )
        if int(token) in by_token:  # "7" and "07"
            raise InvalidRequest(f"logit_bias names token {int(token)} twice", "logit_bias")
        by_token[int(token)] = bias
    return by_token


def predicted(prediction: dict[str, Any] | None) -> str:
    """OpenAI's Predicted Outputs: {"type": "content", "content": a string or parts of text}."""
    if prediction is None:
        return ""
    content = prediction.get("content")
    if isinstance(content, list):
        parts = [
            part["text"] if isinstance(part, dict) and part.get("type") == "text" and "text" in part else None
            for part in content
        ]
        is_text = all(isinstance(part, str) for part in parts)
        content = "".join(parts) if is_text else None  # type: ignore[arg-type]
    if prediction.get("type") != "content" or not isinstance(content, str):
        raise InvalidRequest(
            "prediction must be {'type': 'content', 'content': a string or a list of text parts}",
            "prediction",
        )
    check_text(content, "prediction")
    return content


def custom(params: dict[str, Any]) -> dict[str, Any]:
    """They travel to the engine's process as msgpack, which has no numbers beyond 64 bits and no broken
    Unicode."""
    try:
        msgspec.msgpack.encode(params)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(
            f"custom_params cannot be handed on: {str(error)[:200]}", "custom_params"
        ) from error
    return params
