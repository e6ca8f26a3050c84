"""Work on the KV pool itself."""
