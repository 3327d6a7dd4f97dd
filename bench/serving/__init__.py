"""Servers under load: requests a second, first tokens, long conversations, and answers that must be equal."""
