"""weightbus: the weights of a model in training, carried to the engines that serve it."""

__version__ = "0.1.0"
