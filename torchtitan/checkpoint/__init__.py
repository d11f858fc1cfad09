"""Checkpoints: saved atomically, verified before use, loadable on any number of ranks."""

from torchtitan.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
