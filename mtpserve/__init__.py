"""mtpserve: an inference server for language models in which multi-token prediction is the normal way to decode."""

__version__ = "0.1.0"
