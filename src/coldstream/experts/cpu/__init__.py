"""Experts for the CPU: in slots of RAM, read from the disk when they are chosen."""
