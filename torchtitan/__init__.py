"""torchtitan: train and post-train language models in PyTorch, from one recipe, at any scale."""

__version__ = "0.1.0"
