"""DFlash drafters: their files and their numbers."""
