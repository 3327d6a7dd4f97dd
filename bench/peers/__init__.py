"""Other programs beside this one: llama.cpp and its server, and the cases that others wrote for parsers."""
