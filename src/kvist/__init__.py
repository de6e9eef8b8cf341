"""kvist: a KV-cache service for LLM inference engines, one daemon per host."""

__version__ = "0.1.0"
