"""What the demo and the end-to-end tests run: tiny real models on a CPU."""
