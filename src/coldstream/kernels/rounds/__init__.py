"""Rounds of drafting, verifying and accepting that follow each other on the device."""
