"""SGLang 0.5.23 behind the engine protocol. Nothing here imports sglang: the server is a process of its own."""
