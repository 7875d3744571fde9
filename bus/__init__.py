"""JetStream and nothing about models."""
