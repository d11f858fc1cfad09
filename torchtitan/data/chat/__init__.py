"""Conversations: from rows of many formats to packed tokens with labels where the model is to learn."""
