"""Experts in slots of fast memory: which lie there, where, and how they get there."""
