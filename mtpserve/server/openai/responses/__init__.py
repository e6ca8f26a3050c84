"""OpenAI's responses, and those that are stored."""
