"""Memory that is given back while an engine sleeps."""
