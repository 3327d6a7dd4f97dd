"""What a folder calls its safetensors files."""

from typing import Final

FILE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
