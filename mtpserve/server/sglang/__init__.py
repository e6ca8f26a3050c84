"""SGLang's own routes."""
