"""What request bodies may contain: their base class, checks of single fields, and their schemas for the
OpenAPI document."""
