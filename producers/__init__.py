"""The trainer side: what the ranks hold, staging, publishing."""
