"""Messages between processes, their bounded codec, and the batch format. Never pickle."""
