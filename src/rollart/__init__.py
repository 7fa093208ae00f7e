"""rollart: reinforcement learning of LLM agents on mixed hardware."""

__version__ = "0.1.0"
