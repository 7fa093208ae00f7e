"""The inference engine: continuous batching with token ids in and out, on one device, without Ray or asyncio."""
