"""Conversion to Hugging Face shards: plan, assembly, commit."""
