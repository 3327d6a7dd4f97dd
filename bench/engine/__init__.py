"""Models in one process: prompts, decoding, drafts, budgets, starts, and other commits of the package."""
