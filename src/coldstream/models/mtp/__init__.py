"""The block for multi-token prediction behind a model's trunk."""
