"""The HTTP server. It is handed an EngineClient and a tokenizer; it knows no engine, no model and no
torch."""
