"""Loops: plain asyncio on the ports. They read time only from the running loop and own no thread, socket or file."""
