"""A real, unmodified SGLang server on a CPU: how it is installed, started and stopped."""
