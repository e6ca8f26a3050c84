"""What every dialect becomes: a conversation, its prompt, and its generation as blocks of text, reasoning and
tool calls."""
