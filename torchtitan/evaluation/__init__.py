"""How well a model predicts: log-likelihoods of tokens, perplexity of files, and the tasks of lm-eval."""
