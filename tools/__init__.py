"""Tools for operators, over the same events: status."""
