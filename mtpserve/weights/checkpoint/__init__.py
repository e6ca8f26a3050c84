"""The files of a checkpoint: where they are, their configuration, and the headers of safetensors and GGUF."""
