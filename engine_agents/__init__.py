"""The agent beside an SGLang engine."""
