"""Parsers of a model's output while it is streamed: reasoning, content and tool calls."""
