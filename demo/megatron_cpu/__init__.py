"""Real Megatron-core ranks on a CPU: shims, tiny models, a training program and its HF origin.

Never load a transformers model in a process that has `cpu_shim.prepare()` behind it: its rotary
buffers stay uninitialised, without an error.
"""
