"""Text from a model: a cache of keys and values, sampling, and pieces of text as they come."""
