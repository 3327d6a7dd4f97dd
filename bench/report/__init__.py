"""The generators of all figures in the pages, from the files of docs/results."""
