"""Conversion families and rule kinds."""
