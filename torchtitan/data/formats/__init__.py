"""File formats: how the rows of a file are found without holding their text, and how one is read."""
