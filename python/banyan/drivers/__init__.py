"""Clients that drive running rollout servers over HTTP: vLLM's and SGLang's dialects (rollout.server_urls)."""
