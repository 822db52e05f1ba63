"""The HTTP service around the engine: OpenAI, vLLM and SGLang routes, limits, control, metrics and a chat page."""
